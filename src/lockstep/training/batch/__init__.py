"""Sequences of ids become packs of tensors. Nothing here knows a model."""
