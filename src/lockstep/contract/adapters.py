"""The part of an engine that receives adapters alone. It is called in this order:

    begin → reserved: (the base model, if the engine holds another one) → load → read_back → commit

Every push of an adapter has a new name. This name is part of the keys of vLLM's prefix cache. Therefore a request
never finds keys and values of older weights there. Each request names its adapter, and the engine keeps the adapter
until the last of these requests has ended.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch

from lockstep.contract.tensors import LoadedWeights

# Suffixes of the names of an adapter's two tensors. The name of the adapted layer comes before them.
DOWN, UP = ".lora_A.weight", ".lora_B.weight"


@dataclass(frozen=True, slots=True)
class AdapterLimits:
    """The limits with which an engine was started.

    Attributes:
        rank: largest rank of an adapter.
        dtype: dtype in which the engine keeps adapters.
    """

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
        """Stamp the base model that was pushed with its digest.

        The engine answers no request before an adapter is committed.
        """

    def begin(self) -> None:
        """Refuse to generate until `commit`, and remove this run's adapters that no request uses."""

    def load(self, version: int, tensors: Iterable[tuple[str, torch.Tensor]]) -> LoadedWeights:
        """Add an adapter under a new name. Requests do not use it yet.

        Args:
            tensors: for each adapted layer the tensors A and scaling × B, named by the layer with the suffixes `DOWN`
                and `UP`.

        Returns:
            The tensors that arrived.

        Raises:
            InputError: there is no room for another adapter.
        """

    def read_back(self) -> LoadedWeights:
        """The tensors of the new adapter, read back from the memory that the engine computes with.

        `untouched` names the tensors
        for which the engine has no layer."""

    def commit(self, version: int) -> None:
        """Serve again.

        Every new request uses the new adapter; each older request ends with the adapter that it began with.
        """

    def probe(self, layers: Sequence[str], seed: int) -> dict[str, torch.Tensor]:
        """Outputs of adapted layers for the probe vector of the layer's name (`contract/probe.py`).

        Returns:
            (3, outputs) float32 per layer: the outputs with the adapter, the outputs without it, and their difference.
        """
