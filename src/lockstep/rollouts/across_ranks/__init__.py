"""Rollouts and scores on their way between ranks."""
