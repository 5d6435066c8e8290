"""Prompts become scored rollout groups."""
