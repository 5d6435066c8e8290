"""One push of the trainer's weights into an engine. The order of steps is the same for every engine, and it is the only safe one:

stop serving → load → compare what arrived with the manifest, and the manifest with the live model → reset caches → commit the
version → serve.

The weights come from `sync/source.py`, and `sync/changes.py` decides which of them are sent. They go to the receiving half of an
engine. If a step fails, the engine stays closed, because a half-updated engine must never serve a token.

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
from dataclasses import dataclass
from typing import Protocol

import torch

from lockstep.contract.device_digest import key_for
from lockstep.contract.protocol import LoadedWeights, TensorSpec, WeightReceiver
from lockstep.contract.tensors import one_push
from lockstep.errors import InputError, ProofError
from lockstep.models.loaded_checks import listed
from lockstep.sync.adapters.merged import weights_of
from lockstep.sync.changes import LastPush, Update
from lockstep.sync.live import check_live
from lockstep.sync.source import Manifest

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

    The model is only read. A model with an adapter is sent merged (`sync/adapters/merged.py`). Only what changed since the last
    push is sent (`sync/changes.py`). If the engine does not hold the version afterwards, all weights are sent once. After a failure
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
