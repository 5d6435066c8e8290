"""Reads and adds to the columns of a piece of attention: the keys and values that its rows see, in one or several runs.

It is called for every piece of a plan.
"""

from __future__ import annotations

import torch

from lockstep.training.forward.attention.attention_plan import Run


def columns_of(part: torch.Tensor, runs: tuple[Run, ...]) -> torch.Tensor:
    """(…, columns, width): the columns of some runs, of a (…, T, width) tensor. It is a view if there is one run."""
    if len(runs) == 1:
        return part[..., slice(*runs[0]), :]
    return torch.cat([part[..., a:b, :] for a, b in runs], -2)


def add_to_columns(total: torch.Tensor, runs: tuple[Run, ...], part: torch.Tensor, scale: float = 1.0) -> None:
    """Add `scale` times a (…, columns, width) tensor to the columns of some runs, of a (…, T, width) tensor."""
    start = 0
    for a, b in runs:
        total[..., a:b, :].add_(part[..., start : start + b - a, :], alpha=scale)
        start += b - a
