"""The proof that the model's own backward is right: finite differences of a plain forward in float64."""
