"""The server's key is in the environment of no process that a trainer starts."""

from __future__ import annotations

import ast
import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import lockstep
from lockstep.engines.vllm.environment import process_start
from lockstep.errors import InputError, LockstepError
from lockstep.extras.agents.agent_program import Agent, AgentFailed
from lockstep.extras.environments.verifiers import environment
from lockstep.models.packaged import fetch
from lockstep.processes import KillAtExit, of_users_code
from lockstep.rollouts.programs.environments import in_process
from lockstep.server.keys import KEY_VARIABLE
from lockstep.tasks.math_comparison import Worker

KEY = "a-key-for-tests-only"
SOURCE = Path(lockstep.__file__).parent
# Calls that start a process.
STARTS = {"Popen", "create_subprocess_exec", "create_subprocess_shell", "check_output", "check_call", "popen"}
STARTS |= {
    "posix_spawn",
    "posix_spawnp",
    "spawnv",
    "spawnve",
    "execv",
    "ProcessPoolExecutor",
    "Process",
    "Pool",
}


def starts_of(path: Path) -> list[ast.Call]:
    calls = [
        node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.Call)
    ]
    whole = ("subprocess.run", "os.system")
    return [call for call in calls if name_of(call) in STARTS or ast.unparse(call.func) in whole]


def name_of(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def test_every_start_of_a_process_chooses_its_environment() -> None:
    found = {path: calls for path in SOURCE.rglob("*.py") if (calls := starts_of(path))}
    assert len(found) >= 7
    for path, calls in found.items():
        for call in calls:
            given = [ast.unparse(word.value) for word in call.keywords if word.arg == "env"]
            assert given, f"{path.relative_to(SOURCE)}:{call.lineno} gives its process everything"
            ours = (
                "for_users_code()",
                "for_helpers()",
                "_environment(base_url, api_key)",
                "self._environment",
            )
            assert any(name in given[0] for name in ours), (path, given)


def agent(python: str, folder: Path) -> None:
    asyncio.run(Agent(None, (python,), 60.0).run("http://gateway", "a-rollouts-key", {}))


def compared(python: str, folder: Path) -> None:
    Worker().compare("1", "1")


def fetched(python: str, folder: Path) -> None:
    fetch(folder)


def killer(python: str, folder: Path) -> None:
    made = KillAtExit()
    while not (folder / "environment").exists():
        time.sleep(0.01)
    made.release()


STARTED: dict[str, Callable[[str, Path], Any]] = {
    "an agent": agent,
    "an environment": lambda python, folder: in_process("games.py:Game", python=python)(),
    "verifiers": lambda python, folder: environment("any", python=python).rows(),
    "the comparison of answers": compared,
    "pip": fetched,
    "the process that ends a server": killer,
}


@pytest.mark.parametrize("start", STARTED)
def test_no_process_gets_the_servers_key(start: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spy = tmp_path / "python"
    spy.write_text(f"#!/bin/sh\nenv > {tmp_path}/new\nmv {tmp_path}/new {tmp_path}/environment\nexit 1\n")
    spy.chmod(0o700)
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    monkeypatch.setenv("OTHER_API_KEY", "of-another-service")
    # It is started beside the user's first process.
    of_users_code()
    monkeypatch.setattr(sys, "executable", str(spy))
    with suppress(InputError, LockstepError, AgentFailed):
        STARTED[start](str(spy), tmp_path)
    found = (tmp_path / "environment").read_text()
    assert "PATH=" in found
    assert KEY not in found
    # What the user's code needs stays; a helper of ours needs nothing.
    helpers = ("the comparison of answers", "the process that ends a server")
    assert ("of-another-service" in found) == (start not in helpers)


def test_vllms_workers_beside_a_trainer_do_not_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    with process_start(2, tmp_path):
        assert KEY_VARIABLE not in os.environ
    assert os.environ[KEY_VARIABLE] == KEY


def test_the_engines_processes_of_a_server_do_not_get_it_and_the_guard_has_it() -> None:
    """In a process of its own, because a process keeps the key that it has taken."""
    program = f"""
import os
from lockstep.server.guard import KeyGuard
from lockstep.server.keys import guards_key, take_key
take_key()
assert {KEY_VARIABLE!r} not in os.environ
assert guards_key() == {KEY!r}
KeyGuard(None)  # it raises an error if it has no key
"""
    subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, KEY_VARIABLE: KEY}, check=True, timeout=120
    )
