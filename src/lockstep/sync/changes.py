"""Decides what a push sends: everything, or only what changed since the engine's last proven version.

The weights come from a source (`sync/source.py`, `sync/adapters/merged.py`). Engines and transports read an `Update` once.

- A tensor whose digest did not change is left out. It is sent nevertheless if another tensor of the same part of a layer changed:
  engines fuse such tensors (q, k and v become one), and load all parts of a fused tensor or none.
- To servers over a network (`sync/wire/gloo.py`), only the changed elements of a tensor are sent. For this, the trainer keeps a
  copy of what it has sent (`sync/wire/deltas.py`).
- Everything is sent if the last push was not proven (`Sent.forget`), or if the engine does not hold it (`sync/push.py`).

The manifest describes all tensors of the version, also those that are not sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from lockstep.engines.protocol import TensorSpec
from lockstep.engines.tensor_specs import begin_specs, described, tensor_specs
from lockstep.errors import LockstepError
from lockstep.sync.source import Manifest, PlainSource, read_to_the_end
from lockstep.sync.wire.chunks import Named
from lockstep.sync.wire.deltas import NOTHING, Changes, Piece, changes_between, part_of


class Sent:
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
    """The tensors of one push. It may be read once. The digest of each tensor is computed while the receiver uses the tensor.

    Iterating gives the names and tensors that an engine must load.

    Args:
        dtype: dtype to which wider floating-point tensors are cast, one by one, when they are read; None: nothing is cast.
        sent: the record of the last push to the engine. It stays empty until this push is proven.

    Attributes:
        recorded: whether a later update may build on this one.
        base: digest of the weights that the engine must hold before the update; empty: everything is sent.
        sent_bytes: size of what was sent.
        differing: number of elements that differ from those of the last push; None: they were not counted.

    Raises:
        LockstepError: a tensor could not be made. This is raised while the update is read.
    """

    def __init__(self, source: PlainSource, dtype: torch.dtype | None = None, sent: Sent | None = None) -> None:
        self._source, self._dtype = source, dtype
        self.recorded, self._sent = sent is not None, Sent() if sent is None else sent
        before = self._sent.manifest
        self._sent.forget()
        self._before = {} if before is None else {spec.name: spec for spec in before.tensors}
        self.base = "" if before is None else before.digest
        self._specs: tuple[TensorSpec, ...] | None = None
        self.sent_bytes = 0
        self.differing: int | None = None

    @property
    def own_memory(self) -> bool:
        """Whether the tensors are the model's own memory. They are not if the source makes new tensors, or if they are cast."""
        return self._source.own_memory and self._dtype is None

    @property
    def bytes(self) -> int:
        """Size of all tensors of the version in bytes, after the cast."""
        return sum(tensor.nbytes for _, tensor in self.outline())

    @property
    def elements(self) -> int:
        """Number of elements of all tensors of the version."""
        return sum(tensor.numel() for _, tensor in self.outline())

    def outline(self) -> Iterator[Named]:
        """All tensors of the version, sent or not, in the order of `pieces`, without their memory (device `meta`)."""
        shapes = dict(self._source.outline())
        return _cast(((name, shapes[name]) for name in self._names()), self._dtype)

    def manifest(self, version: int) -> Manifest:
        """The manifest of all tensors of the version."""
        if self._specs is None:
            self._specs = read_to_the_end(self._read(self._names()))
        return Manifest(version, self._specs)

    def __iter__(self) -> Iterator[Named]:
        for name, piece in self.pieces():
            if not isinstance(piece, Changes):
                yield name, piece

    def pieces(self, *, deltas: bool = False) -> Iterator[Piece]:
        """What is sent of every tensor of the version: the whole tensor, or its changed elements (`NOTHING` if there are none).

        Args:
            deltas: whether the receiver keeps a copy of what it is sent, so that the changed elements of a tensor are enough.
        """
        specs: list[TensorSpec] = []
        self.sent_bytes, self.differing = 0, 0 if deltas and self.base else None
        try:
            for name, piece in self._changed_elements(specs) if deltas else self._changed_parts(specs):
                self.sent_bytes += piece.raw.nbytes if isinstance(piece, Changes) else piece.nbytes
                yield name, piece
                # Free this tensor before the next one is made.
                del piece
        except RuntimeError as error:
            # For example, the trainer is out of memory. The caller reads a RuntimeError as the loss of the engine.
            raise LockstepError(f"the trainer could not prepare the weights for the push: {error}") from error
        self._specs = tuple(specs)

    # ---- what changed -----------------------------------------------------------------------------------------------

    def _changed_parts(self, specs: list[TensorSpec]) -> Iterator[Piece]:
        """Whole tensors. Parts of the model in which no digest changed are left out."""
        self._sent.copies.clear()
        if not self.base:
            yield from described(self._read(self._names()), specs)
            return
        if self.own_memory:
            # Start to compute all digests in the background. `tensor_specs` uses these results below (`one_push`).
            begin_specs(list(self._source))
        for names in self._parts():
            yield from self._part(names, specs)

    def _part(self, names: list[str], specs: list[TensorSpec]) -> Iterator[Piece]:
        same: list[TensorSpec] = []
        tensors = self._read(names)
        for name, tensor in tensors:
            (spec,) = tensor_specs([(name, tensor)])
            if self._is_same(spec):
                same.append(spec)
                continue
            # Read the earlier tensors of this part a second time, because they were not kept in memory.
            specs += same
            yield from self._read(own.name for own in same)
            specs.append(spec)
            yield name, tensor
            del tensor
            yield from described(tensors, specs)
            return
        specs += same
        yield from ((name, NOTHING) for name in names)

    def _is_same(self, spec: TensorSpec) -> bool:
        return self._before.get(spec.name) == spec

    def _changed_elements(self, specs: list[TensorSpec]) -> Iterator[Piece]:
        """The changed elements of each tensor, or the whole tensor if that is smaller."""
        for name, tensor in described(self._read(self._names()), specs):
            yield name, self._changes(name, tensor.detach().contiguous().cpu())

    def _changes(self, name: str, new: torch.Tensor) -> torch.Tensor | Changes:
        copies = self._sent.copies
        held = copies.get(name)
        if held is None or (held.shape, held.dtype) != (new.shape, new.dtype):
            # A push without a base, or the first one that sends changed elements.
            copies[name] = new.clone()
            self.differing = None
            return new
        differing, changes = changes_between(held, new) if self.base else (0, None)
        if changes is not NOTHING:
            held.copy_(new)
        if self.differing is not None:
            self.differing += differing
        return new if changes is None else changes

    # ---- reading ----------------------------------------------------------------------------------------------------

    def _parts(self) -> Iterable[list[str]]:
        """The names of all tensors, by part of the model."""
        parts: dict[str, list[str]] = {}
        for name, _ in self._source.outline():
            parts.setdefault(part_of(name), []).append(name)
        return parts.values()

    def _names(self) -> Iterator[str]:
        return (name for names in self._parts() for name in names)

    def _read(self, names: Iterable[str]) -> Iterator[Named]:
        return _cast(((name, self._source.tensor(name)) for name in names), self._dtype)


def outline(tensors: Iterable[Named]) -> Iterable[Named]:
    """Names, dtypes and shapes of the tensors that `pieces` will give. A source does not make its tensors for this."""
    return tensors.outline() if isinstance(tensors, PlainSource | Update) else tensors


def is_recorded(tensors: Iterable[Named]) -> bool:
    """Whether a later update may build on these tensors. Copies of them are kept only for this."""
    return tensors.recorded if isinstance(tensors, Update) else True


def pieces(tensors: Iterable[Named], *, deltas: bool = False) -> Iterator[Piece]:
    """What is sent of each tensor: the pieces of an `Update`, or the tensors themselves."""
    return tensors.pieces(deltas=deltas) if isinstance(tensors, Update) else iter(tensors)


def _cast(tensors: Iterable[Named], dtype: torch.dtype | None) -> Iterator[Named]:
    for name, tensor in tensors:
        is_wider = dtype is not None and tensor.is_floating_point() and tensor.itemsize > dtype.itemsize
        yield name, tensor.to(dtype) if is_wider else tensor
