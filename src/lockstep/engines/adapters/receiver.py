"""The half of an engine that receives adapters alone: what `sync/adapters/push.py` calls, in this order.

    begin → reserved: (base, if it is another one) → load → held → commit

An engine gets every push of an adapter under a name of its own. vLLM's prefix cache has this name in its keys, so that keys and
values of older weights are never found. Requests name the adapter, and it stays in the engine until the last of them has ended.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch

from lockstep.engines.protocol import LoadedWeights

# Ends of the names of an adapter's two tensors, behind the name of the layer that it adapts.
DOWN, UP = ".lora_A.weight", ".lora_B.weight"


@dataclass(frozen=True, slots=True)
class AdapterLimits:
    """What an engine was started with.

    Attributes:
        rank: largest rank of an adapter.
        dtype: dtype in which the engine keeps adapters.
    """

    rank: int
    dtype: torch.dtype


class AdapterReceiver(Protocol):
    """Receives adapters. `sync/adapters/push.py` calls it."""

    @property
    def limits(self) -> AdapterLimits | None:
        """None: the engine was started without LoRA."""

    def base_digest(self) -> str:
        """The digest of the last whole push that the engine received, computed by the engine; empty: it received none."""

    def reserved(self) -> AbstractContextManager[None]:
        """Inside the context no other run changes the engine's base or adapters.

        Raises:
            InputError: another run does not end its push within the time limit.
        """

    def check_alone(self) -> None:
        """Check that the base model may be replaced.

        Raises:
            InputError: the engine holds adapters of other runs, which need its base model as it is.
        """

    def commit_base(self, digest: str) -> None:
        """Name the base model that was pushed. The engine serves no token before an adapter is committed."""

    def begin(self) -> None:
        """Refuse to generate until `commit`, and remove own adapters that no request uses."""

    def load(self, version: int, tensors: Iterable[tuple[str, torch.Tensor]]) -> LoadedWeights:
        """Add an adapter under a new name. Requests do not use it yet.

        Args:
            tensors: for each adapted layer its tensors A and scaling × B, under the layer's name with `DOWN` and `UP`.

        Returns:
            The tensors that arrived.

        Raises:
            InputError: there is no room for another adapter.
        """

    def held(self) -> LoadedWeights:
        """The tensors of the new adapter as the engine computes with them, read back from its memory. `untouched` are the names
        for which the engine has no place."""

    def commit(self, version: int) -> None:
        """Serve again: every new request uses the new adapter. Requests that began earlier end with the adapter they began with."""

    def probe(self, layers: Sequence[str], seed: int) -> dict[str, torch.Tensor]:
        """Per adapted layer, (3, outputs) float32: its outputs with the adapter, without it, and their difference, for the probe
        vector of the layer's name (`engines/probe.py`)."""
