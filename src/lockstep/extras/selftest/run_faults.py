"""Faults of a run's settings, and of its evaluation.

S4: trainer and engine agree with each other, and not with the user. E1: at an evaluation, the engine or the rows are
other ones than those of training.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
import transformers.integrations.sdpa_attention as sdpa

import lockstep.engines.vllm.port.requests as vllm_requests
import lockstep.learn.update as updating
from lockstep.contract.protocol import GenerationRequest
from lockstep.extras.selftest import seams
from lockstep.extras.selftest.draw_faults import SAMPLED
from lockstep.extras.selftest.loss_faults import next_text, other_row, scored_become
from lockstep.extras.selftest.rollout_faults import across_prompts, halved
from lockstep.extras.selftest.seams import REACH, Fault, Patch, is_vllm
from lockstep.extras.verify.stage import Stage
from lockstep.rollouts.group import Prompt, RolloutGroup

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
        with seams.user_asks(stage, **asked), patch.multiple(stage.config, **read):
            yield

    return inject


def _other_temperature(change: Callable[[float], float]) -> Callable[[Stage], Patch]:
    """Requests have the right temperature. The engine samples at another one, and the loss uses this other one too."""

    @contextmanager
    def inject(stage: Stage) -> Iterator[None]:
        real = updating.score_pack

        def otherwise(model: Any, pack: Any, temperature: float, *rest: Any, **more: Any) -> Any:
            return real(model, pack, change(temperature), *rest, **more)

        def changed(request: GenerationRequest) -> GenerationRequest:
            temperature = change(request.sampling.temperature)
            return replace(request, sampling=replace(request.sampling, temperature=temperature))

        other_loss = patch.object(updating, "score_pack", otherwise)
        with (
            seams.user_asks(stage, temperature=_ASKED),
            seams.each_request_becomes(stage, changed),
            other_loss,
        ):
            yield

    return inject


@contextmanager
def _lost_on_the_way(stage: Stage) -> Iterator[None]:
    """The conversion to vLLM's parameters loses a temperature that is close to 1."""
    real = vllm_requests.sampling_fields

    def losing(request: GenerationRequest) -> dict[str, Any]:
        return {**real(request), "temperature": 1.0}

    with seams.user_asks(stage, temperature=0.99), patch.object(vllm_requests, "sampling_fields", losing):
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
    Fault(
        "S4f",
        "both sides lose the stop strings",
        _lost_by_both({"stop_strings": ["zzz"]}, {"stop_strings": None}),
    ),
    Fault("S4g", "both sides lose top-p", _lost_by_both({"top_p": 0.5}, {"top_p": 1.0})),
    Fault(
        "S4h",
        "thinking is never interrupted",
        lambda stage: seams.user_asks(stage, **_THINKING),
        needs=_needs_tokens,
    ),
    Fault(
        "S4i",
        "both sides lose the reward weights",
        _lost_by_both({"reward_weights": [2.0]}, {"reward_weights": None}),
    ),
)

_WINDOW = 4
# Completions per prompt, for the fault that only many tokens show.
_SAMPLES = 256


def _rotations(stage: Stage) -> list[torch.Tensor]:
    """The tables or the frequencies of the engine's rotary embeddings."""
    model = seams.vllm_worker(stage).model_runner.model if is_vllm(stage) else stage.engine.model  # type: ignore[attr-defined]
    name = "cos_sin_cache" if is_vllm(stage) else "inv_freq"
    found = [tensor for module in model.modules() if (tensor := getattr(module, name, None)) is not None]
    return list({id(tensor): tensor for tensor in found}.values())


@contextmanager
def _other_bases(stage: Stage) -> Iterator[None]:
    """The engine's rotary embeddings have the base to the power of 1.3."""
    kept = [(tensor, tensor.clone()) for tensor in _rotations(stage)]
    for tensor, old in kept:
        tensor.copy_(_turned(old.float()).to(old.dtype) if is_vllm(stage) else old**1.3)
    try:
        yield
    finally:
        for tensor, old in kept:
            tensor.copy_(old)


def _turned(table: torch.Tensor) -> torch.Tensor:
    """A (positions, 2 × n) table of cosines and sines, for other frequencies than those that position 1 has."""
    cosines, sines = table[1].chunk(2)
    angles = torch.arange(len(table), device=table.device)[:, None] * torch.atan2(sines, cosines) ** 1.3
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


def _window(stage: Stage) -> Patch:
    """The engine's attention sees the last tokens only."""
    return _vllm_window(stage) if is_vllm(stage) else _transformers_window(stage)


