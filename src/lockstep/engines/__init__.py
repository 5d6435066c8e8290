"""Ids in, ids with log-probs and weight versions out: one protocol, several engines."""
