"""A run that is resumed: with less memory, for more steps, and after a signal.

In process, on the transformers engine.
"""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from datasets import Dataset
from methods import timeless
from safetensors.torch import load_file

from lockstep.cli.main import main

REWARD = """
import os, signal
calls = 0

def by_length(completion_ids, **_):
    global calls
    calls += 1
    number, *at = os.environ.get("TEST_SIGNAL", "0").split()
    for _ in range(at.count(str(calls))):
        os.kill(os.getpid(), int(number))
    return [float(len(ids) % 5 + ids[0] % 3) for ids in completion_ids]
"""


@pytest.fixture
def home(tmp_path: Path) -> Path:
    Dataset.from_list([{"prompt": f"what is {i} + {i}"} for i in range(20)]).to_json(tmp_path / "data.jsonl")
    (tmp_path / "rewards.py").write_text(REWARD)
    return tmp_path


def run(home: Path, model: str, name: str, **fields: Any) -> int:
    """Run `lockstep grpo`; returns the exit code.

    Without an evaluation, the rehearsal makes the first call of the reward.
    """
    content = {
        "model_name_or_path": model,
        "dataset_name": str(home / "data.jsonl"),
        "reward_funcs": [f"{home / 'rewards.py'}:by_length"],
        "output_dir": str(home / name),
        "use_vllm": False,
        "bf16": False,
        "per_device_train_batch_size": 4,
        "num_generations": 2,
        "max_completion_length": 6,
        "max_steps": 4,
        "save_steps": 2,
        "logging_steps": 1,
        "learning_rate": 1e-3,
        "lr_scheduler_type": "constant",
        # The function counts its calls.
        "recheck_rewards": False,
        **fields,
    }
    path = home / "config.yaml"
    path.write_text(yaml.safe_dump(content))
    return main(["grpo", "--config", str(path)])


def curve(folder: Path) -> list[dict[str, Any]]:
    return [timeless(json.loads(line)) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_finished_run_that_goes_on_for_longer_is_the_longer_run(
    home: Path, untied_dir: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(home, untied_dir, "whole", max_steps=6) == 0
    assert run(home, untied_dir, "grown") == 0
    capsys.readouterr()
    assert run(home, untied_dir, "grown", max_steps=6) == 0
    assert "going on from" in capsys.readouterr().out
    assert curve(home / "grown") == curve(home / "whole")
    assert json.loads((home / "grown" / "summary.json").read_text())["steps"] == 6
    assert json.loads((home / "grown" / "summary-at-step-4.json").read_text())["steps"] == 4


def test_a_run_goes_on_with_less_memory_and_other_intervals(
    home: Path, untied_dir: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TEST_SIGNAL", f"{signal.SIGINT:d} 3")
    assert run(home, untied_dir, "run") == 130
    monkeypatch.delenv("TEST_SIGNAL")
    fewer = {"token_budget": 64, "logits_chunk_size": 8, "vllm_gpu_memory_utilization": 0.1}
    assert run(home, untied_dir, "run", **fewer, logging_steps=2, save_steps=1) == 0, capsys.readouterr().err
    assert "going on from" in capsys.readouterr().out
    assert [line["step"] for line in curve(home / "run")] == [1, 2, 3, 4]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "checkpoint-4" / "model.safetensors")


# Both signals have one handler, and the exit code and the words name the signal: each case has one of them.
@pytest.mark.parametrize(
    ("number", "fields", "call", "stop"),
    [
        (signal.SIGINT, {}, 3, "after step 2, with a checkpoint"),
        # The first generation makes the second call of the reward. The second step of this generation has not run yet.
        (
            signal.SIGTERM,
            {"num_iterations": 2},
            2,
            "after step 2, where its generation ends, with a checkpoint",
        ),
    ],
    ids=["one step per generation", "two steps per generation"],
)
def test_a_signal_stops_after_the_step_under_way_whatever_the_intervals_and_the_run_goes_on_to_the_same_weights(
    home: Path,
    untied_dir: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    number: signal.Signals,
    fields: dict[str, Any],
    call: int,
    stop: str,
) -> None:
    fields = {**fields, "logging_steps": 10, "save_steps": 4}
    assert run(home, untied_dir, "whole", **fields) == 0
    before = [signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)]
    monkeypatch.setenv("TEST_SIGNAL", f"{number:d} {call}")
    assert run(home, untied_dir, "cut", **fields) == 128 + number
    monkeypatch.delenv("TEST_SIGNAL")
    found = capsys.readouterr()
    assert f"{number.name}: stopping {stop}; again to stop at once" in found.out
    assert found.err.strip() == "lockstep: stopped after step 2; the same command goes on from checkpoint-2"
    assert [signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)] == before
    assert [line["step"] for line in curve(home / "cut")] == [2]
    assert run(home, untied_dir, "cut", **fields) == 0
    expected, resumed = weights(home / "whole"), weights(home / "cut")
    assert all(torch.equal(resumed[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize(
    ("number", "fields", "calls", "message"),
    [
        (
            signal.SIGINT,
            {"save_strategy": "no"},
            "3",
            "stopped after step 2; there is no checkpoint, so the same command starts from the beginning",
        ),
        (
            signal.SIGTERM,
            {},
            "2 2",
            "stopped at once; there is no checkpoint, so the same command starts from the beginning",
        ),
        (signal.SIGINT, {}, "4 4", "stopped at once; the same command goes on from checkpoint-2"),
        # During the evaluation before training, there is no step that the run could finish.
        (
            signal.SIGTERM,
            {"eval_size": 4},
            "2",
            "stopped at once; there is no checkpoint, so the same command starts from the beginning",
        ),
    ],
    ids=["nothing is saved", "twice before a checkpoint", "twice after a checkpoint", "before training"],
)
def test_a_checkpoint_is_spoken_of_only_where_there_is_one(
    home: Path,
    untied_dir: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    number: signal.Signals,
    fields: dict[str, Any],
    calls: str,
    message: str,
) -> None:
    monkeypatch.setenv("TEST_SIGNAL", f"{number:d} {calls}")
    assert run(home, untied_dir, "run", **fields) == 128 + number
    assert capsys.readouterr().err.strip().splitlines()[-1] == f"lockstep: {message}"
