"""What a run leaves on disk: checkpoints, logs, the state of its method."""
