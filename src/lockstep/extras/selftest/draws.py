"""Faults of sampling: S1 and S2. The engine reports the right log-probs, and samples otherwise.

The sampler of vLLM or of the transformers engine gets other logits than those whose log-probs are reported, or its seeds are
changed on their way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch

import lockstep.rollouts.driver as collecting
from lockstep.contract.protocol import GenerationRequest, RequestKey
from lockstep.extras.selftest.seams import (
    REACH,
    Fault,
    Patch,
    at_temperature_one,
    is_vllm,
    needs_single,
    requests_become,
    vllm_worker,
)
from lockstep.extras.verify.stage import Stage

# Between the positions of two draws with the same seed: more than a completion has.
_APART = 1 << 20
# Changes (R, V) logits.
Change = Callable[[torch.Tensor], torch.Tensor]


def _samples_from(change: Change, times: int = 1) -> Callable[[Stage], Patch]:
    """The engine samples from changed logits; of several samples it keeps the likeliest."""

    def inject(stage: Stage) -> Patch:
        return _vllm_samples(stage, change, times) if is_vllm(stage) else _transformers_samples(change, times)

    return lambda stage: at_temperature_one(stage, inject)


def _vllm_samples(stage: Stage, change: Change, times: int) -> Patch:
    sampler = vllm_worker(stage).model_runner.sampler
    if not hasattr(sampler, "topk_topp_sampler"):
        return _second_runner_samples(sampler, change, times)
    sampler = sampler.topk_topp_sampler
    real = sampler.forward

    def otherwise(logits: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
        _, reported = real(logits.clone(), *rest)
        samples = torch.stack([real(change(logits.float()), *rest)[0] for _ in range(times)], -1)
        return _likeliest(samples, reported), reported

    return patch.object(sampler, "forward", REACH.of(otherwise))


def _second_runner_samples(sampler: Any, change: Change, times: int) -> Patch:
    """The same in vLLM's second model runner, whose noise is a function of seed and position."""
    real = sampler._sample_random

    def otherwise(
        logits: torch.Tensor, mapping: Any, places: Any, positions: torch.Tensor, *rest: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        _, reported = real(logits.clone(), mapping, places, positions, *rest)
        drawn = [real(change(logits.float()), mapping, places, positions + _APART * i, *rest)[0] for i in range(times)]
        return _likeliest(torch.stack(drawn, -1), reported), reported

    return patch.object(sampler, "_sample_random", REACH.of(otherwise))


def _transformers_samples(change: Change, times: int) -> Patch:
    real = torch.multinomial

    def otherwise(weights: torch.Tensor, count: int, **more: Any) -> torch.Tensor:
        changed = change(weights.log()[None]).softmax(-1)[0]
        samples = torch.stack([real(changed, count, **more) for _ in range(times)], -1)
        return _likeliest(samples, weights[None])

    return patch.object(torch, "multinomial", otherwise)


def _likeliest(samples: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """(R,) the sample with the highest score. `samples` is (R, n), `scores` (R, V)."""
    samples = samples.long()
    return samples.gather(-1, scores.gather(-1, samples).argmax(-1, keepdim=True))[:, 0]


def _without(cut: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    """`cut` says of (R, V) probabilities which ids are left out."""
    return lambda logits: logits.masked_fill(cut(logits.softmax(-1)), -torch.inf)


def _outside_top_p(p: torch.Tensor) -> torch.Tensor:
    values, ids = p.sort(descending=True)
    return torch.zeros_like(p, dtype=torch.bool).scatter_(-1, ids, values.cumsum(-1) - values >= 0.95)


def _seeds_in_pairs(stage: Stage) -> Patch:
    def paired(requests: list[GenerationRequest]) -> list[GenerationRequest]:
        seeds = {request.key: request.seed for request in requests}
        return [replace(r, seed=seeds[r.key._replace(sample=r.key.sample // 2 * 2)]) for r in requests]

    return requests_become(stage, paired)


def _blind_to(change: Callable[[int, RequestKey], tuple[int, RequestKey]]) -> Callable[[Stage], Patch]:
    real = collecting.request_seed

    def blind(run_seed: int, version: int, key: RequestKey) -> int:
        return real(run_seed, *change(version, key))

    return lambda stage: patch.object(collecting, "request_seed", blind)


SAMPLED: Sequence[tuple[str, str, Callable[[Stage], Patch]]] = (
    ("heat", "the engine samples at 1.05 times the temperature", _samples_from(lambda z: z / 1.05)),
    ("cold", "the engine samples at 0.95 times the temperature", _samples_from(lambda z: z / 0.95)),
    ("top_k", "the engine samples from the 50 likeliest ids", _samples_from(lambda z: _top_k(z, 50))),
    ("top_p", "the engine samples with a top-p of 0.95", _samples_from(_without(_outside_top_p))),
    (
        "min_p",
        "the engine samples with a min-p of 0.02",
        _samples_from(_without(lambda p: p < 0.02 * p.amax(-1, keepdim=True))),
    ),
    ("two", "the engine keeps the likelier one of two sampled tokens", _samples_from(lambda z: z, times=2)),
    ("greedy", "the engine takes the likeliest token", _samples_from(lambda z: _top_k(z, 1))),
)


def _top_k(logits: torch.Tensor, k: int) -> torch.Tensor:
    return logits.masked_fill(logits < logits.topk(k).values[:, -1:], -torch.inf)


DRAW_FAULTS = (
    *(
        Fault(
            f"S1-{name}",
            f"{what}, and reports the right log-probs",
            inject,
            check="draws",
            needs=needs_single("in half precision, rounding hides a temperature that is off by a twentieth")
            if name in ("heat", "cold")
            else lambda stage: "",
        )
        for name, what, inject in SAMPLED
    ),
    Fault(
        "S2-pairs",
        "the engine samples the completions of a group in pairs of equal seeds",
        lambda stage: at_temperature_one(stage, _seeds_in_pairs),
    ),
    Fault(
        "S2-prompt",
        "seeds do not depend on the prompt",
        _blind_to(lambda version, key: (version, key._replace(prompt_id=""))),
    ),
    Fault("S2-version", "seeds do not depend on the weight version", _blind_to(lambda version, key: (0, key))),
)
