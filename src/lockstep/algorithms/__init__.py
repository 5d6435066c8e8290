"""Pure functions on tensors: advantages and losses. They know no engine, no model and no trainer."""
