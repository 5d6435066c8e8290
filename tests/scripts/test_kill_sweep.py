"""The kill sweep does what it says: it counts the file operations below a folder, and kills or fails the chosen one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "scripts"))

import kill_sweep
import nightly
from kill_sweep import ROOT, WAYS, Command, Ended, attacked

# Its operations: 1 mkdir, 2 open, 3 write, 4 fsync, 5 rename, 6 open, 7 write, 8 unlink, 9 rmdir.
PROGRAM = """
import os, sys
os.chdir(sys.argv[1])
open("/tmp/" + sys.argv[2], "w").close()
os.mkdir("made")
with open("made/new", "wb", buffering=0) as file:
    file.write(b"0123456789")
    os.fsync(file.fileno())
os.rename("made/new", "made/file")
with open("made/file", "ab", buffering=0) as file:
    file.write(b"abc")
open("made/file").read()
os.unlink("made/file")
os.rmdir("made")
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("library") / "kill_sweep.so"
    subprocess.run(
        ["cc", "-shared", "-fPIC", "-o", made, ROOT / "scripts" / "kill_sweep.c", "-ldl"], check=True
    )
    return made


def run(library: Path, folder: Path, number: int, way: str = "") -> tuple[int, int, str]:
    """The program's exit code, the number of its operations, and the last line of its error."""
    counter = folder.with_name("counter")
    counter.write_bytes(bytes(8))
    settings = {
        "LD_PRELOAD": str(library), "KILL_SWEEP_FOLDER": str(folder), "KILL_SWEEP_COUNTER": str(counter),
        "KILL_SWEEP_NUMBER": str(number), "KILL_SWEEP_MODE": str(WAYS.get(way, 0)),
    }  # fmt: skip
    words = [sys.executable, "-I", "-c", PROGRAM, str(folder), f"lockstep-sweep-{os.getpid()}"]
    ended = subprocess.run(words, env={**os.environ, **settings}, capture_output=True, text=True, check=False)
    Path("/tmp", words[-1]).unlink()
    said = ended.stderr.strip().splitlines()
    return ended.returncode, int.from_bytes(counter.read_bytes(), sys.byteorder), said[-1] if said else ""


def test_operations_below_the_folder_are_counted_and_the_chosen_one_meets_its_fate(
    library: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "home"
    folder.mkdir()
    assert run(library, folder, 0) == (0, 9, "")
    assert run(library, folder, 3, "kill")[:2] == (-signal.SIGKILL, 3)
    assert (folder / "made" / "new").read_bytes() == b""
    for name in ("new", "file"):
        (folder / "made" / name).unlink(missing_ok=True)
    (folder / "made").rmdir()
    assert run(library, folder, 7, "torn")[:2] == (-signal.SIGKILL, 7)
    assert (folder / "made" / "file").read_bytes() == b"0123456789a"
    (folder / "made" / "file").unlink()
    (folder / "made").rmdir()
    code, _, said = run(library, folder, 4, "full")
    assert (code, "No space left on device" in said) == (1, True)
    (folder / "made" / "new").unlink()
    (folder / "made").rmdir()
    code, _, said = run(library, folder, 8, "broken")
    assert (code, "Input/output error" in said) == (1, True)


@pytest.mark.parametrize(
    ("first", "second", "wrong", "verdict"),
    [
        (Ended(-9, ""), Ended(0, ""), None, "same"),
        (Ended(-9, ""), Ended(0, ""), "model.safetensors differs", "FAILED"),
        (Ended(-9, ""), Ended(2, "lockstep: a checkpoint is damaged; move it away\n"), None, "refused"),
        (Ended(-9, ""), Ended(1, "Traceback (most recent call last)\nlockstep: x\n"), None, "FAILED"),
        (Ended(-9, ""), Ended(1, ""), None, "FAILED"),
        (Ended(0, ""), Ended(0, ""), None, "FAILED"),
        (Ended(1, "KeyError: 'x'"), Ended(0, ""), None, "FAILED"),
    ],
)
def test_a_verdict(first: Ended, second: Ended, wrong: str | None, verdict: str) -> None:
    runs = iter([first, second])
    command = Command(lambda: None, lambda number, way: next(runs), lambda: wrong)
    assert attacked(command, 1, "kill")[0] == verdict


def test_the_night_counts_the_verdicts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def played(command: list[object], until: float, log: Path) -> int:
        assert [str(word) for word in command[1:4]] == ["scripts/kill_sweep.py", "--seed", "7"]
        log.write_text("train ...\n9 of 10 cases were right, of 2480 cases; seed 7\n", encoding="utf-8")
        return 1

    monkeypatch.setattr(nightly, "run_program", played)
    (result,) = nightly.kill_sweep(7, time.monotonic() + 100)
    assert (result.ran, result.of, result.failed, result.passed) == (10, 2480, 1, False)


@pytest.mark.release
def test_a_sample_of_the_sweep_is_right() -> None:
    (result,) = nightly.kill_sweep(
        5, time.monotonic() + 500, ["--only", "train,resume,merge", "--most", "12"]
    )
    assert result.ran > 0
    assert result.passed


def test_every_way_is_known_to_the_library() -> None:
    names = (ROOT / "scripts" / "kill_sweep.c").read_text().partition("enum {")[2].partition("}")[0]
    assert [name.strip().lower() for name in names.split(",")] == ["count", *kill_sweep.WAYS]
