"""Compares the log-probs of the engine and of the trainer, and explains a gap between them."""
