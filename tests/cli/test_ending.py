"""A command ends when its work is done: it frees no memory in pieces, and what programs registered still runs."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PROGRAM = """
import atexit, sys, threading, time
from lockstep.cli import main as cli

class Held:
    def __del__(self):
        print("freed")

cli.held = Held()

def command():
    atexit.register(print, "registered")
    thread = threading.Thread(target=lambda: (gate.wait(), print("thread")))
    thread.start()
    atexit.register(print, "registered later")
    print("done")
    gate.set()
    {end}

gate = threading.Event()
cli._run = lambda *_: command()
sys.argv = ["lockstep", "verify"]
sys.exit(cli.main())
"""


@pytest.mark.parametrize(
    ("end", "code", "freed"), [("return 0", 0, []), ("return 1", 1, []), ("1 / 0", 1, ["freed"])]
)
def test_what_programs_registered_runs_before_the_end_and_nothing_is_freed(
    end: str, code: int, freed: list[str]
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(end=end)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == code, done.stderr
    assert done.stdout.split("\n")[:-1] == ["done", "thread", "registered later", "registered", *freed]
    assert ("ZeroDivisionError" in done.stderr) == bool(freed)


def test_a_thread_without_an_end_is_named_and_left() -> None:
    program = """
import atexit, sys, threading
from lockstep.cli import main as cli, process
process._THREADS = 0.1

def command():
    atexit.register(print, "registered")
    threading.Thread(target=threading.Event().wait, name="endless").start()
    return 7

cli._run = lambda *_: command()
sys.argv = ["lockstep", "verify"]
sys.exit(cli.main())
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (7, "registered\n")
    assert done.stderr == "lockstep: the thread endless still runs; the process ends without it\n"


def test_a_reader_that_is_gone_changes_no_exit_code() -> None:
    program = "import sys\nfrom lockstep.cli import main as cli\ncli._run = lambda *_: print(sys.stdin.read()) or 0\n"
    process = subprocess.Popen(
        [sys.executable, "-c", f"{program}sys.argv = ['lockstep', 'verify']\nsys.exit(cli.main())"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, "PYTHONUNBUFFERED": ""},
    )  # fmt: skip
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdout.close()
    process.stdin.close()
    assert process.wait(60) == 0
