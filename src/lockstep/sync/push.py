"""One push of the trainer's weights into an engine, the same for every engine, in the only order that is safe:

stop serving → load → compare what arrived with the manifest → reset caches → commit the version → serve.

Comes from: `sync/source.py`. Goes to: the receiving half of an engine. If any step fails the engine stays closed, since
half an update must never serve a token.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from lockstep.engines.protocol import LoadedWeights, WeightReceiver
from lockstep.errors import ProofError
from lockstep.sync.source import Manifest, PlainSource


@dataclass(frozen=True, slots=True)
class SyncRecord:
    """What one push did; a line of the receipt."""

    version: int
    digest: str
    tensors: int
    bytes: int
    seconds: float


def push_weights(model: torch.nn.Module, engine: WeightReceiver, version: int) -> SyncRecord:
    """Bring an engine to the weights of `model` and commit them as `version`.

    The model is only read. On failure the engine refuses to generate until a later push succeeds.

    Raises:
        ProofError: the engine loaded something else than was sent, left parameters untouched, or did not confirm the reset of
            its caches.
    """
    start = time.perf_counter()
    source = PlainSource(model)
    manifest = source.manifest(version)
    engine.begin_update()
    with torch.no_grad():
        loaded = engine.load(source)
    check_loaded(manifest, loaded)
    if not engine.reset_caches():
        raise ProofError(
            "caches",
            f"the engine did not confirm the reset of its caches for version {version}",
            "requests are still running in the engine, so cached keys and values of older weights stay in use",
            "finish or abort every request before pushing weights",
        )
    engine.commit_version(version)
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    return SyncRecord(version, manifest.digest, len(manifest.tensors), size, time.perf_counter() - start)


def check_loaded(manifest: Manifest, loaded: LoadedWeights) -> None:
    """Compare an acknowledgement with the manifest it answers.

    Raises:
        ProofError: a tensor is missing, extra or of another shape or dtype, or an engine parameter got nothing.
    """
    if loaded.tensors != manifest.tensors:
        sent, arrived = set(manifest.tensors), set(loaded.tensors)
        odd = sorted(sent ^ arrived)
        raise ProofError(
            "manifest",
            f"{len(manifest.tensors)} tensors were sent and {len(loaded.tensors)} arrived"
            + (f"; first difference: {odd[0]}" if odd else "; their order differs"),
            "the transport dropped, renamed or converted tensors",
            "this is a defect of the weight transport; report it with this message",
        )
    if loaded.untouched:
        raise ProofError(
            "manifest",
            f"{len(loaded.untouched)} engine parameters received nothing, {loaded.untouched[0]} first",
            "the trained model lacks parameters that the engine serves, or names them differently",
            "give trainer and engine the same model; adapters and partial models are not supported here",
        )
