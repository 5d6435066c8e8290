"""One push of the trainer's weights into an engine.

The order of steps is the same for every engine, and it is the only safe one:

stop serving → load → compare what arrived with the manifest, and the manifest with the live model → reset caches →
commit the version → serve.

If a step fails, the engine stays closed, because a half-updated engine must never serve a token. `weights/source.py`
says what is sent.

A push and the module probe read the weights from a source. If the source gave old weights, or merged an adapter
wrongly, push, probe and engine would agree with each other. So the comparison with the live model reads it without
the source: the parameters that the forward uses and the optimizer changes, and the forward of the adapter's own
layers.

Proof `manifest`, `digest`.
Shows: names, dtypes, shapes and bytes that arrived are those that were sent, and every parameter of the engine
received values.
Does not show: what the engine did with them afterwards.
When: every push.

Proof `caches`.
Shows: the engine confirmed that it holds nothing that was computed from older weights.
Does not show: that the confirmation is true (the gap shows this).
When: every push.

Proof `live`.
Shows: the optimizer trains the same parameter objects that the push reads, and the bytes that were sent are those of
these parameters. The proof reads them a second time, by another way than the push: all tensors where the push sends
the model's own memory; 4 drawn ones where it casts them, or where the model has an adapter. With `vllm_enable_lora`:
what 4 drawn layers compute themselves is what the sent tensors give.
Does not show: other tensors.
When: every push, before the version is committed.

Proof `merge`.
Shows: a merged weight that was sent computes what the adapter's own forward computes, up to the rounding of the base
weights: 5e-6 of the outputs in fp32, 0.08 in half precision and for 4-bit weights.
Does not show: layers that are not drawn; in half precision, an error below that rounding.
When: every push of a model with an adapter: 4 drawn layers, one vector or 64 ids each.
"""

from __future__ import annotations

import logging
import random
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from lockstep.contract.protocol import WeightReceiver
from lockstep.contract.tensors import LoadedWeights, TensorSpec, key_for, one_push, tensor_specs
from lockstep.errors import InputError, ProofError
from lockstep.models.adapters import is_adapted
from lockstep.models.policy import listed
from lockstep.models.quantised import is_quantised
from lockstep.shards.model import sharded
from lockstep.weights.merged import AdaptedSource
from lockstep.weights.source import LastPush, Manifest, PlainSource, Update

_logger = logging.getLogger(__name__)

# Number of tensors of each kind that are compared per push, if each comparison must make, cast or read a tensor again.
_TENSORS_COMPARED = 4


def weights_of(model: torch.nn.Module) -> PlainSource:
    """The weights that the engine of this model should hold: plain, or merged if the model has an adapter."""
    if is_adapted(model):
        return AdaptedSource(model)
    if any(is_quantised(p) for p in model.parameters()):
        raise InputError(
            "the model is quantised, and quantised weights cannot be trained; give it a LoRA adapter"
        )
    return PlainSource(model)


@dataclass(frozen=True, slots=True)
class SyncRecord:
    """The result of one push; one line of the receipt.

    Attributes:
        digest: digest of all tensors of the version, also of those that were not sent.
        tensors: number of these tensors.
        bytes: size of these tensors.
        seconds: time that the push took.
        sent_bytes: number of bytes that were sent to each worker.
        changed: share of the elements that changed since the last push; None if they were not counted. They are
            counted if only changed elements are sent.
        in_full: why all weights were sent although the engine had an earlier version. Empty: only changes were sent,
            or the engine had no earlier version.
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
    """Let an engine give its memory back until the next push, which sends everything if the weights were discarded."""
    if engine.sleep():
        forget_push(engine)


def drop_record(engine: WeightReceiver) -> None:
    """Free the record of an engine that gets no further push."""
    LAST_PUSHES.pop(engine, None)


def push_weights(model: torch.nn.Module, engine: WeightReceiver, version: int) -> SyncRecord:
    """Load the weights of `model` into an engine and commit them as `version`.

    The model is only read. A model with an adapter is sent merged (`weights/source.py`). Only what changed since the
    last push is sent (`weights/push.py`). If the engine does not hold the version afterwards, all weights are sent
    once. After a failure the engine refuses to generate until a later push succeeds.

    Args:
        version: from 0 to 2^63 − 1.

    Raises:
        InputError: the model has an adapter of a kind that cannot be merged, the engine has no place for one of its
            weights, or `version` is no such number.
        ProofError: what the engine holds differs from the version, some parameters received nothing, what was sent is
            not the live model, or the engine did not confirm the reset of its caches.
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
            _logger.warning(
                f"all weights of version {version} are sent, instead of those that changed: {in_full}"
            )
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
    """Load an update into the engine, and check the engine's acknowledgement. Returns the manifest of the version."""
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
    """Compare an engine's acknowledgement with the manifest of the version."""
    for other in loaded.others:
        check_loaded(manifest, other)
    where = _server_name(loaded)
    sent, arrived = {t.name: t for t in manifest.tensors}, {t.name: t for t in loaded.tensors}
    mismatched = [
        n
        for n in sent.keys() | arrived.keys()
        if n not in sent or n not in arrived or sent[n][:3] != arrived[n][:3]
    ]
    if mismatched or len(manifest.tensors) != len(loaded.tensors):
        first = min(mismatched, default="none by name")
        raise ProofError(
            "manifest",
            f"{len(manifest.tensors)} tensors were sent and {len(loaded.tensors)} arrived{where}; first "
            f"difference: {first}, "
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
            f"weights that were sent, and has dropped them: {listed(loaded.unstored)}. It would compute "
            f"another model than the one "
            "that is trained. Set use_vllm to false, or train a model without these weights"
        )


