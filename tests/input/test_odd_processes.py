"""A process without a folder, without room, or in another locale: right output or one sentence, nothing half written.

The rows in CI are those that end before a library is imported, and one per way through the code. The others start
whole processes, which import PyTorch, and run with `release`.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from full_disk import full_disk
from portions import portion
from tiny import save_model
from training_words import words

from lockstep.cli.main import main

DELETED = "the working directory has been deleted: go to another one"


@pytest.mark.parametrize(
    "command",
    [
        ["compare", "run"],
        ["report", "run"],
        ["rollouts", "run"],
        ["init", "new"],
        ["merge", "adapter", "whole"],
        ["verify", "--model", "model"],
        ["serve", "model", "--dry_run"],
        ["grpo", "--model_name_or_path", "model", "--dataset_name", "arithmetic"],
    ],
    ids=lambda command: command[0],
)
def test_a_working_directory_that_was_deleted_is_named(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert main(command) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith(DELETED)


def test_temporary_files_without_a_folder_are_not_a_deleted_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tempfile.tempdir", None)
    command = words(tmp_path, str(save_model(tmp_path / "model")))
    with full_disk(0):
        assert main(command) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == (
        "lockstep: no folder for temporary files can be written to: make room, or set TMPDIR to a folder that has some"
    )


def test_init_leaves_nothing_where_it_could_not_write_both_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with full_disk(0):
        assert main(["init", str(tmp_path / "new")]) == 2
    assert not (tmp_path / "new").exists()
    (tmp_path / "old" / ".rewards.py.new").mkdir(parents=True)
    assert main(["init", str(tmp_path / "old")]) == 2
    assert [path.name for path in (tmp_path / "old").iterdir()] == [".rewards.py.new"]
    assert capsys.readouterr().err.count("\n") == 2


LOCALE = {"PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
ODD: dict[str, Mapping[str, str]] = {
    "C": {"LC_ALL": "C", **LOCALE},
    "POSIX": {"LC_ALL": "POSIX", **LOCALE},
    "no locale": {"LC_ALL": "xx_YY.foo", **LOCALE},
    "streams of ASCII": {"PYTHONIOENCODING": "ascii:strict"},
    "no home": {"HOME": ""},
    "a home that cannot be written": {"HOME": "/proc"},
    "no temporary folder": {"TMPDIR": "/nonexistent"},
    "a temporary folder that is a file": {"TMPDIR": "/etc/passwd"},
    "no PATH": {"PATH": ""},
    "a narrow terminal": {"COLUMNS": "1", "TERM": ""},
}
RUN = "--use_vllm false --bf16 false --report_to none --num_generations 4 --max_completion_length 4"
DATA = f"--model_name_or_path model --dataset_name data.jsonl --reward_funcs length {RUN}"
COMMANDS = {
    "rollouts": "rollouts run",
    "compare": "compare run",
    "report": "report run --output page.html",
    "init": "init new",
    "grpo": f"grpo {DATA} --output_dir made --max_steps 1 --per_device_train_batch_size 4 --eval_size 2",
    "evaluate": f"evaluate {DATA} --eval_size 2",
}
CASES = [(command, odd) for command in COMMANDS for odd in ODD]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("odd")
    rows = [{"prompt": f"grüße 日本 {i}"} for i in range(8)]
    (place / "data.jsonl").write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    (place / "run").mkdir()
    rollout = {"prompt": "grüße", "completions": ["日本"], "rewards": [1.0]}
    (place / "run" / "before.json").write_text(
        json.dumps({"metrics": {"eval_reward": 1.0}, "rollouts": [rollout]})
    )
    (place / "run" / "run.json").write_text('{"model": "modül"}')
    (place / "run" / "metrics.jsonl").write_text('{"step": 1, "loss": 0.5}\n')
    save_model(place / "model")
    return place


@pytest.mark.parametrize(
    ("command", "odd"),
    portion(CASES, lambda case: case in [("rollouts", "C"), ("report", "C"), ("init", "streams of ASCII")]),
)
def test_a_command_gives_its_result_in_any_environment(
    command: str, odd: str, home: Path, tmp_path: Path
) -> None:
    place = shutil.copytree(home, tmp_path / "place")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("LC_", "LANG"))}
    ended = subprocess.run(
        [sys.executable, "-m", "lockstep.cli.main", *COMMANDS[command].split()],
        cwd=place,
        env={**kept, "LC_ALL": "C.UTF-8", **ODD[odd]},
        capture_output=True,
        timeout=200,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    said = ended.stderr.decode(errors="replace")
    assert "Traceback" not in said
    assert ended.returncode == 0, said
    made = {"report": "page.html", "init": "new/rewards.py", "grpo": "made/summary.json"}
    if command in made:
        assert (place / made[command]).is_file()
    shown = {"rollouts": "grüße", "compare": "run", "evaluate": "held-out reward"}.get(command, "")
    is_ascii = odd in ("C", "POSIX", "no locale", "streams of ASCII")
    assert (shown.encode("ascii", "backslashreplace") if is_ascii else shown.encode()) in ended.stdout
    if command == "report":
        assert "grüße" in (place / "page.html").read_text(encoding="utf-8")
