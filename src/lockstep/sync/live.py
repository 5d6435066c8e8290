"""Compares what a push has sent with the live model, and a merged layer with the layer and its adapter.

A push and the module probe read the weights from a source (`sync/source.py`). If the source
gave old weights, or merged an adapter wrongly, push, probe and engine would agree with each other. So this module reads
the model without the source: the parameters that the forward uses and the optimizer changes, and the forward of the
adapter's own layers.

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

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from transformers.pytorch_utils import Conv1D

from lockstep.contract.tensors import TensorSpec, tensor_specs
from lockstep.errors import ProofError
from lockstep.models.adapters import causal_model, is_adapted
from lockstep.models.checkpoint_names import checkpoint_tensors
from lockstep.models.cuda import rounds_products
from lockstep.models.quantised import is_quantised
from lockstep.shards.model import sharded
from lockstep.sync.source import PlainSource

# Number of tensors of each kind that are compared per push, if each comparison must make, cast or read a tensor again.
_TENSORS_COMPARED = 4
# Largest allowed difference between the outputs of a merged layer and of the layer with its adapter, divided by the rms of the
# outputs. By the dtype of the base weights. Largest values on tiny models, over 64 to 384 outputs: 9e-7 in float32, 0.027 in
# bfloat16 (`tests/sync/test_live.py`).
_TOLERANCES = {torch.float64: 1e-12, torch.float32: 5e-6}
_HALF_TOLERANCE = 0.08
_EMBEDDING_ROWS = 64


def check_same_parameters(pushed: torch.nn.Module, trained: torch.nn.Module, version: int) -> None:
    """Check that every parameter of the trained model is also a parameter of the pushed model: the same object.

    Raises:
        ProofError: `live`: a parameter of the trained model is not in the pushed model.
    """
    pushed_ids = {id(p) for p in pushed.parameters()}
    unknown = [name for name, p in trained.named_parameters() if id(p) not in pushed_ids]
    if unknown:
        raise ProofError(
            "live",
            f"at version {version} {len(unknown)} parameters of the trained model are not those of the model that is pushed; the "
            f"first is {unknown[0]}",
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

    Weights without an adapter are compared by the digest of their bytes. If the push sent the model's own memory, all of them are
    compared; their digests are not computed a second time (`one_push`). Otherwise the version is the seed that draws a few of them.
    A few layers with an adapter are drawn too. Their forward must give the same outputs as the sent weights.

    Args:
        source: what the push has read.
        sent: the push's description of every tensor that it sent.
        dtype: dtype to which wider tensors were cast.

    Raises:
        ProofError: `live`: the model now has other weights than were sent. `merge`: a merged weight gives other outputs than the
            layer with its adapter.
    """
    random_draw, adapted = random.Random(version), is_adapted(model)
    inner = causal_model(model) if adapted else model
    parameters = {p.name: p.tensor for p in checkpoint_tensors(inner)}
    # The source sends a quantised weight dequantised, so its bytes cannot be compared.
    compared = [spec for spec in sent if spec.name in parameters and not is_quantised(parameters[spec.name])]
    if not source.is_model_memory or dtype is not None:
        compared = random_draw.sample(compared, min(_TENSORS_COMPARED, len(compared)))
    shards = sharded(model)
    if shards is None:
        _check_digests([(spec.name, parameters[spec.name].detach()) for spec in compared], dtype, compared, version)
    else:
        for spec in compared:
            # One at a time, because each is gathered from all ranks.
            _check_digests([(spec.name, shards.gather(parameters[spec.name]))], dtype, [spec], version)
    if adapted:
        layers = [spec for spec in sent if spec.name not in parameters and spec.name.endswith(".weight")]
        for spec in random_draw.sample(layers, min(_TENSORS_COMPARED, len(layers))):
            merged = source.tensor(spec.name)
            _check_digests([(spec.name, merged)], dtype, [spec], version)
            _check_merge(model, source, spec.name, merged, version)


