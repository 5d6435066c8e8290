"""Faults of sampling filters: P7 to P12.

Each fault samples with filters of its own, whatever filters the run has. The engine is then made to do something else, or its
answers are changed on their way to the trainer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import fields, replace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

import lockstep.engines.transformers_engine as transformers_engine
from lockstep.contract.protocol import Completion, GenerationRequest
from lockstep.contract.sampling import Grammar, Sampling
from lockstep.engines.vllm.port.faults import counts_of_second_runner, penalties_of_first_runner
from lockstep.extras.selftest.seams import REACH, Fault, Patch, answers_become, is_vllm, requests_become, user_asks
from lockstep.extras.verify.stage import Stage
from lockstep.tokens.arrays import small_ids, whole_numbers
from lockstep.tokens.end import end_ids
from lockstep.tokens.kept_ids import KeptIds, joined_kept_ids
from lockstep.training.config.fields.filters import FilterFields
from lockstep.training.config.sampling import sampling_of
from lockstep.training.forward.filters.id_rules import IdRules

# A value of each filter that shows in most sets, and the filter that is in force on both sides beside it.
_FILTERS: dict[str, tuple[float, dict[str, Any]]] = {
    "top_k": (3, {"top_p": 0.999}),
    "top_p": (0.5, {"top_k": 50}),
    "min_p": (0.3, {"top_k": 50}),
}
_NEUTRAL = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
_LETTERS, _DIGITS = "[a-zA-Z ]{4,60}", "[0-9 ]{4,60}"


@contextmanager
def samples_with(stage: Stage, **given: Any) -> Iterator[None]:
    """The run samples at temperature 1 with these filters and no others: its requests, its trainer, and its proofs."""
    neutral = {f.name: f.default for f in fields(FilterFields)}
    with user_asks(stage, **{**neutral, "temperature": 1.0, **given}), ExitStack() as stack:
        ends = end_ids(stage.model, stage.tokenizer)
        rules = IdRules.of_run(sampling_of(stage.config, stage.tokenizer, ends), stage.model, stage.tokenizer)
        stack.enter_context(patch.object(stage.trainer, "rules", rules))
        stack.enter_context(patch.object(stage.trainer.proofs, "distribution", rules.distribution))
        yield


@contextmanager
def _answers_with(stage: Stage, asked: dict[str, Any], change: Any) -> Iterator[None]:
    """The run samples with filters, and each answer's kept ids are changed."""

    def changed(requests: Sequence[GenerationRequest], answers: list[Completion]) -> list[Completion]:
        return [replace(answer, kept_ids=change(answer)) for answer in answers]

    with samples_with(stage, **asked), answers_become(stage, changed):
        yield


def _set_of_another_token(stage: Stage) -> Patch:
    return _answers_with(stage, {"top_k": 3}, _moved_on)


def _set_of_another_token_with_its_own(stage: Stage) -> Patch:
    """The sampled token is put into the other token's set, so that only the log-probs show the fault."""

    def with_own(answer: Completion) -> KeptIds:
        moved = _moved_on(answer)
        sets = [np.union1d(moved.part(i, i + 1).ids, [token]) for i, token in enumerate(answer.token_ids)]
        return joined_kept_ids([KeptIds(small_ids(ids), whole_numbers([len(ids)])) for ids in sets])

    return _answers_with(stage, {"top_k": 3}, with_own)


def _moved_on(answer: Completion) -> KeptIds:
    """The sets of a completion, each one at the next token. The last set comes first."""
    kept = answer.kept_ids
    assert kept is not None
    last = len(kept) - 1
    return joined_kept_ids([kept.part(last, last + 1), kept.part(0, last)])


def _cut_short(stage: Stage) -> Patch:
    return _answers_with(stage, {"top_k": 20}, _halves)


def _halves(answer: Completion) -> KeptIds:
    """Every second id of each set, and the sampled token."""
    kept = answer.kept_ids
    assert kept is not None
    own = kept.ids == np.repeat(answer.token_ids, kept.sizes)
    return _kept_part(kept, own | (np.arange(len(kept.ids)) % 2 == 0))


def _kept_part(kept: KeptIds, stays: np.ndarray) -> KeptIds:
    """The sets without some of their ids.

    Args:
        stays: (M,) bool, whether each id stays in its set.
    """
    return KeptIds(kept.ids[stays], np.cumsum(np.bincount(kept.tokens[stays], minlength=len(kept))))


@contextmanager
def _engine_samples(stage: Stage, asked: dict[str, Any], done: dict[str, Any], every: int = 1) -> Iterator[None]:
    """The run asks for filters, and the engine samples every n-th request with others."""

    def otherwise(requests: list[GenerationRequest]) -> list[GenerationRequest]:
        return [
            request if place % every else replace(request, sampling=replace(request.sampling, **done))
            for place, request in enumerate(requests)
        ]

    with samples_with(stage, **asked), requests_become(stage, otherwise):
        yield


def _ignored_by_engine(name: str) -> Fault:
    value, beside = _FILTERS[name]
    what = f"the engine ignores the {name} of the run, and the trainer applies it"
    asked, done = {**beside, name: value}, {name: _NEUTRAL[name]}
    return Fault(f"P9-{name}", what, lambda stage: _engine_samples(stage, asked, done))


