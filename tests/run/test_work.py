"""Steps do no unnecessary work: the tests count the forwards and backwards of real steps."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from methods import ALONE, FIELDS, GROUPS, PAIRS, logs, lora, make, reference_of
from work import TWO_GROUPS, agreeing, all_apart, names_of, scored_in_part, worked

from lockstep.algorithms.corrections import high_entropy_mask
from lockstep.contract.protocol import Engine
from lockstep.errors import ProofError
from lockstep.learn.methods.objective import Entropies
from lockstep.learn.pack import Pack
from lockstep.learn.scoring import TokenScores
from lockstep.learn.sequence import TrainingSequence, column
from lockstep.learn.update import OptimizerStep, Policy


@pytest.mark.parametrize("of", ["the policy", "its trunk", "the reference"])
def test_a_pass_that_scores_no_pack_is_counted_too(
    untied_dir: str, tmp_path: Path, hf_engine: Engine, monkeypatch: pytest.MonkeyPatch, of: str
) -> None:
    run = make("GRPO", untied_dir, tmp_path, hf_engine, {**TWO_GROUPS, "beta": 0.1})
    policy = run.loop.policy().model
    models = {"the policy": policy, "its trunk": policy.base_model, "the reference": reference_of(run)}
    proofs = run.source.proofs
    real = proofs.check

    def prove(*args: Any, **kwargs: Any) -> None:
        models[of](input_ids=torch.tensor([[5, 6]], device=run.model.device))
        real(*args, **kwargs)

    monkeypatch.setattr(proofs, "check", prove)
    with pytest.raises(AssertionError, match="forwards"):
        worked(run, monkeypatch)


def test_a_group_that_agrees_has_no_backward_and_its_tokens_are_proven_all_the_same(
    untied_dir: str, tmp_path: Path, hf_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make("GRPO", untied_dir, tmp_path, hf_engine, TWO_GROUPS, reward_funcs=agreeing)
    work = worked(run, monkeypatch)
    assert run.loop.generation is not None
    first, second = ([str(r.completion.key) for r in group.rollouts] for group in run.loop.generation.groups)
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


# The number of the policy's passes without gradient over a generation, as docs/internals/speed.md lists them.
PASSES: list[tuple[str, dict[str, Any], int]] = [
    ("GRPO", {}, 0),
    ("GRPO", {"beta": 0.1}, 0),
    ("GRPO", {"entropy_coef": 0.1}, 0),
    ("GRPO", {"loss_type": "vespo"}, 0),
    ("GRPO", {"top_entropy_quantile": 0.5}, 1),
    ("GRPO", {"num_iterations": 2}, 1),
    ("GRPO", {"steps_per_generation": 2}, 1),
    ("GRPO", {"top_entropy_quantile": 0.5, "num_iterations": 3}, 3),
    ("RLOO", {}, 1),
    ("RLOO", {"num_iterations": 2}, 1),
    ("RLOO", {"beta": 0.0}, 0),
    ("RLOO", {"beta": 0.0, "num_iterations": 2}, 1),
    ("ReinforcePP", {}, 1),
    ("ReinforcePP", {"beta": 0.0}, 0),
    ("ReinforcePP", {"baseline": "group", "num_generations": 2}, 0),
    ("PPO", {}, 1),
    ("PPO", {"num_iterations": 2}, 1),
    ("PPO", {"beta": 0.0}, 1),
    ("OnlineDPO", {}, 0),
]


@pytest.mark.parametrize(("method", "more", "passes"), PASSES, ids=str)
def test_a_pass_without_gradient_is_taken_where_something_must_be_known_before_the_first_step(
    untied_dir: str,
    tmp_path: Path,
    hf_engine: Engine,
    monkeypatch: pytest.MonkeyPatch,
    method: str,
    more: dict[str, Any],
    passes: int,
) -> None:
    iterations = more.get("num_iterations", 1)
    fields = {**FIELDS[method], **more, "max_steps": iterations * more.get("steps_per_generation", 1)}
    run = make(method, untied_dir, tmp_path, hf_engine, fields, reward_funcs=all_apart)
    work = worked(run, monkeypatch)
    every, _ = names_of(run)
    assert work.learned() == Counter(every * iterations)
    assert work.looked(run.loop.policy().model) == Counter(every * passes)


@pytest.mark.parametrize("more", [{"num_iterations": 2}, {"steps_per_generation": 2}], ids=str)
def test_what_was_scored_before_the_first_step_and_moves_nothing_takes_no_other_pass(
    untied_dir: str, tmp_path: Path, hf_engine: Engine, monkeypatch: pytest.MonkeyPatch, more: dict[str, int]
) -> None:
    run = make(
        "GRPO", untied_dir, tmp_path, hf_engine, {**TWO_GROUPS, **more, "max_steps": 2}, reward_funcs=agreeing
    )
    work = worked(run, monkeypatch)
    every, apart = names_of(run)
    assert work.looked() == Counter(every)
    assert work.learned() == Counter(apart * run.config.passes)


@pytest.mark.parametrize("method", ["RLOO", "PPO"])
def test_what_was_scored_for_the_advantages_and_moves_nothing_takes_no_other_pass(
    untied_dir: str, tmp_path: Path, hf_engine: Engine, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    run = make(method, untied_dir, tmp_path, hf_engine, TWO_GROUPS, reward_funcs=scored_in_part)
    work = worked(run, monkeypatch)
    every, apart = names_of(run)
    assert work.looked(run.loop.policy().model) == Counter(every)
    assert work.learned() == Counter(apart)
    # The gap is judged and recorded over all tokens.
    receipt = [json.loads(line) for line in (tmp_path / "receipt.jsonl").read_text().splitlines()]
    assert (
        receipt[-1]["checked_tokens"] == receipt[-1]["sampled_tokens"] == run.loop.generation.sampled_tokens
    )


@pytest.mark.parametrize(("method", "more"), [("GRPO", {"num_iterations": 2, "max_steps": 2}), ("RLOO", {})])
def test_a_step_that_loses_such_a_sequence_is_not_taken(
    untied_dir: str,
    tmp_path: Path,
    hf_engine: Engine,
    monkeypatch: pytest.MonkeyPatch,
    method: str,
    more: dict[str, int],
) -> None:
    run = make(method, untied_dir, tmp_path, hf_engine, {**TWO_GROUPS, **more}, reward_funcs=scored_in_part)
    real = OptimizerStep.learn

    def learn(step: OptimizerStep, policy: Policy, sequences: Sequence[TrainingSequence], part: int) -> float:
        return real(step, policy, [s for s in sequences if run.objective.has_gradient(s)], part)

    monkeypatch.setattr(OptimizerStep, "learn", learn)
    with pytest.raises(
        ProofError, match=r"micro-batch 0 learns from 2 completions, and 4 were sampled for it"
    ):
        run.train()
    assert run.state.global_step == 0


def test_figures_of_what_takes_no_pass_in_a_step_are_those_of_the_pass_before_the_first(
    untied_dir: str, tmp_path: Path, hf_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields = {**TWO_GROUPS, "num_iterations": 2, "max_steps": 2}
    run = make("GRPO", untied_dir, tmp_path, hf_engine, fields, reward_funcs=agreeing)
    real, later = Policy.score, []

    def score(policy: Policy, pack: Pack, *args: Any, **kwargs: Any) -> TokenScores:
        scores = real(policy, pack, *args, **kwargs)
        if torch.is_grad_enabled():
            later.append((pack, scores.logps.detach(), scores.entropies.detach()))
        return scores

    monkeypatch.setattr(Policy, "score", score)
    run.train()
    (batch,) = run.loop.generation.micro_batches
    before = column(batch, "entropies")
    first, second = logs(run)
    assert first["entropy"] == pytest.approx(float(before.mean()), rel=1e-5)
    # The group with equal rewards keeps its old entropy; the other group has the entropy after one step.
    pack, logps, entropies = later[-1]
    agreed = column([s for s in batch if not run.objective.has_gradient(s)], "entropies")
    assert second["entropy"] == pytest.approx(float(torch.cat([agreed, entropies.cpu()]).mean()), rel=1e-5)
    assert second["entropy"] != pytest.approx(first["entropy"], rel=1e-4)
    # The change of the policy is measured over the tokens with new log-probs.
    moved = float((logps - pack.column("old_logps")).abs().mean())
    assert second["parity/gap_staleness"] == pytest.approx(moved, rel=1e-5)
    for name in (
        "sampling/tokens",
        "sampling/sampling_logp_difference/mean",
        "sampling/importance_sampling_ratio/mean",
    ):
        assert second[name] == pytest.approx(first[name], rel=1e-6)


def test_several_steps_per_generation_take_one_pass_before_the_first(
    untied_dir: str, tmp_path: Path, hf_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields = {**GROUPS, "max_steps": 2, "num_iterations": 2}
    work = worked(make("GRPO", untied_dir, tmp_path, hf_engine, fields), monkeypatch)
    assert len(work.learned()) == 4
    assert set(work.learned().values()) == {2}
    assert set(work.looked().values()) == {1}


@pytest.mark.parametrize(("passes", "looked"), [(1, 1), (2, 2)])
def test_the_threshold_of_entropies_takes_a_pass_only_where_the_policy_has_moved_since_the_last(
    untied_dir: str,
    tmp_path: Path,
    hf_engine: Engine,
    monkeypatch: pytest.MonkeyPatch,
    passes: int,
    looked: int,
) -> None:
    fields = {**TWO_GROUPS, "top_entropy_quantile": 0.5, "num_iterations": passes, "max_steps": passes}
    run = make("GRPO", untied_dir, tmp_path, hf_engine, fields, reward_funcs=agreeing)
    masks: list[tuple[float, ...]] = []
    real = run.objective.prepare_step

    def prepare_step(sequences: list[TrainingSequence], entropies: Entropies) -> list[TrainingSequence]:
        found = real(sequences, entropies)
        masks.append(tuple(column(found, "kept").tolist()))
        return found

    monkeypatch.setattr(run.objective, "prepare_step", prepare_step)
    work = worked(run, monkeypatch)
    every, apart = names_of(run)
    assert work.looked() == Counter(every * looked)
    assert work.learned() == Counter(apart * passes)
    (batch,) = run.loop.generation.micro_batches
    assert masks[0] == tuple(high_entropy_mask(column(batch, "entropies"), 0.5).float().tolist())
    # With this learning rate the entropies of the next step differ.
    assert len(set(masks)) == passes


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


@pytest.mark.parametrize(
    ("method", "fields"),
    [
        ("GRPO", {**TWO_GROUPS, "beta": 0.1, "filter_zero_variance": True}),
        ("OnlineDPO", {**PAIRS, "max_steps": 1, "shuffle_dataset": False}),
    ],
)
def test_the_reference_scores_what_the_loss_compares_with_it_and_nothing_else(
    untied_dir: str,
    tmp_path: Path,
    hf_engine: Engine,
    monkeypatch: pytest.MonkeyPatch,
    method: str,
    fields: dict[str, Any],
) -> None:
    run = make(method, untied_dir, tmp_path, hf_engine, fields, reward_funcs=agreeing)
    work = worked(run, monkeypatch)
    every, apart = names_of(run)
    assert len(apart) == len(every) / 2
    assert work.looked(reference_of(run)) == work.learned() == Counter(apart)


@pytest.mark.parametrize("method", ["GRPO", "PPO"])
def test_under_an_adapter_the_reference_is_the_same_model_with_the_adapter_off_in_packs_of_its_own(
    untied_dir: str, tmp_path: Path, hf_engine: Engine, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    fields = {**(ALONE if method == "PPO" else GROUPS), "max_steps": 1, "beta": 0.1}
    run = make(method, untied_dir, tmp_path, hf_engine, fields, peft_config=lora())
    work = worked(run, monkeypatch)
    every = [*work.looking, *work.learning]
    assert len({id(model) for model, _ in every}) == 1
    # PPO needs the values before the step, so the policy makes a pass for them.
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
        trained = {id(p) for p in run.loop.trained_parameters()}
        assert {id(p) for group in optimizer.param_groups for p in group["params"]} == trained
