"""What a weight transport is to a server engine. Implemented in `sync/`, which stands above this room."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch


class WeightReceiverCalls(Protocol):
    """What a transport may ask of one server."""

    def init_transfer(self, info: dict[str, Any]) -> None:
        """Agree with the server's worker on how bytes will come."""

    def update_weights(self, info: dict[str, Any]) -> None:
        """Have the worker take one chunk; returns when it has been loaded."""

    def worker(self, method: str, *args: str) -> Any:
        """Call a method of the worker that runs the model; its JSON answer."""


class WeightTransport(Protocol):
    """Moves the bytes of a push to every server at once."""

    name: str

    def send(self, tensors: Iterable[tuple[str, torch.Tensor]], servers: Sequence[WeightReceiverCalls]) -> None:
        """Send all tensors; returns when every server has loaded every one.

        Raises:
            EngineLost: a server did not take part to the end.
        """

    def forget(self) -> None:
        """Drop what was agreed with the servers; the next `send` agrees anew."""

    def close(self) -> None:
        """Release memory and connections."""
