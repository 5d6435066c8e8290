"""The engine's own record of the tensors that it holds. A later push may leave out what did not change since.

The transformers engine and vLLM's worker (`sync/vllm/backend.py`) keep one each. `sync/push.py` compares it with the manifest of
the new version: the record has every tensor of the version, whether this push has sent it or an earlier one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from lockstep.engines.protocol import LoadedWeights, TensorSpec
from lockstep.engines.tensor_specs import digest_of_all


class HeldWeights:
    """What an engine has loaded, tensor by tensor, described from the arrived tensors themselves.

    Attributes:
        digest: of all tensors; empty during an update, and after an update that did not end.
    """

    def __init__(self) -> None:
        self.digest = ""
        self._known = ""
        self._specs: dict[str, TensorSpec] = {}
        self._written: set[str] = set()
        self._arrived: list[TensorSpec] = []
        self._now: set[str] = set()
        self._refused = False

    @property
    def written_now(self) -> set[str]:
        """The engine's parameters that this update has written."""
        return self._now

    def open(self) -> None:
        """Begin an update. Until it ends, the engine holds nothing that a later update may build on."""
        self._known, self.digest = self.digest, ""
        self._arrived, self._now, self._refused = [], set(), False

    def builds_on(self, base: str) -> bool:
        """Whether the tensors of this update may be loaded.

        Args:
            base: digest of the weights that the update changes; empty: it has all tensors, and older ones do not count.
        """
        if not base:
            self._specs.clear()
            self._written.clear()
        self._refused = bool(base) and base != self._known
        return not self._refused

    def refuse(self) -> None:
        """Load nothing more: something is missing that this update builds on."""
        self._refused = True

    def add(self, specs: Sequence[TensorSpec], written: Iterable[str]) -> None:
        """Record tensors that were loaded, and the engine's parameters that they were written into."""
        self._arrived += specs
        self._now.update(written)

    def close(self, parameters: Iterable[str], half_loaded: tuple[str, ...] = ()) -> LoadedWeights:
        """End the update.

        Args:
            parameters: all parameters of the engine.
            half_loaded: layers that received only some of their elements.

        Returns:
            The acknowledgement: the tensors that arrived in this update, and those that the engine holds from earlier ones.
        """
        if self._refused:
            return LoadedWeights((), (), unknown_base=True)
        arrived = {spec.name: spec for spec in self._arrived}
        kept = tuple(spec for name, spec in self._specs.items() if name not in arrived)
        self._specs |= arrived
        self._written |= self._now
        missing = tuple(name for name in parameters if name not in self._written)
        self.digest = digest_of_all(tuple(self._specs.values()))
        return LoadedWeights((*self._arrived, *kept), missing + half_loaded)