@contextmanager
def _vllm_window(stage: Stage) -> Iterator[None]:
    context = seams.vllm_worker(stage).model_runner.compilation_config.static_forward_context
    with ExitStack() as stack:
        for layer in context.values():
            if hasattr(layer, "impl"):
                # vLLM's backends for GPUs hold a pair: how many tokens are seen to the left and to the right.
                is_pair = isinstance(layer.impl.sliding_window, tuple)
                window = (_WINDOW - 1, 0) if is_pair else _WINDOW
                stack.enter_context(patch.object(layer.impl, "sliding_window", window))
                stack.enter_context(patch.object(layer.impl, "forward", REACH.of(layer.impl.forward)))
        yield


def _transformers_window(stage: Stage) -> Patch:
    serve, attention = stage.engine.serve, torch.nn.functional.scaled_dot_product_attention

    def near(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **more: Any) -> torch.Tensor:
        length, seen = query.shape[-2], key.shape[-2]
        places = torch.arange(seen, device=query.device)
        distance = places[seen - length :, None] - places
        mask = (distance >= 0) & (distance < _WINDOW)
        given = more.pop("attn_mask", None)
        more["is_causal"] = False
        if given is not None:
            mask = mask & (given if given.dtype == torch.bool else given == 0)
        return attention(query, key, value, attn_mask=mask, **more)

    def served(inbox: Any) -> None:
        with patch.object(sdpa.torch.nn.functional, "scaled_dot_product_attention", near):
            serve(inbox)

    return patch.object(stage.engine, "serve", served)


def _warmer(stage: Stage) -> Patch:
    def warmer(request: GenerationRequest) -> GenerationRequest:
        return replace(request, sampling=replace(request.sampling, temperature=2.0))

    return seams.each_request_becomes(stage, warmer)


def _earlier_weights(stage: Stage) -> Patch:
    """Between the push and the first request, the engine loads its first weights again."""
    first, serve = seams.weights_now(stage), stage.engine.serve

    def served(inbox: Any) -> None:
        version = stage.engine.version
        assert version is not None
        stage.engine.begin_update()
        stage.engine.load(list(first.items()))
        stage.engine.reset_caches()
        stage.engine.commit_version(version)
        serve(inbox)

    return patch.object(stage.engine, "serve", served)


@contextmanager
def _best_of_two(stage: Stage) -> Iterator[None]:
    (inject,) = [inject for name, _, inject in SAMPLED if name == "two"]
    with patch.object(stage.config, "num_generations_eval", _SAMPLES), inject(stage):
        yield


def _sampled_become(change: Callable[[Sequence[Prompt]], list[Prompt]]) -> Callable[[Stage], Patch]:
    """Other rows are evaluated than those of the evaluation set."""

    def inject(stage: Stage) -> Patch:
        real = stage.trainer.source.sample

        def sampled(prompts: Sequence[Prompt], *rest: Any) -> list[RolloutGroup]:
            return real(change(prompts), *rest)

        return patch.object(stage.trainer.source, "sample", sampled)

    return inject


def _first_row(prompts: Sequence[Prompt]) -> list[Prompt]:
    return [replace(prompts[0], prompt_id=prompt.prompt_id) for prompt in prompts]


def _needs_rotary(stage: Stage) -> str:
    return "" if _rotations(stage) else "the model has no rotary embeddings"


def _fault(id: str, what: str, inject: Callable[[Stage], Patch], needs: Any = lambda stage: "") -> Fault:
    return Fault(id, f"at an evaluation, {what}", inject, needs=needs, evaluates=True)


EVALUATION_FAULTS = (
    _fault("E1", "the engine has other rotary bases", _other_bases, _needs_rotary),
    _fault("E1b", "the engine attends within a window", _window),
    _fault("E1c", "the engine samples at another temperature", seams.at_temperature_one(_warmer)),
    _fault("E1d", "the engine samples with earlier weights", _earlier_weights),
    _fault("E1e", "completions are paired across prompts", across_prompts),
    _fault("E1f", "reward functions get the next completion's text", scored_become(next_text)),
    _fault("E1g", "reward functions get the columns of another row", scored_become(other_row)),
    _fault("E1h", "every row is the first one", _sampled_become(_first_row)),
    _fault("E1i", "a row is missing", _sampled_become(lambda prompts: list(prompts[1:]))),
    _fault("E1j", "the engine gets half of the token limit", halved),
    _fault("E1k", "the engine keeps the likelier one of two tokens", _best_of_two),
)
