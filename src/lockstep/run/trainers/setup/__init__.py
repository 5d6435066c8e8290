"""What the constructor of a trainer checks and prepares before training."""
