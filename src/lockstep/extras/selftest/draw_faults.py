"""Faults of sampling: the engine reports the right log-probs, and samples otherwise.

S1, S2 and S5: the sampler of vLLM or of the transformers engine gets other logits than those whose log-probs are
reported, or its seeds are changed on their way. Those of S5 look at which ids there are. Some of them need the ids
before a token, which only the sampler of the transformers engine knows here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch

import lockstep.rollouts.driver as collecting
from lockstep.contract.protocol import GenerationRequest, RequestKey
from lockstep.engines.transformers_engine import SampleRows
from lockstep.extras.selftest import seams
from lockstep.extras.selftest.rollout_faults import even_chance
from lockstep.extras.selftest.sampling_faults import samples_with
from lockstep.extras.selftest.seams import REACH, Fault, Patch, is_vllm
from lockstep.extras.verify.stage import Stage
from lockstep.tokens.chat import end_ids

# Between the positions of two draws with the same seed: more than a completion has.
_APART = 1 << 20
# Changes (R, V) logits.
Change = Callable[[torch.Tensor], torch.Tensor]


def _samples_from(change: Change, times: int = 1) -> Callable[[Stage], Patch]:
    """The engine samples from changed logits; of several samples it keeps the likeliest."""

    def inject(stage: Stage) -> Patch:
        return _vllm_samples(stage, change, times) if is_vllm(stage) else _transformers_samples(change, times)

    return seams.at_temperature_one(inject)


def _vllm_samples(stage: Stage, change: Change, times: int) -> Patch:
    sampler = seams.vllm_worker(stage).model_runner.sampler
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
        moved = (positions + _APART * i for i in range(times))
        drawn = [real(change(logits.float()), mapping, places, own, *rest)[0] for own in moved]
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

    return seams.requests_become(stage, paired)


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


# Changes (1, V) logits, given the ids of the prompt and the sampled ids so far.
ChangeOfRow = Callable[[torch.Tensor, list[int], list[int]], torch.Tensor]


def _knowing_the_ids(change: ChangeOfRow) -> Callable[[Stage], Patch]:
    """The transformers engine samples each row from logits that were changed by the ids before the token."""

    @contextmanager
    def inject(stage: Stage) -> Iterator[None]:
        real, rows = SampleRows._sample, [None]

        def noted(self: Any, row: Any, logits: torch.Tensor) -> int:
            rows[:] = [row]
            return real(self, row, logits)

        def of_row(logits: torch.Tensor) -> torch.Tensor:
            (row,) = rows
            assert row is not None
            return change(logits, row.prompt_ids, row.token_ids)

        with patch.object(SampleRows, "_sample", noted), _transformers_samples(of_row, 1):
            yield

    return seams.at_temperature_one(inject)


def _moved(ids: Callable[[int], Sequence[int]], factor: float) -> Change:
    """The odds of some ids of the vocabulary, whose size is given, are multiplied."""
    by = math.log(factor) if factor else -torch.inf

    def change(logits: torch.Tensor) -> torch.Tensor:
        changed = logits.clone()
        changed[:, list(ids(logits.shape[1]))] += by
        return changed

    return change


def _ends_moved(factor: float) -> Callable[[Stage], Patch]:
    """The odds of an end token are multiplied, where half of the completions would end at once."""

    @contextmanager
    def inject(stage: Stage) -> Iterator[None]:
        ends = end_ids(stage.model, stage.tokenizer)
        bias = dict.fromkeys(map(str, ends), even_chance(stage, ends))
        with samples_with(stage, logit_bias=bias), _samples_from(_moved(lambda count: ends, factor))(stage):
            yield

    return inject


def _moved_by_ids(ids: Callable[[list[int], list[int]], Sequence[int]], by: float) -> ChangeOfRow:
    """The logits of some ids, which follow from prompt and completion so far, are moved."""

    def change(logits: torch.Tensor, prompt: list[int], completion: list[int]) -> torch.Tensor:
        changed = logits.clone()
        changed[:, sorted(set(ids(prompt, completion)))] += by
        return changed

    return change


def _after_the_pair(prompt: list[int], completion: list[int]) -> list[int]:
    """The ids that would make a pair of ids that is there already."""
    path = prompt + completion
    return [path[i] for i in range(1, len(path)) if path[i - 1] == path[-1]]


def _first_is_greedy(logits: torch.Tensor, prompt: list[int], completion: list[int]) -> torch.Tensor:
    return logits if completion else _top_k(logits, 1)


def _needs_the_ids(stage: Stage) -> str:
    return "" if not is_vllm(stage) else "the sampler of vLLM is not told the ids before a token"


OF_IDS: Sequence[tuple[str, str, Callable[[Stage], Patch]]] = (
    ("ends", "the engine doubles the odds of an end token", _ends_moved(2.0)),
    (
        "even",
        "the engine never samples an even id",
        _samples_from(_moved(lambda count: range(0, count, 2), 0.0)),
    ),
    (
        "shard",
        "the engine leaves out the second quarter of the vocabulary",
        _samples_from(_moved(lambda count: range(count // 4, count // 2), 0.0)),
    ),
)
# Those that need the ids before a token.
OF_EARLIER_IDS: Sequence[tuple[str, str, ChangeOfRow]] = (
    (
        "last",
        "the engine samples the last id again far too often",
        _moved_by_ids(lambda prompt, completion: (prompt + completion)[-1:], 3.0),
    ),
    ("pairs", "the engine repeats pairs of ids far too often", _moved_by_ids(_after_the_pair, 3.0)),
    (
        "presence",
        "the engine applies a presence penalty that was not asked for",
        _moved_by_ids(lambda prompt, completion: completion, -2.0),
    ),
    ("first", "the engine takes the likeliest id as the first token", _first_is_greedy),
)

DRAW_FAULTS = (
    *(
        Fault(
            f"S1-{name}",
            what,
            inject,
            check="draws",
            needs=seams.needs_single(
                "in half precision, rounding hides a temperature that is off by a twentieth"
            )
            if name in ("heat", "cold")
            else lambda stage: "",
        )
        for name, what, inject in SAMPLED
    ),
    Fault(
        "S2-pairs",
        "the engine samples the completions of a group in pairs of equal seeds",
        seams.at_temperature_one(_seeds_in_pairs),
    ),
    Fault(
        "S2-prompt",
        "seeds do not depend on the prompt",
        _blind_to(lambda version, key: (version, key._replace(prompt_id=""))),
    ),
    Fault(
        "S2-version", "seeds do not depend on the weight version", _blind_to(lambda version, key: (0, key))
    ),
    *(Fault(f"S5-{name}", what, inject, check="draws") for name, what, inject in OF_IDS),
    *(
        Fault(
            f"S5-{name}",
            what,
            _knowing_the_ids(change),
            check="draws",
            needs=_needs_the_ids,
        )
        for name, what, change in OF_EARLIER_IDS
    ),
)
