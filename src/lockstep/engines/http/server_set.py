"""The servers of one engine: which there are, calls to all of them at once, and which of them cannot be used.

One object owns the set and lends it to the parts that send requests and adapters. Servers leave and join between two
pushes.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar

import torch

from lockstep.contract.protocol import EngineSettings
from lockstep.engines.http.server_calls import HEALTH, ServerCalls
from lockstep.engines.http.server_state import agreed_settings, await_health, problem_of, read_state
from lockstep.engines.vllm.port.settings import only_dtype
from lockstep.errors import LockstepError
from lockstep.sync.wire.receivers import finish_all
from lockstep.threads import CallLoop

T = TypeVar("T")
_logger = logging.getLogger(__name__)

# Seconds that a server outside the set may take to say that it is healthy. The trainer waits for this between two generations.
_UP_LIMIT = 1.0


class ServerSet:
    """The servers of one engine.

    Args:
        servers: they are in the order in which they are asked.

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
        """Wait until every server is healthy, and ask each how it was started.

        Raises:
            InputError: a server was started without something that training needs.
            LockstepError: a server did not answer in time.
        """
        self.each(lambda server: await_health(server, timeout, closed))
        for server in self.all:
            read_state(server)

    def problems(self, timeout: float) -> dict[ServerCalls, str]:
        """The servers that cannot be used at the moment, and the reason of each."""
        found = self.each(lambda server: problem_of(server, timeout))
        return {server: why for server, why in zip(self.all, found, strict=True) if why}

    def agreed(self) -> tuple[EngineSettings, torch.dtype | None]:
        """The settings of all servers, and the common dtype of their parameters; None if there are several dtypes.

        Raises:
            InputError: two URLs belong to the same server.
            ProofError: two servers have different settings.
        """
        return agreed_settings(self.all), only_dtype([name for server in self.all for name in server.loads_in])

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
            _logger.warning(f"the server at {server.url} has left the run, which goes on with {self._count}: {why}")

    def add(self, servers: Sequence[ServerCalls], order: Sequence[str]) -> None:
        """Go on with further servers, in the order of these URLs."""
        self.all[:] = sorted([*self.all, *servers], key=lambda server: order.index(server.url))
        self._pool.shutdown(wait=False)
        self._pool = _pool_for(self.all)
        for server in servers:
            _logger.warning(f"the server at {server.url} has joined the run, which goes on with {self._count}")

    @property
    def _count(self) -> str:
        return f"{len(self.all)} server{'s' if len(self.all) > 1 else ''}"

    def close(self) -> None:
        """End the threads, without waiting for calls."""
        self._pool.shutdown(wait=False)


def _pool_for(servers: Sequence[ServerCalls]) -> ThreadPoolExecutor:
    """A thread per server: all servers take part in a push at the same time."""
    return ThreadPoolExecutor(max(len(servers), 1), thread_name_prefix="lockstep-servers")
