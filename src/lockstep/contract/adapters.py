"""The part of an engine that receives adapters alone. It is called in this order:

    begin → reserved: (the base model, if the engine holds another one) → load → read_back → commit

Every push of an adapter has a new name, which is part of the keys of vLLM's prefix cache. Therefore a request never
finds keys and values of older weights there. Each request names its adapter, and the engine keeps the adapter until
the last of these requests has ended.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch

from lockstep.contract.tensors import LoadedWeights

# Suffixes of the names of an adapter's two tensors. The name of the adapted layer comes before them.
DOWN, UP = ".lora_A.weight", ".lora_B.weight"


@dataclass(frozen=True, slots=True)
class AdapterLimits:
    """The limits with which an engine was started: the largest rank, and the dtype in which it keeps adapters."""

    rank: int
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class UsedAdapter:
    """The adapter of a request.

    Attributes:
        stamp: the engine's stamp of the base model with which the adapter was proven.
    """

    name: str
    version: int
    stamp: str

    @property
    def versions(self) -> dict[str, int]:
        """The weight version of each stamp that the request's tokens may have."""
        return {self.stamp: self.version}


class NoAdapters:
    """Of an engine without LoRA: it receives no adapter, and requests use the engine's own weights."""

    limits = name = request = None

    def used(self) -> AbstractContextManager[None]:
        """A request uses no adapter."""
        return nullcontext()

    def nothing(self, *given: object) -> None:
        """There is no adapter that this would concern."""

    check_whole_push_allowed = use_none = forget = leave_server = forget_servers = name_as = close = nothing


class AdapterReceiver(Protocol):
    """An engine that receives adapters."""

    @property
    def limits(self) -> AdapterLimits | None:
        """The engine's limits; None: it was started without LoRA."""

    def base_digest(self) -> str:
        """The digest of the last push of whole weights, as the engine computed it; empty: it received none."""

    def reserved(self) -> AbstractContextManager[None]:
        """Inside the context no other run changes the engine's base or adapters.

        Raises:
            InputError: another run did not end its push within the time limit.
        """

    def check_base_replaceable(self) -> None:
        """Check that the base model may be replaced.

        Raises:
            InputError: the engine holds adapters of other runs, which need its present base model.
        """

    def commit_base(self, digest: str) -> None:
        """Stamp the pushed base with its digest. The engine answers no request before an adapter is committed."""

    def begin(self) -> None:
        """Refuse to generate until `commit`, and remove this run's adapters that no request uses."""

    def load(self, version: int, tensors: Iterable[tuple[str, torch.Tensor]]) -> LoadedWeights:
        """Add an adapter under a new name, which requests do not use yet. Returns the tensors that arrived.

        Args:
            tensors: for each adapted layer the tensors A and scaling × B, named by the layer with the suffixes `DOWN`
                and `UP`.

        Raises:
            InputError: there is no room for another adapter.
        """

    def read_back(self) -> LoadedWeights:
        """The tensors of the new adapter, read back from the memory that the engine computes with.

        `untouched` names the tensors for which the engine has no layer.
        """

    def commit(self, version: int) -> None:
        """Serve again: new requests use the new adapter; each older one ends with the adapter that it began with."""

    def probe(self, layers: Sequence[str], seed: int) -> dict[str, torch.Tensor]:
        """(3, outputs) float32 per layer, for the probe vector of the layer's name (`contract/probe.py`).

        They are the outputs with the adapter, the outputs without it, and their difference.
        """
