"""How a forward computes: its dtypes, Liger's kernels, and what some families do to the output head's logits.

`transformers.Trainer` puts Liger's Triton kernels into the model when training begins: norms, rotary embedding, gated
MLP. Lockstep computes the head and the loss itself. Liger's fused linear loss (`LigerFusedLinearGRPOLoss` of
liger-kernel 0.8) is no Triton kernel: it computes the head in chunks in PyTorch, and gives the same loss and gradients.

Families multiply the logits by a factor (Cohere, Falcon-H1), divide them (Granite), or cap them (Gemma 2,
RecurrentGemma, xLSTM).
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from lockstep.errors import InputError, check_extra

# Liger's kernels for losses that Lockstep does not use.
_LOSSES = ("fused_linear_cross_entropy", "cross_entropy")


def liger_config(
    use_liger_kernel: bool, kernel_config: Mapping[str, bool] | str | None
) -> dict[str, bool] | None:
    """The kernels to put into the model, as a `liger_kernel_config`; None if Liger is not used.

    Args:
        use_liger_kernel: the setting `use_liger_kernel`.
        kernel_config: the setting `liger_kernel_config`: kernels by Liger's names, on or off.

    Raises:
        InputError: kernels are chosen without `use_liger_kernel`, liger-kernel is missing, or a loss is chosen.
    """
    if isinstance(kernel_config, str):
        raise InputError(
            f'liger_kernel_config={kernel_config!r}; it must be a mapping, such as {{"rope": false}}'
        )
    if not use_liger_kernel:
        if kernel_config:
            raise InputError(
                "liger_kernel_config is given without use_liger_kernel; set both, or leave it out"
            )
        return None
    for name in _LOSSES:
        if kernel_config and kernel_config.get(name):
            raise InputError(f"liger_kernel_config has {name}, but no loss of Lockstep uses it; leave it out")
    check_extra("use_liger_kernel", "liger", "liger_kernel")
    return {**(kernel_config or {}), _LOSSES[0]: False}


def check_gpu(use_liger_kernel: bool, *, use_cpu: bool) -> None:
    """Refuse to train with the kernels where they cannot run. A config and a trainer can be made there, as in TRL."""
    has_gpu = torch.cuda.is_available() and not use_cpu
    if use_liger_kernel and not has_gpu and os.environ.get("TRITON_INTERPRET") != "1":
        raise InputError(
            "use_liger_kernel needs a GPU: Liger's kernels are written in Triton; leave it out on a CPU"
        )


def check_kernels(model: PreTrainedModel, chosen: Mapping[str, bool]) -> None:
    """Refuse settings, as `liger_config` returns them, that Liger would ignore without a message."""
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    model_type = model.config.model_type
    if model_type not in MODEL_TYPE_TO_APPLY_LIGER_FN:
        raise InputError(
            f"Liger has no kernels for models of type {model_type!r}; leave use_liger_kernel out"
        )
    parameters = inspect.signature(MODEL_TYPE_TO_APPLY_LIGER_FN[model_type]).parameters
    names = [name for name in parameters if name != "model"]
    for name in chosen:
        if name not in names and name not in _LOSSES:
            raise InputError(
                f"liger_kernel_config has {name!r}, and Liger's kernels for {model_type!r} are {', '.join(names)}"
            )


def _capped(logits: torch.Tensor, cap: float) -> torch.Tensor:
    return torch.tanh(logits / cap) * cap


# Key: the field of a text model's config that has the number. Value: what the family computes with it.
_TRANSFORMS: dict[str, Callable[[torch.Tensor, float], torch.Tensor]] = {
    "logit_scale": lambda logits, factor: logits * factor,
    "logits_scaling": lambda logits, divisor: logits / divisor,
    "lm_head_multiplier": lambda logits, factor: logits * factor,
    "final_logit_softcapping": _capped,
    "logits_soft_cap": _capped,
    "output_logit_soft_cap": _capped,
}


def changes_logits(config: PreTrainedConfig) -> bool:
    """Whether the family of a text model's config changes the head's logits at all."""
    return any(getattr(config, name, None) is not None for name in _TRANSFORMS)


def transformed_logits(config: PreTrainedConfig, logits: torch.Tensor) -> torch.Tensor:
    """(…, V) the logits that the model's own forward makes of the head's. `config` is that of the text model."""
    for name, transform in _TRANSFORMS.items():
        if (number := getattr(config, name, None)) is not None:
            logits = transform(logits, number)
    return logits


@dataclass(frozen=True, slots=True)
class Precision:
    """The precision in which the trainer computes a forward.

    Attributes:
        autocast: dtype of autocast; None: the weights' own dtype.
        head: dtype in which the output head computes; None: the dtype of the rest of the model.
    """

    autocast: torch.dtype | None = None
    head: torch.dtype | None = None

    def dtype_of(self, model: PreTrainedModel) -> torch.dtype:
        """The dtype in which a forward of the model computes."""
        return self.autocast or model.dtype


def autocast_dtype(device: str, otherwise: torch.dtype) -> torch.dtype:
    """Autocast's dtype on a kind of device (`torch.device.type`), or `otherwise` if autocast is off."""
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else otherwise


def head_dtype(head: torch.nn.Module, otherwise: torch.dtype) -> torch.dtype:
    """The dtype in which an output head takes hidden states: that of its weights, or `otherwise` inside autocast.

    A model that adds its layers up in float32 (Mamba) has float32 hidden states beside weights in half precision. The
    codes of a quantised head have no dtype of numbers.
    """
    weight: torch.Tensor = head.weight  # type: ignore[assignment]
    inside = torch.is_autocast_enabled(weight.device.type)
    return otherwise if inside or not weight.is_floating_point() else weight.dtype
