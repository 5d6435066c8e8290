"""Sends the trainer's weights to the engine, with a manifest, an acknowledgement and a version."""
