"""Packing does not change the result: loss and gradients equal a padded reference; packs have the right contents."""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from blocks import dense, small_blocks
from draws import draws
from hypothesis import HealthCheck, assume, given
from hypothesis import strategies as st
from portions import portion
from reference import padded_logps, reference_loss, sampled_places
from tiny import make_model
from transformers import PreTrainedModel

from lockstep.algorithms.losses import token_weights
from lockstep.extras.verify.logprob_checks import Unwatched
from lockstep.learn.attention.tree import adopt_tree_attention
from lockstep.learn.generation import score_all
from lockstep.learn.methods.grpo import GRPOConfig, GRPOObjective
from lockstep.learn.pack import pack_rows, pack_sequences
from lockstep.learn.scoring import score_pack
from lockstep.learn.sequence import TrainingSequence
from lockstep.learn.update import Policy, StepSums, learn
from lockstep.report.phases import PhaseClock
from lockstep.watch.evidence import TokenEvidence, kept

MODELS = {kind: make_model(kind, tied=kind == "llama") for kind in ("qwen2", "llama")}
# In double precision a difference is a mistake and not rounding, even if the drawn step is degenerate.
EXACT = {kind: make_model(kind, tied=kind == "llama").double() for kind in ("qwen2", "llama")}


@pytest.fixture(autouse=True, scope="module")
def trees() -> Iterator[None]:
    """Small packs use tree attention too, like long packs."""
    for model in (*MODELS.values(), *EXACT.values(), *USUAL.values()):
        adopt_tree_attention(model)
    with small_blocks():
        yield


def config(folder: Path | str = "unused", **fields: Any) -> GRPOConfig:
    base = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 8,
        "max_completion_length": 16,
        "bf16": False,
    }
    return GRPOConfig(**{**base, **fields})


@st.composite
def steps(draw: st.DrawFn) -> list[TrainingSequence]:
    """One optimizer step: groups with shared prompts and beginnings, equal completions and mixed lengths.

    Tokens that were not sampled may be anywhere in a completion.
    """
    shared = draw(st.lists(st.integers(4, 40), min_size=0, max_size=10))
    sequences = []
    for g in range(draw(st.integers(1, 4))):
        prompt = (*shared, *draw(st.lists(st.integers(4, 60), min_size=1, max_size=12)))
        # There are few distinct tokens, so that branches share beginnings and equal completions occur.
        completions = draw(
            st.lists(st.lists(st.integers(4, 8), min_size=1, max_size=10), min_size=1, max_size=5)
        )
        for i, completion in enumerate(completions):
            size = len(completion)
            mask = draw(st.none() | st.lists(st.booleans(), min_size=size, max_size=size).filter(any))
            count = sum(mask) if mask is not None else size
            sequences.append(
                TrainingSequence(
                    name=f"g{g}#{i}",
                    prompt_ids=prompt,
                    completion_ids=tuple(completion),
                    behaviour_logps=tuple(draw(st.floats(-3, -0.125, width=32)) for _ in range(count)),
                    advantages=(draw(st.sampled_from([0.0, 1.0, -1.0, 0.37])),) * count,
                    weight=0.0,
                    sampled=tuple(mask) if mask is not None else None,
                )
            )
    return sequences


def weighted(sequences: list[TrainingSequence], settings_: GRPOConfig) -> list[TrainingSequence]:
    lengths = torch.tensor([len(sampled_places(s)) for s in sequences])
    weights = token_weights(lengths, settings_.loss_type, settings_.max_completion_length).tolist()
    return [replace(s, weight=w) for s, w in zip(sequences, weights, strict=True)]


