"""The servers of one engine: calls to all of them, checks before use, and pauses for a push.

Servers leave and join between two pushes. At the start, after a server was lost, and when a server joins, all are
checked: they are healthy, have the options that training needs, and have equal settings. A push pauses them while its
transport sends the weights: running requests stay, and go on after the commit of the new weights.
"""

from __future__ import annotations

import concurrent.futures
import logging
import threading
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar

import torch

from lockstep.contract.protocol import EngineSettings
from lockstep.engines.servers.calls import HEALTH, HOW_TO_START, ServerCalls
from lockstep.engines.vllm.arguments import SERVER_BACKEND
from lockstep.engines.vllm.port.engine import differing_settings, only_dtype, settings_from
from lockstep.errors import EngineLost, InputError, LockstepError, ProofError
from lockstep.progress import waiting
from lockstep.threads import CallLoop, Pending
from lockstep.weights.wire.stream import finish_all

# Seconds that one health check may take, and seconds between two health checks.
HEALTH_LIMIT, HEALTH_EVERY = 5.0, 0.5


def await_health(server: ServerCalls, timeout: float, closed: threading.Event) -> None:
    """Wait until a server is healthy, for `timeout` seconds at most."""
    deadline, problem = time.monotonic() + timeout, server.health_problem(min(HEALTH_LIMIT, timeout))
    with waiting(f"the server at {server.url} to be ready", timeout, lambda: problem or ""):
        while problem:
            if closed.wait(HEALTH_EVERY) or time.monotonic() > deadline or "CERTIFICATE" in problem:
                raise unreachable(server, timeout, problem)
            problem = server.health_problem(min(HEALTH_LIMIT, timeout))


def unreachable(server: ServerCalls, timeout: float, problem: str) -> LockstepError:
    """The error for a server that was waited for in vain."""
    return LockstepError(
        f"the server at {server.url} did not answer within {timeout:.0f} s; is it running ('lockstep serve "
        f"MODEL')? The run can be "
        f"resumed from its last checkpoint when the server runs. The last answer: {problem}"
    )


def problem_of(server: ServerCalls, timeout: float) -> str:
    """The reason why a server that was lost cannot be used yet; empty if it can be used."""
    if problem := server.health_problem(min(HEALTH_LIMIT, timeout)):
        return problem
    try:
        read_state(server)
    except EngineLost as lost:
        # The server answered the health check and then failed. It may be stopping or starting.
        return str(lost)
    return ""


def read_state(server: ServerCalls) -> None:
    """Ask a server how it was started, and store its answer in `server`."""
    workers = server.workers("lockstep_state")
    state = workers[0]
    if state["backend"] != SERVER_BACKEND:
        raise InputError(
            f"the server at {server.url} receives weights by {state['backend']!r}, not by {SERVER_BACKEND!r}. "
            f"{HOW_TO_START}"
        )
    if state["copies"] != 1:
        raise InputError(
            f"the server at {server.url} keeps {state['copies']} copies of the model (data_parallel_size), "
            f"and a trainer cannot "
            "distinguish them; start one server per copy without this argument, and give all URLs"
        )
    if state["splits_prompts"]:
        raise InputError(
            f"the server at {server.url} computes prompts in parts (chunked prefill). On a CPU its engine "
            f"would end when it splits the prompt of a request with a seed. {HOW_TO_START}"
        )
    server.settings, server.instance = settings_from(state["settings"]), state["instance"]
    # Stages of a pipeline may have parameters of different dtypes.
    server.loads_in = [name for worker in workers for name in worker["loads_in"]]
    server.world_size = state["world_size"]
    server.takes_priorities = state["takes_priorities"]
    server.picture_cache = state["picture_cache"]
    server.available_bytes = min(worker["available_bytes"] for worker in workers)
    server.takes_adapters = state["adapters"]


def agreed_settings(servers: Sequence[ServerCalls]) -> EngineSettings:
    """The settings that all servers have. `read_state` has asked each server before."""
    if len({server.instance for server in servers}) < len(servers):
        raise InputError("two of the servers' URLs lead to the same server; give each server once")
    first, *others = servers
    assert first.settings is not None
    for server in others:
        assert server.settings is not None
        if server.settings != first.settings:
            names = differing_settings(server.settings, first.settings)
            raise ProofError(
                "handshake",
                f"the servers at {first.url} and {server.url} differ in {', '.join(names)}",
                "they were started with different models or arguments",
                "start all servers of a run with the same command line",
            )
    return first.settings


T = TypeVar("T")
_logger = logging.getLogger(__name__)

# Seconds that a server outside the set may take to say that it is healthy, between two generations.
_UP_LIMIT = 1.0


