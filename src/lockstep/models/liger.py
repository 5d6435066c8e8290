"""Liger's Triton kernels for the trainer's model: what is accepted, before a model is loaded.

Comes from: `training/config/online_config.py` and `training/forward/policy.py`. Goes to: `transformers.Trainer`, which puts the
kernels into the model as training begins: norms, rotary embedding, gated MLP. Head and loss stay Lockstep's. Liger's fused linear
loss (`LigerFusedLinearGRPOLoss` of liger-kernel 0.8) has no kernel of its own: it is the head in chunks, in PyTorch, as
`training/forward/token_logps.py` is, and gives the same loss and gradients.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping

import torch
from transformers import PreTrainedModel
from transformers.utils import is_liger_kernel_available

from lockstep.errors import InputError

# Of losses that nothing here goes through.
_LOSSES = ("fused_linear_cross_entropy", "cross_entropy")


def liger_config(wanted: bool, given: Mapping[str, bool] | str | None, *, use_cpu: bool) -> dict[str, bool] | None:
    """The kernels to put into the model, as `liger_kernel_config`; None for none.

    Args:
        wanted: `use_liger_kernel`.
        given: `liger_kernel_config`: kernels by Liger's names, on or off.

    Raises:
        InputError: kernels are chosen and not wanted, liger-kernel is missing, no GPU would run them, or a loss is among them.
    """
    if isinstance(given, str):
        raise InputError(f'liger_kernel_config={given!r}; it must be a mapping, such as {{"rope": false}}')
    if not wanted:
        if given:
            raise InputError("liger_kernel_config is given without use_liger_kernel; set both, or leave it out")
        return None
    for name in _LOSSES:
        if given and given.get(name):
            raise InputError(f"liger_kernel_config has {name}, which no loss here goes through; leave it out")
    if not is_liger_kernel_available():
        raise InputError("use_liger_kernel needs liger-kernel; install lockstep-rl[liger]")
    if (use_cpu or not torch.cuda.is_available()) and os.environ.get("TRITON_INTERPRET") != "1":
        raise InputError("use_liger_kernel needs a GPU: Liger's kernels are written in Triton; leave it out on a CPU")
    return {**(given or {}), _LOSSES[0]: False}


def check_kernels(model: PreTrainedModel, chosen: Mapping[str, bool]) -> None:
    """Refuse what Liger would pass over in silence.

    Args:
        chosen: what `liger_config` gave.

    Raises:
        InputError: it has no kernels for models of this kind, or none of a name.
    """
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    kind = model.config.model_type
    if kind not in MODEL_TYPE_TO_APPLY_LIGER_FN:
        raise InputError(f"Liger has no kernels for models of type {kind!r}; leave use_liger_kernel out")
    names = [name for name in inspect.signature(MODEL_TYPE_TO_APPLY_LIGER_FN[kind]).parameters if name != "model"]
    for name in chosen:
        if name not in names and name not in _LOSSES:
            raise InputError(
                f"liger_kernel_config has {name!r}, and Liger's kernels for {kind!r} are {', '.join(names)}"
            )
