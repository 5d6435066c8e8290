"""Faults of the ends of completions: S3.

The run adds a bias to its end tokens, on both sides, so that completions of a few tokens end by themselves.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from statistics import median
from typing import Any
from unittest.mock import patch

import torch

import lockstep.engines.transformers_engine as transformers_engine
import lockstep.engines.vllm.port.requests as vllm_requests
from lockstep.contract.protocol import Completion, GenerationRequest
from lockstep.contract.sampling import Sampling
from lockstep.extras.selftest.filters import samples_with
from lockstep.extras.selftest.seams import Fault, Patch, answers_become, is_vllm, requests_become
from lockstep.extras.verify.stage import Stage
from lockstep.tokens.arrays import Ids
from lockstep.tokens.end import end_ids
from lockstep.watch.rescoring import completion_logps

# The largest bias that requests may have.
_MOST = 100.0


@contextmanager
def _ending(stage: Stage, fault: Patch) -> Iterator[None]:
    ends = end_ids(stage.model, stage.tokenizer)
    bias = dict.fromkeys(map(str, ends), even_chance(stage, ends))
    with samples_with(stage, logit_bias=bias), fault:
        yield


def even_chance(stage: Stage, ends: Sequence[int]) -> float:
    """The bias under which a completion of a median prompt ends at its first token in one of two cases.

    The policy of a run has moved far, and may hardly end by itself any more.
    """

    def odds(prompt: Ids) -> float:
        """The logit of ending there."""
        logps = [completion_logps(stage.model, prompt, [end], Sampling(1), stage.precision) for end in ends]
        end = torch.cat(logps).double().logsumexp(0).clamp(max=-1e-9)
        return float(end - torch.log1p(-end.exp()))

    return min(max(-median(odds(p.ids) for p in stage.prompts), 0.0), _MOST)


def _ignored(stage: Stage) -> Patch:
    return _ending(stage, _vllm_ignores() if is_vllm(stage) else _transformers_ignores())


def _vllm_ignores() -> Patch:
    real = vllm_requests.sampling_fields

    def ignoring(request: GenerationRequest) -> dict[str, Any]:
        return {**real(request), "ignore_eos": True, "stop_token_ids": []}

    return patch.object(vllm_requests, "sampling_fields", ignoring)


def _transformers_ignores() -> Patch:
    real = transformers_engine._RowsDone._reason

    def ignoring(self: Any, row: Any) -> Any:
        with patch.object(row, "end_ids", ()):
            return real(self, row)

    return patch.object(transformers_engine._RowsDone, "_reason", ignoring)


def _stripped(stage: Stage) -> Patch:
    ends = end_ids(stage.model, stage.tokenizer)

    def without(requests: Sequence[GenerationRequest], answers: list[Completion]) -> list[Completion]:
        return [_cut(a) if len(a.token_ids) > 1 and a.token_ids[-1] in ends else a for a in answers]

    return _ending(stage, answers_become(stage, without))


def _cut(answer: Completion) -> Completion:
    """A completion without its last token."""
    return replace(
        answer,
        token_ids=answer.token_ids[:-1],
        logprobs=answer.logprobs[:-1],
        weight_versions=answer.weight_versions[:-1],
        kept_ids=None if answer.kept_ids is None else answer.kept_ids.part(0, len(answer.token_ids) - 1),
    )


def halved(stage: Stage) -> Patch:
    def halved(requests: list[GenerationRequest]) -> list[GenerationRequest]:
        return [
            replace(r, sampling=replace(r.sampling, max_tokens=max(r.sampling.max_tokens // 2, 1))) for r in requests
        ]

    return requests_become(stage, halved)


def _shortened(stage: Stage) -> Patch:
    def shortened(requests: Sequence[GenerationRequest], answers: list[Completion]) -> list[Completion]:
        longest = max(range(len(answers)), key=lambda i: len(answers[i].token_ids))
        return [_cut(a) if i == longest else a for i, a in enumerate(answers)]

    return answers_become(stage, shortened)


def _needs_two_tokens(stage: Stage) -> str:
    return "" if stage.config.max_completion_length > 1 else "completions have one token each"


END_FAULTS = (
    Fault("S3", "the engine goes on after an end token", _ignored, needs=_needs_two_tokens),
    Fault("S3b", "end tokens are removed from the answers", _stripped, needs=_needs_two_tokens),
    Fault("S3c", "the engine gets half of the token limit", halved, needs=_needs_two_tokens),
    Fault("S3d", "the last token of one answer is missing", _shortened, needs=_needs_two_tokens),
)
