"""`contract/distribution.py` computes the distribution that `Sampling` defines. The order of its steps is vLLM's."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from by_the_book import kept_set, logprob, shaped
from draws import draws
from hypothesis import given
from hypothesis import strategies as st

from lockstep.contract.distribution import banned_ids, processed_logprobs
from lockstep.contract.sampling import Sampling

V = 40
END_IDS = (0, 1)
ids = st.integers(0, V - 1)


@st.composite
def samplings(draw: st.DrawFn) -> Sampling:
    def maybe(strategy: st.SearchStrategy, neutral: object) -> object:
        return draw(strategy) if draw(st.booleans()) else neutral

    return Sampling(
        max_tokens=9,
        temperature=draw(st.sampled_from([0.5, 1.0, 1.7])),
        top_p=maybe(st.floats(0.3, 0.95), 1.0),
        top_k=maybe(st.integers(1, V), 0),
        min_p=maybe(st.floats(0.0, 0.3), 0.0),
        repetition_penalty=maybe(st.floats(0.5, 2.0), 1.0),
        presence_penalty=maybe(st.floats(-2, 2), 0.0),
        frequency_penalty=maybe(st.floats(-2, 2), 0.0),
        logit_bias=tuple(maybe(st.dictionaries(ids, st.floats(-4, 4), max_size=6), {}).items()),  # type: ignore[attr-defined]
        allowed_token_ids=maybe(st.sets(ids, min_size=20).map(tuple), None),
        bad_words=tuple(maybe(st.lists(st.lists(ids, min_size=1, max_size=3).map(tuple), max_size=5), ())),  # type: ignore[arg-type]
        min_tokens=maybe(st.integers(1, 5), 0),
    )  # type: ignore[arg-type]


def mask_of(allowed: set[int]) -> torch.Tensor:
    """(1, 2) int32 mask, as xgrammar makes it."""
    words = [sum(1 << (i % 32) for i in allowed if i // 32 == word) for word in range(math.ceil(V / 32))]
    return torch.tensor(
        [[word - (1 << 32) if word >= 1 << 31 else word for word in words]], dtype=torch.int32
    )


@draws(300)
@given(
    sampling=samplings(),
    seed=st.integers(0, 10**6),
    prompt=st.lists(ids, min_size=1, max_size=6),
    output=st.lists(ids, max_size=6),
    allowed=st.none() | st.sets(ids, min_size=25),
)
def test_log_probs_are_those_of_the_definition(
    sampling: Sampling, seed: int, prompt: list[int], output: list[int], allowed: set[int] | None
) -> None:
    logits = 3 * torch.randn(V, generator=torch.Generator().manual_seed(seed))
    before = logits.clone()
    mask = None if allowed is None else mask_of(allowed)
    found = processed_logprobs(logits, sampling, prompt, output, end_ids=END_IDS, grammar_mask=mask)
    assert torch.equal(logits, before)
    scores = shaped(logits, sampling, prompt, output, END_IDS, None if mask is None else mask[0])
    if scores.isneginf().all():
        return
    kept = set(torch.isfinite(found).nonzero()[:, 0].tolist())
    assert kept_set(scores, sampling, -1e-4) <= kept <= kept_set(scores, sampling, 1e-4)
    for token in kept:
        assert float(found[token]) == pytest.approx(logprob(scores, sorted(kept), token), abs=1e-4)


@pytest.mark.parametrize(
    ("output", "banned"),
    [([], [9]), ([5], [9, 6]), ([5, 6], [9, 7]), ([6, 5], [9, 6]), ([5, 6, 5], [9, 6]), ([6], [9])],
)
def test_the_last_token_of_a_bad_word_is_banned_after_its_other_tokens_in_the_completion(
    output: list[int], banned: list[int]
) -> None:
    sampling = Sampling(9, bad_words=((9,), (5, 6), (5, 6, 7)))
    assert banned_ids(sampling, output) == banned


def test_an_end_token_is_allowed_early_if_a_grammar_leaves_nothing_else() -> None:
    sampling, logits = Sampling(9, min_tokens=4), torch.randn(V)
    only_end = processed_logprobs(logits, sampling, [3], [], end_ids=END_IDS, grammar_mask=mask_of({1}))
    assert (float(only_end[1]), int(torch.isfinite(only_end).sum())) == (0.0, 1)
    more = processed_logprobs(logits, sampling, [3], [], end_ids=END_IDS, grammar_mask=mask_of({1, 7}))
    assert torch.isfinite(more).nonzero()[:, 0].tolist() == [7]
    ended = processed_logprobs(logits, sampling, [3], [2] * 4, end_ids=END_IDS, grammar_mask=mask_of({1, 7}))
    assert torch.isfinite(ended).nonzero()[:, 0].tolist() == [1, 7]


def test_penalties_apply_to_the_biased_logits() -> None:
    """vLLM's order: a bias that makes a logit positive is divided by the repetition penalty too."""
    logits = torch.full((V,), -1.0)
    sampling = Sampling(9, logit_bias=((4, 3.0),), repetition_penalty=2.0)
    found = processed_logprobs(logits, sampling, [4], [])
    assert float(found[4] - found[5]) == pytest.approx(2.0)
    assert float((processed_logprobs(logits, replace(sampling, logit_bias=()), [4], []) - found)[4]) < -1
