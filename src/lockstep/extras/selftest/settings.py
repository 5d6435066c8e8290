"""Faults of settings: S4. Trainer and engine agree with each other, and not with the user."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import lockstep.engines.vllm.port.requests as vllm_requests
import lockstep.training.step.update as updating
from lockstep.contract.protocol import GenerationRequest
from lockstep.extras.selftest.seams import Fault, Patch, is_vllm, requests_become, user_asks
from lockstep.extras.verify.stage import Stage

_ASKED, _AFTER = 0.7, 4
_THINKING = {
    "max_thinking_length": _AFTER,
    "min_thinking_length": None,
    "interruption": "The time is over.</think>",
    "end_of_thinking": "</think>",
}


def _lost_by_both(asked: dict[str, Any], read: dict[str, Any]) -> Callable[[Stage], Patch]:
    """The user asks for some values, and the config that both sides read has others."""

    @contextmanager
    def inject(stage: Stage) -> Iterator[None]:
        with user_asks(stage, **asked), ExitStack() as stack:
            for name, value in read.items():
                stack.enter_context(patch.object(stage.config, name, value))
            yield

    return inject


def _other_temperature(change: Callable[[float], float]) -> Callable[[Stage], Patch]:
    """Requests have the right temperature. The engine samples at another one, and the loss uses this other one too."""

    @contextmanager
    def inject(stage: Stage) -> Iterator[None]:
        real = updating.score_pack

        def otherwise(model: Any, pack: Any, temperature: float, *rest: Any, **more: Any) -> Any:
            return real(model, pack, change(temperature), *rest, **more)

        def changed(requests: list[GenerationRequest]) -> list[GenerationRequest]:
            return [
                replace(r, sampling=replace(r.sampling, temperature=change(r.sampling.temperature))) for r in requests
            ]

        with (
            user_asks(stage, temperature=_ASKED),
            requests_become(stage, changed),
            patch.object(updating, "score_pack", otherwise),
        ):
            yield

    return inject


@contextmanager
def _lost_on_the_way(stage: Stage) -> Iterator[None]:
    """The conversion to vLLM's parameters loses a temperature that is close to 1."""
    real = vllm_requests.sampling_fields

    def losing(request: GenerationRequest) -> dict[str, Any]:
        return {**real(request), "temperature": 1.0}

    with user_asks(stage, temperature=0.99), patch.object(vllm_requests, "sampling_fields", losing):
        yield


@contextmanager
def _half_the_limit(stage: Stage) -> Iterator[None]:
    with patch.object(stage.config, "max_completion_length", stage.config.max_completion_length // 2):
        yield


def _needs_vllm(stage: Stage) -> str:
    return "" if is_vllm(stage) else "this engine takes the trainer's own requests"


def _needs_tokens(stage: Stage) -> str:
    return "" if stage.config.max_completion_length > _AFTER else f"completions have at most {_AFTER} tokens"


SETTING_FAULTS = (
    Fault("S4", "both sides ignore the temperature", _other_temperature(lambda t: 1.0)),
    Fault("S4b", "both sides invert the temperature", _other_temperature(lambda t: 1 / t)),
    Fault(
        "S4c",
        "the config that both sides read loses the temperature",
        _lost_by_both({"temperature": _ASKED}, {"temperature": 1.0}),
    ),
    Fault("S4d", "the request to vLLM loses a temperature of 0.99", _lost_on_the_way, needs=_needs_vllm),
    Fault("S4e", "both sides halve the token limit", _half_the_limit, needs=_needs_tokens),
    Fault("S4f", "both sides lose the stop strings", _lost_by_both({"stop_strings": ["zzz"]}, {"stop_strings": None})),
    Fault("S4g", "both sides lose top-p", _lost_by_both({"top_p": 0.5}, {"top_p": 1.0})),
    Fault("S4h", "thinking is never interrupted", _lost_by_both(_THINKING, {}), needs=_needs_tokens),
    Fault(
        "S4i", "both sides lose the reward weights", _lost_by_both({"reward_weights": [2.0]}, {"reward_weights": None})
    ),
)
