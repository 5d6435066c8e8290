"""A gap over its limit, a bad reward or a bad verdict ends a run before the optimizer step: no weight has changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from methods import ALONE, FIELDS, PAIRS, make, parameters
from shifted_engine import ShiftedEngine

from lockstep.contract.protocol import Engine
from lockstep.errors import InputError, ProofError

METHODS = {**FIELDS, "PPO": {**ALONE, "num_iterations": 2}}
# Errors that a rehearsal does not find.
LATE = {"rehearse_rewards": False}


def assert_nothing_learned(run: Any, error: type[Exception], match: str) -> None:
    before = {**parameters(run.model), **{f"critic.{name}": p for name, p in parameters(run.critic).items()}}
    with pytest.raises(error, match=match):
        run.train()
    after = {**parameters(run.model), **{f"critic.{name}": p for name, p in parameters(run.critic).items()}}
    assert run.state.global_step == 0
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


@pytest.mark.parametrize("corrected", [True, False])
@pytest.mark.parametrize("method", METHODS)
def test_a_correction_is_not_applied_to_a_gap_that_is_a_defect(
    untied_dir: str, tmp_path: Path, hf_engine: Engine, method: str, corrected: bool
) -> None:
    # The gap is well within the bounds of every correction, and a hundred times as large as the rounding of fp32.
    engine: Any = ShiftedEngine(hf_engine, lambda answer, place: 0.01)
    fields = {**METHODS[method], "vllm_importance_sampling_correction": corrected}
    assert_nothing_learned(
        make(method, untied_dir, tmp_path, engine, fields), ProofError, "proof 'gap' failed"
    )


@pytest.mark.parametrize("method", METHODS)
def test_scores_of_the_wrong_number_are_named_before_a_step(
    untied_dir: str, tmp_path: Path, hf_engine: Engine, method: str
) -> None:
    run = make(
        method, untied_dir, tmp_path, hf_engine, {**METHODS[method], **LATE}, reward_funcs=lambda **_: [1.0]
    )
    assert_nothing_learned(run, InputError, "returned 1 scores for 4 completions")


@pytest.mark.parametrize(
    ("verdicts", "message"),
    [
        (["first", "second"], "returned 'first'"),
        ([0], "returned 1 verdicts for 2 pairs"),
        ([0, 2], "returned 2, not 0 or 1"),
    ],
)
def test_a_judge_that_answers_something_else_is_named_before_a_step(
    untied_dir: str, tmp_path: Path, hf_engine: Engine, verdicts: list[Any], message: str
) -> None:
    class Judge:
        def judge(self, prompts: list[str], completions: Any, shuffle_order: bool = True) -> list[Any]:
            return verdicts

    run = make(
        "OnlineDPO", untied_dir, tmp_path, hf_engine, {**PAIRS, **LATE}, reward_funcs=None, judge=Judge()
    )
    assert_nothing_learned(run, InputError, message)
