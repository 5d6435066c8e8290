"""Liger's Triton kernels for the trainer's model: what is accepted, before a model is loaded.

Comes from: `training/config.py`. Goes to: `transformers.Trainer`, which puts the kernels into the model as training begins: norms,
rotary embedding, gated MLP. Head and loss stay Lockstep's. Liger's fused loss (liger-kernel 0.8, `chunked_loss`) has no kernel of
its own: it is the head in chunks, in PyTorch, as `training/token_logps.py` is, and gives the same loss and gradients.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch
from transformers.utils import is_liger_kernel_available

from lockstep.errors import InputError

# Would put a forward into the model that nothing here calls.
_FUSED = "fused_linear_cross_entropy"


def liger_config(wanted: bool, given: Mapping[str, bool] | str | None) -> dict[str, bool] | None:
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
    if given and given.get(_FUSED):
        raise InputError(f"liger_kernel_config has {_FUSED}, which no loss here goes through; leave it out")
    if not is_liger_kernel_available():
        raise InputError("use_liger_kernel needs liger-kernel; install lockstep-rl[liger]")
    if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
        raise InputError("use_liger_kernel needs a GPU: Liger's kernels are written in Triton; leave it out on a CPU")
    return {**(given or {}), _FUSED: False}
