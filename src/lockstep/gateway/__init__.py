"""An OpenAI-compatible endpoint in front of a run's engine: agents of any framework make rollouts through it."""
