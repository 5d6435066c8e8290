"""`lockstep grpo` with `--tools`, `--environment_factory` and `--rollout_func`: a real step learns from them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

from lockstep.cli.fields import factory_names
from lockstep.cli.main import main
from lockstep.errors import InputError

CODE = '''
import lockstep

def multiply(a: int, b: int) -> int:
    """The product of two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a * b

class Board:
    def reset(self, **row):
        self.looks = 0

    def multiply(self, a: int, b: int) -> int:
        """The product of two numbers.

        Args:
            a: The first number.
            b: The second number.
        """
        self.looks += 1
        return a * b

    def get_reward(self):
        return float(self.looks)

def calls(completions, **_):
    return [float(sum("tool_calls" in m for m in c)) for c in completions]

def of_board(environments, **_):
    return [float(type(board) is Board) for board in environments]

def rollouts(prompts, trainer):
    found = lockstep.generate_rollout_completions(trainer, prompts, max_tokens=20)
    return {name: [row[name] for row in found] for name in ("prompt_ids", "completion_ids", "logprobs")}

def length(completion_ids, **_):
    return [float(len(ids)) for ids in completion_ids]
'''


@pytest.fixture
def home(tmp_path: Path) -> Path:
    rows = [{"prompt": [{"role": "user", "content": f"what is {i} + {i}"}]} for i in range(8)]
    Dataset.from_list(rows).to_json(tmp_path / "data.jsonl")
    (tmp_path / "mine.py").write_text(CODE)
    return tmp_path


def run(home: Path, model: str, *words: str) -> tuple[int, dict[str, Any]]:
    fields = {
        "model_name_or_path": model, "dataset_name": str(home / "data.jsonl"), "output_dir": str(home / "run"),
        "use_vllm": "false", "bf16": "false", "max_steps": "1", "logging_steps": "1", "save_strategy": "no",
        "per_device_train_batch_size": "8", "num_generations": "4", "max_completion_length": "120", "seed": "3",
    }  # fmt: skip
    code = main(["grpo", *(word for name, value in fields.items() for word in (f"--{name}", value)), *words])
    metrics = home / "run" / "metrics.jsonl"
    lines = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
    return code, next((line for line in lines if "loss" in line), {})


def test_tools_of_a_file(home: Path, caller_dir: str) -> None:
    mine = home / "mine.py"
    words = [
        "--tools",
        f"{mine}:multiply",
        "--reward_funcs",
        f"{mine}:calls",
        "--max_tool_calling_iterations",
        "2",
    ]
    code, line = run(home, caller_dir, *words)
    assert code == 0
    assert line["tools/call_frequency"] > 0
    assert line["grad_norm"] > 0


def test_an_environment_of_a_file_and_a_reward_function_know_the_same_class(
    home: Path, caller_dir: str
) -> None:
    mine = home / "mine.py"
    code, line = run(
        home, caller_dir, "--environment_factory", f"{mine}:Board", "--reward_funcs", f"{mine}:of_board"
    )
    assert code == 0
    assert line["rewards/of_board/mean"] == 1.0
    assert line["rewards/Board/mean"] > 0


def test_a_rollout_func_of_a_file(home: Path, caller_dir: str) -> None:
    mine = home / "mine.py"
    code, line = run(
        home, caller_dir, "--rollout_func", f"{mine}:rollouts", "--reward_funcs", f"{mine}:length"
    )
    assert code == 0
    assert line["rewards/length/mean"] == pytest.approx(line["completions/mean_length"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--tools", "no.py:f"], "tool 'no.py:f': no.py does not exist"),
        (["--tools", "multiply"], "give file.py:name or package.module.name"),
        (["--environment_factory", "no.py:f"], "environment 'no.py:f'"),
        (["--rollout_func", "no.py:f"], "rollout_func 'no.py:f'"),
        (["--environment_factory", "a.py:A", "b.py:B"], "NAME=file.py:name"),
        (["--tools", "MINE:nobody"], "has no function 'nobody'"),
    ],
)
def test_what_is_not_there_is_named(
    words: list[str], message: str, home: Path, caller_dir: str, capsys: Any
) -> None:
    given = [word.replace("MINE", str(home / "mine.py")) for word in words]
    code, _ = run(home, caller_dir, *given, "--reward_funcs", "length")
    assert code == 2
    assert message in capsys.readouterr().err


def test_several_environments_have_names() -> None:
    assert factory_names(["a=x.py:A", "b=y.py:B"]) == {"a": "x.py:A", "b": "y.py:B"}
    assert factory_names(["x.py:A"]) == {None: "x.py:A"}
    assert factory_names(None) == {}
    with pytest.raises(InputError, match="a name of its own"):
        factory_names(["a=x.py:A", "a=y.py:B"])
