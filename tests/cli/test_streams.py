"""Streams whose reader is gone, that are closed, or whose disk is full: a whole line and the right exit code."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from portions import portion

from lockstep.cli.output import lasting

LOCKSTEP = f"{sys.executable} -m lockstep.cli.main"
# A command that takes the place of the work. The process, its streams, the fork and the ends are the real ones.
WORK = """
import sys
from lockstep.cli import main as cli

def work(command, words):
    from lockstep.cli.process import run_to_its_end
    from lockstep.terminal import Terminal
    import logging
    with run_to_its_end():
        for number in range(600):
            Terminal(width=80).print(f"step {{number}}")
            print("a reward function prints " * 9)
            logging.getLogger("lockstep.learn").warning("a warning")
    open("ended", "w").close()
    return {code}

cli._run = work
sys.argv = ["lockstep", "{command}"]
sys.exit(cli.main())
"""
GOES_ON = "the run goes on, and its figures are in metrics.jsonl of its directory"
NO_READER = f"lockstep: standard output has no reader any more; {GOES_ON}\n"
FULL = "standard output cannot be written (No space left on device)"


def shell(line: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """The exit code is that of the first command of a pipe."""
    line = f"{line}; exit ${{PIPESTATUS[0]}}"
    environment = {**os.environ, "LC_ALL": "C.UTF-8"}
    return subprocess.run(
        ["bash", "-c", line],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        cwd=folder,
        env=environment,
    )


def work(folder: Path, command: str = "grpo", code: int = 0) -> str:
    (folder / "work.py").write_text(WORK.format(command=command, code=code))
    return f"{sys.executable} work.py"


@pytest.mark.parametrize("code", [0, 1])
def test_a_run_goes_on_when_nobody_reads_its_lines_any_more(tmp_path: Path, code: int) -> None:
    done = shell(f"{work(tmp_path, code=code)} | head -1", tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (code, "step 0\n", NO_READER)
    assert (tmp_path / "ended").exists()


# CI runs a full disk and a closed stream; the other ways go through the same functions.
ENDS = [
    ("> /dev/full", 1),
    (">&-", 0),
    ("2>&- | head -1", 0),
    (">&- 2>&-", 0),
    ("> /dev/full 2>&1", 0),
    ("<&- > /dev/null", 0),
]


@pytest.mark.parametrize(("where", "said"), portion(ENDS, lambda case: case in ENDS[:2]))
def test_a_run_ends_well_wherever_its_lines_go(where: str, said: int, tmp_path: Path) -> None:
    done = shell(f"{work(tmp_path)} {where}", tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count(FULL) == said
    assert done.stderr.count("\n") == said
    assert (tmp_path / "ended").exists()


@pytest.mark.parametrize("code", [0, 1])
def test_a_verdict_keeps_its_exit_code_and_is_not_whole_on_a_full_disk(tmp_path: Path, code: int) -> None:
    done = shell(f"{work(tmp_path, 'verify', code)} | head -1", tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (code, "step 0\n", "")
    done = shell(f"{work(tmp_path, 'verify', code)} > /dev/full", tmp_path)
    assert (done.returncode, done.stderr) == (1, f"lockstep: {FULL}, so that the result is not whole\n")


@pytest.mark.parametrize(
    ("line", "code", "out", "err"),
    [
        ("--help | head -1", 0, "usage: lockstep COMMAND", ""),
        ("--help > /dev/full", 1, "", FULL),
        ("compare --help > /dev/full", 1, "", FULL),
        ("rollouts nowhere <&-", 2, "", "nowhere is not a directory"),
        ("rollouts nowhere 2>&-", 2, "lockstep: nowhere is not a directory", ""),
        ("rollouts nowhere 2> /dev/full", 2, "lockstep: nowhere is not a directory", ""),
        ("nothing 2>&- | cat", 2, "lockstep: no command 'nothing'", ""),
        ("grpo --nothing 2>&-", 2, "lockstep: unknown field 'nothing'", ""),
        ("nothing >&- 2>&-", 2, "", ""),
    ],
)  # fmt: skip
def test_the_real_command_says_everything_that_somebody_can_read(
    line: str, code: int, out: str, err: str, tmp_path: Path
) -> None:
    done = shell(f"{LOCKSTEP} {line}", tmp_path)
    assert done.returncode == code
    assert done.stdout.startswith(out)
    assert err in done.stderr
    assert bool(done.stderr) == bool(err)
    assert "Traceback" not in done.stderr


def test_a_closed_stream_gives_its_number_to_no_file(tmp_path: Path) -> None:
    program = (
        "import os, sys\nfrom lockstep.cli.output import open_streams\nopen_streams()\n"
        "with open('weights', 'wb') as file:\n    os.write(1, b'native code prints')\n    os.write(2, b'and warns')\n"
        "    file.write(b'good')\n"
    )
    (tmp_path / "program.py").write_text(program)
    assert shell(f"{sys.executable} program.py <&- >&- 2>&-", tmp_path).returncode == 0
    assert (tmp_path / "weights").read_bytes() == b"good"


def test_a_trainer_in_a_script_does_not_end_with_its_reader(tmp_path: Path) -> None:
    program = (
        "from lockstep.terminal import Terminal\nimport lockstep, logging\nconsole = Terminal()\n"
        "for n in range(2000):\n    console.print('a line of the trainer')\n"
        "    logging.getLogger('lockstep.x').warning('warned')\n"
        "open('ended', 'w').close()\n"
    )
    (tmp_path / "program.py").write_text(program)
    done = shell(f"{sys.executable} program.py | head -1", tmp_path)
    assert (tmp_path / "ended").exists()
    assert done.stdout == "a line of the trainer\n"
    assert "Traceback" not in done.stderr


def test_an_unexpected_error_steers_no_terminal_and_is_told_where_somebody_reads(tmp_path: Path) -> None:
    program = WORK.format(command="verify", code=0).replace(
        "        for number", "        raise KeyError('\\x1b]0;x hf_AbCdEf12345678')\n        for number"
    )
    (tmp_path / "work.py").write_text(program)
    done = shell(f"{sys.executable} work.py 2>&-", tmp_path)
    assert done.returncode == 1
    assert "KeyError" in done.stdout
    assert "\x1b" not in done.stdout
    assert "hf_AbCd" not in done.stdout


def test_a_stream_on_a_descriptor_of_its_own_closes_it_and_those_of_the_process_stay_open(
    tmp_path: Path,
) -> None:
    with (tmp_path / "log").open("w") as file:
        numbers = [os.dup(file.fileno()), 2]
        streams = [lasting(file, number) for number in numbers]
        del streams
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(numbers[0])
    os.fstat(2)
