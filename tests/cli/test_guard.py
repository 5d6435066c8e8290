"""A training command whose process ends early never exits with code 0.

Signals reach it once. It dies with its parent.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from lockstep.cli import fields as data
from lockstep.cli import main as command_line
from lockstep.cli.process import run_to_its_end
from lockstep.errors import LockstepError

START = """
import os, signal, sys
from lockstep.cli.process import run_to_its_end, split_in_two
split_in_two()
"""


def started(body: str, **options: object) -> subprocess.Popen[str]:
    code = START + body
    return subprocess.Popen(  # type: ignore[call-overload]
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options
    )


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ("with run_to_its_end(): os._exit(0)", 1),
        ("with run_to_its_end(): pass\nos._exit(0)", 0),
        ("with run_to_its_end(): pass\nwith run_to_its_end(): os._exit(0)", 1),
        ("sys.exit(0)", 0),
        ("with run_to_its_end(): os._exit(3)", 3),
        ("with run_to_its_end(): os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
        ("with run_to_its_end(): os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM),
        ("with run_to_its_end():\n    if not os.fork(): os._exit(0)\n    os.wait()", 0),
    ],
)
def test_the_exit_code_is_the_runs_own_but_for_a_zero_before_its_end(body: str, code: int) -> None:
    process = started(body)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == code
    assert (
        errors.startswith("lockstep: the process was ended with exit code 0 before the run had ended")
    ) == (code == 1)


COUNTS = """
seen, done = [], []
signal.signal(signal.{name}, lambda number, frame: seen.append(number))
signal.signal(signal.SIGTERM, lambda number, frame: done.append(number))
print("ready", flush=True)
while not done:
    signal.sigtimedwait([], 0.01)
print(len(seen), flush=True)
"""


@pytest.mark.parametrize("name", ["SIGINT", "SIGUSR1"])
@pytest.mark.parametrize("to", ["parent", "group"])
def test_a_signal_to_the_command_or_to_its_group_reaches_the_run_once(name: str, to: str) -> None:
    process = started(COUNTS.format(name=name), start_new_session=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    (os.kill if to == "parent" else os.killpg)(process.pid, getattr(signal, name))
    # The number of SIGTERM is larger than that of the first signal, so the parent handles SIGTERM after it.
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert output == "1\n"
    assert process.returncode == 0


def test_a_command_that_is_killed_takes_its_run_with_it() -> None:
    process = started("print(os.getpid(), flush=True)\nsignal.pause()")
    assert process.stdout is not None
    child = int(process.stdout.readline())
    assert child != process.pid
    process.kill()
    # The read ends when no process holds the pipe open.
    assert process.stdout.read() == ""
    process.wait(timeout=60)


def test_a_run_that_raises_system_exit_is_an_error() -> None:
    with pytest.raises(LockstepError, match="ended the program"), run_to_its_end():
        raise SystemExit(0)


def test_every_training_command_trains_within_the_guard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def ends(*_: object) -> int:
        sys.exit(0)

    monkeypatch.setattr(data, "data_of", ends)
    words = ["--model_name_or_path", "none", "--dataset_name", "arithmetic", "--output_dir", str(tmp_path)]
    for name in command_line.TRAINING:
        assert command_line.main([name, *words]) == 1
        assert "ended the program" in capsys.readouterr().err
