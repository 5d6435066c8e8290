"""Trainers with TRL's `tools`, `environment_factory` and `rollout_func`: rewards, metrics, masks, and early errors."""

from __future__ import annotations

import html
import json
import re
import signal
import sqlite3
import sys
from collections.abc import Callable
from functools import update_wrapper
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from caller import Product, multiply
from conftest import VLLM
from datasets import Dataset
from methods import StopAfter, logs, parameters
from portions import portion

import lockstep
from lockstep.engines.vllm.in_process import VLLMInProcess
from lockstep.errors import InputError, ProofError
from lockstep.report.page.rollouts import turns_section
from lockstep.report.summary import summary_lines
from lockstep.run.files.rollouts import live_sample, shown_rollout
from lockstep.run.trainers.online import OnlineTrainer
from lockstep.watch.receipt import RECEIPT, check_receipt, read_receipt

sys.path.insert(0, str(Path(__file__).parents[1] / "rollouts"))
import games

ROWS = [{"prompt": [{"role": "user", "content": f"what is {i} + {i}"}], "answer": i} for i in range(8)]
DATA = Dataset.from_list(ROWS)
CONFIGS = {"GRPO": 8, "RLOO": 8, "ReinforcePP": 8, "PPO": 8, "OnlineDPO": 4}


def by_calls(completions: list[Any], **_: Any) -> list[float]:
    return [float(sum("tool_calls" in message for message in messages)) for messages in completions]


