"""Agents of any framework make rollouts through an OpenAI-compatible endpoint (`lockstep gateway` runs them alone)."""