class ServerSet:
    """The servers of one engine, in the order in which they are asked.

    Attributes:
        all: the servers. The list changes in one step when servers leave or join, also while another thread reads it.
        left: URL of each server that has left, and why. Who writes it down clears it.
    """

    def __init__(self, servers: Sequence[ServerCalls]) -> None:
        self.all = list(servers)
        self.left: dict[str, str] = {}
        self._pool = _pool_for(self.all)

    @property
    def urls(self) -> tuple[str, ...]:
        """URL of each server, in their order."""
        return tuple(server.url for server in self.all)

    def name_of(self, number: int) -> str:
        """A server's name in the names of modules and in errors: its URL; empty if there is only one server."""
        return self.all[number].url if len(self.all) > 1 else ""

    # ---- calls to all ------------------------------------------------------------------------------------------------

    def workers(self, method: str, *args: str) -> list[list[Any]]:
        """The answers of every server, by worker."""
        return self.each(lambda server: server.workers(method, *args))

    def each(self, call: Callable[[ServerCalls], T]) -> list[T]:
        """Call a function for all servers at once. All calls have ended before an error is raised."""
        return self.each_number(lambda number: call(self.all[number]))

    def each_number(self, call: Callable[[int], T]) -> list[T]:
        """Call a function for the numbers of all servers at once, as `each` does."""
        return finish_all([self._pool.submit(call, number) for number in range(len(self.all))])

    def submit(self, call: Callable[[ServerCalls], T]) -> list[Future[T]]:
        """Begin a call for each server. Returns their futures, in the order of the servers."""
        return [self._pool.submit(call, server) for server in self.all]

    # ---- what the servers say of themselves --------------------------------------------------------------------------

    def greet(self, timeout: float, closed: threading.Event) -> None:
        """Wait until every server is healthy, and ask each how it was started."""
        self.each(lambda server: await_health(server, timeout, closed))
        for server in self.all:
            read_state(server)

    def problems(self, timeout: float) -> dict[ServerCalls, str]:
        """The servers that cannot be used at the moment, and the reason of each."""
        found = self.each(lambda server: problem_of(server, timeout))
        return {server: why for server, why in zip(self.all, found, strict=True) if why}

    def agreed(self) -> tuple[EngineSettings, torch.dtype | None]:
        """The settings of all servers, and the common dtype of their parameters; None if there are several dtypes."""
        return agreed_settings(self.all), only_dtype(
            [name for server in self.all for name in server.loads_in]
        )

    def healthy(self, urls: Collection[str], loop: CallLoop) -> list[str]:
        """Those of some servers, outside the set, that say within a second that they are healthy."""
        # Without a key, which `/health` does not need.
        outside = [ServerCalls(url, None, _UP_LIMIT, loop, lambda: None) for url in urls]
        asked = [(server.url, server.begin("GET", HEALTH)) for server in outside]
        found = []
        for url, answer in asked:
            with suppress(LockstepError):
                answer.result()
                found.append(url)
        return found

    # ---- which servers there are -------------------------------------------------------------------------------------

    def drop(self, gone: Collection[ServerCalls], why: str) -> None:
        """Go on without some servers; at least one other remains."""
        self.all[:] = [server for server in self.all if server not in gone]
        for server in gone:
            self.left[server.url] = why
            _logger.warning(
                f"the server at {server.url} has left the run, which goes on with {self._count}: {why}"
            )

    def add(self, servers: Sequence[ServerCalls], order: Sequence[str]) -> None:
        """Go on with further servers, in the order of these URLs."""
        self.all[:] = sorted([*self.all, *servers], key=lambda server: order.index(server.url))
        self._pool.shutdown(wait=False)
        self._pool = _pool_for(self.all)
        for server in servers:
            _logger.warning(
                f"the server at {server.url} has joined the run, which goes on with {self._count}"
            )

    @property
    def _count(self) -> str:
        return f"{len(self.all)} server{'s' if len(self.all) > 1 else ''}"

    def close(self) -> None:
        """End the threads, without waiting for calls."""
        self._pool.shutdown(wait=False)


def _pool_for(servers: Sequence[ServerCalls]) -> ThreadPoolExecutor:
    """A thread per server: all servers take part in a push at the same time."""
    return ThreadPoolExecutor(max(len(servers), 1), thread_name_prefix="lockstep-servers")


# Seconds between two questions whether a server is paused.
_PAUSED_EVERY = 0.001


class Pauses:
    """The calls that begin an update of an engine's servers, which may change between two updates."""

    def __init__(self, servers: ServerSet) -> None:
        self._servers = servers
        self._beginning: list[Future[Pending[Any, Any]]] = []

    def begin(self) -> None:
        """Start the calls for every server, without waiting for their answers."""
        self.wait()
        self._beginning = self._servers.submit(_begin)
        for server, beginning in zip(self._servers.all, self._beginning, strict=True):
            server.beginning = beginning

    def wait(self) -> None:
        """Wait until every call has ended, with or without an error. A pause after that would never end."""
        concurrent.futures.wait(self._beginning)
        for beginning in self._beginning:
            if beginning.exception() is None:
                beginning.result().wait()

    def check(self) -> None:
        """Wait until every server is paused."""
        for pause in finish_all(self._beginning):
            pause.result()


def _begin(server: ServerCalls) -> Pending[Any, Any]:
    """Pause a server and begin an update. vLLM answers the returned call 20 ms after the server has stopped."""
    # By default the pause would also drop pictures, which requests need; `reset_caches` drops the rest.
    pause = server.begin("POST", "/pause", mode="keep", clear_cache="false")
    try:
        workers, paused = server.together(
            lambda: server.ask_workers("lockstep_update"), lambda: server.ask("GET", "/is_paused")
        )
        while paused != {"is_paused": True} and not pause.done():
            time.sleep(_PAUSED_EVERY)
            paused = server.call("GET", "/is_paused")
        # A step that began before the pause may still run: in the processes of workers, or ahead of its turn.
        may_run = server.world_size > 1 or server.settings is None or server.settings.async_scheduling
        if may_run or pause.done():
            pause.result()
        if any(worker["open"] for worker in workers):
            # An earlier trainer left this update open, and vLLM would refuse every further update.
            server.call("POST", "/finish_weight_update", {})
        server.call("POST", "/start_weight_update")
    except BaseException:
        pause.wait()
        raise
    return pause
