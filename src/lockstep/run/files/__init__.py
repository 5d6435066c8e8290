"""The files that a run writes: checkpoints, logs, the state of its method."""
