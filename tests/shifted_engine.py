"""An engine whose log-probs are a little off, as those of one with other kernels are: corrections have something to correct.

By less than the proofs of fp32 pass (1e-4 nats in the mean), and by the same each time. The transformers engine agrees with the
trainer to rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from lockstep.engines.protocol import Completion, Engine, GenerationRequest, OnAnswer, RequestKey

# How much the log-prob of a completion's token at a place is off, in nats.
Shift = Callable[[Completion, int], float]


class ShiftedEngine:
    """An engine with another's answers, shifted."""

    def __init__(self, engine: Engine, shift: Shift) -> None:
        self._engine, self._shift = engine, shift

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def generate(
        self, requests: Sequence[GenerationRequest], on_answer: OnAnswer | None = None
    ) -> dict[RequestKey, Completion]:
        return {key: self._shifted(answer) for key, answer in self._engine.generate(requests, on_answer).items()}

    def _shifted(self, answer: Completion) -> Completion:
        return replace(
            answer, logprobs=tuple(logp + self._shift(answer, place) for place, logp in enumerate(answer.logprobs))
        )
