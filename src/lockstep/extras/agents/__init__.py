"""Agents of any framework make rollouts through an OpenAI-compatible endpoint in front of the engine.

Also `lockstep gateway`.
"""