def _check_digests(
    tensors: Sequence[tuple[str, torch.Tensor]], dtype: torch.dtype | None, sent: Sequence[TensorSpec], version: int
) -> None:
    cast = [(name, tensor.to(dtype) if _is_wider(tensor, dtype) else tensor) for name, tensor in tensors]
    own = tensor_specs(cast, {spec.name: spec for spec in sent})
    differing = [spec.name for spec, other in zip(own, sent, strict=True) if spec != other]
    if differing:
        raise ProofError(
            "live",
            f"{len(differing)} of {len(sent)} compared tensors of version {version} are not those of the live model; the first is "
            f"{differing[0]}",
            "the source of the push holds a copy of older weights, or the model was changed during the push",
            "this is a defect of the weight source: report it; do not change the model during a push",
        )


def _check_merge(model: torch.nn.Module, source: PlainSource, name: str, merged: torch.Tensor, version: int) -> None:
    """Check that a merged weight gives the same outputs as the forward of the layer with its adapter."""
    layer_name = name.removesuffix(".weight")
    layer: Any = causal_model(model).get_submodule(layer_name)
    base: Any = source.owning_module(name)
    if merged.dim() != 2:
        # A norm that was trained as a whole (`modules_to_save`).
        return
    if is_quantised(base.weight) and not base.training:
        # A forward would pack the 4-bit weights for inference, and nothing would unpack them again.
        return
    inputs = _inputs(base, merged, version)
    shards = sharded(model)
    bias = source.tensor(f"{layer_name}.bias") if f"{layer_name}.bias" in source.names else None
    with torch.no_grad(), without_dropout(layer), torch.autocast(merged.device.type, enabled=False):
        # The layer runs alone here. Its sharded weights must be gathered, because no forward of the whole model gathers them.
        with nullcontext() if shards is None else shards.whole_around(layer):
            layer_output = layer(inputs)
        merged_output = _merged_output(base, merged, bias, inputs)
    difference = float((layer_output - merged_output).abs().max())
    allowed = _tolerance(base.weight) * float(merged_output.square().mean().sqrt())
    # `not <=` instead of `>`, so that NaN fails.
    if not difference <= allowed:
        raise ProofError(
            "merge",
            f"at version {version} the merged weight of {layer_name} gives outputs that differ by {difference:.2g} from the "
            f"forward of the layer with its adapter (allowed: {allowed:.2g})",
            "the adapter was merged with another scaling, rank or kind than the layer computes with",
            "report it with the adapter's config; train without the adapter until it is fixed",
        )


def _inputs(base: torch.nn.Module, merged: torch.Tensor, seed: int) -> torch.Tensor:
    """Inputs of a layer: ids for an embedding, one random vector for a linear layer; on the layer's device and in its dtype."""
    generator = torch.Generator().manual_seed(seed)
    if isinstance(base, torch.nn.Embedding):
        return torch.randint(len(merged), (_EMBEDDING_ROWS,), generator=generator).to(merged.device)
    width = merged.shape[0] if isinstance(base, Conv1D) else merged.shape[1]
    return torch.randn(1, width, generator=generator).to(merged.device, merged.dtype)


def _merged_output(
    base: torch.nn.Module, merged: torch.Tensor, bias: torch.Tensor | None, inputs: torch.Tensor
) -> torch.Tensor:
    """The output of a layer with the merged weight, in float32 or wider."""
    wide = torch.promote_types(merged.dtype, torch.float32)
    if isinstance(base, torch.nn.Embedding):
        # Some families scale the rows that they look up.
        return merged[inputs].to(wide) * getattr(base, "embed_scale", 1.0)
    weight = merged.T if isinstance(base, Conv1D) else merged
    return torch.nn.functional.linear(inputs.to(wide), weight.to(wide), None if bias is None else bias.to(wide))


def _tolerance(weight: torch.Tensor) -> float:
    rounded = weight.is_cuda and rounds_products(torch.float32)
    return _HALF_TOLERANCE if is_quantised(weight) or rounded else _TOLERANCES.get(weight.dtype, _HALF_TOLERANCE)


def _is_wider(tensor: torch.Tensor, dtype: torch.dtype | None) -> bool:
    return dtype is not None and tensor.is_floating_point() and tensor.itemsize > dtype.itemsize


@contextmanager
def without_dropout(layer: torch.nn.Module) -> Iterator[None]:
    """Switch off the layer's dropout in this context.

    The other modules stay in training mode, because in evaluation mode 4-bit weights are packed and never unpacked.
    """
    training = {m: m.training for m in layer.modules() if isinstance(m, torch.nn.Dropout)}
    for module in training:
        module.eval()
    try:
        yield
    finally:
        for module, before in training.items():
            module.training = before
