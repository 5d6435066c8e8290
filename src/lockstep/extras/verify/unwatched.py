"""A watch that proves nothing, for a loss that is computed outside of a run."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from lockstep.training.batch.sequence import TrainingSequence
from lockstep.watch.evidence import TokenEvidence


class Unwatched:
    """The events of `training/events.py` that a loss and its backward have. The sums are those of a run, and nobody judges them."""

    def evidence(self) -> TokenEvidence:
        return TokenEvidence()

    def part(
        self, index: int, sequences: Sequence[TrainingSequence], moving: Sequence[TrainingSequence]
    ) -> list[list[TrainingSequence]]:
        return [list(moving)]

    def backward(self, *given: Any) -> AbstractContextManager[None]:
        return nullcontext()

    def _pass(self, *given: Any, **named: Any) -> None:
        pass

    referenced = forward = learned = aside = compared = summing = summed = accumulated = _pass
