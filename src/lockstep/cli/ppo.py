"""`lockstep ppo`: train with PPO from a config, and end with a summary and a report."""

from __future__ import annotations

from typing import Any

from lockstep.cli.training import train


def run(words: list[str]) -> int:
    """Run the command; returns the exit code (see `lockstep.cli.training.train`)."""
    return train(words, "ppo", _method)


def _method() -> Any:
    from lockstep.training.trainers.ppo import PPOTrainer

    return PPOTrainer
