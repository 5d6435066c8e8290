"""Compares the adapter that a push has sent with the live model: the bytes of the factors A and B, and the forward of the layers.

The source could give an old adapter, or one with a wrong scaling. The engine would receive exactly this adapter, and
no comparison of the two would find the fault. Therefore this module compares with the layers of the model itself. The
comparison comes before a version is committed.
"""

from __future__ import annotations

import random
from typing import Any

import torch
from torch.nn.functional import linear
from transformers.pytorch_utils import Conv1D

from lockstep.contract.adapters import DOWN, UP
from lockstep.contract.tensors import TensorSpec, tensor_specs
from lockstep.errors import ProofError
from lockstep.models.adapters import causal_model
from lockstep.models.quantised import dequantised, is_quantised
from lockstep.sync.adapters.source import AdapterSource, BaseSource
from lockstep.sync.merged import without_dropout
from lockstep.sync.source import Manifest

# Number of layers that are compared per push.
_LAYERS_COMPARED = 4
# Largest allowed difference between two outputs, divided by their rms: in float32, and in half precision.
_FP32_TOLERANCE, _HALF_TOLERANCE = 2e-5, 0.08


def check_adapter_live(model: torch.nn.Module, source: AdapterSource, manifest: Manifest, version: int) -> None:
    """Compare the tensors of a push with the model's own layers.

    Args:
        source: what the push has read.
        manifest: the push's description of what it has sent.

    Raises:
        ProofError: `live`: a layer has other factors than were sent, or its forward differs from the forward with the sent tensors.
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
            layer_delta = module.lora_B[adapter](module.lora_A[adapter](inputs.to(module.lora_A[adapter].weight.dtype)))
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
                linear(inputs.float(), weight_matrix.float(), None if bias is None else bias.float()) + sent_delta
            )
            is_half = source.rounded or weight.dtype not in (torch.float32, torch.float64)
            _check_close(module(inputs).float(), sent_output, is_half, f"the forward of {layer}", version)


def _inputs(base: Any, seed: int) -> torch.Tensor:
    """A random input of shape (1, inputs), on the layer's device and in its dtype."""
    weight = dequantised(base.weight) if is_quantised(base.weight) else base.weight
    width = weight.shape[0] if isinstance(base, Conv1D) else weight.shape[1]
    return torch.randn(1, width, generator=torch.Generator().manual_seed(seed)).to(weight.device, weight.dtype)


def _check_sent(tensors: list[tuple[str, torch.Tensor]], sent: dict[str, TensorSpec], version: int) -> None:
    if differing := [spec.name for spec in tensor_specs(tensors) if sent.get(spec.name) != spec]:
        raise _error(version, f"{differing[0]} of the model is not the tensor that was sent")


def _check_close(output: torch.Tensor, expected: torch.Tensor, is_half: bool, what: str, version: int) -> None:
    difference, rms = float((output - expected).abs().max()), float(output.square().mean().sqrt())
    # `not <=` instead of `>`, so that NaN fails.
    if not difference <= (_HALF_TOLERANCE if is_half else _FP32_TOLERANCE) * rms:
        raise _error(
            version, f"{what} differs by {difference:.2g} from what the sent tensors give (its rms is {rms:.2g})"
        )


def _error(version: int, found: str) -> ProofError:
    return ProofError(
        "live",
        f"at version {version} {found}",
        "the source of the push holds an older adapter or another scaling, or the model was changed during the push",
        "this is a defect of the weight source: report it; do not change the model during a push",
    )
