"""The process groups of a push: how the trainer and the workers meet, prove themselves, and broadcast bytes."""
