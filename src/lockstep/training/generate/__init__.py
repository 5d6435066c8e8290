"""What makes the rollouts of a run, their rewards and their metrics."""
