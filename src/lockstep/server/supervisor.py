"""The supervisor of one server: starts it, reports when it is ready, and starts it again when it ends.

A trainer that uses the server detects a restart, because the new process has no pushed weights. It then makes a new
handshake and push before it uses any answer (fault W8). The supervisor also takes what a server needs of the machine:
a reserved port, and enough open files.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import resource
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from enum import Enum, auto
from pathlib import Path

import httpx

from lockstep import bounded_http
from lockstep.engines.servers.calls import HEALTH
from lockstep.engines.vllm.environment import SOCKETS, note, remove_listed
from lockstep.errors import InputError, LockstepError
from lockstep.processes import KillAtExit, kill_group
from lockstep.progress import waiting
from lockstep.server.guard import SILENT_LIMIT, SILENT_STATUS
from lockstep.server.keys import default_key_file
from lockstep.server.launch import BAD_ARGUMENTS

# A trainer opens up to 512 calls at a time, and vLLM's own processes have 100 to 200 files and sockets open.
_FEWEST_FILES = 1024
_USUAL_FILES = 65536


@contextmanager
def reserved_port(port: int) -> Iterator[None]:
    """Inside the context, no other `lockstep serve` of this user can use the port.

    A server may load its model for a minute before it listens. Until then, only a lock file shows that the port is in
    use.
    """
    path = default_key_file(port).with_suffix(".lock")
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with path.open("a", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise InputError(
                f"another 'lockstep serve' of yours has port {port}, and may still be loading its model; "
                f"choose another --port"
            ) from error
        yield


def raise_file_limit() -> int:
    """Raise this process's limit of open files and connections as far as possible, up to 65,536. Returns it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _USUAL_FILES if hard == resource.RLIM_INFINITY else min(hard, _USUAL_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            soft = wanted
    return _USUAL_FILES if soft == resource.RLIM_INFINITY else soft


def check_file_limit() -> None:
    """Raise the limit of open files, and check that a server and its connections can do with it."""
    if (limit := raise_file_limit()) < _FEWEST_FILES:
        raise InputError(
            f"a process may open only {limit} files and connections here, and a server needs "
            f"{_FEWEST_FILES}: raise the limit (ulimit -n {4 * _FEWEST_FILES}) and start the server again"
        )


def has_stopped_process(session: int) -> bool:
    """Whether a signal has stopped a process of a session: it then answers nothing, and nobody notices its end."""
    return "T" in _states_of(session).values()


def processes_of(session: int) -> list[int]:
    """The ids of the processes of a session."""
    return list(_states_of(session))


def _states_of(session: int) -> dict[int, str]:
    states = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            # The name before the closing bracket may contain anything.
            state, _, _, found = (
                stat.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[:4]
            )
            if int(found) == session:
                states[int(stat.parent.name)] = state
    return states


def private_environment(given: dict[str, str], sockets: Path) -> dict[str, str]:
    """The environment with a private folder for the sockets between vLLM's processes, and for their temporary files.

    vLLM 0.32.0 compiles its allocator for symmetric memory into the temporary folder, under one name, and loads it
    from there.
    """
    return {**given, SOCKETS: os.fspath(sockets), "TMPDIR": os.fspath(sockets)}


# Seconds between two looks at the server's process, between two health checks, and that one health check may take.
_TICK = 0.25
HEALTH_EVERY = 5.0
_HEALTH_LIMIT = 5.0
# If a server refuses connections or reports an error, its engine has ended, and the open calls will never be
# answered. The server is killed after this many seconds of such failures.
FAILING_LIMIT = 3.0
# Bytes of the answer to a health check.
_LARGEST_HEALTH = 1 << 16
# Seconds that a start may take.
START_LIMIT = 1800.0
# Seconds between the end of a server and its next start, which takes almost a minute.
_FIRST_WAIT, _LONGEST_WAIT = 1.0, 5.0
# If a server was healthy for this many seconds, the wait after its end is the first wait again.
_STEADY = 60.0
# Seconds that a server may take to end. It has nothing to save, and waits for open calls.
_STOP_LIMIT = 5.0
# The status that stands for a port on which no program listens.
_REFUSED = 0


class Health(Enum):
    """The result of one health check of a server."""

    HEALTHY = auto()
    # The server does not answer within the time limit.
    SILENT = auto()
    # The server answers with an error, or no program listens on its port.
    FAILING = auto()
    # The server answers that its engine has not answered for `SILENT_LIMIT` seconds.
    ENGINE_SILENT = auto()


