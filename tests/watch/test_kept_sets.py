"""The proof of kept sets accepts every set that rounding explains, and names the filter that was not applied."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace

import numpy as np
import pytest
import torch
from draws import draws
from hypothesis import example, given
from hypothesis import strategies as st
from tiny import make_model
from transformers import PreTrainedModel

from lockstep.contract.distribution import Distribution, filtered, shaped_logits
from lockstep.contract.protocol import Completion, RequestKey
from lockstep.contract.sampling import Sampling
from lockstep.errors import ProofError
from lockstep.learn.pack import pack_rows
from lockstep.learn.sequence import TrainingSequence
from lockstep.learn.update import hidden_states
from lockstep.tokens.arrays import KeptIds, joined_kept_ids
from lockstep.watch import evidence as drawn_rows
from lockstep.watch.evidence import DrawnRows
from lockstep.watch.kept_sets import FilterBounds, KeptSetProof, KeptSetStats, KeptToken, mean_limit
from lockstep.watch.plain_forward import OWN_DTYPE, sequence_logits
from lockstep.watch.tolerances import tolerance

FILTERS = {
    "top_k": Sampling(8, top_k=6),
    "top_p": Sampling(8, top_p=0.7),
    "min_p": Sampling(8, min_p=0.08),
    "all": Sampling(
        8, top_k=30, top_p=0.8, min_p=0.01, temperature=1.3, repetition_penalty=1.3, min_tokens=3
    ),
}


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return make_model(scale=0.3)


@torch.no_grad()
def sampled(model: PreTrainedModel, sampling: Sampling, seed: int = 0) -> Completion:
    """A completion of 8 tokens that the model samples with filters. Its log-probs are not used here."""
    torch.manual_seed(seed)
    prompt, ids = [5, 9, 40, 41], []
    sets: list[KeptIds] = []
    for _ in range(8):
        logits = model(input_ids=torch.tensor([[*prompt, *ids]]), use_cache=False).logits[0, -1]
        shaped = shaped_logits(logits, sampling, prompt, ids, end_ids=(0,)) / sampling.temperature
        scores = filtered(shaped, sampling)[0]
        kept = scores.isfinite().nonzero()[:, 0].numpy()
        sets.append(KeptIds(kept, [len(kept)]))
        ids.append(int(torch.multinomial(scores.softmax(-1), 1)))
    return Completion(
        RequestKey("p", seed),
        prompt,
        ids,
        np.zeros(8),
        np.full(8, 3),
        "length",
        kept_ids=joined_kept_ids(sets),
    )


def tokens_of(model: PreTrainedModel, completion: Completion) -> list[KeptToken]:
    """The tokens of a completion, with the model's logits."""
    assert completion.kept_ids is not None
    prompt, ids = completion.prompt_ids.tolist(), completion.token_ids.tolist()
    logits = sequence_logits(model, [*prompt, *ids])[len(prompt) - 1 :]
    return [
        KeptToken(
            str(completion.key), i, logits[i], prompt, ids[:i], None, completion.kept_ids.part(i, i + 1).ids
        )
        for i in range(len(ids))
    ]


def check(
    model: PreTrainedModel,
    sampling: Sampling,
    completions: list[Completion],
    dtype: torch.dtype = torch.float32,
) -> KeptSetStats:
    """What the proof finds about completions of a generation."""
    limit = tolerance(dtype, dtype)
    found = KeptSetProof(Distribution(sampling, (0,)), limit).check(
        [token for completion in completions for token in tokens_of(model, completion)]
    )
    found.check_mean(sampling, limit)
    return found


@pytest.mark.parametrize("name", FILTERS)
def test_sets_of_the_same_filters_pass_and_are_counted(model: PreTrainedModel, name: str) -> None:
    found = check(model, FILTERS[name], [sampled(model, FILTERS[name], seed) for seed in range(3)])
    assert (found.tokens, found.differences) == (24, 0)
    assert found.metrics() == {"sampling/edge_differences": 0.0, "sampling/edge_rounding": 0.0}


@pytest.mark.parametrize(
    ("name", "ignored"),
    [("top_k", {"top_k": 0, "top_p": 0.999}), ("top_p", {"top_p": 0.999}), ("min_p", {"min_p": 1e-4})],
)
def test_a_filter_that_the_engine_ignores_is_named(
    model: PreTrainedModel, name: str, ignored: dict[str, float]
) -> None:
    made = sampled(model, replace(FILTERS[name], **ignored))
    with pytest.raises(ProofError, match=f"against {name}"):
        check(model, FILTERS[name], [made])


