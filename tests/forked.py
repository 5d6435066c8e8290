"""Starts Python programs for tests as forks of a process that has imported torch and vLLM already (`fork_server.py`).

The first process of the suite starts the fork server; all workers use it. The fork server imports nothing before the
first program.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

# Holds the address of the fork server, for the workers.
ADDRESS = "LOCKSTEP_TESTS_FORK_SERVER"
_START_LIMIT = 300.0


class Program:
    """A program that the fork server started, with the methods of `subprocess.Popen`.

    Attributes:
        returncode: None until the program has ended and `poll` or `wait` has seen it.
    """

    def __init__(
        self, words: Sequence[str], *, stdout: IO[str], stderr: IO[str], env: Mapping[str, str] | None = None
    ) -> None:
        self.args, self.returncode = list(words), None
        self._words = b""
        asked = {"words": self.args, "env": dict(os.environ if env is None else env), "cwd": os.getcwd()}
        self._server = socket.socket(socket.AF_UNIX)
        self._server.settimeout(_START_LIMIT)
        self._server.connect(os.environ[ADDRESS])
        data = json.dumps(asked).encode() + b"\n"
        sent = socket.send_fds(self._server, [data], [stdout.fileno(), stderr.fileno()])
        self._server.sendall(data[sent:])
        self.pid = self._number()

    def poll(self) -> int | None:
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            self._server.settimeout(timeout)
            try:
                self.returncode = self._number()
            except (TimeoutError, BlockingIOError) as error:
                raise subprocess.TimeoutExpired(self.args, timeout or 0) from error
        return self.returncode

    def send_signal(self, sign: int) -> None:
        if self.poll() is None:
            # It may end between the question and the signal.
            with suppress(ProcessLookupError):
                os.kill(self.pid, sign)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _number(self) -> int:
        while b"\n" not in self._words:
            found = self._server.recv(64)
            assert found, "the fork server has ended"
            self._words += found
        word, _, self._words = self._words.partition(b"\n")
        return int(word)


def finish(
    words: Sequence[str], *, timeout: float, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end; returns its exit code and its output.

    Raises:
        subprocess.TimeoutExpired: it did not end in time; it was killed.
    """
    with (
        tempfile.TemporaryFile("w+", encoding="utf-8") as out,
        tempfile.TemporaryFile("w+", encoding="utf-8") as err,
    ):
        program = Program(words, stdout=out, stderr=err, env=env)
        try:
            code = program.wait(timeout)
        finally:
            program.kill()
        out.seek(0)
        err.seek(0)
        return subprocess.CompletedProcess(words, code, out.read(), err.read())


def start_fork_server() -> subprocess.Popen[bytes]:
    """Start it. It ends with this process at the latest, because its standard input is closed then."""
    os.environ[ADDRESS] = str(Path(tempfile.mkdtemp(prefix="lockstep-fork-")) / "socket")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(os.environ[ADDRESS])
        listener.listen()
        words = [
            sys.executable,
            "-W",
            "ignore",
            str(Path(__file__).parent / "fork_server.py"),
            str(listener.fileno()),
        ]
        return subprocess.Popen(words, stdin=subprocess.PIPE, pass_fds=[listener.fileno()])


def stop_fork_server(server: subprocess.Popen[bytes]) -> None:
    server.communicate(timeout=60)
    shutil.rmtree(Path(os.environ.pop(ADDRESS)).parent)
