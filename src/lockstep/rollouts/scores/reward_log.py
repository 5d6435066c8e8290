"""Values that reward functions log beside their scores, with TRL's `log_metric` and `log_extra`.

Reward functions get both as keyword arguments. Metrics go to the trainer's logs, extras to the rollouts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lockstep.errors import InputError

# Names that a log line already has. A reward function that used one would hide the trainer's value.
_TAKEN = ("loss", "grad_norm", "learning_rate", "epoch", "step", "num_tokens", "entropy", "kl", "aux_loss", "step_time")
_TAKEN_FAMILIES = (
    *(
        "parity/",
        "time/",
        "engine/",
        "completions/",
        "sampling/",
        "push/",
        "update/",
        "checked/",
        "clip_ratio/",
        "staleness/",
    ),
    *("prompts/", "objective/", "logps/", "pairs/", "val/"),
)


class RewardLog:
    """Metrics that reward functions log, kept until the trainer takes them."""

    def __init__(self) -> None:
        self._values: dict[str, list[float]] = {}

    def log_metric(self, name: str, value: float) -> None:
        """Store one value of a metric.

        Raises:
            InputError: the name belongs to the trainer, or the value is not a finite number.
        """
        if not isinstance(name, str) or name in _TAKEN or name.startswith(_TAKEN_FAMILIES):
            raise InputError(f"log_metric: {name!r:.80} cannot be a metric's name here; choose another")
        try:
            number = float(value)
        except (TypeError, ValueError) as error:
            raise InputError(f"log_metric: {name} is {value!r:.80}, not a number") from error
        if not math.isfinite(number):
            raise InputError(f"log_metric: {name} is {number}, not a finite number; leave the call out instead")
        self._values.setdefault(name, []).append(number)

    def values(self) -> dict[str, list[float]]:
        """All stored values, by metric."""
        return dict(self._values)

    def add(self, values: Mapping[str, Sequence[float]]) -> None:
        """Add the values of another log."""
        for name, more in values.items():
            self._values.setdefault(name, []).extend(more)

    def take(self, own: Iterable[str] = ()) -> dict[str, float]:
        """Mean of each metric over the calls since the last `take`.

        Args:
            own: names of the trainer's own metrics in the same log line.

        Raises:
            InputError: a reward function logged one of `own`.
        """
        clash = sorted(set(self._values) & set(own))
        if clash:
            raise InputError(f"log_metric: {clash[0]!r} is a metric of the trainer's own; choose another name")
        means = {name: sum(values) / len(values) for name, values in self._values.items()}
        self._values.clear()
        return means


class Extras:
    """Columns that reward functions add to the rollouts of one call: one value per completion.

    Args:
        count: number of completions of the call.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._columns: dict[str, list[Any]] = {}

    def log_extra(self, column: str, values: Iterable[Any]) -> None:
        """Store a column. If it is logged again, the new values replace the old ones.

        Raises:
            InputError: the number of values differs from the number of completions.
        """
        kept = list(values)
        if len(kept) != self._count:
            raise InputError(f"log_extra: column {column!r} has {len(kept)} values for {self._count} completions")
        self._columns[str(column)] = kept

    def of(self, position: int) -> dict[str, Any]:
        """The values of one completion, by column."""
        return {column: values[position] for column, values in self._columns.items()}
