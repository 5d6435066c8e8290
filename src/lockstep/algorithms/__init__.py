"""Pure functions on tensors: advantages and losses. They do not depend on engines, models or trainers."""