class Supervisor:
    """Runs a server until `stop` is called.

    Args:
        command, environment: the command and the environment of the server, which runs as a child process.
        url: base URL of the server, for health checks.
        ready: called each time the server has become healthy, with the seconds that this took.
        say: called with one line of text for every other event.
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
        """Serve until `stop`."""
        wait, ever_healthy = _FIRST_WAIT, False
        while not self._stop:
            healthy_for, end = self._run_once()
            if self._stop:
                return
            if not ever_healthy and self._child is not None and self._child.returncode == BAD_ARGUMENTS:
                raise InputError("vLLM's server refuses this command line; the reason is in the line above")
            if not ever_healthy and healthy_for is None:
                raise LockstepError(f"the server {end} before it was ready; vLLM's own messages are above")
            ever_healthy = True
            if healthy_for is not None and healthy_for > _STEADY:
                wait = _FIRST_WAIT
            self._say(f"the server {end}; starting it again in {wait:.0f} s")
            self._sleep(wait)
            wait = min(2 * wait, _LONGEST_WAIT)

    def stop(self) -> None:
        """End the server, and let `run` return. A signal handler may call it."""
        self._stop = True

    def _run_once(self) -> tuple[float | None, str]:
        """Run the server once. Returns the seconds since it became healthy (None: it never was), and how it ended."""
        start, healthy_since, next_check = time.monotonic(), None, 0.0
        last_healthy, running_at, failing_since = start, start, None
        # vLLM's server listens when its engine has started. From its first answer on, a bad answer means a bad engine.
        answers = False
        # vLLM's processes would end late or never: a server that gets SIGTERM waits for its open calls.
        kill_at_exit = KillAtExit()
        # A process group, to end all processes of the server; and a umask, so that only this user opens its files.
        self._child = subprocess.Popen(
            self._command,
            env=self._environment,
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            umask=0o077,
        )
        kill_at_exit.add(self._child.pid)
        shown = ExitStack()
        shown.enter_context(waiting("vLLM's server to be ready", START_LIMIT))
        try:
            while True:
                now = time.monotonic()
                code = self._child.poll()
                if self._stop or code is not None:
                    return _since(healthy_since), _how_it_ended(code)
                if now >= next_check:
                    health = self._health()
                    if health is Health.HEALTHY:
                        last_healthy = time.monotonic()
                    if not has_stopped_process(self._child.pid):
                        running_at = time.monotonic()
                    if health is Health.HEALTHY:
                        self._note_files(self._child.pid)
                    failing_since = (failing_since or now) if health is Health.FAILING else None
                    if not answers and health is not Health.SILENT and self._is_ours():
                        answers, last_healthy, running_at = True, time.monotonic(), time.monotonic()
                        failing_since = running_at if health is Health.FAILING else None
                    if health is Health.HEALTHY and healthy_since is None and answers:
                        healthy_since = time.monotonic()
                        shown.close()
                        self._ready(healthy_since - start)
                    next_check = now + (HEALTH_EVERY if healthy_since and health is Health.HEALTHY else _TICK)
                if answers:
                    if health is Health.ENGINE_SILENT:
                        self._child.kill()
                        return _since(
                            healthy_since
                        ), f"has an engine that did not answer for {SILENT_LIMIT:.0f} s"
                    if now - running_at > SILENT_LIMIT:
                        self._child.kill()
                        return _since(healthy_since), f"had a stopped process for {SILENT_LIMIT:.0f} s"
                    if now - last_healthy > SILENT_LIMIT:
                        return _since(healthy_since), f"did not answer for {SILENT_LIMIT:.0f} s"
                    if failing_since is not None and now - failing_since > FAILING_LIMIT:
                        self._child.kill()
                        return _since(healthy_since), f"reported errors for {FAILING_LIMIT:.0f} s"
                if healthy_since is None and now - start > START_LIMIT:
                    return None, f"was not ready within {START_LIMIT:.0f} s"
                time.sleep(_TICK)
        finally:
            shown.close()
            self._end()
            kill_at_exit.release()

    def _health(self) -> Health:
        status = self._status(HEALTH)
        if status is None:
            return Health.SILENT
        if status == SILENT_STATUS:
            return Health.ENGINE_SILENT
        return Health.HEALTHY if status == 200 else Health.FAILING

    def _is_ours(self) -> bool:
        """Whether the guard of our server answers. Another program on the port may answer every path with 200."""
        return self._status("/") == 401

    def _status(self, path: str) -> int | None:
        """The status of the answer to a GET; `_REFUSED` if nothing listens on the port; None if it is late."""
        try:
            return bounded_http.run(_status(self._url + path))
        except httpx.ConnectError as error:
            return _REFUSED if _is_refused(error) else None
        except (TimeoutError, httpx.HTTPError, bounded_http.UnboundedAnswer):
            return None

    def _end(self) -> None:
        """End the server and every process that it has started: an engine outlives its API server."""
        child = self._child
        if child is None:
            return
        if child.poll() is None:
            child.terminate()
            try:
                with waiting("vLLM's server to stop", _STOP_LIMIT):
                    child.wait(_STOP_LIMIT)
            except subprocess.TimeoutExpired:
                self._say(f"the server did not stop within {_STOP_LIMIT:.0f} s; killing it")
        self._note_files(child.pid)
        kill_group(child.pid)
        child.wait()
        if folder := self._environment.get(SOCKETS):
            remove_listed(Path(folder))

    def _note_files(self, session: int) -> None:
        """Note the files in shared memory that the server's processes use, for whoever removes what they leave."""
        if folder := self._environment.get(SOCKETS):
            note(Path(folder), processes_of(session))

    def _sleep(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while not self._stop and time.monotonic() < end:
            time.sleep(_TICK)


def check_port(host: str, port: int) -> None:
    """Check that the port is free, before anything is loaded."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise InputError(
                f"cannot listen on {host} port {port}: {error.strerror}; choose another --port"
            ) from error


async def _status(url: str) -> int:
    # The server is a child process on this machine. Ignore proxies, and accept any certificate.
    async with httpx.AsyncClient(verify=False, trust_env=False) as client:
        answer, _ = await bounded_http.call(
            client, "GET", url, seconds=_HEALTH_LIMIT, most=lambda _: _LARGEST_HEALTH
        )
        return answer.status_code


def _is_refused(error: BaseException | None) -> bool:
    """Whether a connection failed because no program listens on the port."""
    while error is not None and not isinstance(error, ConnectionRefusedError):
        error = error.__cause__ or error.__context__
    return error is not None


def _since(moment: float | None) -> float | None:
    return None if moment is None else time.monotonic() - moment


def _how_it_ended(code: int | None) -> str:
    if code is None:
        return "was stopped"
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
