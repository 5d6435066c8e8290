"""Splits a generation into optimizer steps, learns from each, and accounts for it."""
