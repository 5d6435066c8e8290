"""Token weights and policy losses equal their formulas, written out with loops."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.algorithms.losses import (
    cispo_loss,
    clipped_policy_loss,
    importance_ratios,
    prompt_weights,
    sapo_loss,
    token_weights,
    vespo_loss,
)
from lockstep.algorithms.segments import Segments

lengths_of_step = st.lists(st.integers(1, 20), min_size=1, max_size=10)


@settings(deadline=None)
@given(lengths_of_step, st.data())
def test_weighted_sums_are_the_papers_averages(lengths: list[int], data: st.DataObject) -> None:
    losses = [data.draw(st.lists(st.floats(-2, 2, width=32), min_size=n, max_size=n)) for n in lengths]
    limit = 20

    def weighted(kind: str) -> float:
        weights = token_weights(torch.tensor(lengths), kind, limit)  # type: ignore[arg-type]
        return sum(float(w) * sum(tokens) for w, tokens in zip(weights, losses, strict=True))

    assert weighted("grpo") == pytest.approx(sum(sum(t) / len(t) for t in losses) / len(losses), abs=1e-5)
    assert weighted("dr_grpo") == pytest.approx(sum(map(sum, losses)) / (len(losses) * limit), abs=1e-5)
    assert weighted("dapo") == pytest.approx(sum(map(sum, losses)) / sum(lengths), abs=1e-5)
    assert weighted("luspo") == pytest.approx(sum(map(sum, losses)) / len(losses), abs=1e-5)
    for kind in ("bnpo", "cispo", "vespo"):
        assert weighted(kind) == weighted("dapo")
    assert weighted("sapo") == weighted("grpo")


def test_a_masked_completion_still_counts_as_one_of_the_batch_where_completions_are_averaged() -> None:
    assert token_weights(torch.tensor([0, 4]), "grpo", 8)[1] == pytest.approx(1 / 8)
    assert token_weights(torch.tensor([0, 4]), "sapo", 8)[1] == pytest.approx(1 / 8)
    assert token_weights(torch.tensor([0, 4]), "luspo", 8)[1] == pytest.approx(1 / 2)
    assert token_weights(torch.tensor([0, 4]), "dr_grpo", 8)[1] == pytest.approx(1 / 16)
    assert token_weights(torch.tensor([0, 4]), "dapo", 8)[1] == pytest.approx(1 / 4)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "flows"),
    [
        (1.0, 1.0, -1.0, True),
        (1.5, 1.0, -1.28, False),
        (1.5, -1.0, 1.5, True),
        (0.5, 1.0, -0.5, True),
        (0.5, -1.0, 0.8, False),
    ],
)
def test_the_clip_holds_only_where_it_would_help(
    ratio: float, advantage: float, loss: float, flows: bool
) -> None:
    ratios = torch.tensor([ratio], requires_grad=True)
    token = clipped_policy_loss(ratios, torch.tensor([advantage]), 0.2, 0.28)
    token.loss.sum().backward()
    assert token.loss.item() == pytest.approx(loss)
    assert (ratios.grad.item() != 0.0) == flows
    assert bool(token.low_clipped | token.high_clipped) == (not flows)


def test_delta_bounds_the_ratio_of_bad_tokens_alone() -> None:
    ratios = torch.tensor([9.0, 9.0, 2.0], requires_grad=True)
    token = clipped_policy_loss(ratios, torch.tensor([-1.0, 1.0, -1.0]), 0.2, 0.28, delta=4.0)
    token.loss.sum().backward()
    assert token.loss.tolist() == pytest.approx([4.0, -1.28, 2.0])
    assert ratios.grad.tolist() == [0.0, 0.0, 1.0]
    assert token.high_clipped.tolist() == [False, True, False]


@pytest.mark.parametrize("kind", ["clipped", "cispo", "sapo", "vespo"])
def test_without_movement_the_gradient_is_the_policy_gradient(kind: str) -> None:
    advantages, both = torch.tensor([2.0, -1.0]), Segments(torch.tensor([1, 1]))
    logps = torch.tensor([-0.3, -2.0], requires_grad=True)
    ratios = importance_ratios(logps, logps.detach(), both, "token")
    token = {
        "clipped": lambda: clipped_policy_loss(ratios, advantages, 0.2, 0.2),
        "cispo": lambda: cispo_loss(ratios, logps, advantages, 5.0),
        "sapo": lambda: sapo_loss(ratios, advantages, 1.0, 1.05),
        "vespo": lambda: vespo_loss(logps, logps.detach(), advantages, both, None, 2.0, 3.0, 3.0, 2.0)[0],
    }[kind]()
    token.loss.sum().backward()
    assert logps.grad.tolist() == pytest.approx([-2.0, 1.0])
    assert not (token.low_clipped | token.high_clipped).any()


def test_ratios_of_tokens_and_of_completions() -> None:
    logps = torch.tensor([0.1, 0.3, -1.0], requires_grad=True)
    segments = Segments(torch.tensor([2, 0, 1]))
    token = importance_ratios(logps, torch.zeros(3), segments, "token")
    assert token.tolist() == pytest.approx([math.exp(0.1), math.exp(0.3), math.exp(-1.0)])
    whole = importance_ratios(logps, torch.zeros(3), segments, "sequence")
    assert whole.tolist() == pytest.approx([math.exp(0.2), math.exp(0.2), math.exp(-1.0)])
    whole[0].backward()
    # Each token of the completion changes the ratio by its share of the mean.
    assert logps.grad.tolist() == pytest.approx([math.exp(0.2) / 2, math.exp(0.2) / 2, 0.0])


def test_cispo_bounds_the_weight_and_keeps_every_gradient() -> None:
    logps = torch.tensor([-1.0, -1.0, -1.0], requires_grad=True)
    token = cispo_loss(torch.tensor([5.5, 8.0, 0.1]), logps, torch.tensor([1.0, -1.0, 1.0]), 5.0)
    token.loss.sum().backward()
    assert logps.grad.tolist() == pytest.approx([-5.0, 5.0, -0.1])
    assert token.high_clipped.tolist() == [True, False, False]


@settings(deadline=None)
@given(st.floats(0.05, 5), st.sampled_from([-1.0, 1.0]))
def test_sapos_gradient_fades_on_both_sides_of_one(ratio: float, advantage: float) -> None:
    ratios = torch.tensor([ratio], dtype=torch.float64, requires_grad=True)
    sapo_loss(ratios, torch.tensor([advantage]), 2.0, 3.0).loss.sum().backward()
    temperature = 2.0 if advantage > 0 else 3.0
    fade = 1 / math.cosh(temperature * (ratio - 1) / 2) ** 2
    assert ratios.grad.item() == pytest.approx(-advantage * fade)


def test_vespos_weights_are_those_of_the_formula_and_a_zero_correction_drops_its_completion() -> None:
    segments = Segments(torch.tensor([2, 1, 0, 1]))
    logps = torch.tensor([-0.8, -1.1, -1.0, -2.0], requires_grad=True)
    advantages = torch.tensor([1.0, 1.0, -1.0, 2.0])
    correction = torch.tensor([1.1, 0.9, 1.5, 0.0])
    token, phi = vespo_loss(
        logps, torch.full((4,), -1.0), advantages, segments, correction, 2.0, 3.0, 3.0, 2.0
    )
    first, second = math.exp(0.2 - 0.1) * 1.1 * 0.9, 1.5
    expected = [first**2 * math.exp(3 - 3 * first), second**3 * math.exp(2 - 2 * second), 1.0, 0.0]
    assert phi.tolist() == pytest.approx(expected, rel=1e-5, abs=1e-10)
    token.loss.sum().backward()
    assert logps.grad.tolist() == pytest.approx(
        [-expected[0], -expected[0], expected[1], 0.0], rel=1e-5, abs=1e-10
    )


@pytest.mark.parametrize(("advantage", "power", "rate"), [(1.0, 2.0, 3.0), (0.0, 2.0, 3.0), (-1.0, 3.0, 2.0)])
def test_vespos_shape_follows_the_sign_of_the_advantage(advantage: float, power: float, rate: float) -> None:
    one = Segments(torch.tensor([1]))
    _, phi = vespo_loss(
        torch.tensor([0.4]), torch.zeros(1), torch.tensor([advantage]), one, None, 2.0, 3.0, 3.0, 2.0
    )
    weight = math.exp(0.4)
    assert phi.item() == pytest.approx(weight**power * math.exp(rate - rate * weight), rel=1e-5)


@pytest.mark.parametrize(
    ("log_ratios", "corrections", "log_weight"),
    [
        # Each token's ratio is kept within e^±20 and each correction is at least 1e-8; the same limits hold for the
        # whole.
        ([-60.0, 30.0], [1.0, 1.0], 0.0),
        ([20.0, 0.0], [0.0, 1.0], 20 + math.log(1e-8)),
        ([-60.0, 0.0], [1.0, 1.0], math.log(1e-8)),
    ],
)
def test_vespos_log_weights_are_bounded(
    log_ratios: list[float], corrections: list[float], log_weight: float
) -> None:
    two = Segments(torch.tensor([2]))
    _, phi = vespo_loss(
        torch.tensor(log_ratios),
        torch.zeros(2),
        torch.ones(2),
        two,
        torch.tensor(corrections),
        0.5,
        1.0,
        3.0,
        2.0,
    )
    assert phi.item() == pytest.approx(math.exp(0.5 * log_weight + 1 - math.exp(log_weight)), rel=1e-4)


def test_vespo_takes_a_completions_correction_once() -> None:
    segments = Segments(torch.tensor([3]))
    arguments = (
        torch.zeros(3),
        torch.zeros(3),
        torch.ones(3),
        segments,
        torch.full((3,), 2.0),
        2.0,
        3.0,
        3.0,
        2.0,
    )
    once = vespo_loss(*arguments, correction_level="sequence")[1]
    assert once.item() == pytest.approx(2.0**2 * math.exp(3 - 3 * 2.0))
    assert vespo_loss(*arguments)[1].item() == pytest.approx(8.0**2 * math.exp(3 - 3 * 8.0))


@settings(deadline=None)
@given(st.permutations(range(4)), st.integers(0, 100))
def test_the_order_of_completions_changes_no_ones_loss(order: list[int], seed: int) -> None:
    torch.manual_seed(seed)
    lengths = [3, 1, 0, 4]
    old, new = (
        [torch.randn(n, dtype=torch.float64) for n in lengths],
        [torch.randn(n).double() for n in lengths],
    )
    signs = [1.0, -1.0, 1.0, -0.5]

    def losses(rows: list[int]) -> list[torch.Tensor]:
        segments = Segments(torch.tensor([lengths[i] for i in rows]))
        logps, before = torch.cat([new[i] for i in rows]), torch.cat([old[i] for i in rows])
        advantages = segments.spread(torch.tensor([signs[i] for i in rows], dtype=torch.float64))
        ratios = importance_ratios(logps, before, segments, "sequence")
        tokens = clipped_policy_loss(ratios, advantages, 0.2, 0.3).loss
        tokens = tokens + vespo_loss(logps, before, advantages, segments, None, 2.0, 3.0, 3.0, 2.0)[0].loss
        return list(tokens.split([lengths[i] for i in rows]))

    straight, shuffled = losses([0, 1, 2, 3]), losses(order)
    for place, i in enumerate(order):
        assert torch.allclose(shuffled[place], straight[i], rtol=1e-12)


def test_every_prompt_counts_alike_however_many_tokens_answer_it() -> None:
    lengths, groups = torch.tensor([2, 4, 0, 3, 0]), torch.tensor([7, 7, 7, 2, 9])
    weights = prompt_weights(lengths, groups)
    # Three prompts, the last of which is masked and keeps its place: 6 tokens of the first, 3 of the second.
    assert torch.allclose(weights[:4], torch.tensor([1 / 18, 1 / 18, 1 / 18, 1 / 9]))
