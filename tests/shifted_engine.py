"""An engine with slightly wrong log-probs, like an engine with other kernels, so that corrections have an effect.

The difference is the same each time, and smaller than the limit of the fp32 proofs (1e-4 nats on average). Without
it, the transformers engine agrees with the trainer up to rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from played_engine import ChangedAnswers

from lockstep.contract.inbox import Inbox
from lockstep.contract.protocol import Completion, Engine

# Gives the difference, in nats, for the token of a completion at a place.
Shift = Callable[[Completion, int], float]


class ShiftedEngine:
    """An engine that shifts the log-probs of another engine's answers."""

    def __init__(self, engine: Engine, shift: Shift) -> None:
        self._engine, self._shift = engine, shift

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def serve(self, inbox: Inbox) -> None:
        self._engine.serve(ChangedAnswers(inbox, self._shifted))  # type: ignore[arg-type]

    def _shifted(self, answer: Completion) -> Completion:
        return replace(
            answer,
            logprobs=tuple(logp + self._shift(answer, place) for place, logp in enumerate(answer.logprobs)),
        )
