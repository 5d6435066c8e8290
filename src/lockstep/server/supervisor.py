"""Keeps one server running: starts it, reports when it is ready, and starts it again when it dies.

`server/command.py` gives the command. A trainer that used the server notices a restart by itself: the new engine holds no pushed
weights. So the trainer trains on none of its answers before a new handshake and push (fault W8).
"""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
import socket
import ssl
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from enum import Enum, auto

from lockstep.engines.http.server_calls import HEALTH
from lockstep.errors import InputError, LockstepError
from lockstep.server.launch import BAD_ARGUMENTS
from lockstep.server.machine import Leash

_TICK = 0.25
_HEALTH_EVERY = 5.0
_HEALTH_LIMIT = 5.0
# A server that answers nothing for this many seconds counts as dead. It may only be busy, so that the limit is long.
_SILENT_LIMIT = 120.0
# A server that refuses connections or reports an error is not busy: its engine has died, and it waits for calls that never end.
# After this many seconds of failures it is killed, because nothing in it can still end well.
_FAILING_LIMIT = 3.0
_START_LIMIT = 1800.0
# Seconds. A start takes nearly a minute, so that longer waits would save nothing.
_FIRST_WAIT, _LONGEST_WAIT = 1.0, 5.0
# After this many seconds in good health, the next death counts as a new one, and the waiting time starts again from the first.
_STEADY = 60.0
_STOP_LIMIT = 15.0
# Takes the place of a status when nothing listens on the port.
_REFUSED = 0


class Health(Enum):
    """The state of a server, as it answers when it is asked."""

    WELL = auto()
    # It does not answer within the time limit.
    SILENT = auto()
    # It answers with an error, or nothing listens on its port any more.
    FAILING = auto()


class Supervisor:
    """Runs a server until `stop` is called.

    Args:
        command, environment: of the server, which runs as a child process.
        url: base URL of the server, for health checks.
        ready: called each time the server has become healthy, with the seconds that this took.
        say: called with one line about everything else that happens.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: dict[str, str],
        url: str,
        *,
        ready: Callable[[float], None],
        say: Callable[[str], None],
    ) -> None:
        self._command = list(command)
        self._environment = environment
        self._url = url
        self._ready = ready
        self._say = say
        self._stop = False
        self._child: subprocess.Popen[bytes] | None = None

    def run(self) -> None:
        """Serve until `stop`.

        Raises:
            InputError: vLLM refuses the command line; the server has printed why.
            LockstepError: the server ended before it was ever healthy. A second try would end in the same way.
        """
        wait, ever_healthy = _FIRST_WAIT, False
        while not self._stop:
            healthy_for, end = self._run_once()
            if self._stop:
                return
            if not ever_healthy and self._child is not None and self._child.returncode == BAD_ARGUMENTS:
                raise InputError("vLLM's server does not take this command line; the line above says why")
            if not ever_healthy and healthy_for is None:
                raise LockstepError(f"the server {end} before it was ready; vLLM's own messages are above")
            ever_healthy = True
            if healthy_for is not None and healthy_for > _STEADY:
                wait = _FIRST_WAIT
            self._say(f"the server {end}; starting it again in {wait:.0f} s")
            self._sleep(wait)
            wait = min(2 * wait, _LONGEST_WAIT)

    def stop(self) -> None:
        """End the server and `run`; may be called from a signal handler."""
        self._stop = True

    def _run_once(self) -> tuple[float | None, str]:
        """Run the server once. Returns its seconds in good health (None: it was never healthy), and how it ended."""
        start, healthy_since, next_question = time.monotonic(), None, 0.0
        last_well, failing_since = start, None
        # A group of its own, so that every process of the server can be ended; and files that nobody else can open.
        self._child = subprocess.Popen(
            self._command, env=self._environment, start_new_session=True, stdin=subprocess.DEVNULL, umask=0o077
        )
        leash = Leash(self._child.pid)
        try:
            while True:
                now = time.monotonic()
                code = self._child.poll()
                if self._stop or code is not None:
                    return _since(healthy_since), _ending(code)
                if now >= next_question:
                    health = self._health()
                    if health is Health.WELL:
                        last_well = time.monotonic()
                    failing_since = (failing_since or now) if health is Health.FAILING else None
                    if health is Health.WELL and healthy_since is None and self._is_ours():
                        healthy_since = time.monotonic()
                        self._ready(healthy_since - start)
                    next_question = now + (_HEALTH_EVERY if healthy_since and health is Health.WELL else _TICK)
                if healthy_since is not None:
                    if now - last_well > _SILENT_LIMIT:
                        return _since(healthy_since), f"did not answer for {_SILENT_LIMIT:.0f} s"
                    if failing_since is not None and now - failing_since > _FAILING_LIMIT:
                        self._child.kill()
                        return _since(healthy_since), f"reported errors for {_FAILING_LIMIT:.0f} s"
                if healthy_since is None and now - start > _START_LIMIT:
                    return None, f"was not ready within {_START_LIMIT:.0f} s"
                time.sleep(_TICK)
        finally:
            self._end()
            leash.release()

    def _health(self) -> Health:
        status = self._status(HEALTH)
        if status is None:
            return Health.SILENT
        return Health.WELL if status == 200 else Health.FAILING

    def _is_ours(self) -> bool:
        """Whether our guard answers. Another program on the port may answer everything with 200."""
        return self._status("/") == 401

    def _status(self, path: str) -> int | None:
        """The status of the answer; `_REFUSED` if nothing listens, None if no answer comes."""
        # The server is our own child on this machine: no proxy is needed, and any certificate will do.
        handlers = [
            urllib.request.ProxyHandler({}),
            urllib.request.HTTPSHandler(context=ssl._create_unverified_context()),
        ]
        try:
            with urllib.request.build_opener(*handlers).open(self._url + path, timeout=_HEALTH_LIMIT) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return error.code
        except (urllib.error.URLError, http.client.HTTPException, OSError) as error:
            return _REFUSED if isinstance(getattr(error, "reason", error), ConnectionRefusedError) else None

    def _end(self) -> None:
        """End the child and every process that it started: engines outlive an API server that was killed."""
        child = self._child
        if child is None:
            return
        if child.poll() is None:
            child.terminate()
            try:
                child.wait(_STOP_LIMIT)
            except subprocess.TimeoutExpired:
                self._say(f"the server did not stop within {_STOP_LIMIT:.0f} s; killing it")
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()

    def _sleep(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while not self._stop and time.monotonic() < end:
            time.sleep(_TICK)


def check_port(host: str, port: int) -> None:
    """Refuse a port that is taken, before anything is loaded.

    Raises:
        InputError: another program listens there, or the address does not belong to this machine.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise InputError(f"cannot listen on {host} port {port}: {error.strerror}; choose another --port") from error


def _since(moment: float | None) -> float | None:
    return None if moment is None else time.monotonic() - moment


def _ending(code: int | None) -> str:
    if code is None:
        return "was stopped"
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
