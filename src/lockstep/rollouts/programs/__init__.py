"""What a rollout does beside a single turn: interrupted thinking, tools, environments, a user's own function."""
