"""The entry point of earlier installations."""
