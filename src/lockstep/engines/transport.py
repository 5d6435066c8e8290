"""What a weight transport is to a server engine. Implemented in `sync/`, which stands above this room."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import Future, wait
from typing import Any, Protocol, TypeVar

import torch

T = TypeVar("T")


def finish_all(pending: Sequence[Future[T]]) -> list[T]:
    """Results of what runs on several servers; every one is waited for before the first error is raised.

    So that no server still reads what the caller is about to change.
    """
    wait(pending)
    return [future.result() for future in pending]


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
        """Send all tensors; returns when every server has loaded every one.

        Raises:
            EngineLost: a server did not take part to the end.
        """

    def forget(self) -> None:
        """Drop what was agreed with the servers; the next `send` agrees anew."""

    def close(self) -> None:
        """Release memory and connections."""
