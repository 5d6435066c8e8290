"""What a weight transport is to a server engine. Implemented in `sync/`, which stands above this room."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import Future, wait
from itertools import accumulate
from typing import Any, Protocol, TypeVar

import torch

T = TypeVar("T")


def finish_all(pending: Sequence[Future[T]]) -> list[T]:
    """Results of what runs on several servers; every one is waited for before the first error is raised.

    So that no server still reads what the caller is about to change.
    """
    wait(pending)
    return [future.result() for future in pending]


def check_pending(pending: Sequence[Future[None]]) -> None:
    """Raise the error of one that has failed, while the others still run."""
    for future in pending:
        if future.done() and (error := future.exception()) is not None:
            raise error


def worker_ranks(servers: Sequence[WeightReceiverCalls], first: int) -> list[int]:
    """The rank of each server's first worker, the workers of all counted from `first`; at the end the rank behind the last."""
    return list(accumulate((server.world_size for server in servers), initial=first))


class WeightReceiverCalls(Protocol):
    """What a transport may ask of one server.

    Attributes:
        url: where it is.
        world_size: how many workers share its model; each of them takes every byte.
    """

    url: str
    world_size: int

    def init_transfer(self, info: dict[str, Any]) -> None:
        """Agree with the server's workers on how bytes will come."""

    def update_weights(self, info: dict[str, Any]) -> None:
        """Have the workers take the chunks of a push; returns when they have been loaded."""

    def workers(self, method: str, *args: str) -> list[Any]:
        """Call a method of the workers that run the model; their JSON answers."""


class WeightTransport(Protocol):
    """Moves the bytes of a push to every server at once."""

    def send(self, tensors: Iterable[tuple[str, torch.Tensor]], servers: Sequence[WeightReceiverCalls]) -> None:
        """Send all tensors; returns when every server has loaded every one. After a failure nothing agreed stands.

        Raises:
            EngineLost: a server did not take part to the end.
        """

    def forget(self) -> None:
        """Drop what was agreed with the servers; the next `send` agrees anew."""

    def close(self) -> None:
        """Release memory and connections."""
