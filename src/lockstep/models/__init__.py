"""Finds and loads models by name: the packaged model, a local directory, or a hub id."""