def by_length(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [float(len(ids) % 7) for ids in completion_ids]


Make = Callable[..., OnlineTrainer]


@pytest.fixture
def make(caller_dir: str, tmp_path: Path) -> Any:
    made: list[OnlineTrainer] = []

    def trainer(
        method: str = "GRPO", *, data: Any = DATA, reward: Any = by_calls, **given: Any
    ) -> OnlineTrainer:
        names = ("tools", "environment_factory", "rollout_func", "agent", "engine", "eval_dataset", "judge")
        arguments = {name: given.pop(name) for name in names if name in given}
        fields = {"max_completion_length": 120, "num_generations": 4}
        if method == "OnlineDPO":
            fields = {"max_new_tokens": 120, "max_length": 256}
        base = {
            "max_steps": 2,
            "logging_steps": 1,
            "save_strategy": "no",
            "bf16": False,
            "disable_tqdm": True,
        }
        base |= {"use_vllm": False, "learning_rate": 1e-3, "report_to": [], "seed": 3}
        config = getattr(lockstep, f"{method}Config")(
            output_dir=str(tmp_path / given.pop("output_dir", "run")),
            **{"per_device_train_batch_size": CONFIGS[method], **fields, **base, **given},
        )
        kind = getattr(lockstep, f"{method}Trainer")
        made.append(kind(caller_dir, reward_funcs=reward, args=config, train_dataset=data, **arguments))
        return made[-1]

    yield trainer
    for each in made:
        each.close()


def logs_of(run: OnlineTrainer) -> list[dict[str, float]]:
    return [line for line in run.state.log_history if "loss" in line]


# A trainer with pairs, one with a critic and one with groups; the others are run before a release.
METHODS = portion(CONFIGS, lambda method: method in ("GRPO", "PPO", "OnlineDPO"))


@pytest.mark.parametrize("method", METHODS)
def test_every_method_learns_from_rollouts_with_tools(method: str, make: Make) -> None:
    run = make(method, tools=[multiply])
    run.train()
    lines = logs_of(run)
    assert len(lines) == 2
    for line in lines:
        assert line["tools/call_frequency"] > 0
        assert 0 < line["tools/failure_frequency"] < 1
        assert line["tools/turns"] > 1
        assert line["parity/max_abs_gap"] < 1e-4
        assert line["grad_norm"] > 0
    generation = run.loop.generation
    assert generation is not None
    rollouts = [rollout for group in generation.groups for rollout in group.rollouts]
    inserted = [c for rollout in rollouts for c in rollout.branches if c.sampled is not None]
    assert inserted
    counted = lines[-1]["parity/checked_tokens"] + lines[-1]["parity/aside_tokens"]
    assert counted == sum(len(c.sampled_places) for r in rollouts for c in r.branches)


@pytest.mark.vllm
@pytest.mark.parametrize("kind", [pytest.param("vllm", marks=VLLM)])
def test_tools_and_environments_on_vllm(kind: str, make: Make) -> None:
    run = make(environment_factory=Product, reward=None, use_vllm=True, per_device_train_batch_size=16)
    assert isinstance(run.engine, VLLMInProcess)
    run.train()
    assert max(line["parity/max_abs_gap"] for line in logs_of(run)) < 1e-4
    assert max(line["rewards/Product/mean"] for line in logs_of(run)) > 0
    for given in (
        {"tools": [multiply]},
        {"rollout_func": two_turns, "reward": by_second, "rehearse_rewards": False},
    ):
        again = make(engine=run.engine, **given)
        again.train()
        assert logs_of(again)[0]["parity/max_abs_gap"] < 1e-4


FILTERS = {"top_p": 0.9, "repetition_penalty": 1.3}


@pytest.mark.vllm
@pytest.mark.parametrize("kind", [pytest.param("vllm", marks=VLLM)])
def test_turns_on_vllm_with_top_p_and_a_repetition_penalty_are_scored_as_sampled(
    kind: str, make: Make
) -> None:
    run = make(tools=[multiply], use_vllm=True, per_device_train_batch_size=16, **FILTERS)
    run.train()
    for line in logs_of(run):
        assert line["tools/turns"] > 1
        assert line["parity/max_abs_gap"] < 1e-4
        assert line["sampling/edge_differences"] < 0.1
    groups = run.loop.generation.groups  # type: ignore[union-attr]
    inserted = [c for g in groups for r in g.rollouts for c in r.branches if c.sampled is not None]
    assert inserted
    assert all(c.kept_ids is not None and len(c.kept_ids) == len(c.sampled_places) for c in inserted)


@pytest.mark.parametrize("name", ["tools", "environment_factory", "agent"])
@pytest.mark.parametrize(
    "counts",
    [
        {"presence_penalty": 0.5},
        {"bad_words": ["no"]},
        {"min_tokens": 3},
        {"vllm_structured_outputs_regex": "a+"},
    ],
)
def test_settings_that_would_start_again_with_each_turn_are_refused_at_the_start(
    name: str, counts: dict[str, Any], make: Make
) -> None:
    given = {"tools": [multiply], "environment_factory": Product, "agent": "examples:agent"}
    with pytest.raises(InputError, match="would start again with each turn"):
        make(**{name: given[name]}, **counts)


def test_prompts_show_the_tools(make: Make) -> None:
    run = make(tools=[multiply])
    (prompt, *_) = run.loop.prompts
    assert run.processing_class.decode(prompt.ids.tolist()).startswith(
        "<|system|>multiply <|end|><|user|>what is 0 + 0"
    )


def test_rewards_and_metrics_are_trls(make: Make) -> None:
    seen: dict[str, Any] = {}

    def reward(**given: Any) -> list[float]:
        seen.update(given)
        return by_calls(**given)

    run = make(tools=[multiply], reward=reward, max_steps=1)
    run.train()
    (line,) = logs_of(run)
    called = [sum(len(m.get("tool_calls", ())) for m in messages) for messages in seen["completions"]]
    assert sum(called) > 0
    whole = [r for g in run.loop.generation.groups for r in g.rollouts]  # type: ignore[union-attr]
    assert line["tools/call_frequency"] == sum(r.notes["tool_calls"] for r in whole) / len(whole)
    assert seen["completion_ids"] == [r.token_ids.tolist() for r in whole]
    assert seen["completions"] == [r.notes["messages"] for r in whole]
    assert seen["prompts"] == [[{"role": "user", "content": f"what is {i} + {i}"}] for i in seen["answer"]]
    assert "environments" not in seen


def test_an_environment_gives_its_reward_under_its_class_beside_the_functions(make: Make) -> None:
    seen: list[Any] = []

    def reward(environments: list[Any], completions: list[Any], **_: Any) -> list[float]:
        seen.extend(environments)
        return [10.0 * environment.calls for environment in environments]

    run = make(environment_factory=Product, reward=reward, max_steps=1)
    seen.clear()
    run.train()
    (line,) = logs_of(run)
    rollouts = [r for g in run.loop.generation.groups for r in g.rollouts]  # type: ignore[union-attr]
    assert all(type(environment) is Product for environment in seen)
    assert len({id(environment) for environment in seen}) == len(rollouts)
    for rollout in rollouts:
        own = rollout.scores["Product"]
        assert own is not None
        assert rollout.scores["reward"] == 10 * own
        assert rollout.reward == 11 * own
        assert own == rollout.notes["tool_calls"] - rollout.notes["tool_failures"]
    assert line["rewards/Product/mean"] == pytest.approx(np.mean([r.scores["Product"] for r in rollouts]))
    assert line["environments/failed"] == 0


def test_the_trainer_shows_the_environments_of_the_last_rollouts_in_their_order(make: Make) -> None:
    run = make(environment_factory=Product, reward=None, tools=[], max_steps=1)
    assert run.environments is None
    run.train()
    rollouts = [r for g in run.loop.generation.groups for r in g.rollouts]  # type: ignore[union-attr]
    assert len({r.scores["Product"] for r in rollouts}) > 1
    assert [environment.calls for environment in run.environments] == [r.scores["Product"] for r in rollouts]


def test_the_last_entry_of_the_log_has_the_figures_of_steps_after_the_last_multiple(make: Make) -> None:
    run = make(tools=[multiply], max_steps=3, logging_steps=2)
    run.train()
    *_, logged, end = run.state.log_history
    assert logged["step"] == end["step"] == 3
    assert "train_runtime" in end
    names = ("reward", "tools/call_frequency", "parity/max_abs_gap")
    assert {name: end[name] for name in names} == {name: logged[name] for name in names}


def test_the_last_entry_of_the_log_repeats_nothing_that_was_logged_on_time(make: Make) -> None:
    run = make(tools=[multiply], max_steps=2, logging_steps=2)
    run.train()
    assert "reward" not in run.state.log_history[-1]


@pytest.mark.parametrize(
    "given", [{"tools": [multiply]}, {"environment_factory": Product}], ids=["tools", "environments"]
)
def test_a_run_with_tools_that_was_stopped_goes_on_to_the_same_bits(
    given: dict[str, Any], make: Make
) -> None:
    fields = {**given, "max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    whole = make(**fields)
    whole.train()
    expected, curve = parameters(whole.model), logs(whole)
    assert sum(line["tools/call_frequency"] for line in curve) > 0
    stopped = make(**fields, output_dir="cut")
    stopped.add_callback(StopAfter(2))
    stopped.train()
    resumed = make(**fields, output_dir="cut")
    resumed.train(resume_from_checkpoint=str(Path(resumed.args.output_dir) / "checkpoint-2"))
    assert all(torch.equal(found, expected[name]) for name, found in parameters(resumed.model).items())
    assert logs(resumed)[-2:] == curve[-2:]


def test_an_environment_alone_may_give_reward_and_data(make: Make) -> None:
    run = make(environment_factory=Product, reward=None, data=None)
    run.train()
    assert len(logs_of(run)) == 2
    (prompt, *_) = run.loop.prompts
    assert prompt.source == [{"role": "user", "content": ""}]


def test_several_environments_are_chosen_by_a_column_and_show_their_own_tools(make: Make) -> None:
    names = ["product" if i % 2 else "quiet" for i in range(8)]
    data = DATA.add_column("environment", names)
    run = make(environment_factory={"product": Product, "quiet": games.Quiet}, reward=by_length, data=data)
    texts = [run.processing_class.decode(p.ids.tolist()) for p in run.loop.prompts]
    assert all(("multiply" in text) == (name == "product") for text, name in zip(texts, names, strict=True))
    assert all(("look" in text) == (name == "quiet") for text, name in zip(texts, names, strict=True))
    run.train()
    rollouts = [r for g in run.loop.generation.groups for r in g.rollouts]  # type: ignore[union-attr]
    for rollout in rollouts:
        chosen = names[int(rollout.key.prompt_id.split("/")[1])]
        assert (rollout.scores["Product"] is None) == (chosen == "quiet")


@pytest.mark.parametrize("method", METHODS)
def test_a_failed_environment_leaves_its_rollout_out_of_rewards_baseline_and_loss(
    method: str, make: Make, capsys: Any
) -> None:
    # A step takes four rows in order: one fails in `reset`, one in `get_reward`. The first row is also played before
    # training.
    faults = ["", "reset", "get_reward", ""] * 2
    given: dict[str, Any] = {"max_steps": 1, "per_device_train_batch_size": 2 * CONFIGS[method]}
    given |= {"data": DATA.add_column("how", faults), "shuffle_dataset": False}
    run = make(method, environment_factory=Product, reward=by_length, **given)
    run.train()
    (line,) = logs_of(run)
    generation = run.loop.generation
    assert generation is not None
    learned = {s.name: s for batch in generation.micro_batches for s in batch}
    rollouts = [r for g in generation.groups for r in g.rollouts]
    found = {
        fault: [r for r in rollouts if faults[int(r.key.prompt_id.split("/")[1])] == fault]
        for fault in faults
    }
    failed = [*found["reset"], *found["get_reward"]]
    assert len(found["reset"]) == len(found["get_reward"]) == len(rollouts) / 4
    assert line["environments/failed"] == line["rewards/unscored"] / len(rollouts) == 0.5
    assert line["grad_norm"] > 0
    for rollout in failed:
        assert rollout.failed is not None
        assert not rollout.scored
        assert set(rollout.scores.values()) == {None}
    # A rollout that failed in `reset` has no tokens.
    assert not {str(rollout.key) for rollout in found["reset"]} & learned.keys()
    assert all(learned[str(rollout.key)].weight == 0 for rollout in found["get_reward"])
    for rollout in found[""]:
        assert rollout.failed is None
        assert rollout.scores["by_length"] == len(rollout.token_ids) % 7
    out = capsys.readouterr().out
    assert "environment Product: reset: no" in out
    assert "environment Product: get_reward: no" in out


def test_a_generation_in_which_every_environment_fails_is_an_error(make: Make) -> None:
    data = DATA.add_column("how", [""] + ["reset"] * 7)
    run = make(environment_factory=Product, reward=by_length, data=data, shuffle_dataset=False, max_steps=4)
    with pytest.raises(InputError, match="all 8 rollouts failed: environment Product: reset: no board"):
        run.train()


def one_turn(prompts: list[Any], trainer: Any) -> dict[str, Any]:
    found = lockstep.generate_rollout_completions(trainer, prompts, max_tokens=20)
    return {name: [row[name] for row in found] for name in ("prompt_ids", "completion_ids", "logprobs")}


def two_turns(prompts: list[Any], trainer: Any) -> dict[str, Any]:
    """A second turn after inserted ids, with a reward of its own."""
    first = lockstep.generate_rollout_completions(trainer, prompts, max_tokens=20)
    inserted = trainer.processing_class("<|end|><|user|>again<|end|><|assistant|>", add_special_tokens=False)[
        "input_ids"
    ]
    before = [row["prompt_ids"] + row["completion_ids"] + inserted for row in first]
    second = lockstep.generate_rollout_completions(trainer, before, max_tokens=20)
    both = list(zip(first, second, strict=True))
    return {
        "prompt_ids": [row["prompt_ids"] for row in first],
        "completion_ids": [a["completion_ids"] + inserted + b["completion_ids"] for a, b in both],
        "logprobs": [a["logprobs"] + [0.0] * len(inserted) + b["logprobs"] for a, b in both],
        "env_mask": [
            [1] * len(a["completion_ids"]) + [0] * len(inserted) + [1] * len(b["completion_ids"])
            for a, b in both
        ],
        "second_length": [len(b["completion_ids"]) for _, b in both],
    }


def by_second(second_length: list[int], **_: Any) -> list[float]:
    return [float(length) for length in second_length]


def test_a_rollout_func_samples_inserts_and_gives_rewards_what_it_likes(make: Make) -> None:
    run = make(rollout_func=two_turns, reward=by_second)
    run.train()
    for line in logs_of(run):
        assert line["parity/max_abs_gap"] < 1e-4
        assert line["reward_std"] > 0
    rollouts = [r for g in run.loop.generation.groups for r in g.rollouts]  # type: ignore[union-attr]
    assert all(r.completion.sampled is not None for r in rollouts)
    assert len({tuple(r.token_ids.tolist()) for r in rollouts}) > 1


def test_a_rollout_func_gets_each_prompt_once_per_rollout_and_the_same_run_gives_the_same_steps(
    make: Make,
) -> None:
    seen: list[Any] = []

    def recording(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        seen.append([prompt[0]["content"] for prompt in prompts])
        return one_turn(prompts, trainer)

    losses = []
    for _ in range(2):
        run = make(rollout_func=recording, reward=by_length)
        run.train()
        losses.append([line["loss"] for line in logs_of(run)])
    assert losses[0] == losses[1]
    assert seen[:2] == seen[2:]
    assert all(texts[i] == texts[i - i % 4] for texts in seen for i in range(8))


@pytest.mark.parametrize("fault", ["wrong log-probs", "another token", "inserted as sampled"])
def test_a_rollout_func_that_lies_about_its_tokens_is_caught_before_the_step(fault: str, make: Make) -> None:
    def lying(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        found = two_turns(prompts, trainer)
        if fault == "wrong log-probs":
            found["logprobs"] = [[value - 0.5 for value in row] for row in found["logprobs"]]
        elif fault == "another token":
            found["completion_ids"] = [[40, *row[1:]] for row in found["completion_ids"]]
        else:
            del found["env_mask"]
        return found

    run = make(rollout_func=lying, reward=by_second, rehearse_rewards=False)
    with pytest.raises(ProofError):
        run.train()
    assert run.state.global_step == 0


def test_an_error_of_a_rollout_func_is_one_clear_error(make: Make) -> None:
    def broken(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        raise KeyError("board")

    with pytest.raises(InputError, match="rollout_func raised KeyError: 'board'"):
        make(rollout_func=broken).train()


def test_a_rollout_func_whose_parameters_do_not_fit_gets_advice(make: Make) -> None:
    with pytest.raises(InputError, match=r"it is called as rollout_func\(prompts, trainer\)"):
        make(rollout_func=lambda prompts: {}).train()


def test_rollout_completions_are_for_rollout_funcs(make: Make) -> None:
    with pytest.raises(InputError, match="call it from there"):
        lockstep.generate_rollout_completions(make(tools=[multiply]), ["hello"])


def nameless(a: int) -> int:
    return a


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tools": [nameless]}, "tool nameless has no JSON schema"),
        ({"tools": [multiply, multiply]}, "two tools are named"),
        ({"environment_factory": games.NeverMade}, "no licence"),
        ({"environment_factory": games.NeverReset}, "has no method 'reset'"),
        ({"environment_factory": Product, "tools": [multiply]}, "also the name of a tool"),
        (
            {"environment_factory": games.Broken, "data": DATA.add_column("how", ["reset raises"] * 8)},
            "reset: no board",
        ),
        ({"environment_factory": games.Quiet, "reward": None}, "No reward source provided.*get_reward"),
        (
            {"environment_factory": Product, "data": None, "max_steps": -1, "num_train_epochs": 1},
            "set max_steps",
        ),
        ({"tools": [multiply], "rollout_func": one_turn}, "rollout_func makes rollouts itself"),
        ({"rollout_func": 3}, "rollout_func is a int"),
        ({"rollout_func": one_turn, "top_p": 0.9}, "temperature and stop_strings only"),
        ({"rollout_func": one_turn, "repetition_penalty": 1.2}, "temperature and stop_strings only"),
        ({"rollout_func": one_turn, "min_tokens": 3}, "temperature and stop_strings only"),
        ({"tools": [multiply], "max_thinking_length": 5}, "max_thinking_length is not supported"),
        ({"tools": [multiply], "tool_timeout": 0}, "tool_timeout=0"),
        ({"tools": [multiply], "max_tool_calling_iterations": -1}, "max_tool_calling_iterations=-1"),
        ({"tools": [multiply], "tool_format": "smoke"}, "smoke"),
        (
            {"tools": [multiply], "data": Dataset.from_dict({"prompt": ["text"]})},
            "must be a list of messages",
        ),
        ({"environment_factory": {"a": Product}, "data": None}, "requires a `train_dataset`"),
        ({"tools": [multiply], "data": None}, "`train_dataset` is required"),
        (
            {"environment_factory": {"a": Product}, "rehearse_rewards": False},
            "environment=None is not among the environments .*'a'",
        ),
    ],
)
def test_what_cannot_work_is_refused_before_training(
    arguments: dict[str, Any], message: str, make: Make
) -> None:
    with pytest.raises(InputError, match=message):
        make(**arguments)


def test_a_rollout_func_may_have_another_bound_on_kept_ids_which_filters_nothing(make: Make) -> None:
    make(rollout_func=one_turn, max_kept_ids=64)


def test_a_reward_function_is_rehearsed_with_an_environment(make: Make) -> None:
    def few(environments: list[Any], **_: Any) -> list[float]:
        return [float(environment.calls) for environment in environments][:1]

    with pytest.raises(InputError, match=r"few returned 1 scores.*rehearsal"):
        make(environment_factory=Product, reward=few)


def test_the_report_of_a_run_with_tools_shows_turns_results_and_the_gap_of_each_token(make: Make) -> None:
    run = make(tools=[multiply], eval_dataset=DATA)
    run.train()
    run.evaluate()
    groups = run.last_eval_groups
    rollouts = [r for group in groups for r in group.rollouts if r.notes["tool_calls"]][:3]
    assert rollouts
    for rollout in rollouts:
        shown = shown_rollout(rollout, run.processing_class, run.source.proofs.token_gaps)
        (branch,) = shown["branches"]
        sampled = [span for span in branch["spans"] if "tokens" in span]
        inserted = [span["text"] for span in branch["spans"] if "text" in span]
        assert len(sampled) == len(rollout.finish_reasons) == len(inserted) + 1
        gaps = [gap for span in sampled for gap in span["gaps"]]
        assert [len(span["tokens"]) for span in sampled] == [len(span["gaps"]) for span in sampled]
        assert len(gaps) == len(rollout.completion.sampled_places)
        assert [span["finish_reason"] for span in sampled] == list(rollout.finish_reasons)
        # Small, and not made up: two implementations of one model round differently.
        assert 0 < max(map(abs, gaps)) < 1e-3
        result = next(m["content"] for m in rollout.notes["messages"] if m["role"] == "tool")
        assert result in inserted[0]
        assert any(result in line for line in shown["calls"])
        page = turns_section([shown])
        assert page.count("title='gap ") == len(gaps)
    talking = next(group for group in groups if group.rollouts[0].notes["tool_calls"])
    _, said = live_sample(talking) or (0.0, [])
    assert [label.split(", ")[0] for label, _ in said][:3] == ["assistant", "tool", "assistant"]
    reasons = [label.partition(", ")[2] for label, _ in said if label.startswith("assistant")]
    assert reasons == list(talking.rollouts[0].finish_reasons)
    assert "→ multiply(" in said[0][1]


class Judged:
    def reset(self, **_: Any) -> None:
        """Begin."""

    def get_reward(self) -> float:
        return 1.0

    def look(self) -> str:
        """Look around."""
        return "nothing"


class Awaited(Judged):
    async def get_reward(self) -> float:  # type: ignore[override]
        return 2.0


class Unjudged:
    def reset(self, **_: Any) -> None:
        """Begin."""


def test_the_environments_own_rewards_stand_behind_the_functions_and_can_be_weighted(make: Make) -> None:
    kinds = {"a": Judged, "b": Unjudged, "c": Judged, "d": Awaited}
    data = DATA.select(range(4)).add_column("environment", list(kinds))
    run = make(
        data=data,
        environment_factory=kinds,
        reward_weights=[0.5],
        max_steps=1,
        per_device_train_batch_size=16,
    )
    assert run.reward_func_names == ["by_calls", "Judged", "Awaited"]
    assert run.reward_weights.tolist() == [0.5, 1.0, 1.0]
    assert run.reward_processing_classes == [None] * 3
    assert run.reward_funcs[0] is by_calls
    assert run.reward_funcs[1](environments=[Judged(), Unjudged(), Awaited()]) == [1.0, None, None]
    assert run.reward_funcs[2](environments=[Judged(), Unjudged(), Awaited()]) == [None, None, 2.0]
    assert [method.__name__ for method in run.tools] == ["look", "look", "look"]
    assert run.environment_factories == kinds
    run.reward_weights[1:] = torch.tensor([0.25, 3.0])
    run.train()
    rollouts = [r for group in run.loop.generation.groups for r in group.rollouts]
    assert {r.scores["Awaited"] for r in rollouts} == {None, 2.0}
    for rollout in rollouts:
        own = zip((0.5, 0.25, 3.0), rollout.scores.values(), strict=True)
        assert rollout.reward == pytest.approx(
            sum(weight * score for weight, score in own if score is not None)
        )


def with_alarm() -> Callable[..., Any]:
    """`multiply` with a time limit of its own, as in TRL's `grpo_agent.py`."""

    def product(a: int, b: int) -> int:
        before = signal.signal(signal.SIGALRM, lambda *_: None)
        signal.alarm(60)
        try:
            return a * b
        finally:
            signal.alarm(0)
            signal.signal(signal.SIGALRM, before)

    return update_wrapper(product, multiply)


def with_database() -> Callable[..., Any]:
    """`multiply` by a connection that is made once, at the first call."""
    made: list[sqlite3.Connection] = []

    def product(a: int, b: int) -> Any:
        if not made:
            made.append(sqlite3.connect(":memory:"))
        # A text is no number, for SQLite as for Python.
        return made[0].execute("select ? * ?", (int(a), int(b))).fetchone()[0]

    return update_wrapper(product, multiply)


@pytest.mark.parametrize(
    ("tool", "max_staleness"),
    [(with_alarm, 0), (with_database, 0), (with_database, 1)],
    ids=["signal", "SQLite", "SQLite, ahead"],
)
def test_a_tool_with_an_alarm_or_a_connection_works_as_one_without(
    tool: Callable[[], Any], max_staleness: int, make: Make
) -> None:
    plain, run = (make(tools=[one], max_staleness=max_staleness) for one in (multiply, tool()))
    plain.train()
    run.train()
    assert logs(run) == logs(plain)
    assert 0 < logs_of(run)[0]["tools/failure_frequency"] < 1
    assert not run.alarms.texts


def test_with_generations_ahead_a_signal_is_refused_by_the_setting(make: Make) -> None:
    run = make(tools=[with_alarm()], max_staleness=1)
    with pytest.raises(
        InputError, match=r"multiply uses a signal: with max_staleness, .*set max_staleness to 0"
    ):
        run.train()


def test_ctrl_c_during_a_call_ends_the_run_as_interrupted(make: Make) -> None:
    def product(a: int, b: int) -> int:
        signal.raise_signal(signal.SIGINT)
        return a * b

    run = make(tools=[update_wrapper(product, multiply)])
    # A shell starts a program in the background without Python's handler.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            run.train()
    finally:
        signal.signal(signal.SIGINT, before)
    assert json.loads((Path(run.args.output_dir) / "end.json").read_text())["ended"] == "interrupted"


class Ledger(Product):
    """`Product` with its calls in a database, to which only the thread that made it has access."""

    def __init__(self) -> None:
        self.made = sqlite3.connect(":memory:")
        self.made.execute("create table calls (result)")

    def reset(self, how: str = "", **row: Any) -> str:
        self.made.execute("delete from calls")
        return super().reset(how, **row)

    def multiply(self, a: int, b: int) -> int:
        """The product of two numbers.

        Args:
            a: The first number.
            b: The second number.
        """
        self.made.execute("insert into calls values (?)", (int(a) * int(b),))
        return super().multiply(a, b)

    def get_reward(self) -> float:
        return float(self.made.execute("select count(*) from calls").fetchone()[0])


def by_ledger(environments: list[Any], **_: Any) -> list[float]:
    return [environment.get_reward() for environment in environments]


@pytest.mark.parametrize(
    "fields",
    [{}, {"max_staleness": 1}],
    ids=str,
)
def test_an_environment_and_the_rewards_that_read_it_share_a_thread(
    fields: dict[str, Any], make: Make
) -> None:
    run = make(environment_factory=Ledger, reward=by_ledger, **fields)
    run.train()
    for line in logs_of(run):
        assert line["environments/failed"] == 0
        assert line["rewards/by_ledger/mean"] == line["rewards/Ledger/mean"] > 0
    assert not run.alarms.texts


def broken(a: int, b: int) -> int:
    raise sqlite3.OperationalError("no such table: interactions")


class BrokenLedger(Product):
    multiply = update_wrapper(lambda self, a, b: broken(a, b), Product.multiply)


def silent(completions: list[Any], **_: Any) -> list[None]:
    return [None] * len(completions)


class Undecided:
    def judge(self, prompts: list[str], completions: Any, shuffle_order: bool = True) -> list[int]:
        return [-1] * len(prompts)


FAILS = (
    r"failed at all \d+ calls of a step in the same way, .*: OperationalError: no such table: interactions"
)
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "a tool": ({"tools": [update_wrapper(broken, multiply)]}, f"multiply {FAILS}"),
    "an environment": (
        {"environment_factory": BrokenLedger, "reward": by_length},
        f"Product.multiply {FAILS}",
    ),
    "a reward": (
        {"tools": [multiply], "reward": [by_calls, silent]},
        "reward function silent returned None for all 8 completions of a step",
    ),
    "a judge": (
        {"method": "OnlineDPO", "tools": [multiply], "reward": None, "judge": Undecided()},
        r"none of judge scored any of the 8 completions of this generation",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_fails_in_the_same_way_at_every_call_is_an_alarm_once(
    name: str, make: Make, capsys: Any
) -> None:
    given, message = WRONG[name]
    run = make(**given)
    run.train()
    (text,) = run.alarms.texts
    assert re.search(message, text)
    assert capsys.readouterr().out.count(f"ALARM: {text}") == 1
    assert [line["alarms"] for line in logs_of(run)] == [1, 1]
    folder = Path(run.args.output_dir)
    assert check_receipt(folder / RECEIPT) == 4
    (line,) = [line for line in read_receipt(folder / RECEIPT) if line["kind"] == "alarm"]
    assert (line["step"], line["text"]) == (0, text)
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["alarms"] == [text]
    assert f"ALARM            {text}" in summary_lines(summary)
    assert html.escape(text) in (folder / "report.html").read_text()
