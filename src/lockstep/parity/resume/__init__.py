"""Proves that a resumed run has the state, the data and the reward functions with which it stopped."""
