"""The trainer's weights as a stream of named tensors, the manifest that describes it, and what of it a push sends.

The trained model is the source and is only read. The module probe compares the engine with the same tensors. An
`Update` decides what is sent: everything, or only what changed since the engine's last proven version. Engines and
transports read it once.

- A tensor whose digest did not change is left out. It is sent nevertheless if another tensor of the same part of a
  layer changed: engines fuse such tensors (q, k and v become one), and load all parts of a fused tensor or none.
- To servers over a network, only the changed elements of a tensor are sent. For this, the trainer keeps a copy of
  what it has sent (`weights/wire/stream.py`).
- Tensors of a GPU that go through main memory are copied there once, and the copies are digested. Tensors that go
  from GPU to GPU are digested there. If the push builds on an earlier one, all digests are computed first, so that
  the host waits once for them.
- Everything is sent if the last push was not proven (`LastPush.forget`), or if the engine does not hold it.

The manifest describes all tensors of the version, also those that are not sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from lockstep.contract.tensors import (
    Begun,
    TensorSpec,
    begin_specs,
    described,
    digest_of_all,
    digest_under,
    finished,
    host_copy,
    key_of,
    push_key,
)
from lockstep.errors import LockstepError
from lockstep.models.parameters import checkpoint_tensors
from lockstep.shards.model import sharded
from lockstep.weights.wire.stream import NO_CHANGES, Changes, Named, Piece, changes_between, part_of


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
    """Weights of a model, under the names of its checkpoint. Tied parameters occur once, under their first name.

    A source can be read several times, and equal weights give equal bytes. If the model is sharded, each tensor is
    gathered from all ranks when it is read. Then the rank that holds the engine reads the source, inside a call of
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

    @staticmethod
    def unmerged(model: torch.nn.Module) -> dict[str, torch.Tensor]:
        """The model's own tensors that are sent as they are, by name."""
        return {p.name: p.tensor for p in checkpoint_tensors(model)}

    @staticmethod
    def merge_error(
        model: torch.nn.Module, source: PlainSource, name: str, merged: torch.Tensor, version: int
    ) -> tuple[float, float] | None:
        """How far the outputs of a merged weight are from those of the model's own layer, and how far they may be.

        `merged` was sent under `name`; `version` is the seed of the inputs. None: the weight is not merged, or its
        layer cannot be asked alone.
        """
        return None

    def owning_module(self, name: str) -> torch.nn.Module:
        """The module that owns a tensor, without PEFT's wrapper. It may own the tensors of several experts."""
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


# ---- what is sent
# -----------------------------------------------------------------------------------------------------


class LastPush:
    """The trainer's record of the last push to one engine.

    Attributes:
        manifest: the manifest of the last proven push; None: the next push sends everything.
        copies: the tensors as they were sent, if only changed elements are sent.
    """

    def __init__(self) -> None:
        self.manifest: Manifest | None = None
        self.copies: dict[str, torch.Tensor] = {}

    def forget(self) -> None:
        """Send everything in the next push."""
        self.manifest = None


