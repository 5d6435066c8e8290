"""One push of the trainer's weights into an engine. The order of steps is the same for every engine, and it is the only safe one:

stop serving → load → compare what arrived with the manifest, and the manifest with the live model → reset caches → commit the
version → serve.

The weights come from `sync/source.py` and go to the receiving half of an engine. If a step fails, the engine stays closed,
because a half-updated engine must never serve a token.
"""

from __future__ import annotations

import time
from contextlib import nullcontext
from dataclasses import dataclass

import torch

from lockstep.engines.protocol import LoadedWeights, TensorSpec, WeightReceiver
from lockstep.engines.tensor_specs import one_push
from lockstep.errors import ProofError
from lockstep.sync.adapters import weights_of
from lockstep.sync.live import check_live
from lockstep.sync.source import DescribedSource, Manifest


@dataclass(frozen=True, slots=True)
class SyncRecord:
    """The result of one push; one line of the receipt."""

    version: int
    digest: str
    tensors: int
    bytes: int
    seconds: float


def push_weights(model: torch.nn.Module, engine: WeightReceiver, version: int) -> SyncRecord:
    """Load the weights of `model` into an engine and commit them as `version`.

    The model is only read. A model with an adapter is sent merged (`sync/adapters.py`). After a failure the engine refuses to
    generate until a later push succeeds.

    Raises:
        InputError: the model has an adapter of a kind that cannot be merged.
        ProofError: what the engine loaded differs from what was sent, some parameters received nothing, what was sent is not the
            live model, or the engine did not confirm the reset of its caches.
    """
    start = time.perf_counter()
    source = weights_of(model)
    sent = DescribedSource(source, engine.wire_dtype)
    with one_push() if sent.own_memory else nullcontext(), torch.no_grad():
        engine.begin_update()
        loaded = engine.load(sent)
        manifest = sent.manifest(version)
        check_loaded(manifest, loaded)
        check_live(model, source, manifest.tensors, engine.wire_dtype, version)
    if not engine.reset_caches():
        raise ProofError(
            "caches",
            f"the engine did not confirm the reset of its caches for version {version}",
            "requests are still running in the engine, so cached keys and values of older weights stay in use",
            "finish or abort every request before pushing weights",
        )
    engine.commit_version(version)
    return SyncRecord(version, manifest.digest, len(manifest.tensors), sent.bytes, time.perf_counter() - start)


def check_loaded(manifest: Manifest, loaded: LoadedWeights) -> None:
    """Compare an engine's acknowledgement with the manifest of the push.

    Raises:
        ProofError: a tensor is missing, unexpected, or of another shape, dtype or content, or an engine parameter received
            nothing. The message names the server if there are several.
    """
    for one in loaded.others:
        check_loaded(manifest, one)
    where = f" at {loaded.server}" if loaded.server else ""
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


def _described(tensor: TensorSpec | None) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}" if tensor else "nothing"