def _ignored_by_trainer(name: str) -> Fault:
    value, beside = _FILTERS[name]
    what = f"the engine applies a {name} that the trainer ignores"
    done = {name: value}
    return Fault(f"P10-{name}", what, lambda stage: _engine_samples(stage, beside, done))


def _other_grammar(stage: Stage) -> Patch:
    asked = {"vllm_structured_outputs_regex": _LETTERS}
    return _engine_samples(stage, asked, {"grammar": Grammar("regex", _DIGITS)}, every=2)


def _narrower_grammar(stage: Stage) -> Patch:
    """Every token that the other grammar allows is also allowed by the request's own grammar."""
    asked = {"vllm_structured_outputs_regex": _LETTERS}
    return _engine_samples(stage, asked, {"grammar": Grammar("regex", "[a-m]{4,60}")}, every=2)


def _prompt_not_counted(stage: Stage) -> Patch:
    """The engine's repetition penalty counts the completion alone."""
    return _counting_otherwise(stage, {"repetition_penalty": 1.8}, lambda prompt, output: ([], output))


def _prompt_counted(stage: Stage) -> Patch:
    """The engine's presence and frequency penalties count the prompt too."""
    asked = {"presence_penalty": -2.0, "frequency_penalty": -2.0}
    return _counting_otherwise(stage, asked, lambda prompt, output: (prompt, [*prompt, *output]))


@contextmanager
def _counting_otherwise(stage: Stage, asked: dict[str, Any], counted: Any) -> Iterator[None]:
    with (
        samples_with(stage, **asked),
        _vllm_counts(stage, counted) if is_vllm(stage) else _transformers_counts(counted),
    ):
        yield


def _vllm_counts(stage: Stage, counted: Any) -> Patch:
    if stage.engine.settings().second_runner:
        return _second_runner_counts(counted)
    place = penalties_of_first_runner()
    honest = getattr(*place)

    def otherwise(logits: torch.Tensor, prompts: torch.Tensor, *penalties: torch.Tensor, **more: Any) -> torch.Tensor:
        # vLLM pads the prompts with the number of tokens.
        none, *values = logits.shape[1], *penalties
        outputs = more.pop("output_token_ids", None) or values.pop()
        pairs = [
            counted([i for i in prompt if i != none], output)
            for prompt, output in zip(prompts.tolist(), outputs, strict=True)
        ]
        longest = max(len(prompt) for prompt, _ in pairs)
        padded = [[*prompt, *[none] * (max(longest, 1) - len(prompt))] for prompt, _ in pairs]
        return honest(logits, torch.tensor(padded).to(prompts), *values, [output for _, output in pairs], **more)

    return patch.object(*place, REACH.of(otherwise))


def _second_runner_counts(counted: Any) -> Patch:
    """The same in vLLM's second model runner, which counts the ids of a request once, when it comes."""
    place = counts_of_second_runner()
    honest = getattr(*place)

    def otherwise(
        rows: torch.Tensor,
        ids: torch.Tensor,
        lengths: torch.Tensor,
        filled: Any,
        in_prompt: Any,
        counts: Any,
        *rest: Any,
    ) -> None:
        honest(rows, ids, lengths, filled, in_prompt, counts, *rest)
        for row in rows.tolist():
            prompt, output = counted(ids[row, : int(lengths[row])].tolist(), [])
            if not prompt:
                in_prompt[row].zero_()
            counts[row] += torch.bincount(torch.tensor(output, dtype=torch.long), minlength=counts.shape[1]).to(counts)

    return patch.object(*place, REACH.of(otherwise))


def _transformers_counts(counted: Any) -> Patch:
    honest = transformers_engine.processed_logprobs

    def otherwise(
        logits: torch.Tensor, sampling: Sampling, prompt: list[int], output: list[int], **more: Any
    ) -> torch.Tensor:
        return honest(logits, sampling, *counted(prompt, output), **more)

    return patch.object(transformers_engine, "processed_logprobs", otherwise)


def _needs_grammars(stage: Stage) -> str:
    try:
        import xgrammar  # noqa: F401
    except ImportError:
        return "xgrammar is not installed"
    return ""


FILTER_FAULTS = (
    Fault("P7", "each token has the kept ids of another token", _set_of_another_token),
    Fault("P7b", "the same, and the sampled token is added to the set", _set_of_another_token_with_its_own),
    Fault("P8", "half of the kept ids are missing", _cut_short),
    *(_ignored_by_engine(name) for name in _FILTERS),
    *(_ignored_by_trainer(name) for name in _FILTERS),
    Fault("P11", "the engine follows the grammar of another request", _other_grammar, needs=_needs_grammars),
    Fault("P11b", "the other grammar allows a part of the own one", _narrower_grammar, needs=_needs_grammars),
    Fault("P12", "the engine's repetition penalty does not count the prompt", _prompt_not_counted),
    Fault("P12b", "the engine's presence and frequency penalties count the prompt", _prompt_counted),
)
