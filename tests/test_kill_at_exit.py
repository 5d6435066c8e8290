"""What runs the user's code ends with the process that started it, with all that it started, also after SIGKILL."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

# Each has a child, says the ids of both, and waits for nothing that would end.
PROGRAM = """#!/bin/sh
trap '' HUP TERM
sleep 3600 &
echo $$ $! > ids.new
mv ids.new ids
echo '{"ready": true}'
exec sleep 3600
"""
GAME = """
import os, subprocess
class Game:
    def __init__(self):
        child = subprocess.Popen(["sleep", "3600"])
        with open("ids.new", "w") as file:
            file.write(f"{os.getpid()} {child.pid}")
        os.rename("ids.new", "ids")
"""
# The run has told the process that kills.
PRELUDE = """
from pathlib import Path
from lockstep.processes import KillAtExit
add = KillAtExit.add
def told(self, group):
    add(self, group)
    Path("told").touch()
KillAtExit.add = told
"""
STARTS = {
    "an agent's command": """
import asyncio
from lockstep.extras.agents.agent_program import Agent
asyncio.run(Agent(None, ("./program",), 3600.0).run("http://gateway", "key", {}))
""",
    "an environment": """
import threading
from lockstep.rollouts.programs.environments import in_process
kept = in_process("game.py:Game")()
threading.Event().wait(3600)
""",
    "verifiers": """
from lockstep.extras.environments.verifiers import environment
environment("any", python="./program").rows()
""",
}


def runs(process: int) -> bool:
    try:
        return (
            Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
            not in "ZX"
        )
    except OSError:
        return False


@pytest.mark.parametrize("start", STARTS)
def test_users_processes_end_with_a_run_that_is_killed(start: str, tmp_path: Path) -> None:
    (tmp_path / "program").write_text(PROGRAM)
    (tmp_path / "program").chmod(0o700)
    (tmp_path / "game.py").write_text(GAME)
    run = subprocess.Popen([sys.executable, "-c", PRELUDE + STARTS[start]], cwd=tmp_path)
    ids: list[int] = []
    try:
        until = time.monotonic() + 60
        while not ((tmp_path / "ids").exists() and (tmp_path / "told").exists()):
            assert run.poll() is None
            assert time.monotonic() < until
            time.sleep(0.01)
        ids = [int(word) for word in (tmp_path / "ids").read_text().split()]
        assert all(map(runs, ids))
        run.kill()
        run.wait()
        until = time.monotonic() + 20
        while any(map(runs, ids)) and time.monotonic() < until:
            time.sleep(0.01)
        assert not any(map(runs, ids))
    finally:
        run.kill()
        run.wait()
        for process in filter(runs, ids):
            os.kill(process, signal.SIGKILL)
