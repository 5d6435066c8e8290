"""`lockstep grpo --reward_funcs NAME` with each kind of name: a real step learns from the scores of this reward."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file
from tiny import make_tokenizer
from transformers import LlamaConfig, LlamaForSequenceClassification

from lockstep.cli.main import main
from lockstep.models.reward_model import RewardModel

# Writes down what it gave: a function's own word against the log's.
REWARD = """
import json
from pathlib import Path

def first_letter(completion_ids, **columns):
    found = [float(ids[0] % 7) for ids in completion_ids]
    Path(__file__).with_suffix(".json").write_text(json.dumps(found))
    return found
"""


@pytest.fixture
def home(tmp_path: Path) -> Path:
    Dataset.from_list([{"prompt": f"what is {i} + {i}"} for i in range(8)]).to_json(tmp_path / "data.jsonl")
    return tmp_path


def train(home: Path, model: str, reward: str) -> dict[str, Any]:
    """Run one step from the command line, assert that the weights have changed, and return its log."""
    fields = {
        "model_name_or_path": model,
        "dataset_name": str(home / "data.jsonl"),
        "reward_funcs": reward,
        "output_dir": str(home / "run"),
        "use_vllm": "false",
        "bf16": "false",
        "max_steps": "1",
        "logging_steps": "1",
        "save_steps": "1",
        "per_device_train_batch_size": "8",
        "num_generations": "4",
        "max_completion_length": "40",
        # The functions of these tests note their last call.
        "recheck_rewards": "false",
    }
    assert main(["grpo", *(word for name, value in fields.items() for word in (f"--{name}", value))]) == 0
    assert json.loads((home / "run" / "summary.json").read_text())["steps"] == 1
    before = load_file(Path(model) / "model.safetensors")
    after = load_file(home / "run" / "checkpoint-1" / "model.safetensors")
    assert all(not torch.equal(after[name], tensor) for name, tensor in before.items())
    lines = [json.loads(line) for line in (home / "run" / "metrics.jsonl").read_text().splitlines()]
    (step,) = [line for line in lines if "loss" in line]
    assert step["grad_norm"] > 0
    assert step["reward_std"] > 0
    assert [name for name in step if name.startswith("rewards/") and name.endswith("/mean")] == [
        f"rewards/{reward_name(reward)}/mean"
    ]
    return step


def reward_name(reward: str) -> str:
    return Path(reward).name.split(":")[-1].split(".")[-1]


def test_a_built_in_reward_by_its_name(home: Path, untied_dir: str) -> None:
    step = train(home, untied_dir, "length")
    assert step["completions/min_length"] < step["completions/max_length"]
    assert step["rewards/length/mean"] == step["reward"] == pytest.approx(-step["completions/mean_length"])


@pytest.mark.parametrize("form", ["file.py:function", "package.module.function"])
def test_a_function_of_ones_own_by_its_path(
    home: Path, untied_dir: str, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = home / "tastes_of_mine"
    package.mkdir()
    (package / "letters.py").write_text(REWARD)
    # `sys.path` of an installed command does not contain the folder where the command is started.
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(home)
    name = f"{package / 'letters.py'}:first_letter" if ":" in form else "tastes_of_mine.letters.first_letter"
    step = train(home, untied_dir, name)
    given = json.loads((package / "letters.json").read_text())
    assert len(given) == 8
    assert step["rewards/first_letter/mean"] == step["reward"] == pytest.approx(fmean(given))


def test_a_reward_model_by_its_directory(
    home: Path, untied_dir: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    classifier = LlamaForSequenceClassification(
        LlamaConfig(vocab_size=384, num_labels=1, initializer_range=0.3, pad_token_id=None, **sizes)
    ).eval()
    classifier.save_pretrained(home / "taste")
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(home / "taste")
    texts: list[str] = []
    score = RewardModel.__call__

    def watched(model: RewardModel, *, prompts: Any, completions: Any, **columns: Any) -> list[float]:
        texts.extend(p + c for p, c in zip(prompts, completions, strict=True))
        return score(model, prompts=prompts, completions=completions, **columns)

    monkeypatch.setattr(RewardModel, "__call__", watched)
    step = train(home, untied_dir, str(home / "taste"))
    with torch.no_grad():
        rows = [tokenizer(text, add_special_tokens=False, return_tensors="pt") for text in texts]
        alone = [float(classifier(input_ids=row["input_ids"]).logits[0, 0]) for row in rows]
    assert len(alone) == 8
    assert step["rewards/taste/mean"] == step["reward"] == pytest.approx(fmean(alone), abs=1e-5)
