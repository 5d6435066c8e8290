"""Real vLLM servers for tests, started with `lockstep serve` on a free port of this machine and stopped afterwards."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx
import torch
from forked import Program
from hosts import Host

from lockstep.contract.inbox import Inbox
from lockstep.contract.protocol import Completion, GenerationRequest, RequestKey
from lockstep.engines.servers.calls import ServerCalls
from lockstep.engines.servers.server import VLLMServer
from lockstep.errors import LockstepError
from lockstep.server.keys import KEY_VARIABLE
from lockstep.weights.wire.network import NCCL, NCCLTransport
from lockstep.weights.wire.transport import WeightTransport, choose_transport

KEY = "a-key-for-tests-only"
_START_LIMIT = 300.0
# For single calls to servers here. A new client loads the certificates of the system: 20 ms that no call over HTTP
# needs.
HTTP = httpx.Client(trust_env=False, limits=httpx.Limits(max_keepalive_connections=0))


@dataclass
class Server:
    """A running `lockstep serve`.

    Attributes:
        host: where it runs; None for this machine.
    """

    url: str
    supervisor: Program
    log: Path
    host: Host | None = None

    @property
    def processes(self) -> dict[str, int]:
        """Process ids by role: `api`, `core`, and `worker` if the model has a process of its own."""
        found = {}
        for pid in descendants(self.supervisor.pid):
            with suppress(OSError):
                command = Path(f"/proc/{pid}/cmdline").read_text(encoding="utf-8")
                role = {"server.launch": "api", "VLLM::EngineCore": "core", "VLLM::Worker": "worker"}
                found |= {name: pid for mark, name in role.items() if mark in command}
        return found

    def kill(self, role: str, sign: signal.Signals = signal.SIGKILL, limit: float = _START_LIMIT) -> None:
        """Send a signal to a process as soon as it exists (after an earlier kill it may not exist yet)."""
        deadline = time.monotonic() + limit
        while (pid := self.processes.get(role)) is None:
            assert time.monotonic() < deadline, f"no process {role} in {self.processes}"
            time.sleep(0.1)
        os.kill(pid, sign)

    def restart(self, limit: float = _START_LIMIT) -> None:
        """Kill the server, and wait until its supervisor has started another server."""
        before, deadline = self.processes["api"], time.monotonic() + limit
        os.kill(before, signal.SIGKILL)
        while self.processes.get("api", before) == before:
            assert time.monotonic() < deadline, "nothing was started again"
            time.sleep(0.1)
        self.await_health(limit)

    def sampled_tokens(self) -> float:
        """The number of tokens that the server has sampled since its start, by its own count."""
        return self._count("vllm:generation_tokens_total")

    def waiting_requests(self) -> float:
        """The number of requests that the server has received but not started, by its own count."""
        return self._count("vllm:num_requests_waiting{")

    def running_requests(self) -> float:
        """The number of requests that the server is working on or has not started, by its own count."""
        return self._count("vllm:num_requests_running{") + self.waiting_requests()

    def _count(self, name: str) -> float:
        shown = {"Authorization": f"Bearer {KEY}"}
        found = HTTP.get(self.url + "/metrics", headers=shown, timeout=10)
        assert found.status_code == 200
        lines = [line for line in found.text.splitlines() if line.startswith(name)]
        return sum(float(line.split()[-1]) for line in lines)

    def await_health(self, limit: float = _START_LIMIT) -> None:
        deadline = time.monotonic() + limit
        while time.monotonic() < deadline:
            with suppress(httpx.HTTPError):
                if (self.host.do(self._health) if self.host else self._health()) == 200:
                    return
            if self.supervisor.poll() is not None:
                break
            time.sleep(0.2)
        raise AssertionError(f"no server:\n{self.log.read_text()[-3000:]}")

    def _health(self) -> int:
        return HTTP.get(self.url + "/health", timeout=5).status_code


def descendants(pid: int) -> list[int]:
    """The ids of all child processes of a process, without the process itself."""
    below = []
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                below += [int(child), *descendants(int(child))]
    return below


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def is_free(port: int) -> bool:
    """Whether a server could listen on this port; closed connections of an earlier server do not matter."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


