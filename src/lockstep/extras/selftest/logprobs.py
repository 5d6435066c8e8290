"""Log-prob faults: P1 to P5."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch

import lockstep.engines.transformers_engine as transformers_engine
import lockstep.engines.vllm.in_process as vllm_inprocess
from lockstep.contract.protocol import Completion, GenerationRequest
from lockstep.extras.selftest.seams import (
    REACH,
    Fault,
    Patch,
    answers_become,
    at_temperature_one,
    is_vllm,
    user_asks,
    vllm_worker,
)
from lockstep.extras.verify.stage import Stage
from lockstep.tokens.arrays import Reals, reals
from lockstep.watch.rescoring import sequence_logits


@contextlib.contextmanager
def _raw(stage: Stage) -> Iterator[None]:
    """The engine reports log-probs before the temperature, at a temperature that is not 1."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(user_asks(stage, temperature=0.7))
        if is_vllm(stage):
            sampler = vllm_worker(stage).model_runner.sampler
            stack.enter_context(patch.object(sampler, "logprobs_mode", "raw_logprobs"))
            stack.enter_context(patch.object(sampler, "sample", REACH.of(sampler.sample)))
            if hasattr(sampler, "topk_topp_sampler"):
                # The first model runner has the mode in two places, the second one in one.
                stack.enter_context(patch.object(sampler.topk_topp_sampler, "logprobs_mode", "raw_logprobs"))
        else:
            honest = transformers_engine.processed_logprobs

            def raw(logits: torch.Tensor, sampling: Any, *ids: Any, **more: Any) -> torch.Tensor:
                return honest(logits, replace(sampling, temperature=1.0), *ids, **more)

            stack.enter_context(patch.object(transformers_engine, "processed_logprobs", raw))
        yield


def _top_k_unasked(stage: Stage) -> Patch:
    if is_vllm(stage):
        params = vllm_inprocess.sampling_params

        def with_top_k(request: GenerationRequest, **more: Any) -> Any:
            found = params(request, **more)
            found.top_k = 3
            return found

        return patch.object(vllm_inprocess, "sampling_params", with_top_k)
    honest = transformers_engine.processed_logprobs

    def filtered(logits: torch.Tensor, sampling: Any, *ids: Any, **more: Any) -> torch.Tensor:
        return honest(logits, replace(sampling, top_k=3), *ids, **more)

    return patch.object(transformers_engine, "processed_logprobs", filtered)


def _first_becomes(stage: Stage, value: float) -> Patch:
    def changed(requests: Sequence[GenerationRequest], answers: list[Completion]) -> list[Completion]:
        # The least likely token: a token that the model is sure of has a true log-prob near 0.
        unsure = min(answers, key=lambda a: float(a.logprobs.min()))
        logprobs = unsure.logprobs.copy()
        logprobs[unsure.logprobs.argmin()] = value
        return [replace(a, logprobs=logprobs) if a is unsure else a for a in answers]

    return answers_become(stage, changed)


def _missing(stage: Stage) -> Patch:
    return _first_becomes(stage, float("nan"))


def _default_value(stage: Stage) -> Patch:
    return _first_becomes(stage, 0.0)


def _top_one(stage: Stage) -> Patch:
    """The engine reports the most likely token's log-prob as the sampled token's."""
    if not is_vllm(stage):

        def top(requests: Sequence[GenerationRequest], answers: list[Completion]) -> list[Completion]:
            return [replace(a, logprobs=_best(stage, a)) for a in answers]

        return answers_become(stage, top)
    return _first_of_vllms_list()


@contextlib.contextmanager
def _first_of_vllms_list() -> Iterator[None]:
    params, made = vllm_inprocess.sampling_params, vllm_inprocess.completion

    def with_top(request: GenerationRequest, **more: Any) -> Any:
        found = params(request, **more)
        found.logprobs = 1
        return found

    def first(key: Any, output: Any, **more: Any) -> Completion:
        best = [max(entry.values(), key=lambda e: e.logprob).logprob for entry in output.outputs[0].logprobs]
        return replace(made(key, output, **more), logprobs=reals(best))

    with patch.object(vllm_inprocess, "sampling_params", with_top), patch.object(vllm_inprocess, "completion", first):
        yield


def _best(stage: Stage, answer: Completion) -> Reals:
    logits = sequence_logits(
        stage.model, [*answer.prompt_ids.tolist(), *answer.token_ids[:-1].tolist()], stage.precision
    )
    scaled = logits[len(answer.prompt_ids) - 1 :] / stage.config.temperature
    return reals(scaled.log_softmax(-1).max(-1).values.tolist())


@contextlib.contextmanager
def _half_head(stage: Stage) -> Iterator[None]:
    """The engine computes its output head in bf16 and everything else in fp32."""

    def half(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x.bfloat16(), weight.bfloat16()).to(x.dtype)

    if is_vllm(stage):
        head = vllm_worker(stage).model_runner.model.lm_head.quant_method
        with patch.object(head, "apply", REACH.of(lambda layer, x, *args, **kwargs: half(x, layer.weight))):
            yield
        return
    head = stage.engine.model.get_output_embeddings()  # type: ignore[attr-defined]
    hook = head.register_forward_hook(lambda module, inputs, output: half(inputs[0], module.weight))
    try:
        yield
    finally:
        hook.remove()


def _needs_exact_steps(stage: Stage) -> str:
    in_8_bits = stage.config.vllm_quantization is not None
    return (
        "an engine in 8 bits shows it at the start of a run, and this one began at another temperature"
        if in_8_bits
        else ""
    )


def _needs_single(stage: Stage) -> str:
    if is_vllm(stage) and not hasattr(vllm_worker(stage).model_runner.model, "lm_head"):
        return "this model's head is inside another module"
    dtype = stage.trainer.proofs.engine_dtype
    return "" if dtype == torch.float32 else "both heads are in half precision"


LOGPROB_FAULTS = (
    Fault("P1", "raw log-probs at temperature 0.7", _raw, needs=_needs_exact_steps),
    Fault("P2", "top-k that nobody asked for", _top_k_unasked),
    Fault("P3", "a log-prob that is missing (NaN)", _missing),
    Fault("P3b", "a missing log-prob became 0.0", lambda stage: at_temperature_one(stage, _default_value)),
    Fault(
        "P4", "the most likely token's log-prob passes for the sampled one's", lambda s: at_temperature_one(s, _top_one)
    ),
    Fault("P5", "the engine's head in bf16, the trainer's in fp32", _half_head, needs=_needs_single),
)
