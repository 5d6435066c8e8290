"""Advantages of the completions of a group, relative to the group (GRPO, arXiv 2402.03300, section 4.1)."""

from __future__ import annotations

from typing import Literal

import torch

ScaleRewards = Literal["group", "batch", "none"]

# TRL's constant, kept so that curves compare.
_EPSILON = 1e-4


def group_advantages(rewards: list[torch.Tensor], scale: ScaleRewards) -> list[torch.Tensor]:
    """Rewards minus their group's mean, divided by a standard deviation.

    Args:
        rewards: one (G_i,) tensor a group; groups may differ in size.
        scale: `group` divides by the group's own standard deviation, `batch` by that of all rewards given,
            `none` by nothing (Dr. GRPO, arXiv 2503.20783: scaling favours groups of little spread).

    Returns:
        One (G_i,) tensor a group. A group of equal rewards has advantages of exactly zero.
    """
    spread_of_all = torch.cat(rewards).std() if scale == "batch" and rewards else torch.tensor(0.0)
    advantages = []
    for group in rewards:
        centred = group - group.mean()
        # The mean of equal floats need not be that float.
        if bool((group == group[0]).all()):
            centred = torch.zeros_like(group)
        if scale == "group":
            centred = centred / (group.std() + _EPSILON)
        elif scale == "batch":
            centred = centred / (spread_of_all + _EPSILON)
        advantages.append(centred)
    return advantages
