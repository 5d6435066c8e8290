"""Sequences of ids become packs of tensors. This package does not depend on a model."""
