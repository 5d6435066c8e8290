"""Work that need not be done is not done: forwards and backwards of real steps, counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from methods import ALONE, FIELDS, GROUPS, lora, make

from lockstep.engines.protocol import Engine
from lockstep.training.online import OnlineTrainer
from lockstep.training.packing import Pack
from lockstep.training.scoring import TokenScores
from lockstep.training.update import Policy

pytestmark = pytest.mark.usefixtures("one_thread")

# Two groups a step: the first prompt of `PROMPTS` agrees, the second one does not.
TWO_GROUPS = {**GROUPS, "max_steps": 1, "shuffle_dataset": False}


def agreeing(prompts: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
    """The same for all completions of an even prompt, another for each one of an odd prompt."""
    return [float(i) if int(prompt.split()[-1]) % 2 else 1.0 for i, prompt in enumerate(prompts)]


@dataclass
class Work:
    """What went through a model in a run.

    Attributes:
        learning: sequences scored with gradient, one entry a forward.
        looking: the same without gradient.
        adapters: whether an adapter was on, by forward, where there is one.
        forwards: of the trunk of the policy, wherever they come from, while a pack was scored.
        backwards: calls of the trainer's.
    """

    learning: list[tuple[Any, list[str]]] = field(default_factory=list)
    looking: list[tuple[Any, list[str]]] = field(default_factory=list)
    adapters: list[bool] = field(default_factory=list)
    forwards: int = 0
    backwards: int = 0

    def learned(self) -> Counter[str]:
        """How often each sequence was scored with gradient."""
        return Counter(name for _, names in self.learning for name in names)

    def looked(self, model: Any = None) -> Counter[str]:
        """How often each was scored without, by this model or by any."""
        return Counter(name for by, names in self.looking if model in (None, by) for name in names)


@contextmanager
def counted(run: OnlineTrainer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Work]:
    """The work of a run."""
    work = Work()
    real_score, real_backward = Policy.score, run.accelerator.backward

    def score(policy: Policy, pack: Pack, *args: Any, **kwargs: Any) -> TokenScores:
        seen = work.learning if torch.is_grad_enabled() else work.looking
        seen.append((policy.model, [s.name for s in pack.sequences]))
        work.adapters += [
            not module.disable_adapters
            for module in policy.model.modules()
            if isinstance(module, peft.tuners.lora.LoraLayer)
        ][:1]

        def forward(*_: Any) -> None:
            work.forwards += 1

        with policy.model.base_model.register_forward_pre_hook(forward):
            return real_score(policy, pack, *args, **kwargs)

    def backward(loss: torch.Tensor, **kwargs: Any) -> None:
        work.backwards += 1
        real_backward(loss, **kwargs)

    monkeypatch.setattr(Policy, "score", score)
    monkeypatch.setattr(run.accelerator, "backward", backward)
    yield work
    assert work.forwards == len(work.learning) + len(work.looking)
    assert work.backwards == len(work.learning)


def logged(run: OnlineTrainer, name: str) -> float:
    return sum(log.get(name, 0.0) for log in run.state.log_history)


def worked(run: OnlineTrainer, monkeypatch: pytest.MonkeyPatch) -> Work:
    """The work of a whole run, each sampled token of which is proven."""
    sampled: list[int] = []
    real = run.source.rollout

    def rollout(*args: Any, **kwargs: Any) -> Any:
        groups = real(*args, **kwargs)
        sampled.extend(len(r.completion.token_ids) for group in groups for r in group.rollouts)
        return groups

    monkeypatch.setattr(run.source, "rollout", rollout)
    with counted(run, monkeypatch) as work:
        run.train()
    steps = run.config.passes
    assert logged(run, "parity/checked_tokens") == steps * sum(sampled) > 0
    return work


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
