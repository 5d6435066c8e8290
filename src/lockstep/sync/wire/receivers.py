"""What a transport asks of the servers, or of the worker processes, that receive a push, and calls to several of them."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, wait
from itertools import accumulate
from typing import Any, Protocol, TypeVar

T = TypeVar("T")


def finish_all(pending: Sequence[Future[T]]) -> list[T]:
    """Wait for calls to several servers, and return their results. An error is raised only after all calls have ended.

    Therefore no server still reads memory when the caller changes it.
    """
    wait(pending)
    return [future.result() for future in pending]


def check_pending(pending: Sequence[Future[None]]) -> None:
    """If a call has already failed, raise its error without waiting for the other calls."""
    for future in pending:
        if future.done() and (error := future.exception()) is not None:
            raise error


def worker_ranks(servers: Sequence[WeightReceiverCalls], first: int) -> list[int]:
    """Rank of each server's first worker, and as the last entry the rank after the last worker. The first rank is `first`."""
    return list(accumulate((server.world_size for server in servers), initial=first))


class WeightReceiverCalls(Protocol):
    """The calls that a transport may make to one server.

    Attributes:
        url: base URL of the server.
        world_size: number of workers that share the server's model. Each of them receives every byte.
        available_bytes: free main memory of the worker's machine when the trainer connected, in bytes.
    """

    url: str
    world_size: int
    available_bytes: int

    def init_transfer(self, info: dict[str, Any]) -> None:
        """Tell the server's workers how the bytes will arrive."""

    def update_weights(self, info: dict[str, Any]) -> None:
        """Let the workers receive the chunks of a push. Returns when all chunks have been loaded."""

    def workers(self, method: str, *args: str) -> list[Any]:
        """Call a method of the workers that run the model. Returns their JSON answers."""
