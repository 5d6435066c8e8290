"""What makes the rollouts of a run in place of one answer per prompt: tools and environments, agents, or a function of the user."""
