"""Turns text into token ids, once."""
