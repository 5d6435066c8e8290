"""Which prompts each generation gets, from the seed and from the solved prompts; and runs that skip solved prompts."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import methods
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from methods import GROUPS, StopAfter, logs, parameters
from transformers import TrainerCallback

from lockstep.contract.protocol import Completion, Engine, RequestKey
from lockstep.errors import InputError
from lockstep.learn.methods.grpo import GRPOConfig
from lockstep.rollouts.group import Prompt, Rollout, RolloutGroup
from lockstep.run.data.prompts import GenerationBatches, PromptOrder


def order_of(
    count: int, size: int, seed: int = 0, *, shuffle: bool = True, at: float | None = None, ahead: int = 0
) -> PromptOrder:
    names = [f"t/{i}" for i in range(count)]
    return PromptOrder(names, size, shuffle=shuffle, seed=seed, solved_at=at, ahead=ahead)


def group(place: int, rewards: list[float]) -> RolloutGroup:
    prompt = Prompt(f"t/{place}", (1, place), "x")
    found = [
        Rollout(
            Completion(RequestKey(prompt.prompt_id, i), prompt.ids, (5,), (-0.5,), (0,), "stop"),
            "x",
            {},
            reward,
        )
        for i, reward in enumerate(rewards)
    ]
    return RolloutGroup(prompt, tuple(found))


@given(
    size=st.integers(1, 40),
    prompts=st.integers(1, 6),
    parts=st.integers(1, 4),
    seed=st.integers(0, 5),
    epoch=st.integers(0, 3),
)
def test_an_epoch_gives_each_prompt_at_most_once_a_generation(
    size: int, prompts: int, parts: int, seed: int, epoch: int
) -> None:
    if size < prompts:
        with pytest.raises(InputError, match="one generation needs"):
            order_of(size, prompts, seed)
        return
    batches = GenerationBatches(order_of(size, prompts, seed), parts)
    batches.set_epoch(epoch)
    items = list(batches)
    assert len(items) == len(batches) == size // prompts * parts
    for start_of in range(0, len(items), parts):
        generation = items[start_of : start_of + parts]
        assert [part for item in generation for _, part in item] == [
            p for p in range(parts) for _ in range(prompts)
        ]
        assert len({tuple(index for index, _ in item) for item in generation}) == 1
    seen = [index for item in items[::parts] for index, _ in item]
    assert len(seen) == len(set(seen))


def test_order_depends_on_seed_and_epoch_alone() -> None:
    def order(seed: int, epoch: int, shuffle: bool = True) -> list[list[tuple[int, int]]]:
        batches = GenerationBatches(order_of(20, 4, seed, shuffle=shuffle), 2)
        batches.set_epoch(epoch)
        return list(batches)

    assert order(1, 2) == order(1, 2) != order(1, 3)
    assert order(1, 2) != order(2, 2)
    assert order(1, 2, shuffle=False) == order(5, 0, shuffle=False)


@given(
    count=st.integers(2, 14),
    size=st.integers(1, 3),
    seed=st.integers(0, 3),
    hard=st.sets(st.integers(0, 13)),
    data=st.data(),
)
def test_a_solved_prompt_is_in_no_later_pass_and_every_other_is_in_each(
    count: int, size: int, seed: int, hard: set[int], data: st.DataObject
) -> None:
    """Compare with a step-by-step version: a list of the pass's remaining prompts and a set of the solved ones."""
    size = min(size, count)
    order, plain = order_of(count, size, seed, at=0.9), order_of(count, size, seed)
    solved: set[int] = set()
    waiting: list[int] = []
    passes = -1
    for generation in range(12):
        if not waiting:
            passes += 1
            permuted = torch.randperm(count, generator=torch.Generator().manual_seed(seed + passes)).tolist()
            left = [place for place in permuted if place not in solved]
            waiting = left[: len(left) // size * size]
            if not waiting:
                assert order.used_up(generation)
                with pytest.raises(InputError, match=rf"all prompts but {count - len(solved)} are solved"):
                    order.places(generation)
                return
        assert not order.used_up(generation)
        places, waiting = order.places(generation), waiting[size:]
        if not solved:
            assert places == plain.places(generation)
        assert len(set(places)) == size
        found = []
        for place in places:
            solves = place not in hard and data.draw(st.booleans())
            solved |= {place} if solves else set()
            found.append(group(place, [1.0, 1.0, 0.7] if solves else [1.0, 0.0, math.nan]))
        order.note(generation, found)
        assert order.solved == len(solved)
        # The run is resumed here.
        other = order_of(count, size, seed, at=0.9)
        other.load_state(json.loads(json.dumps(order.state())))
        if not order.used_up(generation + 1):
            assert other.places(generation + 1) == order.places(generation + 1)
        assert other.places(generation) == places
        order = other


def test_no_generation_is_drawn_before_the_one_in_front_of_it_was_scored() -> None:
    order = order_of(6, 2, at=0.5)
    order.places(0)
    with pytest.raises(InputError, match="generation 1 is asked for before generation 0 was scored"):
        order.places(1)


class Prompts(TrainerCallback):
    """The prompts of each step."""

    def __init__(self, run: Any) -> None:
        self.seen: list[tuple[str, ...]] = []
        self._run = run

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.seen.append(self._run.loop.generation.prompt_ids)


EASY = {f"what is {i} + {i}" for i in (1, 3, 4)}


def easy(prompts: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
    """A reward that solves some prompts at once and the others never."""
    return [1.0 if p in EASY else 0.1 * (ids[0] % 7) for p, ids in zip(prompts, completion_ids, strict=True)]


def run_of(model: str, folder: Path, engine: Engine, **fields: Any) -> tuple[Any, Prompts]:
    base = {**GROUPS, "no_positive_resampling": 0.9, "max_steps": 10, **fields}
    run = methods.make("GRPO", model, folder, engine, base, reward_funcs=easy)
    seen = Prompts(run)
    run.add_callback(seen)
    return run, seen


def test_a_run_leaves_solved_prompts_out_and_one_that_is_resumed_goes_on_to_the_bit(
    hf_engine: Engine, untied_dir: str, tmp_path: Path
) -> None:
    whole, seen = run_of(untied_dir, tmp_path / "whole", hf_engine)
    whole.train()
    first, rest = seen.seen[:4], seen.seen[4:]
    assert {name for names in first for name in names} == {f"train/{i}" for i in range(8)}
    # Five prompts are left: two generations of two prompts per pass.
    assert {name for names in rest for name in names} == {f"train/{i}" for i in (0, 2, 5, 6, 7)}
    assert [log["prompts/solved"] for log in logs(whole)][3:] == [3.0] * 7

    folder = tmp_path / "resumed"
    stopped, _ = run_of(untied_dir, folder, hf_engine, save_strategy="steps", save_steps=5)
    stopped.add_callback(StopAfter(5))
    stopped.train()
    resumed, seen_again = run_of(untied_dir, folder, hf_engine, save_strategy="steps", save_steps=5)
    resumed.train(resume_from_checkpoint=True)
    assert seen_again.seen == seen.seen[5:]
    assert logs(resumed)[5:] == logs(whole)[5:]
    expected = parameters(whole.model)
    assert all(torch.equal(p, expected[name]) for name, p in parameters(resumed.model).items())

    (folder / "checkpoint-5" / "prompts.json").unlink()
    again, _ = run_of(untied_dir, folder, hf_engine)
    with pytest.raises(InputError, match=r"checkpoint-5 has no prompts\.json"):
        again.train(resume_from_checkpoint=str(folder / "checkpoint-5"))


def test_a_run_ends_where_too_few_prompts_are_left(
    hf_engine: Engine, untied_dir: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reward = 1.0

    def solved(completion_ids: list[list[int]], **_: Any) -> list[float]:
        return [reward for _ in completion_ids]

    fields = {**GROUPS, "no_positive_resampling": 1.0, "max_steps": 10, "num_iterations": 2}
    run = methods.make("GRPO", untied_dir, tmp_path, hf_engine, fields, reward_funcs=solved)
    run.train()
    # There are eight prompts, two per generation, and two steps per generation.
    assert run.state.global_step == 8
    assert "training ends at step 8: too few prompts are left unsolved" in capsys.readouterr().out
    # Another call starts from the beginning.
    reward = 0.0
    run.train()
    assert run.state.global_step == 10


@given(
    count=st.integers(2, 14),
    size=st.integers(1, 3),
    seed=st.integers(0, 3),
    ahead=st.integers(0, 4),
    solves=st.lists(st.sets(st.integers(0, 13)), min_size=16, max_size=16),
)
def test_what_is_begun_ahead_has_the_prompts_that_it_has_when_its_turn_comes(
    count: int, size: int, seed: int, ahead: int, solves: list[set[int]]
) -> None:
    size = min(size, count)
    order = order_of(count, size, seed, at=0.9, ahead=ahead)
    begun: dict[int, list[int]] = {}
    gone: dict[int, int] = {}
    for generation, solved in enumerate(solves):
        for number in range(generation, generation + ahead + 1):
            if order.used_up(number):
                break
            if number not in begun:
                begun[number] = order.places(number)
                # A prompt that was solved one pass and `ahead` generations earlier is not sampled again.
                assert all(
                    number < gone.get(place, number + 1) + ahead + count // size for place in begun[number]
                )
        if order.used_up(generation):
            return
        assert begun[generation] == order.places(generation)
        for place in set(begun[generation]) & solved:
            gone.setdefault(place, generation)
        order.note(generation, [group(p, [1.0, float(p in solved)]) for p in begun[generation]])
        with pytest.raises(InputError, match="before generation"):
            order.places(generation + ahead + 2)


def test_a_checkpoint_of_another_number_of_generations_ahead_is_refused() -> None:
    state = order_of(6, 2, at=0.9, ahead=2).state()
    with pytest.raises(InputError, match="2 generations ahead, this one has 0"):
        order_of(6, 2, at=0.9).load_state(state)
    order_of(6, 2, at=0.9, ahead=2).load_state(json.loads(json.dumps(state)))


def test_a_run_that_ends_early_keeps_its_last_step_and_is_at_its_end_when_it_is_resumed(
    hf_engine: Engine, untied_dir: str, tmp_path: Path
) -> None:
    fields = {**GROUPS, "no_positive_resampling": 1.0, "max_steps": 10, "save_strategy": "steps"}
    fields |= {"save_steps": 3, "logging_steps": 3}

    def run() -> Any:
        rewards = {"reward_funcs": lambda completions, **_: [1.0] * len(completions)}
        return methods.make("GRPO", untied_dir, tmp_path, hf_engine, fields, **rewards)

    ended = run()
    ended.train()
    # There are eight prompts, two per step, and all are solved.
    assert [log["step"] for log in ended.state.log_history if "loss" in log] == [3, 4]
    assert (tmp_path / "checkpoint-4" / "trainer_state.json").exists()

    again = run()
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == 4
    expected = parameters(ended.model)
    assert all(torch.equal(p, expected[name]) for name, p in parameters(again.model).items())


def test_a_threshold_that_no_mean_reaches_is_refused() -> None:
    with pytest.raises(InputError, match="no_positive_resampling=nan; it must be a finite number"):
        GRPOConfig(output_dir="unused", no_positive_resampling=math.nan)
