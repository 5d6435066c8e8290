"""A generation without a single score teaches nothing and ends nothing; several in a row end the run."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from methods import FIELDS, make, parameters
from transformers import TrainerCallback

from lockstep.contract.protocol import Engine
from lockstep.errors import InputError


class Scores:
    """A reward function that gives no score in some generations. `calls` counts the generations."""

    __name__ = "scores"

    def __init__(self, *unscored: int) -> None:
        self._unscored, self.calls = unscored, 0

    def __call__(self, completion_ids: list[list[int]], **_: Any) -> list[float | None]:
        self.calls += 1
        return [
            None if self.calls in self._unscored else float(len(ids) + ids[0] % 7) for ids in completion_ids
        ]


class Weights(TrainerCallback):
    """Keeps the policy's weights after each step."""

    def __init__(self) -> None:
        self.after: list[dict[str, torch.Tensor]] = []

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.after.append(parameters(model))


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


@pytest.fixture
def quiet_root() -> Iterator[None]:
    """The level that some libraries give the root logger."""
    root = logging.getLogger()
    before = root.level
    root.setLevel(logging.ERROR)
    yield
    root.setLevel(before)


@pytest.mark.usefixtures("quiet_root")
@pytest.mark.parametrize("method", sorted(FIELDS))
def test_the_policy_stays_as_it_is_and_the_next_generation_is_learned_from(
    untied_dir: str,
    tmp_path: Path,
    hf_engine: Engine,
    method: str,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    weights = Weights()
    fields = {**FIELDS[method], "max_steps": 2, "rehearse_rewards": False, "recheck_rewards": False}
    run = make(method, untied_dir, tmp_path, hf_engine, fields, reward_funcs=Scores(1), callbacks=[weights])
    before = parameters(run.model)
    run.train()
    first, second = [log for log in run.state.log_history if "loss" in log]
    assert same(before, weights.after[0])
    assert not same(before, weights.after[1])
    assert first["rewards/unscored_generations"] == 1
    assert first["rewards/unscored"] == 4
    # A figure of nothing is left out; it is no NaN that would spoil the mean of a longer log.
    assert "reward" not in first
    assert math.isfinite(second["reward"])
    assert "rewards/unscored_generations" not in second
    found = capsys.readouterr()
    assert "none of scores scored any of the 4 completions of this generation" in found.out
    # Programs that read logs know TRL's words. They are not printed beside the line.
    assert "All reward functions returned None for the following kwargs:" in caplog.text
    assert "All reward functions" not in found.out + found.err


def test_so_many_in_a_row_end_the_run_and_others_in_between_start_the_count_anew(
    untied_dir: str, tmp_path: Path, hf_engine: Engine
) -> None:
    calls = {"rehearse_rewards": False, "recheck_rewards": False}
    fields = {**FIELDS["GRPO"], **calls, "max_unscored_generations": 2, "logging_steps": 3}
    scores = Scores(1, 3, 5, 6)
    run = make("GRPO", untied_dir, tmp_path, hf_engine, fields, reward_funcs=scores)
    with pytest.raises(
        InputError, match=r"none of scores scored any of the 4 completions, in 2 generations in a row"
    ):
        run.train()
    assert scores.calls == 6
    assert run.state.global_step == 5
    (log,) = [log for log in run.state.log_history if "loss" in log]
    assert log["rewards/unscored_generations"] == 2
    assert math.isfinite(log["reward"])


def test_a_pair_without_any_verdict_ends_nothing(untied_dir: str, tmp_path: Path, hf_engine: Engine) -> None:
    class Judge:
        def judge(self, prompts: list[str], completions: Any, shuffle_order: bool = True) -> list[int]:
            return [-1] * len(prompts)

    fields = {**FIELDS["OnlineDPO"], "max_steps": 2}
    run = make("OnlineDPO", untied_dir, tmp_path, hf_engine, fields, reward_funcs=None, judge=Judge())
    run.train()
    logs = [log for log in run.state.log_history if "loss" in log]
    assert [log["pairs/undecided"] for log in logs] == [1, 1]
    assert not any(
        math.isnan(value) for name, value in logs[0].items() if not name.startswith("rewards/judge")
    )
