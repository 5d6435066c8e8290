"""Proves how the engine sampled: independent draws, from the reported distribution, with the right filters and ends."""
