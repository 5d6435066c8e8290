"""Pauses servers at the beginning of a push. Their running requests stay, and go on after the commit of the new weights.

A push begins the pauses, and waits for them while its transport sends the weights.
"""

from __future__ import annotations

import concurrent.futures
import time
from concurrent.futures import Future
from typing import Any

from lockstep.engines.http.server_calls import ServerCalls
from lockstep.engines.http.server_set import ServerSet
from lockstep.sync.wire.receivers import finish_all
from lockstep.threads import Pending

# Seconds between two questions whether a server is paused.
_PAUSED_EVERY = 0.001


class Pauses:
    """The calls that begin an update of some servers.

    Args:
        servers: the servers of an engine. They may change between two updates.
    """

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
        """Wait until every server is paused.

        Raises:
            EngineLost: a server did not answer.
        """
        for pause in finish_all(self._beginning):
            pause.result()


def _begin(server: ServerCalls) -> Pending[Any, Any]:
    """Pause a server and begin an update.

    Returns:
        The call that pauses. vLLM answers it only 20 ms after the server has stopped.
    """
    # By default the pause would also drop the pictures that requests need. `reset_caches` drops what depends on weights.
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