@pytest.mark.parametrize("name", FILTERS)
def test_a_set_that_was_cut_short_is_found(model: PreTrainedModel, name: str) -> None:
    whole = sampled(model, FILTERS[name])
    assert whole.kept_ids is not None
    largest = int(whole.kept_ids.sizes.argmax())
    stays = np.ones(len(whole.kept_ids.ids), dtype=bool)
    own = np.flatnonzero(whole.kept_ids.tokens == largest)
    stays[own[whole.kept_ids.ids[own] != whole.token_ids[largest]]] = False
    sizes = np.bincount(whole.kept_ids.tokens[stays], minlength=8)
    cut = replace(whole, kept_ids=KeptIds(whole.kept_ids.ids[stays], np.cumsum(sizes)))
    with pytest.raises(ProofError, match="left out id"):
        check(model, FILTERS[name], [cut])


def test_a_banned_id_in_a_set_is_found(model: PreTrainedModel) -> None:
    made = sampled(model, Sampling(8, top_k=6))
    assert made.kept_ids is not None
    banned = int(made.kept_ids.ids[0])
    rule = Sampling(8, top_k=6, allowed_token_ids=tuple(i for i in range(384) if i != banned))
    with pytest.raises(ProofError, match="against grammar, allowed_token_ids, bad_words or min_tokens"):
        check(model, rule, [made])


def test_a_penalty_that_one_side_counts_otherwise_is_found(model: PreTrainedModel) -> None:
    made = sampled(model, Sampling(8, top_k=6))
    with pytest.raises(ProofError, match="top_k"):
        check(model, Sampling(8, top_k=6, repetition_penalty=2.0), [made])


# What one side samples with, and what the other side's filters are.
ONE_SIDED = {
    "the engine ignores top_k": ({"top_k": 3, "top_p": 0.999}, {"top_k": 0}),
    "the engine ignores top_p": ({"top_k": 50, "top_p": 0.5}, {"top_p": 1.0}),
    "the engine ignores min_p": ({"top_k": 50, "min_p": 0.3}, {"min_p": 0.0}),
    "the trainer ignores top_k": ({"top_p": 0.999}, {"top_k": 3}),
    "the trainer ignores top_p": ({"top_k": 50}, {"top_p": 0.5}),
    "the trainer ignores min_p": ({"top_k": 50}, {"min_p": 0.3}),
}


def in_half_precision(model: PreTrainedModel, asked: Sampling, done: Sampling) -> KeptSetStats:
    """What the proof finds about 64 tokens of an engine in bf16, with the trainer in fp32."""
    engine = deepcopy(model).bfloat16()
    return check(model, asked, [sampled(engine, done, seed) for seed in range(8)], torch.bfloat16)


@pytest.mark.parametrize("name", FILTERS)
def test_in_half_precision_the_rounding_of_honest_sets_is_far_below_its_limits(
    model: PreTrainedModel, name: str
) -> None:
    found = in_half_precision(model, FILTERS[name], FILTERS[name])
    assert found.tokens == 64
    largest = mean_limit(found.tokens, FILTERS[name], tolerance(torch.bfloat16, torch.bfloat16))
    assert 0.0 < found.mean_rounding < largest / 4
    assert 0.0 < found.nearest < 0.25


@pytest.mark.parametrize("name", ONE_SIDED)
def test_in_half_precision_a_filter_of_one_side_alone_is_found(model: PreTrainedModel, name: str) -> None:
    asked, done = ONE_SIDED[name]
    with pytest.raises(
        ProofError, match=r"applies .*(top_k|top_p|min_p).* in another way than the run asks for"
    ):
        in_half_precision(model, Sampling(8, **asked), Sampling(8, **{**asked, **done}))


def test_the_limit_on_a_mean_is_that_on_one_value_for_one_token_and_falls_to_the_scale() -> None:
    limit = tolerance(torch.bfloat16, torch.bfloat16)
    of = [limit.mean_of(tokens) for tokens in (1, 8, 64, 10**6)]
    assert of == sorted(of, reverse=True)
    # Chernoff's bound is not exact for a single value.
    assert limit.largest(1) < of[0] < 1.3 * limit.largest(1)
    assert of[-1] == pytest.approx(1.5 * limit.tail, rel=0.01)


@draws(60)
@given(
    seed=st.integers(0, 10**6),
    scale=st.sampled_from([0.1, 1.0, 5.0]),
    rounding=st.sampled_from([1e-4, 0.02, 0.3]),
    min_p=st.sampled_from([0.0, 0.05, 0.5]),
    top_k=st.sampled_from([0, 1, 7, 50]),
    top_p=st.sampled_from([1.0, 0.95, 0.3]),
)
@example(seed=0, scale=0.1, rounding=0.3, min_p=0.5, top_k=1, top_p=0.3)
def test_bounds_enclose_the_set_of_any_logits_within_rounding(
    seed: int, scale: float, rounding: float, min_p: float, top_k: int, top_p: float
) -> None:
    torch.manual_seed(seed)
    sampling = Sampling(1, min_p=min_p, top_k=top_k, top_p=top_p)
    logits = (torch.randn(60) * scale).double()
    logits[torch.rand(60) < 0.2] = -torch.inf
    logits[0] = 0.0
    bounds = FilterBounds(logits.numpy(), sampling)
    last = bounds.after(rounding)[-1]
    assert last.possible <= last.sure
    for _ in range(5):
        moved = logits + (torch.rand(60) * 2 - 1) * rounding
        kept = filtered(moved[None].float(), sampling)[0] > -torch.inf
        lowest, missing = float(logits[kept].min()), float(logits[~kept].max())
        assert lowest >= last.possible
        assert missing < last.sure
        # The smallest rounding that explains the set is one that does, and it is not larger than the one that was
        # drawn.
        enough = bounds.rounding_for(lowest, missing, 2 * rounding)
        assert enough <= rounding * 1.01
        explained = bounds.after(enough)[-1]
        assert lowest >= explained.possible
        assert missing < explained.sure
    exact = filtered(logits[None].float(), sampling)[0] > -torch.inf
    tight = bounds.after(1e-6)[-1]
    assert torch.equal(logits >= tight.sure, exact) or torch.equal(logits >= tight.possible, exact)


