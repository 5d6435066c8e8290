"""Turns text and messages into token ids, once, and reads sampled ids as messages."""
