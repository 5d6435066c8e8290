"""Datasets and reward functions: built in, from reasoning-gym, or the user's own."""
