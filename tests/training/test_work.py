"""Work that need not be done is not done: forwards and backwards of real steps, counted."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from methods import ALONE, FIELDS, GROUPS, lora, make, reference_of
from work import TWO_GROUPS, agreeing, worked

from lockstep.engines.protocol import Engine

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("of", ["the policy", "its trunk", "the reference"])
def test_a_pass_that_scores_no_pack_is_counted_too(
    untied_dir: str, tmp_path: Path, hf_engine: Engine, monkeypatch: pytest.MonkeyPatch, of: str
) -> None:
    run = make("GRPO", untied_dir, tmp_path, hf_engine, {**TWO_GROUPS, "beta": 0.1})
    models = {"the policy": run._causal(), "its trunk": run._causal().base_model, "the reference": reference_of(run)}
    real = run.source.prove

    def prove(*args: Any, **kwargs: Any) -> None:
        models[of](input_ids=torch.tensor([[5, 6]]))
        real(*args, **kwargs)

    monkeypatch.setattr(run.source, "prove", prove)
    with pytest.raises(AssertionError, match="forwards"):
        worked(run, monkeypatch)


def test_a_group_that_agrees_has_no_backward_and_its_tokens_are_proven_all_the_same(
    untied_dir: str, tmp_path: Path, hf_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make("GRPO", untied_dir, tmp_path, hf_engine, TWO_GROUPS, reward_funcs=agreeing)
    work = worked(run, monkeypatch)
    assert run._generation is not None
    first, second = ([str(r.completion.key) for r in group.rollouts] for group in run._generation.groups)
    assert work.learned() == Counter(second)
    assert work.looked() == Counter(first)
    assert work.backwards == 1


def test_where_all_groups_agree_there_is_no_backward_at_all(
    untied_dir: str, tmp_path: Path, hf_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def constant(completion_ids: list[list[int]], **_: Any) -> list[float]:
        return [2.0] * len(completion_ids)

    run = make("GRPO", untied_dir, tmp_path, hf_engine, TWO_GROUPS, reward_funcs=constant)
    work = worked(run, monkeypatch)
    assert work.backwards == 0
    assert not work.learned()
    assert set(work.looked().values()) == {1}


@pytest.mark.parametrize("more", [{"beta": 0.1}, {"entropy_coef": 0.1}], ids=str)
def test_a_group_that_agrees_is_learned_from_where_the_loss_has_another_part(
    untied_dir: str, tmp_path: Path, hf_engine: Engine, monkeypatch: pytest.MonkeyPatch, more: dict[str, Any]
) -> None:
    run = make("GRPO", untied_dir, tmp_path, hf_engine, {**TWO_GROUPS, **more}, reward_funcs=agreeing)
    work = worked(run, monkeypatch)
    assert len(work.learned()) == 4
    assert set(work.learned().values()) == {1}


@pytest.mark.parametrize("method", ["GRPO", "RLOO", "ReinforcePP"])
def test_a_step_that_follows_its_generation_takes_no_pass_for_old_log_probs(
    untied_dir: str, tmp_path: Path, hf_engine: Engine, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    fields = {**FIELDS[method], "max_steps": 2, "beta": 0.0}
    work = worked(make(method, untied_dir, tmp_path, hf_engine, fields), monkeypatch)
    # Every completion through the model once, with gradient or without.
    assert set((work.learned() + work.looked()).values()) == {1}


def test_several_steps_a_generation_take_one_pass_before_the_first(
    untied_dir: str, tmp_path: Path, hf_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields = {**GROUPS, "max_steps": 2, "num_iterations": 2}
    work = worked(make("GRPO", untied_dir, tmp_path, hf_engine, fields), monkeypatch)
    assert len(work.learned()) == 4
    assert set(work.learned().values()) == {2}
    assert set(work.looked().values()) == {1}


@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_there_is_a_reference_and_a_pass_of_it_only_where_the_loss_has_a_divergence(
    untied_dir: str, tmp_path: Path, hf_engine: Engine, monkeypatch: pytest.MonkeyPatch, beta: float
) -> None:
    run = make("GRPO", untied_dir, tmp_path, hf_engine, {**GROUPS, "max_steps": 2, "beta": beta})
    work = worked(run, monkeypatch)
    assert (run.reference is not None) == bool(beta)
    assert len(work.learned()) == 8
    if run.reference is None:
        assert not work.looked()
        return
    with run.reference.model() as model:
        assert work.looked(model) == work.looked() == work.learned()


@pytest.mark.parametrize("method", ["GRPO", "PPO"])
def test_under_an_adapter_the_reference_is_the_same_model_with_the_adapter_off_in_packs_of_its_own(
    untied_dir: str, tmp_path: Path, hf_engine: Engine, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    fields = {**(ALONE if method == "PPO" else GROUPS), "max_steps": 1, "beta": 0.1}
    run = make(method, untied_dir, tmp_path, hf_engine, fields, peft_config=lora())
    work = worked(run, monkeypatch)
    every = [*work.looking, *work.learning]
    assert len({id(model) for model, _ in every}) == 1
    # PPO's values are asked for before the step, by the policy.
    before = [True] if method == "PPO" else []
    assert work.adapters == [*before, False, True]
    assert [sorted(names) for _, names in every] == [sorted(work.learned())] * len(every)


def test_the_optimizer_is_the_fused_one(untied_dir: str, tmp_path: Path, hf_engine: Engine) -> None:
    for method in ("GRPO", "PPO"):
        run = make(method, untied_dir, tmp_path / method, hf_engine, {**FIELDS[method], "max_steps": 1})
        run.train()
        optimizer = getattr(run.optimizer, "optimizer", run.optimizer)
        assert type(optimizer) is torch.optim.AdamW
        assert all(group["fused"] is True for group in optimizer.param_groups)
        trained = {id(p) for p in run._trained()}
        assert {id(p) for group in optimizer.param_groups for p in group["params"]} == trained
