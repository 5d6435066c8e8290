"""The engine's own record of the tensors that it holds. It allows pushes that contain only the tensors that changed.

The transformers engine and vLLM's worker (`sync/vllm/backend.py`) each keep a record. The record contains every tensor of a
version, whether the last push or an earlier one has sent it. `sync/push.py` compares it with the manifest of the new version.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from lockstep.engines.protocol import LoadedWeights, TensorSpec
from lockstep.engines.tensor_specs import digest_of_all


class HeldWeights:
    """The tensors that an engine has loaded, each with a description that was computed from the arrived tensor itself.

    Attributes:
        digest: digest of all tensors; empty during an update, and after an update that did not end.
    """

    def __init__(self) -> None:
        self.digest = ""
        self._earlier_digest = ""
        self._specs: dict[str, TensorSpec] = {}
        self._written: set[str] = set()
        self._arrived: list[TensorSpec] = []
        self._now: set[str] = set()
        self._stored: set[str] = set()
        self._refused = False

    @property
    def written_now(self) -> set[str]:
        """The engine's parameters that this update has written."""
        return self._now

    def open(self) -> None:
        """Begin an update. Until it ends, the engine holds nothing that a later update may build on."""
        self._earlier_digest, self.digest = self.digest, ""
        self._arrived, self._now, self._refused = [], set(), False

    def forget(self) -> None:
        """Forget all tensors, because the engine has lost them. The next update must have all tensors."""
        self.digest = self._earlier_digest = ""
        self._specs.clear()
        self._written.clear()
        self._stored.clear()

    def accepts_base(self, base: str) -> bool:
        """Whether the engine holds the weights that this update changes. Otherwise the update must not be loaded.

        Args:
            base: digest of the weights that the update changes. Empty: the update has all tensors, and the record begins anew.
        """
        if not base:
            self._specs.clear()
            self._written.clear()
            self._stored.clear()
        self._refused = bool(base) and base != self._earlier_digest
        return not self._refused

    def refuse(self) -> None:
        """End the update without loading the rest: the engine lacks something that the update needs."""
        self._refused = True

    def add(self, specs: Sequence[TensorSpec], written: Iterable[str], stored: Iterable[str]) -> None:
        """Record tensors that were loaded.

        Args:
            written: the engine's parameters that the tensors were written into.
            stored: names of the tensors that were written into a parameter.
        """
        self._arrived += specs
        self._now.update(written)
        self._stored.update(stored)

    def close(self, parameters: Iterable[str], half_loaded: tuple[str, ...] = ()) -> LoadedWeights:
        """End the update.

        Args:
            parameters: all parameters of the engine.
            half_loaded: names of layers that received only some of their elements.

        Returns:
            The acknowledgement: the tensors that arrived in this update, and the tensors that the engine holds from earlier
            updates.
        """
        if self._refused:
            return LoadedWeights((), (), unknown_base=True)
        arrived = {spec.name: spec for spec in self._arrived}
        kept = tuple(spec for name, spec in self._specs.items() if name not in arrived)
        self._specs |= arrived
        self._written |= self._now
        missing = tuple(name for name in parameters if name not in self._written)
        unstored = tuple(name for name in self._specs if name not in self._stored)
        self.digest = digest_of_all(tuple(self._specs.values()))
        return LoadedWeights((*self._arrived, *kept), missing + half_loaded, unstored=unstored)
