"""Extends conversations in ids: reads a sampled turn and its tool calls, and makes the ids that follow it."""
