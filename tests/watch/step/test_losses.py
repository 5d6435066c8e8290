"""Advantages, weights and the gradient of every log-prob: definitions and methods agree, and a change is named.

Every run compares itself with the definitions, also the runs of `test_accounting.py`. CI therefore counts the
comparisons of one case per method, and runs the cases that are not there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import accounts
import methods
import numpy as np
import pytest
import torch
from portions import portion

import lockstep.learn.generation as preparing
import lockstep.watch.loss_gradient as flowing
from lockstep.contract.protocol import Engine
from lockstep.definitions import advantages as define
from lockstep.errors import ProofError
from lockstep.learn.sequence import TrainingSequence
from lockstep.watch.loss_gradient import check

OWN = {"grpo-full", "rloo", "dpo-sigmoid", "reinforce++", "ppo", "grpo-cispo", "grpo-sapo", "grpo-vespo"}


@pytest.mark.parametrize("case", portion(accounts.CASES, lambda case: case in OWN))
def test_every_method_agrees_with_its_definition(
    case: str, untied_dir: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared: list[int] = []

    def counting(*arguments: Any) -> int:
        compared.append(check(*arguments))
        return compared[-1]

    monkeypatch.setattr(flowing, "check", counting)
    run = accounts.make(case, untied_dir, tmp_path, size=accounts.STEP // 2)
    run.train()
    # A proof of nothing would pass as well.
    assert run.watch.expected is not None
    assert sum(compared) > 0
    run.close()


CHANGES: dict[str, Callable[[TrainingSequence], TrainingSequence]] = {
    "sign": lambda s: replace(s, advantages=-s.advantages),
    "size": lambda s: replace(s, advantages=1.01 * s.advantages),
    "weight": lambda s: replace(s, weight=0.5 * s.weight),
}


# The proof does not know the method: CI makes every change with one method, and one change with each of the others.
CHANGED = portion(product(methods.FIELDS, CHANGES), lambda case: case[0] == "GRPO" or case[1] == "size")


@pytest.mark.parametrize(("method", "change"), CHANGED)
def test_changed_advantages_and_weights_are_refused_before_the_loss(
    method: str, change: str, untied_dir: str, tmp_path: Path, hf_engine: Engine
) -> None:
    run = methods.make(method, untied_dir, tmp_path, hf_engine, methods.FIELDS[method])
    real, before = preparing.prepare_generation, methods.parameters(run.model)

    def changed(*arguments: Any) -> Any:
        return real(*arguments).changed(CHANGES[change])

    words = "a weight of" if change == "weight" else "an advantage of"
    with (
        patch.object(preparing, "prepare_generation", changed),
        pytest.raises(ProofError, match=words) as caught,
    ):
        run.train()
    assert caught.value.check == "advantages"
    assert all(torch.equal(p, before[name]) for name, p in run.model.named_parameters())


@pytest.mark.parametrize("method", methods.FIELDS)
def test_a_loss_of_another_size_is_refused_before_the_step(
    method: str, untied_dir: str, tmp_path: Path, hf_engine: Engine
) -> None:
    run = methods.make(method, untied_dir, tmp_path, hf_engine, methods.FIELDS[method])
    real, before = run.objective.loss, methods.parameters(run.model)
    with (
        patch.object(run.objective, "loss", lambda batch, tally: 1.001 * real(batch, tally)),
        pytest.raises(ProofError, match=r"the gradient of the (log-prob|value) of token"),
    ):
        run.train()
    assert all(torch.equal(p, before[name]) for name, p in run.model.named_parameters())


def test_a_reward_that_is_not_the_weighted_sum_of_its_scores_is_refused(
    untied_dir: str, tmp_path: Path, hf_engine: Engine
) -> None:
    """A missing score that was taken for a 0 is one."""
    run = methods.make("GRPO", untied_dir, tmp_path, hf_engine, methods.GROUPS)
    real = run.source.score

    def nothing_is_zero(*arguments: Any) -> Any:
        first, *others = real(*arguments)
        rollouts = tuple(replace(r, scores=dict.fromkeys(r.scores), reward=0.0) for r in first.rollouts)
        return [replace(first, rollouts=rollouts), *others]

    with (
        patch.object(run.source, "score", nothing_is_zero),
        pytest.raises(ProofError, match=r"the reward of .* is 0;"),
    ):
        run.train()


@pytest.mark.parametrize("method", methods.FIELDS)
def test_rewards_that_change_after_their_proof_are_refused_before_the_loss(
    method: str, untied_dir: str, tmp_path: Path, hf_engine: Engine
) -> None:
    """Expected advantages are made of the scores, so that they do not follow the rewards."""
    run = methods.make(method, untied_dir, tmp_path, hf_engine, methods.FIELDS[method])
    real = run.loop.rollout

    def swapped(*arguments: Any) -> Any:
        groups = real(*arguments)
        best = max(
            groups, key=lambda g: max(r.reward for r in g.rollouts) - min(r.reward for r in g.rollouts)
        )
        rollouts = tuple(replace(r, reward=-r.reward) for r in best.rollouts)
        return [replace(g, rollouts=rollouts) if g is best else g for g in groups]

    with (
        patch.object(run.loop, "rollout", swapped),
        pytest.raises(ProofError, match="an advantage of") as caught,
    ):
        run.train()
    assert caught.value.check == "advantages"


def test_the_weights_that_the_user_has_asked_for_are_in_the_expected_advantages(
    untied_dir: str, tmp_path: Path, hf_engine: Engine
) -> None:
    def by_last(completion_ids: list[list[int]], **_: Any) -> list[float]:
        return [float(ids[-1] % 7) for ids in completion_ids]

    fields = {**methods.GROUPS, "max_steps": 1, "reward_weights": [1.0, -3.0]}
    run = methods.make(
        "GRPO", untied_dir, tmp_path, hf_engine, fields, reward_funcs=[methods.by_length, by_last]
    )
    run.train()
    assert run.state.global_step == 1


def test_completions_without_a_score_pass(untied_dir: str, tmp_path: Path, hf_engine: Engine) -> None:
    def some(completion_ids: list[list[int]], **_: Any) -> list[float | None]:
        return [None if i % 3 == 0 else float(ids[0]) for i, ids in enumerate(completion_ids)]

    for method, fields in methods.FIELDS.items():
        run = methods.make(
            method, untied_dir, tmp_path / method, hf_engine, fields | {"max_steps": 2}, reward_funcs=some
        )
        run.train()
        assert run.state.global_step == 2


def test_an_objective_of_the_users_own_is_not_compared(
    untied_dir: str, tmp_path: Path, hf_engine: Engine
) -> None:
    run = methods.make("GRPO", untied_dir, tmp_path, hf_engine, {**methods.GROUPS, "max_steps": 1})

    class Doubled(type(run.objective)):  # type: ignore[misc]
        def loss(self, *arguments: Any) -> torch.Tensor:
            return 2 * super().loss(*arguments)

    run.objective.__class__ = Doubled
    run.train()
    assert run.state.global_step == 1


def test_the_definitions_are_those_of_the_papers() -> None:
    assert define.leave_one_out([1.0, 3.0, None, 5.0]) == [-3.0, 0.0, None, 3.0]
    assert define.grpo([[1.0, 3.0]], "none") == [[-1.0, 1.0]]
    assert define.returns_to_go(2.0, [1.0, 1.0], 0.5, 0.5) == [-0.5 + 0.5 * 1.5, 1.5]
    # With lam = 1 and gamma = 1 an advantage is the return minus the value.
    found = define.gae(2.0, [0.0, 0.0, 0.0], [0.5, 0.25, 1.0], 0.0, 1.0, 1.0)
    np.testing.assert_allclose(found, [1.5, 1.75, 1.0])
