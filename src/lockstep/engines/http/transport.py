"""The interface of a weight transport, as a server engine uses it. `sync/`, which is above this package, implements it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import Future, wait
from itertools import accumulate
from typing import Any, Protocol, TypeVar

import torch

T = TypeVar("T")


def finish_all(pending: Sequence[Future[T]]) -> list[T]:
    """Results of calls to several servers. All calls have ended before the first error is raised.

    So no server still reads memory that the caller is about to change.
    """
    wait(pending)
    return [future.result() for future in pending]


def check_pending(pending: Sequence[Future[None]]) -> None:
    """Raise the error of a call that has failed, while the others still run."""
    for future in pending:
        if future.done() and (error := future.exception()) is not None:
            raise error


def worker_ranks(servers: Sequence[WeightReceiverCalls], first: int) -> list[int]:
    """Rank of each server's first worker, counting all workers from `first`. The last entry is the end of the count."""
    return list(accumulate((server.world_size for server in servers), initial=first))


class WeightReceiverCalls(Protocol):
    """The calls that a transport may make to one server.

    Attributes:
        url: base URL of the server.
        world_size: number of workers that share the server's model. Each of them receives every byte.
        available_bytes: main memory that the machine of a worker had left when the trainer connected.
    """

    url: str
    world_size: int
    available_bytes: int

    def init_transfer(self, info: dict[str, Any]) -> None:
        """Agree with the server's workers on how the bytes will arrive."""

    def update_weights(self, info: dict[str, Any]) -> None:
        """Let the workers receive the chunks of a push. Returns when all chunks have been loaded."""

    def workers(self, method: str, *args: str) -> list[Any]:
        """Call a method of the workers that run the model. Returns their JSON answers."""


class WeightTransport(Protocol):
    """Moves the bytes of a push to every server at once."""

    def send(
        self, tensors: Iterable[tuple[str, torch.Tensor]], servers: Sequence[WeightReceiverCalls], base: str = ""
    ) -> None:
        """Send what an update has to send. Returns when every server has loaded it. After a failure all agreements with servers
        are void.

        Args:
            base: as in `WeightReceiver.load`.

        Raises:
            EngineLost: a server did not take part until the end.
        """

    def forget(self) -> None:
        """Drop all agreements with the servers. The next `send` makes new ones."""

    def close(self) -> None:
        """Release memory and connections."""