def found_by_ladder(p: np.ndarray, top_p: float) -> np.ndarray:
    """The ids that vLLM's kernel for few rows keeps (`_topp_sb_combine`), without equal probabilities."""
    low, high, best = p.min(), p.max(), 0.0
    for _ in range(5):
        pivots = low * np.exp(np.log(high / low) * np.arange(1, 9) / 9)
        mass = np.array([p[p > pivot].sum() for pivot in pivots])
        reach = pivots[mass >= top_p]
        best = max(best, *reach, 0.0)
        exact = [q for q, m in zip(pivots, mass, strict=True) if m >= top_p and m - p[p > q].min() < top_p]
        if exact:
            return p > exact[-1]
        low, high = max(low, *reach, 0.0), min(high, *pivots[mass < top_p], 1.0)
    return p > best


def found_by_halves(p: np.ndarray, top_p: float) -> np.ndarray:
    """The ids that vLLM's kernel for many rows keeps (`_topk_topp_kernel`), without equal probabilities."""
    low, high = p.min(), p.max()
    for _ in range(18):
        pivot = (low + high) / 2
        mass = p[p > pivot].sum()
        if mass >= top_p and mass - p[p > pivot].min() < top_p:
            return p > pivot
        low, high = (pivot, high) if mass > top_p else (low, pivot)
        if high - low < 1e-9:
            break
    return p > (low + high) / 2


@pytest.mark.parametrize(
    ("search", "ids", "spread"),
    [(found_by_ladder, 40_000, 2.0), (found_by_halves, 40_000, 2.0), (found_by_halves, 150_000, 0.3)],
)
def test_ids_that_a_search_keeps_beside_the_edge_are_not_a_fault(
    search: Callable[..., np.ndarray], ids: int, spread: float
) -> None:
    """vLLM's kernels for GPUs do not sort. Real faults stay far outside what their search may miss."""
    sampling, differing = Sampling(1, top_p=0.9), 0
    for seed in range(12):
        logits = np.random.default_rng(seed).normal(0, spread, ids)
        p = np.exp(logits - logits.max())
        kept = search(p / p.sum(), 0.9)
        exact, found = (
            FilterBounds(logits, sampling, searched=searched).after(1e-9)[-1] for searched in (False, True)
        )
        assert logits[kept].min() >= found.possible
        assert logits[~kept].max() < found.sure
        differing += not (logits[kept].min() >= exact.possible and logits[~kept].max() < exact.sure)
        assert exact.sure - 0.02 < found.possible <= found.sure < exact.possible + 0.02
    assert differing > 3


@pytest.mark.parametrize(
    ("case", "compared"),
    [("fresh", True), ("older weights", False), ("a later step", False), ("far away", False)],
)
def test_only_sets_of_the_weights_at_hand_are_compared(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, case: str, compared: bool
) -> None:
    made = sampled(model, Sampling(8, top_p=0.999))
    sequence = TrainingSequence(
        name="p",
        prompt_ids=made.prompt_ids,
        completion_ids=made.token_ids,
        behaviour_logps=made.logprobs,
        kept_ids=made.kept_ids,
        fresh=np.full(8, case != "older weights"),
    )
    (pack,) = pack_rows([sequence], 100)
    proof = KeptSetProof(Distribution(FILTERS["top_p"], (0,)), tolerance(torch.float32, torch.float32))
    rows = DrawnRows(None, proof, OWN_DTYPE)
    if case == "far away":
        monkeypatch.setattr(drawn_rows, "LONGEST", len(made.prompt_ids))
    with hidden_states(model) as seen:
        model(input_ids=pack.input_ids)
    rows.add(pack, torch.zeros(8), seen[-1], before_steps=case != "a later step")
    if compared:
        with pytest.raises(ProofError, match="against top_p"):
            rows.check_with(model, fp32_head=False, single=True)
    else:
        assert rows.check_with(model, fp32_head=False, single=True).tokens == 0
