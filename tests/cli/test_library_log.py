"""Native code and libraries write to the run's file instead of standard error.

Text from Python code stays on the terminal.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import logging, os, subprocess, sys, warnings
from pathlib import Path
from lockstep.cli.output import libraries_aside
from lockstep.errors import InputError

kind, folder = sys.argv[1], Path(sys.argv[2])
with libraries_aside() as log:
    os.write(2, b"native, early\\n")
    if kind == "bad input":
        raise SystemExit(2)
    if kind == "crash":
        raise OSError("unexpected")
    print("path:", log.move_to(folder).name)
    subprocess.run([sys.executable, "-c", "import sys; print('a child', file=sys.stderr)"])
    os.write(2, b"native, late\\n")
    logging.getLogger("vllm").warning("of vllm")
    warnings.warn("of python")
    print("a reward function's words", file=sys.stderr)
print("after", file=sys.stderr)
os.write(2, b"native, after\\n")
"""


def run(kind: str, folder: Path) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-c", SCRIPT, kind, str(folder)]
    return subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)


def test_the_file_holds_what_libraries_wrote_from_the_start_and_the_terminal_what_python_code_said(
    tmp_path: Path,
) -> None:
    done = run("whole", tmp_path)
    assert done.stdout == "path: libraries.log\n"
    assert done.stderr.splitlines() == ["a reward function's words", "after", "native, after"]
    written = (tmp_path / "libraries.log").read_text()
    places = [
        written.index(line) for line in ("native, early", "a child", "native, late", "of vllm", "of python")
    ]
    assert places == sorted(places)


@pytest.mark.parametrize(("kind", "shown"), [("bad input", False), ("crash", True)])
def test_before_there_is_a_folder_only_an_unexpected_error_shows_what_libraries_wrote(
    tmp_path: Path, kind: str, shown: bool
) -> None:
    done = run(kind, tmp_path)
    assert ("native, early" in done.stderr) == shown
    assert ("OSError: unexpected" in done.stderr) == shown
