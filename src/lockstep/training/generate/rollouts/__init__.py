"""What makes the rollouts of a run in place of one answer per prompt: tools and environments, or a function of the user."""
