"""Starts a server for a benchmark in separate processes, and measures the memory of these processes."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from lockstep.server.keys import KEY_VARIABLE, make_key

MODEL = "smollm2-135m-instruct"
_START_LIMIT = 300.0


@contextmanager
def serving(*arguments: str) -> Iterator[tuple[str, int]]:
    """A server for the 135M model: its URL and its supervisor's process id.

    Its key is in this process's environment.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ[KEY_VARIABLE] = make_key()
    command = [sys.executable, "-m", "lockstep.cli.main", "serve", MODEL, "--port", str(port), *arguments]
    supervisor = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, encoding="utf-8"
    )
    try:
        _wait_until_ready(supervisor)
        yield f"http://127.0.0.1:{port}", supervisor.pid
    finally:
        supervisor.terminate()
        supervisor.wait(60)


def resident_bytes(pid: int) -> int:
    """Resident memory of a process and all its children in bytes. Pages that they share are counted once."""
    return sum(_proportional_bytes(p) for p in [pid, *_descendants(pid)])


class Peak:
    """Peak memory of a process since this object was made, minus its memory at that moment (Linux)."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        Path(f"/proc/{pid}/clear_refs").write_text("5", encoding="utf-8")
        self._before = _status_bytes(pid, "VmRSS")

    def bytes(self) -> int:
        return _status_bytes(self._pid, "VmHWM") - self._before


def engine_process(supervisor: int) -> int:
    """The process id of a server's largest process, which is the process with the model."""
    return max(_descendants(supervisor), key=lambda pid: _status_bytes(pid, "VmRSS"))


def _status_bytes(pid: int, name: str) -> int:
    for line in Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return 0


def _wait_until_ready(supervisor: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + _START_LIMIT
    assert supervisor.stdout is not None
    for line in supervisor.stdout:
        if "is ready at" in line:
            return
        if time.monotonic() > deadline:
            break
    sys.exit("the server did not start")


def _descendants(pid: int) -> list[int]:
    found = []
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text(encoding="utf-8").split():
                found += [int(child), *_descendants(int(child))]
    return found


def _proportional_bytes(pid: int) -> int:
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="utf-8").splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return 0
