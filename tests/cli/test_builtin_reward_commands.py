"""`lockstep grpo --reward_funcs NAME` with the built-in rewards on texts: their scores are logged and learned from."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import reasoning_gym
import torch
from datasets import Dataset
from safetensors.torch import load_file
from tiny import make_model, make_tokenizer

from lockstep.cli.main import main
from lockstep.rollouts.group import RolloutGroup
from lockstep.run.loop import TrainingLoop
from lockstep.tasks.rewards import accuracy

RESULTS = range(2, 6)
SPOKEN = [*(rf"\boxed{{{n}}}" for n in RESULTS), "<think>", "</think>"]
Expected = Callable[[str, dict[str, Any]], float | None]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny model that often samples a boxed result or a thinking tag; each of them is one token of its tokenizer."""
    folder = tmp_path_factory.mktemp("models") / "spoken"
    tokenizer, made = make_tokenizer(), make_model()
    tokenizer.add_tokens(SPOKEN)
    with torch.no_grad():
        made.lm_head.weight[tokenizer.convert_tokens_to_ids(SPOKEN)] *= 3
    made.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def train(
    home: Path, model: str, monkeypatch: pytest.MonkeyPatch, **fields: Any
) -> tuple[list[list[RolloutGroup]], list[dict[str, Any]]]:
    """Run two steps from the command line; return the rollouts and the log of each step."""
    kept: list[list[RolloutGroup]] = []
    rollout = TrainingLoop.rollout

    def recorded(loop: TrainingLoop, *args: Any) -> Any:
        groups = rollout(loop, *args)
        kept.append(list(groups))
        return groups

    monkeypatch.setattr(TrainingLoop, "rollout", recorded)
    fields = {
        "model_name_or_path": model,
        "output_dir": home / "run",
        "use_vllm": "false",
        "bf16": "false",
        "max_steps": 2,
        "logging_steps": 1,
        "save_steps": 2,
        "per_device_train_batch_size": 64,
        "num_generations": 8,
        "max_completion_length": 8,
        "learning_rate": 1e-3,
        "report_to": "none",
        **fields,
    }
    assert (
        main(["grpo", *(str(word) for name, value in fields.items() for word in (f"--{name}", value))]) == 0
    )
    before = load_file(Path(model) / "model.safetensors")
    after = load_file(home / "run" / "checkpoint-2" / "model.safetensors")
    assert all(not torch.equal(after[name], tensor) for name, tensor in before.items())
    lines = [json.loads(line) for line in (home / "run" / "metrics.jsonl").read_text().splitlines()]
    return kept, [line for line in lines if "loss" in line]


def assert_logged(
    name: str, kept: Sequence[Sequence[RolloutGroup]], steps: Sequence[dict[str, Any]], expected: Expected
) -> list[float]:
    """Assert that `expected` gives each rollout's score, and that steps log their mean and the share without one."""
    assert len(kept) == len(steps) == 2
    every: list[float] = []
    for groups, step in zip(kept, steps, strict=True):
        pairs = [(r, expected(r.text, g.prompt.columns)) for g in groups for r in g.rollouts]
        assert len(pairs) == 64
        for rollout, score in pairs:
            assert rollout.scores == {name: score}, rollout.text
        scores = [score for _, score in pairs if score is not None]
        assert step[f"rewards/{name}/mean"] == step["reward"] == pytest.approx(fmean(scores))
        assert step.get("rewards/unscored", 0) == len(pairs) - len(scores)
        assert step["reward_std"] > 0
        assert step["grad_norm"] > 0
        every += scores
    return every


def test_accuracy_is_whether_the_box_holds_the_answer_and_a_row_without_one_is_not_scored(
    home: Path, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def right(text: str, columns: dict[str, Any]) -> float | None:
        if columns["answer"] is None:
            return None
        boxes = set(re.findall(r"\\boxed\{(\d)\}", text))
        # math-verify decides which one of several results counts.
        return (
            accuracy([text], answer=[columns["answer"]])[0]
            if len(boxes) > 1
            else float(boxes == {columns["answer"]})
        )

    rows = [{"prompt": f"what is {i} + 1", "answer": str(RESULTS[i % 4]) if i else None} for i in range(8)]
    Dataset.from_list(rows).to_json(home / "data.jsonl")
    kept, steps = train(home, model, monkeypatch, dataset_name=home / "data.jsonl", reward_funcs="accuracy")
    assert set(assert_logged("accuracy", kept, steps, right)) == {0.0, 1.0}
    assert [step["rewards/unscored"] for step in steps] == [8, 8]


def test_format_is_whether_thinking_comes_first_and_ends(
    home: Path, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def thought(text: str, columns: dict[str, Any]) -> float:
        return float(
            re.fullmatch(r"<think>((?!<think>).)*</think>((?!<think>).)*", text, re.DOTALL) is not None
        )

    Dataset.from_list([{"prompt": f"what is {i} + 1"} for i in range(8)]).to_json(home / "data.jsonl")
    kept, steps = train(home, model, monkeypatch, dataset_name=home / "data.jsonl", reward_funcs="format")
    assert set(assert_logged("format", kept, steps, thought)) == {0.0, 1.0}


@pytest.mark.parametrize("named", [True, False], ids=["by its name", "as the data's own"])
def test_reasoning_gyms_score_is_that_of_the_rows_own_data_set(
    home: Path, model: str, monkeypatch: pytest.MonkeyPatch, named: bool
) -> None:
    scorer = reasoning_gym.create_dataset("gcd", seed=1, size=1)

    def scored(text: str, columns: dict[str, Any]) -> float:
        problem = json.loads(columns["entry"])
        assert problem["metadata"]["source_dataset"] == "gcd"
        return float(scorer.score_answer(text.strip(), problem))

    fields: dict[str, Any] = {"dataset_name": "reasoning_gym", "dataset_config": "gcd", "train_size": 40}
    fields |= {"reward_funcs": "reasoning_gym"} if named else {}
    kept, steps = train(home, model, monkeypatch, max_completion_length=20, **fields)
    name = "reasoning_gym" if named else "reasoning_gym_score"
    assert len(set(assert_logged(name, kept, steps, scored))) > 2


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path
