"""Where the trainer's weights cross to the engine, with a manifest, an acknowledgement and a version."""
