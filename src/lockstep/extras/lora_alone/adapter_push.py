"""Pushes a model with an adapter to vLLM's own LoRA: the base weights once, then the adapter alone.

    base (only where the engine does not hold it) → adapter → compare what arrived, and what the engine holds → commit
    the version

The engine computes the digest of the base weights that it holds. If this digest equals the digest of the model's base
weights, the base is not sent. Therefore a second run can use a server that already holds the same base. A server that
was restarted gets the base again.

Proof `adapter`.
Shows: with `vllm_enable_lora`: A and scaling × B of every layer of the adapter are in the slots that vLLM computes
with, bit for bit; they are read back from there.
Does not show: with tensor parallelism nothing is read back; that the layers use the slots (`adapter_probe` shows
this).
When: every push.

`check_adapter_live` compares what a push has sent with the live model: the bytes of the factors A and B, and the
forward of the layers. The source could give an old adapter, or one with a wrong scaling. The engine would receive
exactly this adapter, and no comparison of the two would find the fault. The comparison comes before a version is
committed.
"""

from __future__ import annotations

import random
import time
from typing import Any

import torch
from torch.nn.functional import linear
from transformers.pytorch_utils import Conv1D

from lockstep.contract.adapters import DOWN, UP, AdapterReceiver
from lockstep.contract.protocol import Engine
from lockstep.contract.tensors import (
    LoadedWeights,
    TensorSpec,
    digest_under,
    key_for,
    key_of,
    one_push,
    tensor_specs,
)
from lockstep.errors import InputError, ProofError
from lockstep.extras.lora_alone.adapter_source import AdapterSource, BaseSource, adapter_shape, check_alone
from lockstep.models.adapters import causal_model
from lockstep.models.quantised import dequantised, is_quantised
from lockstep.weights.merged import without_dropout
from lockstep.weights.push import SyncRecord, check_loaded
from lockstep.weights.source import Manifest, Update

# Number of layers that are compared per push.
_LAYERS_COMPARED = 4
# Largest allowed difference between two outputs, divided by their rms: in float32, and in half precision.
_FP32_TOLERANCE, _HALF_TOLERANCE = 2e-5, 0.08


def check_adapter_live(
    model: torch.nn.Module, source: AdapterSource, manifest: Manifest, version: int
) -> None:
    """Compare the tensors of a push with the model's own layers.

    Args:
        source: what the push has read.
        manifest: the push's description of what it has sent.

    Raises:
        ProofError: `live`: a layer has other factors than were sent, or its forward differs from the forward with the
            sent tensors.
    """
    sent = {spec.name: spec for spec in manifest.tensors}
    base = BaseSource(model)
    drawn = random.Random(version).sample(list(source.layers), min(_LAYERS_COMPARED, len(source.layers)))
    for layer in drawn:
        module: Any = causal_model(model).get_submodule(layer)
        (adapter,) = (name for name in module.active_adapters if name in module.scaling)
        down, up = source.tensor(layer + DOWN), source.tensor(layer + UP)
        _check_sent([(layer + DOWN, down), (layer + UP, up)], sent, version)
        weight = base.tensor(f"{layer}.weight")
        bias = base.tensor(f"{layer}.bias") if f"{layer}.bias" in base.names else None
        inputs = _inputs(module.get_base_layer(), version)
        with without_dropout(module), torch.autocast(inputs.device.type, enabled=False):
            layer_delta = module.lora_B[adapter](
                module.lora_A[adapter](inputs.to(module.lora_A[adapter].weight.dtype))
            )
            sent_delta = linear(linear(inputs.float(), down.float()), up.float())
            _check_close(
                layer_delta.float() * module.scaling[adapter],
                sent_delta,
                source.rounded,
                f"what the adapter adds in {layer}",
                version,
            )
            if is_quantised(module.get_base_layer().weight):
                # A forward could pack the 4-bit weights for inference, and nothing would unpack them again.
                continue
            weight_matrix = weight.T if isinstance(module.get_base_layer(), Conv1D) else weight
            sent_output = (
                linear(inputs.float(), weight_matrix.float(), None if bias is None else bias.float())
                + sent_delta
            )
            is_half = source.rounded or weight.dtype not in (torch.float32, torch.float64)
            _check_close(module(inputs).float(), sent_output, is_half, f"the forward of {layer}", version)


def _inputs(base: Any, seed: int) -> torch.Tensor:
    """A random input of shape (1, inputs), on the layer's device and in its dtype."""
    weight = dequantised(base.weight) if is_quantised(base.weight) else base.weight
    width = weight.shape[0] if isinstance(base, Conv1D) else weight.shape[1]
    return torch.randn(1, width, generator=torch.Generator().manual_seed(seed)).to(
        weight.device, weight.dtype
    )


def _check_sent(tensors: list[tuple[str, torch.Tensor]], sent: dict[str, TensorSpec], version: int) -> None:
    if differing := [spec.name for spec in tensor_specs(tensors) if sent.get(spec.name) != spec]:
        raise _error(version, f"{differing[0]} of the model is not the tensor that was sent")


def _check_close(
    output: torch.Tensor, expected: torch.Tensor, is_half: bool, what: str, version: int
) -> None:
    difference, rms = float((output - expected).abs().max()), float(output.square().mean().sqrt())
    # `not <=` instead of `>`, so that NaN fails.
    if not difference <= (_HALF_TOLERANCE if is_half else _FP32_TOLERANCE) * rms:
        raise _error(
            version,
            f"{what} differs by {difference:.2g} from what the sent tensors give (its rms is {rms:.2g})",
        )


