"""One optimizer step, from its first micro-batch to just before the optimizer: the sums of its parts, over all ranks.

The trainer's loop gives one micro-batch at a time. At the end every rank has the gradients and sums of the whole step, after
the rank that holds the engine has proven the sums.
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
    """An optimizer step while its micro-batches are processed."""

    def __init__(self, objective: Objective[Any], clock: PhaseClock, ranks: Ranks) -> None:
        self._objective, self._clock, self._ranks = objective, clock, ranks
        self._sums = UpdateSums()
        self._failure: Exception | None = None

    def learn(self, policy: Policy, sequences: Sequence[TrainingSequence]) -> float:
        """Learn from a micro-batch. With several ranks an error is raised at the end of the step, on every rank.

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
        """Do everything between the last backward and the optimizer. Every rank must call this.

        Args:
            prove: raises if the step's sums fail a proof. It runs on the rank that holds the engine.
            trained: the trained parameters. Their gradients become those of the whole step.

        Returns:
            The sums over all ranks.

        Raises:
            ProofError: as raised by `prove`.
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
            # If all rewards agree, the gradient is zero. AdamW still updates with a zero gradient; with None it would not.
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        sum_gradients(trained, self._ranks)
        return total
