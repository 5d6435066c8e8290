"""The connections of the gateway: a bounded number of them, and a bounded time for each to ask something.

The gateway runs in the trainer's process, whose limit of open files holds for both. uvicorn makes one object of the
class per connection.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from lockstep.server.machine import raise_file_limit

# Seconds in which a client must send the head of a request, after its connection and after each answer, and in which a client must
# go on reading an answer that waits for it.
HEAD_LIMIT = 60.0
_MOST = 8192


def most_connections() -> int:
    """The number of connections that the gateway may hold: half of the files that this process may open, which is raised before."""
    return max(1, min(raise_file_limit() // 2, _MOST))


class Idle:
    """The connections in which no request is being answered, the one that has been idle for longest first.

    Args:
        most: number of all connections that may be open.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.connections: dict[BoundedConnection, None] = {}


class BoundedConnection(H11Protocol):
    """One connection. It is closed if no request comes, if nobody reads its answers, and to make room for a new one.

    h11 bounds the head of a request.

    Args:
        idle: shared by all connections of a gateway.
        given: as uvicorn gives them.
    """

    def __init__(self, idle: Idle, **given: Any) -> None:
        super().__init__(**given)
        self._idle = idle
        self._limit: asyncio.TimerHandle | None = None
        self._unread: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_request()
        if len(self.connections) > self._idle.most:
            # If all others are being answered, this one is the only idle one.
            next(iter(self._idle.connections))._close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        self._is_read()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._is_read()
        self._unread = self.loop.call_later(HEAD_LIMIT, self._close)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._is_read()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._answers():
            self._stop_waiting()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self._answers():
            # Also if the connection is being closed: that waits for the client to read.
            self._await_request()

    def _answers(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _await_request(self) -> None:
        self._stop_waiting()
        self._idle.connections[self] = None
        self._limit = self.loop.call_later(HEAD_LIMIT, self._close)

    def _stop_waiting(self) -> None:
        self._idle.connections.pop(self, None)
        if self._limit is not None:
            self._limit.cancel()
            self._limit = None

    def _is_read(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def _close(self) -> None:
        self._stop_waiting()
        self.connections.discard(self)
        self.transport.abort()
