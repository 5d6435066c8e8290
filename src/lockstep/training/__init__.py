"""Packed batches, chunked log-probs and the trainers."""
