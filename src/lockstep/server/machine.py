"""Resources of the machine that a server needs: a reserved port, and enough open files."""

from __future__ import annotations

import contextlib
import fcntl
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lockstep.engines.vllm.workers.environment import SOCKETS
from lockstep.errors import InputError
from lockstep.server.keys import default_key_file

# A trainer opens up to 512 calls at a time, and vLLM's own processes have 100 to 200 files and sockets open.
_FEWEST_FILES = 1024
_USUAL_FILES = 65536


@contextmanager
def reserved_port(port: int) -> Iterator[None]:
    """Inside the context, no other `lockstep serve` of this user can use the port.

    A server may load its model for a minute before it listens. Until then, only a lock file shows that the port is in use.

    Raises:
        InputError: another `lockstep serve` of this user has reserved the port.
    """
    path = default_key_file(port).with_suffix(".lock")
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with path.open("a", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise InputError(
                f"another 'lockstep serve' of yours has port {port}, and may still be loading its model; choose another --port"
            ) from error
        yield


def raise_file_limit() -> int:
    """Raise this process's limit of open files and connections as far as the system allows, up to 65,536. Returns the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _USUAL_FILES if hard == resource.RLIM_INFINITY else min(hard, _USUAL_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            soft = wanted
    return _USUAL_FILES if soft == resource.RLIM_INFINITY else soft


def check_file_limit() -> None:
    """Raise the limit of open files, and check that it is high enough.

    Raises:
        InputError: the limit is lower than a server and its connections need.
    """
    if (limit := raise_file_limit()) < _FEWEST_FILES:
        raise InputError(
            f"a process may open only {limit} files and connections here, and a server needs {_FEWEST_FILES}: raise the limit "
            f"(ulimit -n {4 * _FEWEST_FILES}) and start the server again"
        )


def has_stopped_process(session: int) -> bool:
    """Whether a process of a session is stopped by a signal (SIGSTOP). It then answers nothing, and nobody notices its end."""
    return "T" in _states_of(session).values()


def processes_of(session: int) -> list[int]:
    """The ids of the processes of a session."""
    return list(_states_of(session))


def _states_of(session: int) -> dict[int, str]:
    states = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            # The name before the closing bracket may contain anything.
            state, _, _, found = stat.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[:4]
            if int(found) == session:
                states[int(stat.parent.name)] = state
    return states


def private_environment(given: dict[str, str], sockets: Path) -> dict[str, str]:
    """The environment with a private folder for the sockets between vLLM's processes, and for their temporary files.

    vLLM 0.32.0 compiles its allocator for symmetric memory into the temporary folder, under one name, and loads it from there.
    """
    return {**given, SOCKETS: os.fspath(sockets), "TMPDIR": os.fspath(sockets)}
