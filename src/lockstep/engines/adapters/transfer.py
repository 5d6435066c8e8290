"""The calls by which a transport sends an adapter to the workers of one engine. The engine's own weights do not change.

It works for servers and for worker processes beside the trainer.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

from lockstep.contract.tensors import LoadedWeights


class WorkerCalls(Protocol):
    """The part of `WeightReceiverCalls` that does not change weights."""

    url: str
    world_size: int
    available_bytes: int

    def workers(self, method: str, *args: str) -> list[Any]:
        """Call a method on every worker. Returns what each of them answers."""


class AdapterCalls:
    """A `WeightReceiverCalls` whose tensors are those of an adapter.

    Args:
        receiver: the workers that receive the adapter.

    Attributes:
        arrived: each worker's description of the tensors that arrived.
    """

    def __init__(self, receiver: WorkerCalls) -> None:
        self.url, self.world_size, self._receiver = receiver.url, receiver.world_size, receiver
        self.available_bytes = receiver.available_bytes
        self._name = self._segment = ""
        self.arrived: list[Any] = []

    def begin(self, name: str) -> None:
        """Begin the transfer of an adapter of this name."""
        self._name, self.world_size, self.arrived = name, self._receiver.world_size, []

    def init_transfer(self, info: dict[str, Any]) -> None:
        self._segment = info["segment"]
        self.workers("lockstep_open_segment", json.dumps(info))

    def update_weights(self, info: dict[str, Any]) -> None:
        self.arrived = self.workers("lockstep_keep_adapter", self._name, json.dumps(info), self._segment)

    def workers(self, method: str, *args: str) -> list[Any]:
        return self._receiver.workers(method, *args)


def one_acknowledgement(found: Sequence[LoadedWeights]) -> LoadedWeights:
    """The acknowledgements of several workers or servers as one."""
    first, *others = found
    return replace(first, others=tuple(others))