@contextmanager
def serve(
    model: str,
    folder: Path,
    *arguments: str,
    dtype: str = "float32",
    max_model_len: int = 512,
    port: int | None = None,
    key: str | None = KEY,
    await_health: bool = True,
    host: Host | None = None,
) -> Iterator[Server]:
    """A healthy server for a model, by default on a free port. If `key` is None, the server makes its own key.

    Its processes are forks of the fork server: it starts in one second instead of twenty.

    Args:
        await_health: wait until it is healthy; otherwise it may still be loading.
        host: run it on this host, at the host's address.
    """
    port = port or free_port()
    address = host.address if host else "127.0.0.1"
    log = folder / f"server-{port}.log"
    command = [
        sys.executable,
        "-m",
        "lockstep.cli.main",
        "serve",
        model,
        "--port",
        str(port),
        "--dtype",
        dtype,
    ]
    command += ["--host", address] if host else []
    with log.open("w") as out:
        supervisor = Program(
            [*command, "--max_model_len", str(max_model_len), *arguments],
            stdout=out,
            stderr=out,
            # The environment of a careless user; the server must not depend on it.
            env={
                **{name: value for name, value in os.environ.items() if name != KEY_VARIABLE},
                **({KEY_VARIABLE: key} if key else {}),
                "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
                "VLLM_API_KEY": "other",
                **(host.environment if host else {}),
            },
        )
    server = Server(f"http://{address}:{port}", supervisor, log, host)
    try:
        if await_health:
            server.await_health()
        yield server
    finally:
        supervisor.terminate()
        try:
            supervisor.wait(40)
        except subprocess.TimeoutExpired:
            supervisor.kill()
            raise


@contextmanager
def impatient(engine: VLLMServer, limit: float) -> Iterator[None]:
    """A short time limit for calls that are not answered, so that they are not waited for longer."""
    usual = engine.timeout, engine.generation_timeouts
    try:
        _set_limit(engine, limit, 1.0)
        yield
    finally:
        _set_limit(engine, *usual)


def _set_limit(engine: VLLMServer, limit: float, generation_timeouts: float) -> None:
    engine.timeout, engine.generation_timeouts = limit, generation_timeouts
    for calls in engine.servers.all:
        calls.timeout = limit


def connect(
    *urls: str,
    timeout: float = 120.0,
    transport: str = "auto",
    key: str = KEY,
    deltas: bool = True,
    run: str = "",
) -> VLLMServer:
    """A server engine that is connected to running servers. With `nccl`, gloo takes NCCL's place on both ends."""

    def choose(servers: Sequence[ServerCalls]) -> WeightTransport:
        if transport == NCCL:
            return NCCLTransport("127.0.0.1", 0, timeout, torch.device("cpu"))
        return choose_transport(transport, servers, "127.0.0.1", 0, timeout, deltas=deltas)

    return VLLMServer(urls, [key] * len(urls), timeout=timeout, transport=choose, run=run)


def begin(server: Server, work: Callable[[], None]) -> threading.Thread:
    """Start requests; return their thread when the server works on them and has sampled tokens for them."""
    before, deadline = server.sampled_tokens(), time.monotonic() + 60
    worker = threading.Thread(target=work)
    worker.start()
    # The count of tokens alone is late: it can still rise for the requests of an earlier push.
    while server.sampled_tokens() == before or not server.running_requests():
        assert time.monotonic() < deadline
    return worker


class Asked:
    """Requests that an engine answers in a thread of its own, while the test goes on."""

    def __init__(self, engine: VLLMServer, requests: Sequence[GenerationRequest]) -> None:
        self._inbox = Inbox()
        self._answers = {request.key: self._inbox.ask(request) for request in requests}
        self._inbox.close()
        self._thread = ThreadPoolExecutor(1)
        self._served = self._thread.submit(engine.serve, self._inbox)
        assert self._inbox.begun.wait(60)

    def result(self) -> dict[RequestKey, Completion]:
        """Wait for the answers."""
        self._served.result(300)
        return {key: answer.result() for key, answer in self._answers.items()}

    def give_up(self) -> None:
        """Drop the requests, and wait until the engine has dropped them."""
        self._inbox.stop(LockstepError("given up by the test"))
        with suppress(LockstepError):
            self._served.result(60)
