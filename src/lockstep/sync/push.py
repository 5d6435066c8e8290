"""One push of the trainer's weights into an engine. The order of steps is the same for every engine, and it is the only safe one:

stop serving → load → compare what arrived with the manifest, and the manifest with the live model → reset caches → commit the
version → serve.

If a step fails, the engine stays closed, because a half-updated engine must never serve a token. The weights come from a source
(`sync/source.py`). An `Update` decides what is sent: everything, or only what changed since the engine's last proven version.
Engines and transports read it once.

- A tensor whose digest did not change is left out. It is sent nevertheless if another tensor of the same part of a layer changed:
  engines fuse such tensors (q, k and v become one), and load all parts of a fused tensor or none.
- To servers over a network, only the changed elements of a tensor are sent. For this, the trainer keeps a
  copy of what it has sent (`sync/wire/deltas.py`).
- Tensors of a GPU that go through main memory are copied there once, and the copies are digested. Tensors that go from GPU to GPU
  are digested there. If the push builds on an earlier one, all digests are computed first, so that the host waits once for them.
- Everything is sent if the last push was not proven (`LastPush.forget`), or if the engine does not hold it.

The manifest describes all tensors of the version, also those that are not sent.

Proof `manifest`, `digest`.
Shows: names, dtypes, shapes and bytes that arrived are those that were sent, and every parameter of the engine
received values.
Does not show: what the engine did with them afterwards.
When: every push.

Proof `caches`.
Shows: the engine confirmed that it holds nothing that was computed from older weights.
Does not show: that the confirmation is true (the gap shows this).
When: every push.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from lockstep.contract.device_digest import key_for
from lockstep.contract.protocol import WeightReceiver
from lockstep.contract.tensors import (
    Begun,
    LoadedWeights,
    TensorSpec,
    begin_specs,
    described,
    digest_under,
    finished,
    host_copy,
    key_of,
    one_push,
    push_key,
)
from lockstep.errors import InputError, LockstepError, ProofError
from lockstep.models.loaded_checks import listed
from lockstep.sync.live import check_live
from lockstep.sync.source import Manifest, PlainSource, read_specs, weights_of
from lockstep.sync.wire.chunks import Named
from lockstep.sync.wire.deltas import NO_CHANGES, Changes, Piece, changes_between, part_of


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
    """The tensors of one push. It may be read once. The digest of each tensor is computed while the receiver uses the tensor.

    Iterating gives the names and tensors that an engine must load.

    Args:
        dtype: dtype to which wider floating-point tensors are cast, one by one, when they are read; None: nothing is cast.
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
        self.can_be_base, self._last_push = last_push is not None, LastPush() if last_push is None else last_push
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
        """Whether the tensors are the model's own memory. They are not if the source makes new tensors, or if they are cast."""
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
        """What is sent of every tensor of the version: the whole tensor, or its changed elements (`NO_CHANGES` if there are none).

        Args:
            deltas: whether the receiver keeps a copy of what it is sent, so that the changed elements of a tensor are enough.
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


_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SyncRecord:
    """The result of one push; one line of the receipt.

    Attributes:
        digest: digest of all tensors of the version, also of those that were not sent.
        tensors: number of these tensors.
        bytes: size of these tensors.
        seconds: time that the push took.
        sent_bytes: number of bytes that were sent to each worker.
        changed: share of the elements that changed since the last push; None if they were not counted. They are counted if only
            changed elements are sent.
        in_full: why all weights were sent although the engine had an earlier version. Empty: only changes were sent, or the engine
            had no earlier version.
    """

    version: int
    digest: str
    tensors: int
    bytes: int
    seconds: float
    sent_bytes: int = 0
    changed: float | None = None
    in_full: str = ""

    def metrics(self) -> dict[str, float]:
        """What was sent, and how long it took, as metrics of a run."""
        counted = {} if self.changed is None else {"push/changed": self.changed}
        return {"push/bytes": float(self.sent_bytes), "push/seconds": self.seconds, **counted}


# The record of the last push to each engine. Entries of engines that no longer exist disappear.
LAST_PUSHES: weakref.WeakKeyDictionary[WeightReceiver, LastPush] = weakref.WeakKeyDictionary()


def forget_push(engine: WeightReceiver) -> None:
    """Send everything in the engine's next push, because the last version was not proven."""
    LAST_PUSHES.setdefault(engine, LastPush()).forget()


class SleepingEngine(WeightReceiver, Protocol):
    """An engine that can give its memory back between two pushes."""

    def sleep(self) -> bool:
        """Give memory back. Returns whether the weights were discarded."""


def let_sleep(engine: SleepingEngine) -> None:
    """Let an engine give its memory back until the next push. If it discards its weights, the next push sends everything."""
    if engine.sleep():
        forget_push(engine)


def drop_record(engine: WeightReceiver) -> None:
    """Free the record of an engine that gets no further push."""
    LAST_PUSHES.pop(engine, None)


