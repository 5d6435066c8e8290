"""Rewards of rollouts: reward functions, judges, environments, and their log."""
