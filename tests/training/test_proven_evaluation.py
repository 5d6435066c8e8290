"""An evaluation is proven as training is, and says what was proven and what was not held out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import methods
import numpy as np
import pytest
from datasets import Dataset
from methods import GROUPS, PROMPTS

from lockstep.engines.protocol import Completion, Engine, RequestKey
from lockstep.errors import ProofError
from lockstep.rollouts.group import Prompt, Rollout, RolloutGroup
from lockstep.tokens.arrays import reals
from lockstep.training.generate.proofs.evaluation import drawn_sequences
from lockstep.training.step.generation import sequences_of
from lockstep.training.trainers.online import OnlineTrainer

HELD_OUT = Dataset.from_dict({"prompt": [f"how much is {i} - 1" for i in range(5)], "answer": list(range(5))})
Make = Callable[..., OnlineTrainer]


@pytest.fixture
def make(untied_dir: str, hf_engine: Engine, tmp_path: Path) -> Make:
    def made(evaluation: Dataset = HELD_OUT, method: str = "GRPO", **fields: Any) -> Any:
        fields = {**(GROUPS if method != "OnlineDPO" else methods.PAIRS), **fields}
        return methods.make(method, untied_dir, tmp_path, hf_engine, fields, eval_dataset=evaluation)

    return made


@pytest.mark.parametrize("method", ["GRPO", "OnlineDPO", "PPO"])
def test_the_figures_of_the_proof_are_among_the_metrics(make: Make, method: str) -> None:
    run = make(method=method)
    metrics = run.evaluate()
    sampled = sum(len(r.token_ids) for group in run.last_eval_groups for r in group.rollouts)
    assert metrics["eval_parity/checked_tokens"] == sampled
    assert metrics["eval_parity/checked_share"] == 1.0
    assert 0.0 < metrics["eval_parity/mean_abs_gap"] < 1e-4
    assert metrics["eval_seen_in_training"] == 0.0


def test_filtered_and_interrupted_completions_are_proven_too(make: Make) -> None:
    for fields in ({"top_k": 5}, {**methods.INTERRUPTED, "max_completion_length": 14}):
        assert make(**fields).evaluate()["eval_parity/checked_tokens"] > 0


def groups_of(problems: int, samples: int) -> list[RolloutGroup]:
    def rollout(name: str, sample: int) -> Rollout:
        answer = Completion(RequestKey(name, sample), [7, 8], [5, 6], [-1.0, -1.0], [0, 0], "length")
        return Rollout(answer, "")

    names = [f"eval/{i}" for i in range(problems)]
    return [RolloutGroup(Prompt(n, [7, 8], ""), tuple(rollout(n, k) for k in range(samples))) for n in names]


def test_of_a_large_evaluation_a_quarter_is_drawn_anew_each_time() -> None:
    every = sequences_of(groups_of(100, 4), 0)
    first, again, later = ([s.name for s in drawn_sequences(every, version, 1)] for version in (0, 0, 1))
    assert len(first) == len(set(first)) == 100
    assert first == again != later
    assert len(drawn_sequences(sequences_of(groups_of(20, 4), 0), 0, 1)) == 64


def sampled_otherwise(run: OnlineTrainer, change: Callable[[list[RolloutGroup]], list[RolloutGroup]]) -> Any:
    real = run.source.sample

    def sampled(prompts: Sequence[Prompt], *rest: Any) -> list[RolloutGroup]:
        return change(real(prompts, *rest))

    return patch.object(run.source, "sample", sampled)


def other_log_probs(groups: list[RolloutGroup]) -> list[RolloutGroup]:
    """The log-probs of one completion in each group are those of an engine with slightly other weights."""

    def changed(rollout: Rollout) -> Rollout:
        moved = reals(rollout.completion.logprobs + np.float32(0.01))
        return replace(rollout, completion=replace(rollout.completion, logprobs=moved))

    return [replace(g, rollouts=(changed(g.rollouts[0]), *g.rollouts[1:])) for g in groups]


def columns_of_the_next(groups: list[RolloutGroup]) -> list[RolloutGroup]:
    columns = [g.prompt.columns for g in groups]
    moved = [*columns[1:], columns[0]]
    return [replace(g, prompt=replace(g.prompt, columns=c)) for g, c in zip(groups, moved, strict=True)]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (other_log_probs, "gap"),
        (columns_of_the_next, "are not those of the evaluation set"),
        (lambda groups: groups[1:], "are not those of the evaluation set"),
        (lambda groups: [*groups, groups[0]], "are not those of the evaluation set"),
        (lambda groups: [replace(g, rollouts=g.rollouts[:1]) for g in groups], "another number of completions than 2"),
    ],
)
def test_an_evaluation_of_other_rows_or_by_another_engine_is_refused(make: Make, change: Any, says: str) -> None:
    run = make()
    with sampled_otherwise(run, change), pytest.raises(ProofError, match=says):
        run.evaluate()
    assert run.last_eval_groups == []


def test_rows_that_changed_after_the_trainer_was_made_are_not_the_evaluation_set(make: Make) -> None:
    run = make()
    run._eval_prompts["eval"] = run._eval_prompts["eval"][:3]
    with pytest.raises(ProofError, match="the 3 rows that were evaluated"):
        run.evaluate()


def test_an_evaluation_on_training_prompts_is_told_and_counted(make: Make, capsys: pytest.CaptureFixture[str]) -> None:
    run = make(Dataset.from_dict({"prompt": [PROMPTS[2]["prompt"], "something else", PROMPTS[0]["prompt"]]}))
    said = "lockstep: 2 of 3 evaluation prompts are training prompts too (eval/0 first)"
    assert said in "".join(capsys.readouterr())
    assert run.evaluate()["eval_seen_in_training"] == 2.0
