"""A generation is cut into optimizer steps; each is learned from and accounted for."""
