"""Proves that a resumed run goes on with the state, the data and the reward functions with which it stopped."""
