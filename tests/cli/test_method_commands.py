"""Each method from its command: a config file goes in, a summary and a report come out.

Only the same method resumes its run.
"""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import yaml
from datasets import Dataset
from methods import timeless

from lockstep.cli.main import main

REWARD = """
import os, signal
calls = 0

def by_length(completion_ids, **_):
    global calls
    calls += 1
    if calls == int(os.environ.get("TEST_INTERRUPT_AT", "-1")):
        os.kill(os.getpid(), signal.SIGINT)
    return [float(len(ids) % 5 + ids[0] % 3) for ids in completion_ids]
"""
GROUPS: dict[str, Any] = {"per_device_train_batch_size": 4, "num_generations": 2, "max_completion_length": 6}
COMMANDS: dict[str, tuple[str, dict[str, Any]]] = {
    "rloo": ("RLOO", {**GROUPS, "reward_clip_range": [0.0, 5.0]}),
    "online-dpo": (
        "Online DPO",
        {"per_device_train_batch_size": 2, "max_new_tokens": 6, "max_length": 60, "beta": [0.2, 0.1]},
    ),
    "reinforce-pp": ("REINFORCE++", {**GROUPS, "baseline": "group"}),
    "ppo": ("PPO", {**GROUPS, "num_generations": 1}),
}
# What a run announces before it does it, apart from names of files. What lasts has a line more
# (tests/report/test_silence.py).
STAGES = (
    "loading PyTorch and transformers",
    "loading the trainer",
    "evaluating on 4 held-out problems",
    "proving every module of the engine",
    "training, step 1 to 4",
    "saving checkpoint-4",
    "writing the report",
)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    Dataset.from_list([{"prompt": f"what is {i} + {i}"} for i in range(20)]).to_json(tmp_path / "data.jsonl")
    (tmp_path / "rewards.py").write_text(REWARD)
    return tmp_path


def config(home: Path, model: str, **fields: Any) -> str:
    content = {
        "model_name_or_path": model,
        "dataset_name": str(home / "data.jsonl"),
        "reward_funcs": [f"{home / 'rewards.py'}:by_length"],
        "eval_size": 4,
        "output_dir": str(home / "run"),
        "use_vllm": False,
        "bf16": False,
        "max_steps": 4,
        "save_steps": 4,
        "logging_steps": 1,
        "learning_rate": 1e-3,
        # The function counts its calls.
        "recheck_rewards": False,
        **fields,
    }
    path = home / "config.yaml"
    path.write_text(yaml.safe_dump(content))
    return str(path)


def curve(folder: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [timeless(line) for line in lines]


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_a_command_runs_its_method_to_summary_and_report_and_goes_on_after_an_interrupt(
    home: Path,
    untied_dir: str,
    command: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    method, fields = COMMANDS[command]
    path = config(home, untied_dir, **fields)
    assert main([command, "--config", path, "--output_dir", str(home / "whole")]) == 0, (
        capsys.readouterr().err
    )
    summary = json.loads((home / "whole" / "summary.json").read_text())
    assert summary["steps"] == 4
    assert summary["parity"]["failed"] == 0
    assert summary["eval_samples"] == 4 * (1 if command == "ppo" else 2)
    assert f"{method} on " in (home / "whole" / "report.html").read_text()
    said = capsys.readouterr().out
    assert "held-out reward" in said
    began = [line.removesuffix(" …") for line in said.splitlines() if line.endswith(" …")]
    assert [stage for stage in STAGES if stage not in began] == []
    assert sorted(STAGES, key=began.index) == list(STAGES), "in this order"

    before = signal.getsignal(signal.SIGINT)
    # The first calls of the reward function are the rehearsal and the evaluation.
    monkeypatch.setenv("TEST_INTERRUPT_AT", "4")
    assert main([command, "--config", path]) == 130
    assert "stopped after step 2" in capsys.readouterr().err
    assert signal.getsignal(signal.SIGINT) is before
    monkeypatch.delenv("TEST_INTERRUPT_AT")

    other = "grpo" if command == "rloo" else "rloo"
    foreign = config(home, untied_dir, **GROUPS)
    assert main([other, "--config", foreign]) == 2
    assert f"method was '{method}'" in capsys.readouterr().err

    assert main([command, "--config", config(home, untied_dir, **fields)]) == 0, capsys.readouterr().err
    assert "going on from" in capsys.readouterr().out
    assert curve(home / "run") == curve(home / "whole")


def test_a_model_is_evaluated_on_problems_that_are_made_and_nothing_is_written(
    untied_dir: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = f"evaluate --model_name_or_path {untied_dir} --dataset_name arithmetic --eval_size 2"
    fields = f"--use_vllm False --use_cpu --max_completion_length 4 --output_dir {tmp_path / 'run'}"
    assert main([*words.split(), *fields.split()]) == 0
    said = capsys.readouterr().out
    assert re.search(
        r"held-out reward [\d.]+ ± [\d.]+ .*2 problems, .* gap proven on 100% of the tokens", said
    )
    assert not (tmp_path / "run").exists()
