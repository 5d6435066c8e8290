"""The whole RLOO and Online DPO trainers beside TRL's: the same tokens give the same gradients and figures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from conftest import start
from methods import lora
from pairs import (
    CLIPS,
    MEANS,
    PAIRS,
    assert_same_figures,
    assert_same_gradients,
    both,
    decided,
    distance,
    longer,
    norm,
    ours,
    rounder,
    theirs,
)

from lockstep.contract.protocol import Engine

pytest.importorskip("trl", reason="TRL is not installed here")

RLOO: dict[str, Any] = {
    "per_device_train_batch_size": 8,
    "num_generations": 4,
    "max_completion_length": 12,
    "num_iterations": 2,
    "epsilon": 0.01,
    "epsilon_high": 0.012,
    # The ratio is that of a whole completion, so it changes about twelve times as fast.
    "learning_rate": 3e-6,
}
REWARDS = {
    "reward",
    "reward_std",
    "rewards/longer/mean",
    "rewards/longer/std",
    "completions/mean_length",
    "num_tokens",
}
# TRL logs the loss with four decimal places, and its other figures count padding
# (docs/reference/migrating-from-trl.md). The loss that TRL differentiates is compared together with the gradients.
ROUNDED = frozenset({"loss"})
OVER_PADDING = {f"objective/{name}" for name in ("kl", "entropy", "non_score_reward", "rlhf_reward")}
PREFERENCES = {
    "grad_norm", "objective/scores", "objective/scores_margin", "logps/chosen", "logps/rejected", "rewards/chosen",
    "beta",
    "rewards/rejected", "rewards/margins", "rewards/accuracies", "val/contain_eos_token",
}  # fmt: skip


@pytest.fixture(scope="module")
def engine(talkative_dir: str) -> Any:
    return start("transformers", talkative_dir)


RLOOS: dict[str, dict[str, Any]] = {
    "plain": {"beta": 0.0},
    "temperature": {"beta": 0.0, "temperature": 1.3},
    "KL in the reward": {"beta": 2.0, "max_steps": 4},
    "normalised": {"beta": 2.0, "normalize_advantages": True, "max_steps": 4},
    "clipped rewards": {"beta": 0.0, "reward_clip_range": [2.0, 12.0]},
    "pairs": {"beta": 0.0, "num_generations": 2, "num_iterations": 1},
    "reference in step": {"beta": 2.0, "sync_ref_model": True, "ref_model_sync_steps": 1, "max_steps": 4},
}


@pytest.mark.parametrize("option", RLOOS)
def test_rloos_gradients_loss_and_figures_are_trls(
    talkative_dir: str, tmp_path: Path, engine: Engine, option: str
) -> None:
    fields = {**RLOO, **RLOOS[option]}
    mine, other = both("RLOO", talkative_dir, tmp_path, engine, fields)
    assert_same_gradients(mine, other)
    kl = {"kl"} if fields["beta"] else set[str]()
    # Here it is the share of groups whose given rewards are equal; in TRL, whose clipped and penalised rewards are
    # equal.
    other_rewards = fields["beta"] or "reward_clip_range" in fields
    equal = frozenset({"frac_reward_zero_std"} if other_rewards else ())
    assert_same_figures(
        mine, other, but=equal, at_least={"loss", "grad_norm", "entropy"} | REWARDS | CLIPS | kl
    )
    if fields["num_iterations"] == 2:
        assert mine.logs[1]["clip_ratio/region_mean"] > 0
    if kl:
        assert abs(mine.logs[2]["kl"]) > 3 * MEANS


def test_rloo_of_several_rewards_with_an_adapter_is_trls(
    talkative_dir: str, tmp_path: Path, engine: Engine
) -> None:
    fields = {**RLOO, "beta": 0.5, "learning_rate": 1e-3, "max_steps": 4, "reward_weights": [0.2, 30.0]}
    mine, other = both(
        "RLOO", talkative_dir, tmp_path, engine, fields, reward_funcs=[longer, rounder], peft_config=lora()
    )
    assert all("lora_" in name for name in mine.gradients[0])
    assert_same_gradients(mine, other)
    assert_same_figures(
        mine,
        other,
        but=frozenset(),
        at_least={"loss", "grad_norm"} | REWARDS | {"kl", "rewards/rounder/mean"},
    )


DPOS: dict[str, dict[str, Any]] = {
    "sigmoid": {"loss_type": "sigmoid"},
    "ipo": {"loss_type": "ipo", "learning_rate": 1e-5},
    "penalty": {"missing_eos_penalty": 2.5},
    "another beta": {"beta": 0.7},
}


@pytest.mark.parametrize("option", DPOS)
def test_online_dpos_gradients_loss_and_figures_are_trls(
    talkative_dir: str, tmp_path: Path, engine: Engine, option: str
) -> None:
    mine, other = both(
        "OnlineDPO", talkative_dir, tmp_path, engine, {**PAIRS, **DPOS[option]}, reward_funcs=decided
    )
    assert mine.logs[0]["pairs/undecided"] == 0
    assert 0 < mine.logs[0]["val/contain_eos_token"] < 1
    assert_same_gradients(mine, other)
    assert_same_figures(mine, other, but=ROUNDED | OVER_PADDING, at_least=PREFERENCES)


def test_where_nothing_is_padded_all_of_online_dpos_figures_are_trls(untied_dir: str, tmp_path: Path) -> None:
    engine, fields = start("transformers", untied_dir), {**PAIRS, "max_new_tokens": 2}
    mine, other = both("OnlineDPO", untied_dir, tmp_path, engine, fields, reward_funcs=decided)
    assert {log["completions/min_length"] for log in mine.logs} == {2.0}
    assert_same_figures(mine, other, but=ROUNDED, at_least=PREFERENCES | OVER_PADDING)
    assert mine.logs[1]["objective/kl"] != 0


def test_trls_online_dpo_cannot_take_a_beta_for_each_epoch_and_ours_does(
    talkative_dir: str, tmp_path: Path, engine: Engine
) -> None:
    fields = {**PAIRS, "beta": [0.1, 0.7]}
    mine, sampled = ours("OnlineDPO", talkative_dir, tmp_path / "ours", engine, fields, reward_funcs=decided)
    assert [log["beta"] for log in mine.logs] == [0.1, 0.7]
    with pytest.raises(TypeError, match="not float"):
        theirs("OnlineDPO", talkative_dir, tmp_path / "theirs", sampled, fields, reward_funcs=decided)


def test_online_dpo_with_an_adapter_is_trls(talkative_dir: str, tmp_path: Path, engine: Engine) -> None:
    fields = {**PAIRS, "learning_rate": 0.1}
    mine, other = both(
        "OnlineDPO", talkative_dir, tmp_path, engine, fields, reward_funcs=decided, peft_config=lora()
    )
    assert all("lora_" in name for name in mine.gradients[0])
    assert_same_gradients(mine, other)
    assert_same_figures(mine, other, but=ROUNDED | OVER_PADDING, at_least=PREFERENCES)


def test_a1_trls_online_dpo_learns_from_the_sum_of_accumulated_steps_and_ours_from_their_mean(
    talkative_dir: str, tmp_path: Path, engine: Engine
) -> None:
    """Our trainer takes eight pairs at once, TRL's takes four and four.

    `test_accounting.py` shows that our cut does not matter.
    """
    fields = {**PAIRS, "max_steps": 1}
    mine, sampled = ours("OnlineDPO", talkative_dir, tmp_path / "ours", engine, fields, reward_funcs=decided)
    halves = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
    other = theirs(
        "OnlineDPO", talkative_dir, tmp_path / "theirs", sampled, {**fields, **halves}, reward_funcs=decided
    )
    twice = {name: 2 * gradient for name, gradient in mine.gradients[0].items()}
    assert distance(other.gradients[0], twice) < 1e-5 * norm(twice.values())
    # TRL rounds this figure to four decimal places.
    assert other.logs[0]["loss"] == pytest.approx(mine.logs[0]["loss"], abs=1e-4)
