"""One optimizer step, from its first micro-batch to just before the optimizer: what its parts add up to, on all ranks.

Comes from: the trainer's loop, a micro-batch at a time. Leaves: gradients of the whole step on every rank, and its sums, once the
rank that holds the engine has passed them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from lockstep.report.phases import PhaseClock
from lockstep.rollouts.ranks import Ranks
from lockstep.training.batch.sequence import TrainingSequence
from lockstep.training.methods.objective import Objective
from lockstep.training.step.distributed import sum_gradients
from lockstep.training.step.update import Policy, UpdateSums, learn


class OptimizerStep:
    """A step in the making."""

    def __init__(self, objective: Objective[Any], clock: PhaseClock, ranks: Ranks) -> None:
        self._objective, self._clock, self._ranks = objective, clock, ranks
        self._sums = UpdateSums()
        self._failure: Exception | None = None

    def learn(self, policy: Policy, sequences: Sequence[TrainingSequence]) -> float:
        """Learn from a micro-batch. On several ranks an error waits for the step's end, where it is every rank's.

        Returns:
            The micro-batch's part of the step's loss.
        """
        if self._failure is not None:
            return 0.0
        try:
            return learn(policy, sequences, self._objective, self._clock, self._sums)
        except Exception as error:
            if self._ranks.count == 1:
                raise
            self._failure = error
            return 0.0

    def finish(self, prove: Callable[[UpdateSums], None], trained: Sequence[torch.nn.Parameter]) -> UpdateSums:
        """Everything between the last backward and the optimizer; every rank must call.

        Args:
            prove: raises where the step's sums show that it must not be taken; run on the rank that holds the engine.
            trained: parameters, whose gradients become those of the whole step.

        Returns:
            The sums of all ranks.

        Raises:
            ProofError: as `prove`.
            LockstepError: a rank could not learn from its part.
        """

        def offer() -> dict[str, Any]:
            if self._failure is not None:
                raise self._failure
            return self._sums.data()

        def work(parts: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
            total = UpdateSums.of(parts)
            prove(total)
            return [total.data()] * len(parts)

        total = UpdateSums.of([self._ranks.call("step", offer, work)])
        for parameter in trained:
            # A step whose groups all agree has gradient zero, which still moves AdamW; None would not.
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        sum_gradients(trained, self._ranks)
        return total
