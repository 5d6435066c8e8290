"""From prompts to scored rollout groups."""
