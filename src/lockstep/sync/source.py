"""The trainer's weights as a stream of named tensors, and the manifest that describes the stream.

The trained model is the source and is only read. The module probe compares the engine with the same tensors. Models
with adapters have a source of their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from lockstep.contract.protocol import TensorSpec
from lockstep.contract.tensors import Begun, described, digest_of_all, finished
from lockstep.models.checkpoint_names import checkpoint_tensors
from lockstep.shards.model import sharded


@dataclass(frozen=True, slots=True)
class Manifest:
    """The weights of one version: its number, and the name, dtype, shape and byte digest of every tensor, in order."""

    version: int
    tensors: tuple[TensorSpec, ...]

    @property
    def digest(self) -> str:
        """Hex digest of the whole version. Equal digests mean equal names, dtypes, shapes and bytes."""
        return digest_of_all(self.tensors)


class PlainSource:
    """Weights of a model, under the names of its checkpoint (`models/checkpoint_names.py`).

    Tied parameters occur once, under their first name.

    A source can be read several times, and equal weights give equal bytes. Every push makes a new source. If the model is sharded,
    each tensor is gathered from all ranks when it is read. Then the rank that holds the engine reads the source, inside a call of
    `Ranks`.
    """

    # Whether the tensors are the model's own memory. If not, they are new tensors that are made to be read once.
    is_model_memory = True

    def __init__(self, model: torch.nn.Module) -> None:
        self._model, self._shards = model, sharded(model)
        if self._shards is not None:
            self.is_model_memory = False
        placed = checkpoint_tensors(model)
        self._parameters = {p.name: p.tensor for p in placed}
        self._own_names = {p.name: p.parameter_name for p in placed}
        firsts: dict[int, str] = {}
        self._first = {name: firsts.setdefault(id(p), name) for name, p in self._parameters.items()}

    @property
    def names(self) -> tuple[str, ...]:
        """All names of all tensors, including every name of a tied tensor."""
        return tuple(self._first)

    def first_name(self, name: str) -> str:
        """The name under which a tensor is sent: its own, or the first name of the tensors tied to it."""
        return self._first[name]

    def tensor(self, name: str) -> torch.Tensor:
        """The tensor that an engine should hold under `name`. Do not write into it."""
        if self._shards is not None:
            return self._shards.gather(self._parameters[name])
        return self._parameters[name].detach()

    def shape(self, name: str) -> torch.Size:
        """Shape of a tensor, without making it."""
        return self._meta_tensor(name).shape

    def owning_module(self, name: str) -> torch.nn.Module:
        """The module that owns a tensor, without PEFT's wrapper. A module with several experts owns the tensors of all of them."""
        return self._model.get_submodule(self._own_names[name].rpartition(".")[0])

    def meta_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The same names, shapes and dtypes as iterating, with tensors that have no memory (device `meta`)."""
        for name in self._sent_names():
            yield name, self._meta_tensor(name)

    def manifest(self, version: int) -> Manifest:
        """Read the whole source and describe its current content."""
        return Manifest(version, read_specs(self))

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name in self._sent_names():
            yield name, self.tensor(name)

    def _meta_tensor(self, name: str) -> torch.Tensor:
        known = self._parameters[name]
        # `empty_like` of a sharded tensor would be sharded.
        return (
            torch.empty(known.shape, dtype=known.dtype, device="meta")
            if self._shards
            else torch.empty_like(known, device="meta")
        )

    def _sent_names(self) -> Iterator[str]:
        return (name for name, first in self._first.items() if name == first)


def read_specs(tensors: Iterable[tuple[str, torch.Tensor]]) -> tuple[TensorSpec, ...]:
    """Read a stream, and describe its tensors."""
    specs: list[TensorSpec | Begun] = []
    for _ in described(tensors, specs):
        pass
    return finished(specs)
