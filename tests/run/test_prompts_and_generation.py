"""Prompts, and the cutting of a generation into micro-batches."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from tiny import make_tokenizer
from tokenizers.processors import TemplateProcessing

from lockstep.contract.protocol import Completion, RequestKey
from lockstep.errors import InputError
from lockstep.images.prompts import PromptReader
from lockstep.learn.generation import prepare_generation
from lockstep.learn.methods.grpo import GRPOConfig, GRPOObjective
from lockstep.report.phases import PhaseClock
from lockstep.rollouts.group import Prompt, Rollout, RolloutGroup
from lockstep.run.data.prompts import check_dataset, load_prompts, tell_added
from lockstep.run.files.logs import StepLog
from lockstep.run.metrics import mean_with_interval, rollout_metrics


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (Dataset.from_dict({"prompt": []}), "is empty"),
        (Dataset.from_dict({"question": ["a"]}), r"no 'prompt' column, only \['question'\]"),
        (None, "`train_dataset` is required"),
        ([{"prompt": "a"}], "got list"),
    ],
)
def test_a_dataset_that_cannot_be_used_is_refused(data: object, message: str) -> None:
    with pytest.raises(InputError, match=message):
        check_dataset(data, "train")


def test_rows_become_prompts_with_names_and_columns() -> None:
    data = Dataset.from_dict({"prompt": ["hello", "world"], "answer": ["1", "2"]})
    prompts = load_prompts(data, "train", PromptReader(make_tokenizer()), max_prompt_length=50)
    assert [(p.prompt_id, p.source, dict(p.columns)) for p in prompts] == [
        ("train/0", "hello", {"answer": "1"}),
        ("train/1", "world", {"answer": "2"}),
    ]


def test_a_row_that_is_too_long_or_cannot_be_rendered_is_named() -> None:
    tokenizer = make_tokenizer()
    with pytest.raises(InputError, match=r"train/1 has \d+ tokens; there is room for 20"):
        load_prompts(
            Dataset.from_dict({"prompt": ["ok", "z" * 100]}),
            "train",
            PromptReader(tokenizer),
            max_prompt_length=20,
        )
    with pytest.raises(
        InputError, match="beside max_new_tokens=500: shorten or drop the row, or lower max_new_tokens"
    ):
        load_prompts(
            Dataset.from_dict({"prompt": ["z" * 100]}),
            "train",
            PromptReader(tokenizer),
            max_prompt_length=20,
            limit=("max_new_tokens", 500),
        )
    with pytest.raises(InputError, match="prompt train/1: a prompt has no tokens"):
        load_prompts(
            Dataset.from_dict({"prompt": ["ok", ""]}), "train", PromptReader(tokenizer), max_prompt_length=20
        )


def scored(
    rewards: list[list[float]], lengths: list[list[int]], cut: set[tuple[int, int]] = frozenset()
) -> list[RolloutGroup]:
    groups = []
    for p, (values, counts) in enumerate(zip(rewards, lengths, strict=True)):
        rollouts = []
        for s, (reward, count) in enumerate(zip(values, counts, strict=True)):
            reason = "length" if (p, s) in cut else "stop"
            completion = Completion(
                RequestKey(f"t/{p}", s), (p, 1), (5,) * count, (-0.5,) * count, (0,) * count, reason
            )  # type: ignore[arg-type]
            rollouts.append(Rollout(completion, "x", {"f": reward}, reward))
        groups.append(RolloutGroup(Prompt(f"t/{p}", (p, 1), "x"), tuple(rollouts)))
    return groups


def test_sequences_carry_their_own_groups_advantage_and_their_steps_weight() -> None:
    config = GRPOConfig(
        output_dir="u",
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        num_generations=2,
        scale_rewards="none",
    )
    generation = prepare_generation(
        scored([[1.0, 0.0], [3.0, 3.0]], [[2, 4], [1, 3]]), GRPOObjective(config), version=5
    )
    names = [[s.name for s in batch] for batch in generation.micro_batches]
    assert names == [["t/0#0", "t/0#1"], ["t/1#0", "t/1#1"]]
    assert [s.advantages[0] for batch in generation.micro_batches for s in batch] == [0.5, -0.5, 0.0, 0.0]
    # With dapo the weight is 1 / the tokens of the whole optimizer step, not of the micro-batch.
    assert [s.weight for batch in generation.micro_batches for s in batch] == pytest.approx([1 / 10] * 4)


def test_two_optimizer_steps_of_one_generation_are_normalised_apart() -> None:
    config = GRPOConfig(
        output_dir="u",
        per_device_train_batch_size=2,
        steps_per_generation=2,
        num_generations=2,
        save_steps=10,
    )
    generation = prepare_generation(
        scored([[1.0, 0.0], [3.0, 2.0]], [[2, 4], [1, 3]]), GRPOObjective(config), version=5
    )
    assert [s.weight for batch in generation.micro_batches for s in batch] == pytest.approx(
        [1 / 6, 1 / 6, 1 / 4, 1 / 4]
    )


def test_a_truncated_completion_is_masked_by_the_engines_finish_reason() -> None:
    config = GRPOConfig(
        output_dir="u", per_device_train_batch_size=4, num_generations=2, mask_truncated_completions=True
    )
    generation = prepare_generation(
        scored([[1.0, 0.0], [3.0, 2.0]], [[2, 4], [1, 3]], {(0, 1)}), GRPOObjective(config), version=5
    )
    assert [s.weight for s in generation.micro_batches[0]] == pytest.approx([1 / 6, 0.0, 1 / 6, 1 / 6])


def test_special_tokens_that_nobody_asked_for_are_said_and_can_be_switched_off(
    caplog: pytest.LogCaptureFixture,
) -> None:
    tokenizer = make_tokenizer()
    begin, end = "<|system|>", tokenizer.eos_token
    tokenizer.bos_token = begin
    adds = TemplateProcessing(
        f"{begin} $A {end}", special_tokens=[(t, tokenizer.convert_tokens_to_ids(t)) for t in (begin, end)]
    )
    tokenizer.backend_tokenizer.post_processor = adds
    data = Dataset.from_list([{"prompt": f"{begin}hello"}, {"prompt": f"hello{end}"}])
    first, last = tokenizer.bos_token_id, tokenizer.eos_token_id
    prompts = load_prompts(data, "train", PromptReader(tokenizer), max_prompt_length=100)
    assert prompts[0].ids[:2].tolist() == [first, first]
    tell_added(prompts, tokenizer)
    assert "1 of 2 prompts (train/0 first) begin with two begin tokens" in caplog.text
    assert "1 of 2 prompts (train/0 first) end with an end token" in caplog.text
    assert caplog.text.count("add_special_tokens=False") == 2
    caplog.clear()
    prompts = load_prompts(
        data, "train", PromptReader(tokenizer, add_special_tokens=False), max_prompt_length=100
    )
    tell_added(prompts, tokenizer)
    assert not caplog.text
    hello = tokenizer("hello", add_special_tokens=False)["input_ids"]
    assert [p.ids.tolist() for p in prompts] == [[first, *hello], [*hello, last]]


_ASKS_FOR_KEYS = (
    "{% for m in messages %}{% if 'tool_calls' in m %}{% if m.tool_calls|length != 1 %}{{ "
    "raise_exception('one call') }}"
    "{% endif %}{{ m.tool_calls[0].function.arguments|tojson }}{% elif 'name' in m %}{{ m.name + m.content }}{% else %}"
    "{{ m.content }}{% endif %}{% endfor %}"
)


def test_a_key_that_only_other_messages_have_is_not_there(tmp_path: Path) -> None:
    def calls(**arguments: int) -> dict[str, Any]:
        function = {"name": "f", "arguments": arguments}
        return {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"type": "function", "function": function}],
        }

    end = {"role": "user", "content": "and now"}
    rows = [
        [end],
        [end, calls(one=1), {"role": "tool", "name": "f", "content": "2"}, end],
        [end, calls(other=2), end],
    ]
    tokenizer = make_tokenizer()
    tokenizer.chat_template = _ASKS_FOR_KEYS
    data = Dataset.from_list([{"prompt": messages} for messages in rows])
    data.to_parquet(tmp_path / "rows.parquet")
    for read in (data, Dataset.from_parquet(str(tmp_path / "rows.parquet"), cache_dir=str(tmp_path))):
        assert read[0]["prompt"] != rows[0]
        prompts = load_prompts(read, "train", PromptReader(tokenizer), max_prompt_length=1000)
        assert [prompt.source for prompt in prompts] == rows
        assert tokenizer.decode(prompts[1].ids) == tokenizer.decode(
            tokenizer('and now{"one": 1}f2and now')["input_ids"]
        )
        assert "null" not in tokenizer.decode(prompts[2].ids)


def test_metrics_have_trls_names_and_meanings() -> None:
    metrics = rollout_metrics(scored([[1.0, 0.0], [1.0, 1.0]], [[2, 4], [1, 3]], {(0, 1)}))
    assert metrics["reward"] == 0.75
    assert metrics["frac_reward_zero_std"] == 0.5
    assert metrics["rewards/f/mean"] == 0.75
    assert metrics["completions/mean_length"] == 2.5
    assert metrics["completions/clipped_ratio"] == 0.25
    assert metrics["completions/max_terminated_length"] == 3.0


def test_the_interval_comes_from_the_spread_of_problems() -> None:
    mean, half = mean_with_interval(scored([[1.0, 1.0], [0.0, 0.0], [1.0, 0.0]], [[1, 1]] * 3))
    assert mean == 0.5
    assert half == pytest.approx(1.96 * 0.5 / 3**0.5)


NONE = float("nan")


def test_rollouts_without_a_reward_are_counted_and_in_no_mean() -> None:
    groups = scored([[1.0, NONE, 0.0], [1.0, NONE, 1.0], [NONE] * 3, [2.0, NONE, NONE]], [[1] * 3] * 4)
    metrics = rollout_metrics(groups)
    assert metrics["reward"] == 1.0
    assert metrics["reward_std"] == pytest.approx(0.5**0.5)
    # One group has equal rewards, and one has a single reward; a group without rewards has no standard deviation.
    assert metrics["frac_reward_zero_std"] == 0.5
    assert metrics["rewards/unscored"] == 7.0
    assert "rewards/unscored" not in rollout_metrics(scored([[1.0, 0.0]], [[1, 1]]))


def test_the_mean_of_a_function_is_over_its_scores_and_absent_without_any() -> None:
    (group,) = scored([[1.0, 0.0]], [[1, 1]])
    log = StepLog()
    for scores in (
        [{"f": 3.0, "g": None}, {"f": None, "g": None}],
        [{"f": 1.0, "g": 4.0}, {"f": 2.0, "g": None}],
    ):
        rollouts = tuple(replace(r, scores=given) for r, given in zip(group.rollouts, scores, strict=True))
        log.note(rollout_metrics([replace(group, rollouts=rollouts)]))
    taken = log.take(PhaseClock())
    assert taken["rewards/f/mean"] == (3.0 + 1.5) / 2
    assert taken["rewards/g/mean"] == 4.0
    assert (taken["rewards/f/unscored"], taken["rewards/g/unscored"]) == (1.0, 3.0)
    assert taken["reward"] == 0.5
    assert not any(math.isnan(value) for value in taken.values())


def test_the_interval_leaves_out_rollouts_and_problems_without_a_reward() -> None:
    whole = mean_with_interval(scored([[1.0, 1.0], [0.0], [1.0, 0.0]], [[1, 1], [1], [1, 1]]))
    groups = scored(
        [[1.0, NONE, 1.0], [0.0, NONE], [NONE, NONE], [1.0, 0.0]], [[1] * 3, [1] * 2, [1] * 2, [1] * 2]
    )
    assert mean_with_interval(groups) == whole
