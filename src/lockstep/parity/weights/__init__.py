"""Proves that the modules of the engine compute with the trainer's weights."""
