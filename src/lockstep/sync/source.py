"""The trainer's weights as a stream of named tensors, and the manifest that says what the stream holds.

Comes from: the trained model, which is only read. Goes to: `sync/push.py`, and to the module probe, which compares the engine with
the same tensors. `sync/adapters.py` has the source for models with adapters, and chooses between the two.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from lockstep.engines.protocol import TensorSpec
from lockstep.engines.tensor_specs import described
from lockstep.errors import LockstepError


@dataclass(frozen=True, slots=True)
class Manifest:
    """What one push sends: the version, and name, dtype, shape and byte digest of every tensor in order."""

    version: int
    tensors: tuple[TensorSpec, ...]

    @property
    def digest(self) -> str:
        """Hex digest of the whole push: equal digests mean equal names, dtypes, shapes and bytes."""
        return hashlib.blake2b(json.dumps(self.tensors).encode(), digest_size=16).hexdigest()


class PlainSource:
    """Weights of a model that lies whole in this process. Tied parameters occur once, under their first name.

    May be read several times; equal weights give equal bytes. It is made anew for every push.
    """

    # Whether what is read is the model's own memory, rather than tensors made to be read once.
    own_memory = True

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._parameters: dict[str, torch.Tensor] = dict(model.named_parameters(remove_duplicate=False))
        firsts: dict[int, str] = {}
        self._first = {name: firsts.setdefault(id(p), name) for name, p in self._parameters.items()}

    @property
    def names(self) -> tuple[str, ...]:
        """Every name of every tensor, those of tied ones too."""
        return tuple(self._first)

    def first_name(self, name: str) -> str:
        """The name that a tensor is sent under: its own, or the first of those tied to it."""
        return self._first[name]

    def tensor(self, name: str) -> torch.Tensor:
        """What an engine should hold under `name`. Not to be written to."""
        return self._parameters[name].detach()

    def shape(self, name: str) -> torch.Size:
        """Shape of a tensor, without making it."""
        return self._outline(name).shape

    def holder(self, name: str) -> torch.nn.Module:
        """The plain module that has a tensor as its own."""
        return self._model.get_submodule(name.rpartition(".")[0])

    def outline(self) -> Iterator[tuple[str, torch.Tensor]]:
        """What iterating gives, as tensors without memory (device `meta`)."""
        for name in self._sent():
            yield name, self._outline(name)

    def manifest(self, version: int) -> Manifest:
        """What the source holds now, read to the last byte."""
        return Manifest(version, _read(self))

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name in self._sent():
            yield name, self.tensor(name)

    def _outline(self, name: str) -> torch.Tensor:
        return torch.empty_like(self._parameters[name], device="meta")

    def _sent(self) -> Iterator[str]:
        return (name for name, first in self._first.items() if name == first)


class DescribedSource:
    """A source that a push reads once: its tensors are described while the engine is given them.

    Args:
        dtype: what wider floating-point tensors are cast to, one by one, as they are read; None: nothing is cast.

    Raises:
        LockstepError: as it is read; a tensor could not be made.
    """

    def __init__(self, source: PlainSource, dtype: torch.dtype | None = None) -> None:
        self._source, self._dtype = source, dtype
        self._specs: tuple[TensorSpec, ...] | None = None

    @property
    def own_memory(self) -> bool:
        """As the source has it, where nothing is cast."""
        return self._source.own_memory and self._dtype is None

    @property
    def bytes(self) -> int:
        """Bytes of one push, as it is sent."""
        return sum(tensor.nbytes for _, tensor in self.outline())

    def outline(self) -> Iterator[tuple[str, torch.Tensor]]:
        """As the source gives it, cast."""
        return _cast(self._source.outline(), self._dtype)

    def manifest(self, version: int) -> Manifest:
        """What was sent; of a source that was not read to its end, what should have been."""
        return Manifest(version, _read(_cast(self._source, self._dtype)) if self._specs is None else self._specs)

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        specs: list[TensorSpec] = []
        try:
            yield from described(_cast(self._source, self._dtype), specs)
        except RuntimeError as error:
            # Running out of memory, say: the trainer's own, where the engine would be thought lost.
            raise LockstepError(f"the weights could not be made ready to be sent: {error}") from error
        self._specs = tuple(specs)


def _cast(tensors: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype | None) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in tensors:
        is_wider = dtype is not None and tensor.is_floating_point() and tensor.itemsize > dtype.itemsize
        yield name, tensor.to(dtype) if is_wider else tensor


def _read(tensors: Iterable[tuple[str, torch.Tensor]]) -> tuple[TensorSpec, ...]:
    """Descriptions of a stream, which is read to its end."""
    specs: list[TensorSpec] = []
    for _ in described(tensors, specs):
        pass
    return tuple(specs)


def outline(tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterable[tuple[str, torch.Tensor]]:
    """Names, dtypes and shapes of a stream that will be read later: of a source without making its tensors."""
    return tensors.outline() if isinstance(tensors, PlainSource | DescribedSource) else tensors