def _server_name(loaded: LoadedWeights) -> str:
    return f" at {loaded.server}" if loaded.server else ""


def _described(tensor: TensorSpec | None) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}" if tensor else "nothing"


# ---- what was sent, and the live model
# ----------------------------------------------------------------------------------


def check_same_parameters(pushed: torch.nn.Module, trained: torch.nn.Module, version: int) -> None:
    """Check that every parameter of the trained model is also a parameter of the pushed model: the same object."""
    pushed_ids = {id(p) for p in pushed.parameters()}
    unknown = [name for name, p in trained.named_parameters() if id(p) not in pushed_ids]
    if unknown:
        raise ProofError(
            "live",
            f"at version {version} {len(unknown)} parameters of the trained model are not those of the model "
            f"that is pushed; the first is {unknown[0]}",
            "the trainer's model was replaced by a copy after the trainer was made, for example by a callback",
            "change the model in place, or make a new trainer for the other model",
        )


def check_live(
    model: torch.nn.Module,
    source: PlainSource,
    sent: Sequence[TensorSpec],
    dtype: torch.dtype | None,
    version: int,
) -> None:
    """Compare the tensors of a push with the live model.

    Weights without an adapter are compared by the digest of their bytes: all of them if the push sent the model's own
    memory (their digests are not computed a second time, `one_push`), otherwise a few that the version draws. The
    forward of a few drawn layers with an adapter must give the same outputs as the sent weights.

    Args:
        source: what the push has read.
        sent: the push's description of every tensor that it sent.
        dtype: dtype to which wider tensors were cast.
    """
    # The live model says of which kind its source must be.
    kind: type[PlainSource] = AdaptedSource if is_adapted(model) else PlainSource
    random_draw, parameters = random.Random(version), kind.unmerged(model)
    # The source sends a quantised weight dequantised, so its bytes cannot be compared.
    compared = [spec for spec in sent if spec.name in parameters and not is_quantised(parameters[spec.name])]
    if not source.is_model_memory or dtype is not None:
        compared = random_draw.sample(compared, min(_TENSORS_COMPARED, len(compared)))
    shards = sharded(model)
    if shards is None:
        _check_digests(
            [(spec.name, parameters[spec.name].detach()) for spec in compared], dtype, compared, version
        )
    else:
        for spec in compared:
            # One at a time, because each is gathered from all ranks.
            _check_digests([(spec.name, shards.gather(parameters[spec.name]))], dtype, [spec], version)
    layers = [spec for spec in sent if spec.name not in parameters and spec.name.endswith(".weight")]
    for spec in random_draw.sample(layers, min(_TENSORS_COMPARED, len(layers))):
        merged = source.tensor(spec.name)
        _check_digests([(spec.name, merged)], dtype, [spec], version)
        error = kind.merge_error(model, source, spec.name, merged, version)
        # `not <=` instead of `>`, so that NaN fails.
        if error is not None and not error[0] <= error[1]:
            raise ProofError(
                "merge",
                f"at version {version} the merged weight of {spec.name.removesuffix('.weight')} gives outputs "
                f"that differ by "
                f"{error[0]:.2g} from the forward of the layer with its adapter (allowed: {error[1]:.2g})",
                "the adapter was merged with another scaling, rank or kind than the layer computes with",
                "report it with the adapter's config; train without the adapter until it is fixed",
            )


def _check_digests(
    tensors: Sequence[tuple[str, torch.Tensor]],
    dtype: torch.dtype | None,
    sent: Sequence[TensorSpec],
    version: int,
) -> None:
    cast = [(name, tensor.to(dtype) if _is_wider(tensor, dtype) else tensor) for name, tensor in tensors]
    own = tensor_specs(cast, {spec.name: spec for spec in sent})
    differing = [spec.name for spec, other in zip(own, sent, strict=True) if spec != other]
    if differing:
        raise ProofError(
            "live",
            f"{len(differing)} of {len(sent)} compared tensors of version {version} are not those of the "
            f"live model; the first is {differing[0]}",
            "the source of the push holds a copy of older weights, or the model was changed during the push",
            "this is a defect of the weight source: report it; do not change the model during a push",
        )


def _is_wider(tensor: torch.Tensor, dtype: torch.dtype | None) -> bool:
    return dtype is not None and tensor.is_floating_point() and tensor.itemsize > dtype.itemsize
