"""Rollouts with several branches, or without a sampled token: counted once, weighed once, in one pack."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from method_variants import VARIANTS
from methods import FIELDS, make, parameters

from lockstep import GRPOConfig
from lockstep.contract.protocol import Completion, Engine, RequestKey
from lockstep.learn.generation import Generation, prepare_generation, sequences_of
from lockstep.learn.methods.grpo import GRPOObjective
from lockstep.learn.pack import pack_rows, pack_sequences
from lockstep.learn.sequence import TrainingSequence
from lockstep.rollouts.conversation import Conversation
from lockstep.rollouts.group import Prompt, Rollout, RolloutGroup
from lockstep.run.files.logs import rows_of
from lockstep.run.metrics import rollout_metrics, staleness_metrics
from lockstep.tokens.arrays import BadValues
from lockstep.watch.receipt import RECEIPT, check_receipt

METHODS = {name.partition(":")[0]: variant for name, variant in reversed(VARIANTS.items())}


def test_a_copy_with_other_values_is_the_one_that_the_constructor_makes() -> None:
    sequence = TrainingSequence("a#0", [1, 2], [3, 4, 5], [-1.0, -2.0, -3.0], kept=[True, False, True])
    changes = {
        "advantages": [1, 2, 3],
        "weight": 0.5,
        "kept": None,
        "fresh": [True, True, False],
        "unit": "a",
    }
    found = sequence.but(**changes)
    assert found == replace(sequence, **changes)
    assert sequence.weight == 0.0
    assert found.advantages.dtype == np.float32
    assert not found.advantages.flags.writeable
    with pytest.raises(BadValues):
        sequence.but(fresh=[1.0, 2.0, 3.0])
    with pytest.raises(AttributeError):
        sequence.but(advantage=[1.0, 2.0, 3.0])


def completion(
    key: RequestKey, prompt: tuple[int, ...], ids: tuple[int, ...], mask: tuple[bool, ...] | None = None
) -> Completion:
    return Completion(key, prompt, ids, (-0.5,) * len(ids), (3,) * len(ids), "stop", mask)


def groups(reward: float = 1.0, *, empty: bool = False) -> list[RolloutGroup]:
    """Two prompts with two rollouts each. The second rollout has two branches, or the third has no token."""
    found = []
    for p in range(2):
        prompt = Prompt(f"p{p}", (4 + p, 9), "say it")
        rollouts = [
            Rollout(
                completion(RequestKey(prompt.prompt_id, s), (4 + p, 9), (20 + s, 21, 22)), "t", {"f": r}, r
            )
            for s, r in ((0, 0.0), (1, 1.0))
        ]
        if p == 0:
            key = RequestKey("p0", 1)
            rollouts[1] = replace(
                rollouts[1],
                completion=completion(key, (4, 9), (20, 30, 31, 32), (True, False, True, True)),
                further=(completion(key._replace(call=2), (4, 9, 20, 77), (33, 34)),),
            )
        elif empty:
            rollouts[0] = replace(
                rollouts[0], completion=completion(rollouts[0].key, (5, 9), ()), reward=reward
            )
        found.append(RolloutGroup(prompt, tuple(rollouts)))
    return found


def config(**fields: Any) -> GRPOConfig:
    base = {
        "output_dir": "u",
        "report_to": [],
        "bf16": False,
        "num_generations": 2,
        "per_device_train_batch_size": 2,
    }
    return GRPOConfig(**{**base, "gradient_accumulation_steps": 2, **fields})


@pytest.mark.parametrize(("loss_type", "weight"), [("dapo", 1 / 14), ("grpo", 1 / (4 * 5))])
def test_a_rollout_with_two_branches_weighs_as_one(loss_type: str, weight: float) -> None:
    generation = prepare_generation(groups(), GRPOObjective(config(loss_type=loss_type)), 3)
    assert [[s.name for s in batch] for batch in generation.micro_batches] == [
        ["p0#0", "p0#1", "p0#1.2"],
        ["p1#0", "p1#1"],
    ]
    first, one, other = generation.micro_batches[0]
    assert (one.weight, other.weight) == pytest.approx((weight, weight))
    assert one.advantages.tolist() == [one.advantages[0]] * 3
    assert other.advantages.tolist() == [one.advantages[0]] * 2
    assert first.advantages[0] == -one.advantages[0]
    # One loss has one ratio over both branches.
    assert (one.unit, other.unit, first.unit) == ("p0#1", "p0#1", None)


def test_counts_cover_all_branches_and_no_inserted_token() -> None:
    generation = prepare_generation(groups(), GRPOObjective(config()), 3)
    assert generation.sampled_tokens == generation.fresh_tokens == 3 + 5 + 3 + 3
    assert sum(s.length for batch in generation.micro_batches for s in batch) == 14
    assert [str(c.key) for c in generation.completions] == ["p0#0", "p0#1", "p0#1.2", "p1#0", "p1#1"]
    assert rollout_metrics(groups())["completions/max_length"] == 5.0
    assert staleness_metrics(groups(), 4)["staleness/mean"] == 1.0
    assert [row.advantage for row in rows_of(generation)] == pytest.approx([-0.7, 0.7, -0.7, 0.7], abs=0.01)


def test_branches_share_the_tokens_up_to_where_they_part_and_stay_in_one_pack() -> None:
    sequences = [
        s for batch in prepare_generation(groups(), GRPOObjective(config()), 3).micro_batches for s in batch
    ]
    tree = sequences[1:3]
    (pack,) = pack_sequences(tree, 1000)
    # Prompt 4 9, then 20, where one branch continues with 30 31 and the other with 77 33. The last ids need no
    # position.
    assert sorted(pack.input_ids[0].tolist()) == [4, 9, 20, 30, 31, 33, 77]
    assert pack.sizes == [5]
    for packs in (pack_sequences(sequences, 5), pack_rows(sequences, 5)):
        homes = [{s.name for s in pack.sequences} for pack in packs]
        assert {"p0#1", "p0#1.2"} in homes


def test_what_was_sampled_in_one_branch_is_context_in_the_others() -> None:
    _, one, other, *_ = sequences_of(groups(), 3)
    assert one.sampled_ids.tolist() == [20, 31, 32]
    assert (other.prompt_ids.tolist(), other.sampled_ids.tolist()) == ([4, 9, 20, 77], [33, 34])


def scored(sequence: TrainingSequence) -> TrainingSequence:
    draw = np.random.default_rng(sequence.length)
    columns = {
        name: draw.normal(size=sequence.length) for name in ("old_logps", "ref_logps", "values", "entropies")
    }
    return replace(sequence, **columns)


@pytest.mark.parametrize("method", sorted(METHODS))
def test_a_rollout_without_tokens_teaches_nothing_and_disturbs_no_other(method: str) -> None:
    variant = METHODS[method]
    fields = (
        {"num_generations": 2, "per_device_train_batch_size": 4}
        if method != "OnlineDPO"
        else {"per_device_train_batch_size": 2}
    )
    run = variant.config(output_dir="u", report_to=[], bf16=False, **{**variant.fields, **fields})
    made = []
    for reward in (1.0, 5.0):
        whole = groups(reward, empty=True)
        sequences = [scored(s) for s in sequences_of(whole, 3)]
        assert [s.name for s in sequences] == ["p0#0", "p0#1", "p0#1.2", "p1#1"]
        generation = prepare_generation(whole, variant.objective(run), 3, sequences)
        assert generation.sampled_tokens == 11
        (batch,) = generation.micro_batches
        assert all(np.isfinite(s.advantages).all() and s.weight >= 0.0 for s in batch)
        made.append([s for s in batch if s.name.startswith("p0")])
    # The reward of the rollout without tokens reaches no token of another prompt, also not of its neighbour in the
    # flat order.
    assert [s.advantages.tolist() for s in made[0]] == [s.advantages.tolist() for s in made[1]]
    if method == "OnlineDPO":
        # No pair is made with it.
        assert not any(s.advantages.any() for s in batch if s.name.startswith("p1"))
    assert torch.isfinite(torch.tensor(rollout_metrics(groups(empty=True))["completions/mean_length"]))


async def program(conversation: Conversation) -> None:
    """Every second rollout has two branches, and every fourth one has no turn at all."""
    if conversation.seed % 4 == 3:
        return
    turn = await conversation.sample(3)
    conversation.insert([40, 41])
    if conversation.room and conversation.seed % 2:
        conversation.branch([*conversation.prompt.ids.tolist(), *turn.token_ids.tolist()[:2], 90])
    if conversation.room:
        await conversation.sample(2)


@pytest.mark.parametrize("method", sorted(FIELDS))
def test_a_run_proves_every_token_of_every_branch(
    untied_dir: str, tmp_path: Path, hf_engine: Engine, method: str
) -> None:
    sizes = FIELDS[method] | {"per_device_train_batch_size": 8, "max_steps": 3}
    sizes |= {"max_new_tokens": 9} if method == "OnlineDPO" else {"max_completion_length": 9}
    run = make(
        method, untied_dir, tmp_path, hf_engine, {**sizes, "rehearse_rewards": False}, reward_funcs=by_sum
    )
    run.source.program = program
    seen: list[Generation] = []
    begin = run.watch.beginning

    def noted(policy: Any, generation: Generation, *more: Any, **named: Any) -> None:
        seen.append(generation)
        begin(policy, generation, *more, **named)

    run.watch.beginning = noted
    before = parameters(run.model)
    run.train()
    assert any(not torch.equal(before[name], p) for name, p in parameters(run.model).items())
    logs = [log for log in run.state.log_history if "loss" in log]
    for generation, log in zip(seen, logs, strict=True):
        sampled = sum(len(c.sampled_places) for c in generation.completions)
        assert log["parity/checked_tokens"] == log["sampling/tokens"] == sampled
        assert log["parity/max_abs_gap"] < 1e-3
    rollouts = [r for generation in seen for group in generation.groups for r in group.rollouts]
    assert {len(r.branches) for r in rollouts} == {1, 2}
    assert {len(r.token_ids) == 0 for r in rollouts} == {False, True}
    assert check_receipt(tmp_path / RECEIPT) == 4


def by_sum(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [float(sum(ids) % 7) for ids in completion_ids]
