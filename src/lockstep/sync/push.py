"""One push of the trainer's weights into an engine. The order of steps is the same for every engine, and it is the only safe one:

stop serving → load → compare what arrived with the manifest, and the manifest with the live model → reset caches → commit the
version → serve.

The weights come from `sync/source.py`, `sync/changes.py` decides which of them are sent, and they go to the receiving half of an
engine. If a step fails, the engine stays closed,
because a half-updated engine must never serve a token.
"""

from __future__ import annotations

import logging
import time
import weakref
from contextlib import nullcontext
from dataclasses import dataclass

import torch

from lockstep.engines.protocol import LoadedWeights, TensorSpec, WeightReceiver
from lockstep.engines.tensor_specs import one_push
from lockstep.errors import ProofError
from lockstep.sync.adapters.merged import weights_of
from lockstep.sync.changes import Sent, Update
from lockstep.sync.live import check_live
from lockstep.sync.source import Manifest

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SyncRecord:
    """The result of one push; one line of the receipt.

    Attributes:
        digest: of all tensors of the version, sent or not.
        tensors: number of these tensors.
        bytes: their size.
        seconds: time that the push took.
        sent_bytes: size of what was sent of them, to each worker.
        changed: share of the elements that changed since the last push; None if they were not counted. They are counted where only
            changed elements are sent.
        in_full: why everything was sent although the engine had an earlier version; empty: it was not, or there was none.
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


# What each engine was sent last. An engine that is gone is no longer in it.
_SENT: weakref.WeakKeyDictionary[WeightReceiver, Sent] = weakref.WeakKeyDictionary()


def forget_push(engine: WeightReceiver) -> None:
    """Send everything in the engine's next push, because the last version was not proven."""
    _SENT.setdefault(engine, Sent()).forget()


def drop_record(engine: WeightReceiver) -> None:
    """Free what is kept of an engine's pushes: it will get no more."""
    _SENT.pop(engine, None)


def push_weights(model: torch.nn.Module, engine: WeightReceiver, version: int) -> SyncRecord:
    """Load the weights of `model` into an engine and commit them as `version`.

    The model is only read. A model with an adapter is sent merged (`sync/adapters/merged.py`). Only what changed since the last
    push is sent (`sync/changes.py`). If the engine then does not hold the version, everything is sent, once. After a failure the
    engine refuses to generate until a later push succeeds.

    Raises:
        InputError: the model has an adapter of a kind that cannot be merged.
        ProofError: what the engine holds differs from the version, some parameters received nothing, what was sent is not the live
            model, or the engine did not confirm the reset of its caches.
    """
    start = time.perf_counter()
    source, sent = weights_of(model), _SENT.setdefault(engine, Sent())
    update, in_full = Update(source, engine.wire_dtype, sent), ""
    with one_push() if update.own_memory else nullcontext(), torch.no_grad():
        try:
            manifest = _loaded(update, engine, version)
        except ProofError as failed:
            if not update.base:
                raise
            in_full = failed.found
            _logger.warning(f"all weights of version {version} are sent, instead of those that changed: {in_full}")
            update = Update(source, engine.wire_dtype, sent)
            manifest = _loaded(update, engine, version)
        check_live(model, source, manifest.tensors, engine.wire_dtype, version)
    if not engine.reset_caches():
        raise ProofError(
            "caches",
            f"the engine did not confirm the reset of its caches for version {version}",
            "requests are still running in the engine, so cached keys and values of older weights stay in use",
            "finish or abort every request before pushing weights",
        )
    engine.commit_version(version)
    sent.manifest = manifest
    return SyncRecord(
        version,
        manifest.digest,
        len(manifest.tensors),
        update.bytes,
        time.perf_counter() - start,
        update.sent_bytes,
        None if update.differing is None else update.differing / update.elements,
        in_full,
    )


def _loaded(update: Update, engine: WeightReceiver, version: int) -> Manifest:
    """The manifest of a version that the engine has loaded.

    Raises:
        ProofError: the engine does not hold what the manifest says.
    """
    engine.begin_update()
    loaded = engine.load(update, update.base)
    for one in (loaded, *loaded.others):
        if one.unknown_base:
            raise ProofError(
                "manifest",
                f"the engine{_at(one)} does not hold the version that was pushed last",
                "it was started again, or another trainer has pushed since",
                "nothing: all weights are sent",
            )
    manifest = update.manifest(version)
    check_loaded(manifest, loaded)
    return manifest


def check_loaded(manifest: Manifest, loaded: LoadedWeights) -> None:
    """Compare an engine's acknowledgement with the manifest of the version.

    Raises:
        ProofError: a tensor is missing, unexpected, or of another shape, dtype or content, or an engine parameter received
            nothing. The message names the server if there are several.
    """
    for one in loaded.others:
        check_loaded(manifest, one)
    where = _at(loaded)
    sent, arrived = {t.name: t for t in manifest.tensors}, {t.name: t for t in loaded.tensors}
    odd = [
        n for n in sent.keys() | arrived.keys() if n not in sent or n not in arrived or sent[n][:3] != arrived[n][:3]
    ]
    if odd or len(manifest.tensors) != len(loaded.tensors):
        first = min(odd, default="none by name")
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


def _at(loaded: LoadedWeights) -> str:
    return f" at {loaded.server}" if loaded.server else ""


def _described(tensor: TensorSpec | None) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}" if tensor else "nothing"
