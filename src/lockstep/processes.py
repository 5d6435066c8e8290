"""The processes that Lockstep starts: what their environment leaves out, and how they end with their parent.

The key of `lockstep serve` opens weights and caches of a server. A process inherits the environment of the process
that starts it, and `tests/server/test_child_environment.py` checks that every start in the source chooses one of
these functions.

A server's processes, agents, and environments in processes of their own could outlive this process: some wait for a
call, and an agent may sleep. Each has a process group. A small process knows the groups, and reads from a pipe. The
kernel closes the other end of the pipe when this process ends, also by a kill, and the small process kills the groups.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress

# `lockstep serve`, the guard inside the server and the trainers read the server's key from this variable.
KEY_VARIABLE = "LOCKSTEP_SERVER_KEY"
_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSW|CREDENTIAL|AUTH", re.IGNORECASE)


def for_users_code(given: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of agents and other code of the user's: this process's without the server's key.

    Tokens of other services stay, because this code may need them.
    """
    whole = os.environ if given is None else given
    return {name: value for name, value in whole.items() if name != KEY_VARIABLE}


def for_helpers(given: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of Lockstep's own small helpers: without any variable whose name says that it is secret."""
    return {name: value for name, value in for_users_code(given).items() if not _SECRET.search(name)}


_PROGRAM = """
import os, signal, sys
groups = set()
for line in sys.stdin.buffer:
    (groups.add if line[:1] == b"+" else groups.discard)(int(line[1:]))
for group in groups:
    try:
        os.killpg(group, signal.SIGKILL)
    except OSError:
        pass
"""


class KillAtExit:
    """The small process. It knows no group at first."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            env=for_helpers(),
            # The terminal's signals must not reach it.
            start_new_session=True,
        )

    def add(self, group: int) -> None:
        """Kill this process group at the end of this process. Its id is that of its first process."""
        self._tell(f"+{group}\n")

    def remove(self, group: int) -> None:
        """Leave this group alone: it has ended, and its id may be used again."""
        self._tell(f"-{group}\n")

    def _tell(self, line: str) -> None:
        assert self._process.stdin is not None
        # Somebody may have killed the small process. What it would have done is then not done.
        with suppress(OSError):
            self._process.stdin.write(line.encode())

    def release(self) -> None:
        """End the small process without killing a group."""
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()
        if self._process.stdin is not None:
            with suppress(OSError):
                self._process.stdin.close()


_alone = threading.Lock()
_of_users_code: list[KillAtExit] = []


def of_users_code() -> KillAtExit:
    """The small process for everything that runs the user's code. Ask for it before such a process is started."""
    with _alone:
        if not _of_users_code:
            _of_users_code.append(KillAtExit())
        return _of_users_code[0]


def kill_group(group: int) -> None:
    """Kill a process that leads a group, and everything that it started. The group may be gone already."""
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)
