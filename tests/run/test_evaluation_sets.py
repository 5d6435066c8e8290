"""Evaluation sets: several by name, other rows, streams, predictions; and streams for training."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset, DatasetDict, IterableDataset, IterableDatasetDict
from methods import FIELDS, GROUPS, PROMPTS, logs, make, parameters
from test_trainer_services import Listener

from lockstep.contract.protocol import Engine
from lockstep.errors import InputError

OTHERS = Dataset.from_dict({"prompt": ["what is 3 - 1", "what is 5 - 2"]})
QUIET: dict[str, Any] = {"max_steps": 2}


def echoed(completion_ids: list[list[int]], prompts: list[str], **_: Any) -> list[float]:
    """A reward that tells the sets apart."""
    return [len(ids) + 100.0 * ("-" in prompt) for ids, prompt in zip(completion_ids, prompts, strict=True)]


def stream(rows: int) -> IterableDataset:
    def made() -> Iterator[dict[str, Any]]:
        for i in range(rows):
            yield {"prompt": f"what is {i} + {i}", "place": i}

    return IterableDataset.from_generator(made)


@pytest.mark.parametrize("method", sorted(FIELDS))
def test_each_set_of_a_mapping_has_metrics_of_its_own_name(
    untied_dir: str, tmp_path: Path, hf_engine: Engine, method: str
) -> None:
    heard = Listener()
    fields = {**FIELDS[method], **QUIET, "eval_strategy": "steps", "eval_steps": 2}
    sets = {"plus": PROMPTS.select(range(3)), "minus": OTHERS}
    run = make(
        method,
        untied_dir,
        tmp_path,
        hf_engine,
        fields,
        reward_funcs=echoed,
        eval_dataset=sets,
        callbacks=[heard],
    )
    run.train()
    named = [metrics for _, metrics in heard.evaluations]
    assert [len(own) and min(own).split("_")[1] for own in named] == ["plus", "minus"]
    assert named[0]["eval_plus_problems"] == 3
    assert named[1]["eval_minus_problems"] == 2
    assert named[0]["eval_plus_reward"] < 100 < named[1]["eval_minus_reward"]
    assert len(run.last_eval_groups) == 5
    found = run.evaluate()
    assert found.keys() == {**named[0], **named[1]}.keys()
    assert found["eval_minus_reward"] > 100


def test_other_rows_are_evaluated_as_the_trainers_own(
    untied_dir: str, tmp_path: Path, hf_engine: Engine
) -> None:
    run = make(
        "GRPO", untied_dir, tmp_path, hf_engine, {**GROUPS, **QUIET}, eval_dataset=PROMPTS.select(range(3))
    )
    own = run.evaluate()
    # The same rows under the same name are the same requests, with the same seeds.
    assert run.evaluate(PROMPTS.select(range(3))) == own
    assert run.evaluate(stream(3)).keys() == own.keys()
    assert run.evaluate(OTHERS, metric_key_prefix="late")["late_problems"] == 2
    assert {name.split("_")[1] for name in run.evaluate({"a": OTHERS, "b": OTHERS})} == {"a", "b"}


def test_one_of_several_sets_is_evaluated_by_its_name(
    untied_dir: str, tmp_path: Path, hf_engine: Engine
) -> None:
    sets = {"plus": PROMPTS.select(range(3)), "minus": OTHERS}
    run = make("GRPO", untied_dir, tmp_path, hf_engine, {**GROUPS, **QUIET}, eval_dataset=sets)
    assert run.evaluate("minus")["eval_problems"] == 2
    with pytest.raises(InputError, match="no evaluation set 'times'; there are: plus, minus"):
        run.evaluate("times")


def test_predictions_are_the_completions_of_each_row(
    untied_dir: str, tmp_path: Path, hf_engine: Engine
) -> None:
    run = make("GRPO", untied_dir, tmp_path, hf_engine, {**GROUPS, **QUIET}, reward_funcs=echoed)
    found = run.predict(OTHERS)
    assert found.predictions.shape == (2, 2)
    assert all(isinstance(text, str) for text in found.predictions.ravel())
    assert found.label_ids is None
    assert found.metrics["test_reward"] > 100
    assert found.metrics["test_samples"] == 4


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (None, "there is no evaluation set"),
        ({}, r"eval_dataset has the names \[\]"),
        ({"": OTHERS}, r"eval_dataset has the names \[''\]"),
        ({"a": Dataset.from_dict({"text": ["x"]})}, "the eval/a dataset has no 'prompt' column"),
        (Dataset.from_dict({"prompt": ["z" * 600]}), r"prompt eval/0 has \d+ tokens; there is room for"),
        ([1], "the eval dataset must be a datasets.Dataset"),
    ],
)
def test_rows_that_cannot_be_evaluated_are_refused(
    untied_dir: str, tmp_path: Path, hf_engine: Engine, given: Any, message: str
) -> None:
    run = make("GRPO", untied_dir, tmp_path, hf_engine, {**GROUPS, **QUIET})
    with pytest.raises(InputError, match=message):
        run.evaluate(given)


def test_an_evaluation_without_any_score_is_nan_and_says_so(
    untied_dir: str, tmp_path: Path, hf_engine: Engine, capsys: pytest.CaptureFixture[str]
) -> None:
    def nothing(completions: list[str], **_: Any) -> list[None]:
        return [None] * len(completions)

    run = make("GRPO", untied_dir, tmp_path, hf_engine, {**GROUPS, **QUIET}, reward_funcs=nothing)
    found = run.evaluate(OTHERS)
    assert math.isnan(found["eval_reward"])
    assert found["eval_rewards/unscored"] == found["eval_samples"] == 4
    assert "no completion of this evaluation (eval) has a score" in capsys.readouterr().out


def test_what_a_callback_appends_for_an_evaluation_is_logged_with_it(
    untied_dir: str, tmp_path: Path, hf_engine: Engine
) -> None:
    run = make("GRPO", untied_dir, tmp_path, hf_engine, {**GROUPS, **QUIET}, eval_dataset=OTHERS)
    run._metrics["eval"]["mine"] += [1.0, 2.0]
    assert run.evaluate()["eval_mine"] == 1.5
    assert "eval_mine" not in run.evaluate()


def test_a_training_stream_gives_the_rows_that_the_run_needs_in_its_order_and_resumes_to_the_bit(
    untied_dir: str, tmp_path: Path, hf_engine: Engine
) -> None:
    seen: list[int] = []

    def noting(completion_ids: list[list[int]], place: list[int], **_: Any) -> list[float]:
        seen.extend(dict.fromkeys(place))
        return [float(len(ids) + ids[0] % 7) for ids in completion_ids]

    fields = {
        **GROUPS,
        "max_steps": 4,
        "save_strategy": "steps",
        "save_steps": 2,
        "rehearse_rewards": False,
        "recheck_rewards": False,
    }
    arguments = {"train_dataset": stream(10**9), "reward_funcs": noting}
    whole = make("GRPO", untied_dir, tmp_path, hf_engine, fields, **arguments)
    whole.train()
    # Two prompts per generation, never shuffled.
    assert seen == list(range(8))
    assert len(whole.loop.prompts) == 8
    seen.clear()
    resumed = make("GRPO", untied_dir, tmp_path, hf_engine, fields, **arguments)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert seen == [4, 5, 6, 7]
    assert logs(resumed) == logs(whole)
    assert all((p == parameters(whole.model)[name]).all() for name, p in parameters(resumed.model).items())


def test_a_stream_that_ends_early_is_used_again_and_one_without_max_steps_is_refused(
    untied_dir: str, tmp_path: Path, hf_engine: Engine
) -> None:
    run = make("GRPO", untied_dir, tmp_path, hf_engine, {**GROUPS, "max_steps": 4}, train_dataset=stream(5))
    run.train()
    assert [run.loop.order.places(generation) for generation in range(4)] == [[0, 1], [2, 3], [0, 1], [2, 3]]
    with pytest.raises(InputError, match="is an IterableDataset: set max_steps"):
        make("GRPO", untied_dir, tmp_path, hf_engine, {**GROUPS, "max_steps": -1}, train_dataset=stream(5))
    with pytest.raises(InputError, match="the train dataset is empty"):
        make("GRPO", untied_dir, tmp_path, hf_engine, GROUPS, train_dataset=stream(0))


def test_the_trainer_shows_the_data_that_it_was_given(
    untied_dir: str, tmp_path: Path, hf_engine: Engine
) -> None:
    for train, evaluation in (
        (PROMPTS, None),
        (stream(8), stream(3)),
        (stream(8), {"one": stream(3), "two": OTHERS}),
        (PROMPTS, IterableDatasetDict({"one": stream(3), "two": stream(2)})),
        (PROMPTS, DatasetDict({"one": OTHERS})),
    ):
        data = {"train_dataset": train, "eval_dataset": evaluation}
        run = make("GRPO", untied_dir, tmp_path, hf_engine, {**GROUPS, **QUIET}, **data)
        assert run.train_dataset is train
        assert run.eval_dataset is evaluation
    assert {"eval_one_loss"} <= run.evaluate().keys()
    found = run.evaluate(eval_dataset=IterableDatasetDict({"other": stream(2)}))
    assert found["eval_other_problems"] == 2
    assert found["eval_other_loss"] == pytest.approx(0.0, abs=10.0)


@pytest.mark.parametrize("which", ["train_dataset", "eval_dataset"])
def test_a_stream_sets_dispatch_batches_and_refuses_it_in_trls_words(
    untied_dir: str, tmp_path: Path, hf_engine: Engine, which: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def made(asked: bool | None, data: Any) -> Any:
        fields = {**GROUPS, **QUIET, "accelerator_config": {"dispatch_batches": asked}}
        return make("GRPO", untied_dir, tmp_path, hf_engine, fields, **{which: data})

    for asked in (None, False):
        assert made(asked, stream(8)).args.accelerator_config.dispatch_batches is False
    assert "dispatch_batches" not in "".join(capsys.readouterr())
    assert made(True, PROMPTS).args.accelerator_config.dispatch_batches is True
    assert "dispatch_batches of accelerator_config: no effect here" in "".join(capsys.readouterr())
    with pytest.raises(InputError, match="Iterable datasets require `dispatch_batches=False`"):
        made(True, stream(8))
