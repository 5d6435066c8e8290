"""The loss and gradients of every method equal a plain padded reference, for every cut into micro-batches and packs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import reference_methods as plain
import torch
from drawn import attending_by_trees, check, config, drawn_of, groups_of, shapes
from draws import draws, hold
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from method_variants import VARIANTS, fit, sizes_of
from subjects import ARCHITECTURES, in_double

from lockstep import GRPOConfig, OnlineDPOConfig
from lockstep.learn.methods.grpo import GRPOObjective
from lockstep.learn.methods.online_dpo import OnlineDPOObjective
from lockstep.rollouts.judges import judge_pairs, judged

pytestmark = pytest.mark.usefixtures("trees")

SUBJECTS = {kind: in_double(kind) for kind in ARCHITECTURES}
SUBJECT = SUBJECTS["qwen2"]
PAIRS = VARIANTS["OnlineDPO: {}"]
few = draws(5, suppress_health_check=list(HealthCheck))


@pytest.fixture(scope="module")
def trees() -> Iterator[None]:
    with attending_by_trees():
        yield


@pytest.mark.parametrize("name", VARIANTS)
def test_loss_and_gradients_equal_the_padded_reference(name: str) -> None:
    variant = VARIANTS[name]

    def same(drawn: dict[str, Any], kind: str) -> None:
        shape = fit(variant, drawn)
        run = config(variant.config, shape, **variant.fields)
        check(SUBJECTS[kind], variant.objective(run), shape, variant.reference(run))

    hold(
        name,
        2,
        same,
        drawn=shapes(sizes_of(variant), trees=True),
        kind=st.sampled_from(sorted(SUBJECTS)),
    )


def test_gdpo_leaves_a_group_whose_scores_agree_without_an_advantage_of_the_last_bit() -> None:
    shape = {"size": 2, "steps": 2, "micro": 1, "rewards": [[0.0, 0.0], [0.0, 1.0]], "lengths": [1, 1, 1, 1]}
    shape |= {
        "cut": [False] * 4,
        "prompts": [1, 1],
        "moved": False,
        "scored": False,
        "budget": 1,
        "chunk": 1,
        "seed": 0,
    }
    shape |= {"holes": [[]] * 4}
    variant = VARIANTS["GRPO: GDPO"]
    run = config(GRPOConfig, shape, **variant.fields)
    check(SUBJECT, GRPOObjective(run), shape, variant.reference(run))


@few
@given(shape=shapes(sizes=(2, 4)), entropies=st.lists(st.sampled_from([0.5, 9.0]), min_size=1, max_size=5))
def test_the_adaptive_bonus_counts_only_after_a_step_of_low_entropy_and_moves_within_its_bounds(
    shape: dict[str, Any], entropies: list[float]
) -> None:
    fields = {
        "entropy_coef": 0.2,
        "entropy_coef_delta": 0.15,
        "entropy_coef_min": 0.1,
        "entropy_coef_max": 0.4,
    }
    run = config(GRPOConfig, shape, use_adaptive_entropy=True, **fields)
    objective = GRPOObjective(run)
    drawn = drawn_of(SUBJECT, shape, run.temperature)
    coefficient, low = 0.2, False
    for target in entropies:
        run.entropy_target = target
        with torch.no_grad():
            now = plain.padded(SUBJECT.model, drawn.sequences, run.temperature)
        # The entropy of the last step is compared with the target, so all steps of a shape must be on the same side
        # of it.
        size = run.completions_per_step
        means = [
            float((now.entropies[i : i + size]).sum() / now.mask[i : i + size].sum())
            for i in range(0, len(drawn.sequences), size)
        ]
        assert all((mean <= target) == (means[0] <= target) for mean in means)
        state = objective.state()
        expected = state["entropy_coef"] if state["last_entropy"] <= target else 0.0
        assert state["entropy_coef"] == pytest.approx(coefficient)
        steps = []
        for mean in means:
            steps.append(expected)
            low = mean <= target
            coefficient = min(max(coefficient + (0.15 if low else -0.15), 0.1), 0.4)
            expected = coefficient if low else 0.0
        coefficients = iter(steps)
        check(
            SUBJECT,
            objective,
            shape,
            lambda subject, d, step, c=coefficients: plain.grpo(subject.exact_model, d, step, run, next(c)),
            drawn=drawn,
        )


@few
@given(shape=shapes(sizes=(2,)), epoch=st.integers(0, 2))
def test_online_dpo_takes_the_beta_of_its_epoch(shape: dict[str, Any], epoch: int) -> None:
    shape = fit(PAIRS, shape)
    run = config(OnlineDPOConfig, shape, beta=[0.5, 0.2])
    objective = OnlineDPOObjective(run)
    objective.epoch = epoch
    beta = run.beta[min(epoch, 1)]
    (logged,) = check(
        SUBJECT,
        objective,
        shape,
        lambda subject, drawn, step: plain.online_dpo(subject.exact_model, drawn, step, run, beta),
    )
    assert logged["beta"] == beta


class Fixed:
    """A judge with given verdicts."""

    def __init__(self, verdicts: list[int]) -> None:
        self.verdicts = verdicts

    def judge(
        self, prompts: list[str], completions: list[list[str]], shuffle_order: bool = True
    ) -> list[int]:
        return self.verdicts


@few
@given(shape=shapes(sizes=(2,)), seed=st.integers(0, 99))
def test_online_dpo_with_a_judge_prefers_as_the_judge_does(shape: dict[str, Any], seed: int) -> None:
    shape = fit(PAIRS, shape)
    run = config(OnlineDPOConfig, shape)
    generator = torch.Generator().manual_seed(seed)
    verdicts = torch.randint(-1, 2, (len(shape["rewards"]),), generator=generator).tolist()
    values = {0: [1.0, 0.0], 1: [0.0, 1.0], -1: [None, None]}
    drawn = drawn_of(SUBJECT, shape, run.temperature)
    seen = replace(drawn, rewards=[[None, None]] * len(verdicts))
    groups = groups_of(seen)
    groups = [judged(g, v) for g, v in zip(groups, judge_pairs(groups, Fixed(verdicts), 60.0), strict=True)]
    drawn = replace(drawn, rewards=[values[v] for v in verdicts])
    (logged,) = check(
        SUBJECT, OnlineDPOObjective(run), shape, PAIRS.reference(run), drawn=drawn, groups=groups
    )
    assert logged["pairs/undecided"] == pytest.approx(verdicts.count(-1) / len(verdicts))