class Update:
    """The tensors of one push, to be read once. Iterating gives the names and tensors that an engine must load.

    The digest of each tensor is computed while the receiver uses the tensor.

    Args:
        dtype: dtype to which wider floating-point tensors are cast, one by one, when they are read; None: none is cast.
        sent: the record of the last push to the engine. It stays empty until this push is proven.

    Attributes:
        can_be_base: whether a later update may build on this one.
        base: digest of the weights that the engine must hold before the update; empty: everything is sent.
        sent_bytes: size of what was sent.
        changed_elements: number of elements that differ from those of the last push; None: they were not counted.

    Raises:
        LockstepError: a tensor could not be made. This is raised while the update is read.
    """

    def __init__(
        self, source: PlainSource, dtype: torch.dtype | None = None, last_push: LastPush | None = None
    ) -> None:
        self._source, self._dtype = source, dtype
        self.can_be_base, self._last_push = (
            last_push is not None,
            LastPush() if last_push is None else last_push,
        )
        last_manifest = self._last_push.manifest
        self._last_push.forget()
        self._before = {} if last_manifest is None else {spec.name: spec for spec in last_manifest.tensors}
        self.base = "" if last_manifest is None else last_manifest.digest
        # Some may still be on a GPU. `manifest` waits for them.
        self._specs: Sequence[TensorSpec | Begun] | None = None
        self._now: dict[str, TensorSpec] | None = None
        self._to_host = False
        self.sent_bytes = 0
        self.changed_elements: int | None = None

    @property
    def is_model_memory(self) -> bool:
        """Whether the tensors are the model's own memory: the source makes no new ones, and none is cast."""
        return self._source.is_model_memory and self._dtype is None

    @property
    def bytes(self) -> int:
        """Size of all tensors of the version in bytes, after the cast."""
        return sum(tensor.nbytes for _, tensor in self.meta_tensors())

    @property
    def elements(self) -> int:
        """Number of elements of all tensors of the version."""
        return sum(tensor.numel() for _, tensor in self.meta_tensors())

    def meta_tensors(self) -> Iterator[Named]:
        """All tensors of the version, sent or not, in the order of `pieces`, without their memory (device `meta`)."""
        shapes = dict(self._source.meta_tensors())
        return _cast(((name, shapes[name]) for name in self._names()), self._dtype)

    def manifest(self, version: int) -> Manifest:
        """The manifest of all tensors of the version."""
        if self._specs is None:
            self._specs = read_specs(self._read(self._names()))
        self._specs = finished(self._specs)
        return Manifest(version, self._specs)

    def __iter__(self) -> Iterator[Named]:
        for name, piece in self.pieces():
            if not isinstance(piece, Changes):
                yield name, piece

    def pieces(self, *, deltas: bool = False, to_host: bool = False) -> Iterator[Piece]:
        """What is sent of every tensor: the whole tensor, or its changed elements (`NO_CHANGES` if there are none).

        Args:
            deltas: whether the receiver keeps what it is sent, so that the changed elements of a tensor are enough.
            to_host: whether the tensors go through main memory. They are then copied there.
        """
        self._to_host = deltas or to_host
        if self._to_host:
            digest_under(None)
        specs: list[TensorSpec | Begun] = []
        self.sent_bytes, self.changed_elements = 0, 0 if deltas and self.base else None
        try:
            for name, piece in self._element_changes(specs) if deltas else self._changed_parts(specs):
                self.sent_bytes += piece.raw.nbytes if isinstance(piece, Changes) else piece.nbytes
                yield name, piece
                # Free this tensor before the next one is made.
                del piece
        except RuntimeError as error:
            # For example, the trainer is out of memory. The caller reads a RuntimeError as the loss of the engine.
            raise LockstepError(f"the trainer could not prepare the weights for the push: {error}") from error
        self._specs = specs

    # ---- what changed -----------------------------------------------------------------------------------------------

    def _changed_parts(self, specs: list[TensorSpec | Begun]) -> Iterator[Piece]:
        """Whole tensors. Parts of the model in which no digest changed are left out."""
        self._last_push.copies.clear()
        if not self.base:
            yield from self._described(self._names(), specs)
            return
        if push_key() is not None:
            self._now = self._digested_like(self._before)
        elif self.is_model_memory and not self._to_host:
            # Start to compute all digests in the background. `begin_specs` uses these results below (`one_push`).
            begin_specs(list(self._source))
        for names in self._parts():
            yield from self._changed_part(names, specs)

    def _changed_part(self, names: list[str], specs: list[TensorSpec | Begun]) -> Iterator[Piece]:
        if self._now is not None:
            if any(name not in self._now or not self.is_same(self._now[name]) for name in names):
                yield from self._described(names, specs)
            else:
                specs += [self._now[name] for name in names]
                yield from ((name, NO_CHANGES) for name in names)
            return
        same: list[TensorSpec] = []
        tensors = self._read(names)
        for name, original in tensors:
            tensor = host_copy(original) if self._to_host else original
            (spec,) = begin_specs([(name, tensor)], copied=[original])()
            if self.is_same(spec):
                same.append(spec)
                continue
            # Read the earlier tensors of this part a second time, because they were not kept in memory.
            specs += same
            earlier_tensors = self._read(earlier.name for earlier in same)
            yield from ((n, host_copy(t) if self._to_host else t) for n, t in earlier_tensors)
            specs.append(spec)
            yield name, tensor
            del tensor, original
            yield from described(tensors, specs, to_host=self._to_host)
            return
        specs += same
        yield from ((name, NO_CHANGES) for name in names)

    def _digested_like(self, before: dict[str, TensorSpec]) -> dict[str, TensorSpec]:
        """The descriptions of all tensors that have a digest with a key in `before`, under their keys there."""
        keyed = {name: spec for name, spec in before.items() if key_of(spec.digest) is not None}
        specs: list[TensorSpec | Begun] = []
        for _ in described(self._read(name for name in self._names() if name in keyed), specs, like=keyed):
            pass
        return {spec.name: spec for spec in finished(specs)}

    def _described(self, names: Iterable[str], specs: list[TensorSpec | Begun]) -> Iterator[Named]:
        return described(self._read(names), specs, to_host=self._to_host)

    def is_same(self, spec: TensorSpec) -> bool:
        """Whether the engine holds a tensor of these bytes."""
        return self._before.get(spec.name) == spec

    def _element_changes(self, specs: list[TensorSpec | Begun]) -> Iterator[Piece]:
        """The changed elements of each tensor, or the whole tensor if that is smaller."""
        for name, tensor in self._described(self._names(), specs):
            yield name, self._changes(name, tensor.detach().contiguous())

    def _changes(self, name: str, new: torch.Tensor) -> torch.Tensor | Changes:
        copies = self._last_push.copies
        copy = copies.get(name)
        if copy is None or (copy.shape, copy.dtype) != (new.shape, new.dtype):
            # A push without a base, or the first one that sends changed elements.
            copies[name] = new.clone()
            self.changed_elements = None
            return new
        differing, changes = changes_between(copy, new) if self.base else (0, None)
        if changes is not NO_CHANGES:
            copy.copy_(new)
        if self.changed_elements is not None:
            self.changed_elements += differing
        return new if changes is None else changes

    # ---- reading ----------------------------------------------------------------------------------------------------

    def _parts(self) -> Iterable[list[str]]:
        """The names of all tensors, by part of the model."""
        parts: dict[str, list[str]] = {}
        for name, _ in self._source.meta_tensors():
            parts.setdefault(part_of(name), []).append(name)
        return parts.values()

    def _names(self) -> Iterator[str]:
        return (name for names in self._parts() for name in names)

    def _read(self, names: Iterable[str]) -> Iterator[Named]:
        return _cast(((name, self._source.tensor(name)) for name in names), self._dtype)


def meta_tensors(tensors: Iterable[Named]) -> Iterable[Named]:
    """Names, dtypes and shapes of the tensors that `pieces` will give. A source does not make its tensors for this."""
    return tensors.meta_tensors() if isinstance(tensors, PlainSource | Update) else tensors


def may_be_base(tensors: Iterable[Named]) -> bool:
    """Whether a later update may build on these tensors. Copies of them are kept only for this."""
    return tensors.can_be_base if isinstance(tensors, Update) else True


def pieces(tensors: Iterable[Named], *, deltas: bool = False, to_host: bool = False) -> Iterator[Piece]:
    """What is sent of each tensor: the pieces of an `Update`, or the tensors themselves."""
    return tensors.pieces(deltas=deltas, to_host=to_host) if isinstance(tensors, Update) else iter(tensors)


def _cast(tensors: Iterable[Named], dtype: torch.dtype | None) -> Iterator[Named]:
    for name, tensor in tensors:
        is_wider = dtype is not None and tensor.is_floating_point() and tensor.itemsize > dtype.itemsize
        yield name, tensor.to(dtype) if is_wider else tensor
