"""Datasets and reward functions: built in, from reasoning-gym, or the user's own."""

# The tasks that make their problems, so that their rows have no number of their own.
MADE = ("arithmetic", "calculator", "dots", "reasoning_gym")