def _error(version: int, found: str) -> ProofError:
    return ProofError(
        "live",
        f"at version {version} {found}",
        "the source of the push holds an older adapter or another scaling, or the model was changed during the push",
        "this is a defect of the weight source: report it; do not change the model during a push",
    )


class AdapterPusher:
    """Pushes one model's adapter into an engine.

    Args:
        model: a model with an adapter; it is only read.
        engine: an engine with LoRA.

    Raises:
        InputError: the adapter cannot be sent alone, or the engine has no place for it.
    """

    def __init__(self, model: torch.nn.Module, engine: Engine) -> None:
        check_alone(model)
        self._model, self._engine, self._rank = model, engine, adapter_shape(model)[0]
        self.receiver = receiver_of(engine, self._rank)

    def push(self, version: int) -> SyncRecord:
        """Load the adapter into the engine and commit it as `version`.

        The model is only read. After a failure the engine refuses to generate until a later push succeeds.

        Returns:
            The record of the push. Its `digest` covers the base too. Its `bytes` counts only what was sent.

        Raises:
            InputError: the adapter cannot be sent alone, or the engine has no room for it.
            ProofError: what the engine received or holds differs from what was sent, or what was sent is not the live
                model.
        """
        start = time.perf_counter()
        check_alone(self._model)
        # A server may have been started again without LoRA.
        receiver = self.receiver = receiver_of(self._engine, self._rank)
        limits = receiver.limits
        assert limits is not None
        receiver.begin()
        with receiver.reserved(), torch.no_grad():
            base, base_bytes = self._push_base(version)
            source = AdapterSource(self._model, limits.dtype)
            update = Update(source)
            loaded = receiver.load(version, update)
            manifest = update.manifest(version)
            check_loaded(manifest, loaded)
            check_held(manifest, receiver.read_back())
            check_adapter_live(self._model, source, manifest, version)
            self._check_base(base)
        receiver.commit(version)
        digest = Manifest(version, (*base.tensors, *manifest.tensors)).digest
        bytes_sent = update.bytes + base_bytes
        return SyncRecord(
            version, digest, len(manifest.tensors), bytes_sent, time.perf_counter() - start, bytes_sent
        )

    def _push_base(self, version: int) -> tuple[Manifest, int]:
        """Send the base weights if the engine lacks them. Returns their manifest, and the number of bytes sent."""
        source, engine = BaseSource(self._model), self._engine
        held = self.receiver.base_digest()
        with one_push(key_of(held), remembers=source.is_model_memory):
            if held:
                manifest = Update(source, engine.wire_dtype).manifest(version)
                if held == manifest.digest:
                    return manifest, 0
            self.receiver.check_base_replaceable()
            digest_under(key_for(self._model.parameters()))
            update = Update(source, engine.wire_dtype)
            engine.begin_update()
            loaded = engine.load(update)
            manifest = update.manifest(version)
            check_loaded(manifest, loaded)
        if not engine.reset_caches():
            raise ProofError(
                "caches",
                "the engine did not confirm the reset of its caches after a push of the base weights",
                "requests are still running in the engine",
                "finish or abort every request before pushing weights",
            )
        self.receiver.commit_base(manifest.digest)
        self._check_base(manifest)
        return manifest, update.bytes

    def _check_base(self, manifest: Manifest) -> None:
        if (digest := self.receiver.base_digest()) != manifest.digest:
            held = f"base weights with the digest {digest}" if digest else "no complete base weights"
            raise ProofError(
                "digest",
                f"the engine holds {held} instead of the base weights with the digest {manifest.digest}",
                "in the meantime another trainer has pushed weights to this server",
                "give each run a server of its own, or let all of them train adapters of the same base "
                "(vllm_enable_lora)",
            )


def receiver_of(engine: Engine, rank: int) -> AdapterReceiver:
    """The part of an engine that receives adapters of this rank."""
    receiver: AdapterReceiver | None = getattr(engine, "adapters", None)
    if receiver is None:
        raise InputError(
            "vllm_enable_lora needs vLLM as the engine; leave it out, and merged weights are sent instead"
        )
    if (limits := receiver.limits) is None:
        raise InputError(
            "vllm_enable_lora is set, and the engine was started without LoRA: start it with 'lockstep serve "
            f"MODEL --enable_lora --max_lora_rank {rank}', or leave vllm_enable_lora out"
        )
    if limits.rank < rank:
        raise InputError(
            f"the adapter has rank {rank}, and the engine takes at most {limits.rank}: start it with "
            f"--max_lora_rank {rank} or more, or leave vllm_enable_lora out"
        )
    return receiver


def check_held(manifest: Manifest, held: LoadedWeights) -> None:
    """Compare the adapter that the engine computes with and the adapter that was sent."""
    for other in held.others:
        check_held(manifest, other)
    where = f" at {held.server}" if held.server else ""
    if held.untouched:
        raise InputError(
            f"the engine{where} has no LoRA layer for {held.untouched[0]}: start it without "
            f"--lora_target_modules, or with this "
            "layer among them; if vLLM has no LoRA for this layer, leave vllm_enable_lora out"
        )
    sent = {spec.name: spec for spec in manifest.tensors}
    differing = [spec.name for spec in held.tensors if sent.get(spec.name) != spec]
    if differing:
        raise ProofError(
            "adapter",
            f"at version {manifest.version} the engine{where} computes with other values than were sent for "
            f"{len(differing)} of {len(sent)} tensors of the adapter; the first is {differing[0]}",
            "the engine kept an older adapter, scaled it, or holds the adapter of another run under this name",
            "do not train with this engine; report it with the model, the adapter's config and the engine's version",
        )
