"""Checks the settings of Liger's Triton kernels for the trainer's model.

`transformers.Trainer` puts the kernels into the model when training begins: norms, rotary embedding, gated MLP.
Lockstep computes the head and the loss itself. Liger's fused linear loss (`LigerFusedLinearGRPOLoss` of liger-kernel
0.8) is no Triton kernel: it computes the head in chunks in PyTorch, as `training/forward/token_logps.py` does, and
gives the same loss and gradients.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping

import torch
from transformers import PreTrainedModel

from lockstep.errors import InputError, check_extra

# Liger's kernels for losses that Lockstep does not use.
_LOSSES = ("fused_linear_cross_entropy", "cross_entropy")


def liger_config(use_liger_kernel: bool, kernel_config: Mapping[str, bool] | str | None) -> dict[str, bool] | None:
    """The kernels to put into the model, as a `liger_kernel_config`; None if Liger is not used.

    Args:
        use_liger_kernel: the setting `use_liger_kernel`.
        kernel_config: the setting `liger_kernel_config`: kernels by Liger's names, on or off.

    Raises:
        InputError: kernels are chosen without `use_liger_kernel`, liger-kernel is missing, or a loss is chosen.
    """
    if isinstance(kernel_config, str):
        raise InputError(f'liger_kernel_config={kernel_config!r}; it must be a mapping, such as {{"rope": false}}')
    if not use_liger_kernel:
        if kernel_config:
            raise InputError("liger_kernel_config is given without use_liger_kernel; set both, or leave it out")
        return None
    for name in _LOSSES:
        if kernel_config and kernel_config.get(name):
            raise InputError(f"liger_kernel_config has {name}, but no loss of Lockstep uses it; leave it out")
    check_extra("use_liger_kernel", "liger", "liger_kernel")
    return {**(kernel_config or {}), _LOSSES[0]: False}


def check_gpu(use_liger_kernel: bool, *, use_cpu: bool) -> None:
    """Refuse to train with the kernels where they cannot run. A config and a trainer can be made there, as in TRL.

    Raises:
        InputError: `use_liger_kernel` is set, and there is no GPU or it is not used.
    """
    has_gpu = torch.cuda.is_available() and not use_cpu
    if use_liger_kernel and not has_gpu and os.environ.get("TRITON_INTERPRET") != "1":
        raise InputError("use_liger_kernel needs a GPU: Liger's kernels are written in Triton; leave it out on a CPU")


def check_kernels(model: PreTrainedModel, chosen: Mapping[str, bool]) -> None:
    """Refuse settings that Liger would ignore without a message.

    Args:
        chosen: the result of `liger_config`.

    Raises:
        InputError: Liger has no kernels for models of this type, or no kernel of a chosen name.
    """
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    model_type = model.config.model_type
    if model_type not in MODEL_TYPE_TO_APPLY_LIGER_FN:
        raise InputError(f"Liger has no kernels for models of type {model_type!r}; leave use_liger_kernel out")
    names = [name for name in inspect.signature(MODEL_TYPE_TO_APPLY_LIGER_FN[model_type]).parameters if name != "model"]
    for name in chosen:
        if name not in names and name not in _LOSSES:
            raise InputError(
                f"liger_kernel_config has {name!r}, and Liger's kernels for {model_type!r} are {', '.join(names)}"
            )
