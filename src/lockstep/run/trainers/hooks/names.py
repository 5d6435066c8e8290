"""The names of the parameters that a trainer trains, as the proofs of the optimizer say them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from lockstep.run.trainers.hooks.steps import StepHooks

# Before the names of the parameters of a value head.
HEAD = "value_head."


def named_parameters(trainer: StepHooks) -> dict[str, torch.nn.Parameter]:
    """Every parameter of the policy, and of the value head if there is one, by name."""
    policy, *critic = trainer._trained_modules()
    named = dict(policy.named_parameters())
    return named | {f"{HEAD}{name}": p for head in critic for name, p in head.named_parameters()}