def gradients(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    found = {
        n: p.grad.clone() if p.grad is not None else torch.zeros_like(p) for n, p in model.named_parameters()
    }
    model.zero_grad()
    return found


def policy_of(model: PreTrainedModel, *, plain_rows: bool = False) -> Policy:
    return Policy(model, contextlib.nullcontext, lambda loss: loss.backward(), plain_rows=plain_rows)


def sampled_near(
    model: PreTrainedModel, sequences: list[TrainingSequence], temperature: float
) -> list[TrainingSequence]:
    """The sequences with this model's log-probs as behaviour log-probs, changed by the drawn differences."""
    with torch.no_grad():
        logps, _ = padded_logps(model, sequences, temperature)
    found = []
    for s, row in zip(sequences, logps.tolist(), strict=True):
        near = [own + drawn + 1.5 for own, drawn in zip(row, s.behaviour_logps, strict=False)]
        found.append(replace(s, behaviour_logps=tuple(near)))
    return found


def moved_by(
    model: PreTrainedModel, sequences: list[TrainingSequence], temperature: float
) -> list[TrainingSequence]:
    """The sequences, sampled by an older policy; some ratios are within the clip and some are beyond it."""
    with torch.no_grad():
        logps, _ = padded_logps(model, sequences, temperature)
    moves = (0.15, -0.15, 0.3, -0.3)
    return [
        replace(s, old_logps=tuple((row[: len(sampled_places(s))] + moves[i % 4]).tolist()))
        for i, (s, row) in enumerate(zip(sequences, logps, strict=True))
    ]


def gradients_beside_reference(
    model: PreTrainedModel,
    exact: PreTrainedModel,
    sequences: list[TrainingSequence],
    run: GRPOConfig,
    parts: int = 1,
    *,
    plain_rows: bool = False,
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The gradients of a step cut into parts, and the reference's with `exact`; the losses are compared here."""
    # Delete gradients that an earlier, failed comparison may have left.
    model.zero_grad()
    exact.zero_grad()
    expected_loss = reference_loss(exact, sequences, run)
    expected_loss.backward()
    expected = gradients(exact)
    sums, size = StepSums(TokenEvidence()), -(-len(sequences) // parts)
    policy = policy_of(model, plain_rows=plain_rows)
    for start in range(0, len(sequences), size):
        learn(policy, sequences[start : start + size], GRPOObjective(run), PhaseClock(), sums, Unwatched())
    # The loss is a sum of parts that may be a hundred times as large.
    assert sums.loss == pytest.approx(expected_loss.item(), rel=1e-5, abs=1e-6)
    assert kept(sums.evidence).gap.tokens == sum(len(sampled_places(s)) for s in sequences)
    return gradients(model), expected


def assert_same_gradients(
    found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], limit: float, floor: float = 0.0
) -> None:
    """Compare all gradients together and one by one; each single one may also differ by `floor` times the largest."""
    norms = {name: float(gradient.norm()) for name, gradient in expected.items()}
    differences = {name: float((found[name] - gradient).norm()) for name, gradient in expected.items()}
    assert math.hypot(*differences.values()) <= limit * math.hypot(*norms.values()) + 1e-9
    largest = max(norms.values())
    for name, norm in norms.items():
        assert differences[name] <= limit * norm + floor * largest + 1e-9, name


def runs() -> st.SearchStrategy[GRPOConfig]:
    """Losses, and ways to cut a step up."""
    return st.builds(
        config,
        loss_type=st.sampled_from(["grpo", "dr_grpo", "dapo", "bnpo"]),
        token_budget=st.integers(1, 300),
        logits_chunk_size=st.integers(1, 40),
        temperature=st.sampled_from([1.0, 0.7]),
    )


@draws(24, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(
    sequences=steps(),
    kind=st.sampled_from(sorted(MODELS)),
    run=runs(),
    parts=st.integers(1, 3),
    moved=st.booleans(),
)
def test_loss_and_gradients_equal_the_padded_reference(
    sequences: list[TrainingSequence], kind: str, run: GRPOConfig, parts: int, moved: bool
) -> None:
    model = EXACT[kind]
    sequences = weighted(sequences, run)
    if moved:
        sequences = moved_by(model, sequences, run.temperature)
    found, expected = gradients_beside_reference(model, model, sequences, run, parts)
    assert_same_gradients(found, expected, 1e-5)


# Weights of a more usual scale: with the weights above, the rounding of the logits alone changes a log-prob by 3e-5
# nats.
USUAL = {kind: make_model(kind, tied=kind == "llama", scale=0.1) for kind in MODELS}
UNROUNDED = {kind: copy.deepcopy(model).double() for kind, model in USUAL.items()}


@draws(12, suppress_health_check=list(HealthCheck))
@given(
    sequences=steps(),
    kind=st.sampled_from(sorted(USUAL)),
    run=runs(),
    parts=st.integers(1, 3),
    moved=st.booleans(),
)
def test_in_fp32_loss_and_gradients_of_what_is_drawn_are_within_1e_5(
    sequences: list[TrainingSequence], kind: str, run: GRPOConfig, parts: int, moved: bool
) -> None:
    sequences = sampled_near(UNROUNDED[kind], weighted(sequences, run), run.temperature)
    if moved:
        sequences = moved_by(UNROUNDED[kind], sequences, run.temperature)
    found, expected = gradients_beside_reference(USUAL[kind], UNROUNDED[kind], sequences, run, parts)
    # If all parts cancel, only their rounding is left, and a relative difference has no meaning.
    assume(not 0.0 < max(float(gradient.norm()) for gradient in expected.values()) < 0.1)
    assert_same_gradients(found, expected, 1e-5, floor=1e-6)


LOSS_TYPES = ["grpo", "dr_grpo", "dapo", "bnpo"]
KINDS = sorted(MODELS)


# A loss does not know the architecture, so CI has each loss with one of them.
@pytest.mark.parametrize(
    ("kind", "loss_type"),
    portion(
        product(KINDS, LOSS_TYPES), lambda case: (KINDS.index(case[0]) + LOSS_TYPES.index(case[1])) % 2 == 0
    ),
)
def test_in_fp32_loss_and_every_gradient_are_within_1e_5(kind: str, loss_type: str) -> None:
    model, run = MODELS[kind], config(loss_type=loss_type, max_completion_length=64, token_budget=200)
    generator = torch.Generator().manual_seed(3)

    def ids(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(4, 380, (count,), generator=generator).tolist())

    lengths = [1, 64, 5, 30, 12, 2, 47, 9]
    drawn = [
        TrainingSequence(f"{p}#{s}", prompt, ids(n), (0.0,) * n, ((-1.0) ** s * (0.3 + 0.1 * s),) * n, 0.0)
        for p, prompt in enumerate([ids(n) for n in (3, 40, 17, 80)])
        for s, n in enumerate(lengths)
    ]
    # Behaviour log-probs are near the policy's own, as in a run.
    with torch.no_grad():
        logps, _ = padded_logps(model, drawn, 1.0)
    sequences = weighted(
        [
            replace(s, behaviour_logps=tuple((row[: len(s.completion_ids)] + 0.02).tolist()))
            for s, row in zip(drawn, logps, strict=True)
        ],
        run,
    )
    found, expected = gradients_beside_reference(model, model, sequences, run)
    for name, gradient in expected.items():
        assert float((found[name] - gradient).norm() / gradient.norm()) < 1e-5, name


def test_a_wrong_mask_would_be_seen() -> None:
    """The comparison can fail: the same loss with causal attention over the whole row is very different."""
    model = MODELS["qwen2"]
    sequences = [
        TrainingSequence(f"a#{i}", (5, 6, 7), (8 + i, 9, 10), (-1.0,) * 3, (1.0,) * 3, 0.1) for i in range(2)
    ]
    (pack,) = pack_sequences(sequences, 100)
    assert pack.ends is not None
    broken = replace(pack, ends=torch.full_like(pack.ends, len(pack.ends)))
    with torch.no_grad():
        right, wrong = score_pack(model, pack, 1.0, 64).logps, score_pack(model, broken, 1.0, 64).logps
    assert float((right - wrong).abs().max()) > 1e-2


def test_shared_beginnings_and_equal_completions_take_no_second_place() -> None:
    shown = (11, 12, 13, 14)
    sequences = [
        TrainingSequence(
            f"{p}#{s}", (*shown, p), completion, (-1.0,) * len(completion), (1.0,) * len(completion), 1.0
        )
        for p in (21, 22)
        for s, completion in enumerate([(31, 32, 0), (31, 32, 0), (31, 33, 0)])
    ]
    (pack,) = pack_sequences(sequences, 1000)
    # Token 4 occurs once. Each prompt adds itself, 31, 32 and 33 (no token is predicted from the end tokens).
    assert pack.input_ids.shape == (1, 4 + 2 * 4)
    assert len(pack.targets) == len(pack.predictors) == sum(s.length for s in pack.sequences) == 18
    assert pack.position_ids.max() == 6


def filled_one_by_one(sequences: list[TrainingSequence], budget: int) -> int:
    """The number of packs if each pack were filled before the next one is begun."""
    packs, held = 1, set()
    for s in sequences:
        path = (*s.prompt_ids, *s.completion_ids[:-1])
        nodes = {path[: i + 1] for i in range(len(path))}
        if held and len(held | nodes) > budget:
            packs, held = packs + 1, set()
        held |= nodes
    return packs


@draws(100)
@given(steps(), st.integers(1, 200))
def test_packs_hold_every_token_once_and_keep_to_the_budget(
    sequences: list[TrainingSequence], budget: int
) -> None:
    packs = list(pack_sequences(sequences, budget))
    assert [s for pack in packs for s in pack.sequences] == sequences
    assert len(packs) <= filled_one_by_one(sequences, budget)
    for pack in packs:
        alone = max(len(s.prompt_ids) + len(s.completion_ids) - 1 for s in pack.sequences)
        assert pack.input_ids.shape[1] <= max(budget, alone)
        assert pack.targets.tolist() == [
            s.completion_ids[i] for s in pack.sequences for i in sampled_places(s)
        ]
        assert pack.sizes == [len(sampled_places(s)) for s in pack.sequences]
        # The position that predicts a token sees exactly the ids before it. Each id is marked with its depth.
        mark = pack.input_ids[0] * 1000 + pack.position_ids[0]
        assert pack.ends is not None
        mask = dense(pack.ends)[0, 0]
        seen = iter(mask[pack.predictors])
        for s in pack.sequences:
            for place in sampled_places(s):
                before = (*s.prompt_ids, *s.completion_ids[:place])
                assert sorted(mark[next(seen)].tolist()) == sorted(1000 * t + i for i, t in enumerate(before))
        # A node sees as many nodes as its depth says: its ancestors and itself.
        assert torch.equal(mask.sum(-1), pack.position_ids[0] + 1)


def units_of(sequences: list[TrainingSequence], sizes: list[int]) -> list[list[TrainingSequence]]:
    """The sequences in units of one, two or three; some belong to no unit."""
    units: list[list[TrainingSequence]] = []
    rest = list(sequences)
    for number, size in enumerate(sizes):
        unit = None if number % 4 == 3 else f"unit {number}"
        taken, rest = rest[:size], rest[size:]
        marked = [replace(s, unit=unit) for s in taken]
        units += [[s] for s in marked] if unit is None else [marked] if marked else []
    return units


@draws(100)
@given(steps(), st.integers(1, 120), st.lists(st.integers(1, 3), min_size=20, max_size=20))
def test_units_are_never_cut_apart(sequences: list[TrainingSequence], budget: int, sizes: list[int]) -> None:
    units = units_of(sequences, sizes)
    flat = [s for unit in units for s in unit]
    packs = list(pack_sequences(flat, budget))
    assert [s for pack in packs for s in pack.sequences] == flat
    homes = {s.name: i for i, pack in enumerate(packs) for s in pack.sequences}
    assert all(len({homes[s.name] for s in unit}) == 1 for unit in units)
    for pack in packs:
        held = [unit for unit in units if unit[0].name in {s.name for s in pack.sequences}]
        whole = [next(iter(pack_sequences(unit, 10**6))).input_ids.shape[1] for unit in held]
        # Only a pack with a single unit that is too large exceeds the budget.
        assert pack.input_ids.shape[1] <= (budget if len(held) > 1 else max(budget, whole[0]))


def test_entropy_is_that_of_the_distribution() -> None:
    model = MODELS["llama"]
    sequence = TrainingSequence("a#0", (5, 6, 7), (8, 9), (-1.0, -1.0), (1.0, 1.0), 1.0)
    (pack,) = pack_sequences([sequence], 100)
    with torch.no_grad():
        scores = score_pack(model, pack, 0.7, 1)
        logps = (model(torch.tensor([[5, 6, 7, 8]])).logits[0, 2:] / 0.7).log_softmax(-1)
    assert scores.entropies.tolist() == pytest.approx((-(logps.exp() * logps).sum(-1)).tolist(), rel=1e-5)


def test_scores_of_a_generation_come_back_by_name() -> None:
    model = MODELS["qwen2"]
    sequences = [
        TrainingSequence(f"a#{i}", (5, 6, 7 + i), (8,) * (i + 1), (-1.0,) * (i + 1), (0.0,) * (i + 1), 0.0)
        for i in range(4)
    ]
    found = score_all(policy_of(model), sequences, config(), TokenEvidence())
    logps, gap = found.logps, kept(found.evidence).gap
    with torch.no_grad():
        expected, _ = padded_logps(model, sequences, 1.0)
    for i, s in enumerate(sequences):
        assert logps[s.name] == pytest.approx(expected[i, : i + 1].tolist(), rel=1e-4)
    assert gap.tokens == 10


@pytest.mark.parametrize("pack", [pack_sequences, pack_rows])
def test_an_empty_completion_is_refused(pack: Any) -> None:
    with pytest.raises(ValueError, match="a#0 has no prompt or no completion"):
        list(pack([TrainingSequence("a#0", (5,), (), (), (), 1.0)], 10))
    with pytest.raises(ValueError, match="a#0 has no prompt or no completion"):
        list(pack([TrainingSequence("a#0", (5,), (6,), (), (), 1.0, sampled=(False,))], 10))
    with pytest.raises(ValueError, match="a#0 does not say of each of its ids whether it was sampled"):
        list(pack([TrainingSequence("a#0", (5,), (6, 7), (-1.0,), (), 1.0, sampled=(True,))], 10))


def test_a_column_with_a_value_for_an_id_that_nobody_sampled_is_refused() -> None:
    sequence = TrainingSequence("a#0", (5, 6), (7, 8, 9), (-1.0, 0.0, -1.0), sampled=(True, False, True))
    (pack,) = pack_sequences([sequence], 10)
    with pytest.raises(ValueError, match="a#0 has no behaviour_logps for each of its tokens"):
        pack.column("behaviour_logps")
