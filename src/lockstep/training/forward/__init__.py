"""Packs go through a model: attention within a pack, log-probs of the sampled tokens, the reference model."""
