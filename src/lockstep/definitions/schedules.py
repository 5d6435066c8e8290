"""Learning-rate schedules as formulas of the step. `parity/step/update.py` compares the scheduler's rates with them."""

from __future__ import annotations

import math


def rate_factor(schedule: str, step: int, warmup: int, total: int) -> float | None:
    """The factor by which a schedule multiplies the learning rate.

    Args:
        schedule: its name in transformers: `constant`, `constant_with_warmup`, `linear` or `cosine`.
        step: number of optimizer steps before this one.
        warmup: steps of linear warm-up from 0. `constant` has none.
        total: steps of the run.

    Returns:
        The factor; None if this function does not know the schedule.
    """
    if schedule == "constant":
        return 1.0
    if schedule not in ("constant_with_warmup", "linear", "cosine"):
        return None
    if step < warmup:
        return step / warmup
    if schedule == "constant_with_warmup":
        return 1.0
    done = min((step - warmup) / max(total - warmup, 1), 1.0)
    return 1.0 - done if schedule == "linear" else (1.0 + math.cos(math.pi * done)) / 2