def push_weights(model: torch.nn.Module, engine: WeightReceiver, version: int) -> SyncRecord:
    """Load the weights of `model` into an engine and commit them as `version`.

    The model is only read. A model with an adapter is sent merged (`sync/source.py`). Only what changed since the last
    push is sent (`sync/push.py`). If the engine does not hold the version afterwards, all weights are sent once. After a failure
    the engine refuses to generate until a later push succeeds.

    Args:
        version: from 0 to 2^63 − 1.

    Raises:
        InputError: the model has an adapter of a kind that cannot be merged, the engine has no place for one of its weights, or
            `version` is no such number.
        ProofError: what the engine holds differs from the version, some parameters received nothing, what was sent is not the live
            model, or the engine did not confirm the reset of its caches.
    """
    if type(version) is not int or not 0 <= version < 1 << 63:
        raise InputError(f"version={version!r}; a weight version must be a whole number from 0 to 2^63 - 1")
    start = time.perf_counter()
    source, last_push = weights_of(model), LAST_PUSHES.setdefault(engine, LastPush())
    update, in_full = Update(source, engine.wire_dtype, last_push), ""
    with one_push(key_for(model.parameters()), remembers=update.is_model_memory), torch.no_grad():
        try:
            manifest = _load_update(update, engine, version)
        except ProofError as error:
            if not update.base:
                raise
            in_full = error.found
            _logger.warning(f"all weights of version {version} are sent, instead of those that changed: {in_full}")
            update = Update(source, engine.wire_dtype, last_push)
            manifest = _load_update(update, engine, version)
        check_live(model, source, manifest.tensors, engine.wire_dtype, version)
    if not engine.reset_caches():
        raise ProofError(
            "caches",
            f"the engine did not confirm the reset of its caches for version {version}",
            "requests are still running in the engine, so cached keys and values of older weights stay in use",
            "finish or abort every request before pushing weights",
        )
    engine.commit_version(version)
    last_push.manifest = manifest
    return SyncRecord(
        version,
        manifest.digest,
        len(manifest.tensors),
        update.bytes,
        time.perf_counter() - start,
        update.sent_bytes,
        None if update.changed_elements is None else update.changed_elements / update.elements,
        in_full,
    )


def _load_update(update: Update, engine: WeightReceiver, version: int) -> Manifest:
    """Load an update into the engine, and check the engine's acknowledgement. Returns the manifest of the version.

    Raises:
        ProofError: the engine does not hold what the manifest says.
    """
    engine.begin_update()
    loaded = engine.load(update, update.base)
    for each in (loaded, *loaded.others):
        if each.unknown_base:
            raise ProofError(
                "manifest",
                f"the engine{_server_name(each)} does not hold the version that was pushed last",
                "it was started again, or another trainer has pushed since",
                "nothing to do: the trainer sends all weights",
            )
    manifest = update.manifest(version)
    check_loaded(manifest, loaded)
    return manifest


def check_loaded(manifest: Manifest, loaded: LoadedWeights) -> None:
    """Compare an engine's acknowledgement with the manifest of the version.

    Raises:
        ProofError: a tensor is missing or unexpected, has another shape, dtype or content, or an engine parameter received
            nothing. The message names the server if there are several.
        InputError: the engine's model has no place for a tensor.
    """
    for other in loaded.others:
        check_loaded(manifest, other)
    where = _server_name(loaded)
    sent, arrived = {t.name: t for t in manifest.tensors}, {t.name: t for t in loaded.tensors}
    mismatched = [
        n for n in sent.keys() | arrived.keys() if n not in sent or n not in arrived or sent[n][:3] != arrived[n][:3]
    ]
    if mismatched or len(manifest.tensors) != len(loaded.tensors):
        first = min(mismatched, default="none by name")
        raise ProofError(
            "manifest",
            f"{len(manifest.tensors)} tensors were sent and {len(loaded.tensors)} arrived{where}; first difference: {first}, "
            f"sent as {_described(sent.get(first))}, arrived as {_described(arrived.get(first))}",
            "the transport dropped, renamed or converted tensors",
            "this is a defect of the weight transport; report it with this message",
        )
    changed = [name for name in sent if sent[name].digest != arrived[name].digest]
    if changed:
        raise ProofError(
            "digest",
            f"the bytes of {len(changed)} of {len(sent)} tensors differ{where} from those that were sent; the first is "
            f"{changed[0]}",
            "the transport damaged tensors, or the model was changed while it was being sent",
            "do not change the model during a push; otherwise this is a defect of the weight transport: report it",
        )
    if loaded.untouched:
        raise ProofError(
            "manifest",
            f"{len(loaded.untouched)} engine parameters received nothing{where}; the first is {loaded.untouched[0]}",
            "the trained model lacks parameters that the engine serves, or names them differently",
            "give trainer and engine the same model; partial models are not supported",
        )
    _refuse_unstored(loaded)


def _refuse_unstored(loaded: LoadedWeights) -> None:
    if loaded.unstored:
        raise InputError(
            f"the engine{_server_name(loaded)} has no place for {len(loaded.unstored)} of the {len(loaded.tensors)} "
            f"weights that were sent, and has dropped them: {listed(loaded.unstored)}. It would compute another model than the one "
            "that is trained. Set use_vllm to false, or train a model without these weights"
        )


def _server_name(loaded: LoadedWeights) -> str:
    return f" at {loaded.server}" if loaded.server else ""


def _described(tensor: TensorSpec | None) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}" if tensor else "nothing"
