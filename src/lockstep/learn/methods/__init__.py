"""The methods: their fields, advantages and losses. They do not depend on an engine."""
