"""What a forward leaves for its backward: the products and the attention of each layer; what is cheap is computed again.

Used by: `training/forward/scoring.py`. A layer's norms, rotary embeddings, activations and casts leave several copies of its
states behind, which are most of a step's memory and take little time to make anew from what the matrix products gave. The
gradients are the same to the bit. On a CPU only: what it would cost on a GPU is not measured, and there Liger's kernels keep less
by themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

# Makes an operation of attention, which is kept.
import lockstep.training.forward.block_attention  # noqa: F401

_ATEN = torch.ops.aten
_PRODUCTS = {
    _ATEN.mm.default,
    _ATEN.addmm.default,
    _ATEN.bmm.default,
    _ATEN.baddbmm.default,
    _ATEN._grouped_mm.default,
    _ATEN.convolution.default,
    _ATEN._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.lockstep.attend.default,
}
# Products over fewer columns, such as an adapter's second, are themselves cheap, and large.
_THIN = 64
# By these names transformers finds out whether and how a layer is checkpointed.
_NAMES = ("gradient_checkpointing", "_gradient_checkpointing_func")


@contextmanager
def products_kept(model: PreTrainedModel) -> Iterator[None]:
    """Forwards within it keep only products and attention for their backward, which runs once and may come later.

    Nothing changes for a model on another device than a CPU, one in evaluation mode, one whose layers transformers cannot
    checkpoint, one whose user has switched gradient checkpointing on, and without gradients. The model is left as it was.

    Args:
        model: a causal language model, without the wrapper of an adapter.
    """
    wanted = (
        torch.is_grad_enabled()
        and model.device.type == "cpu"
        and model.supports_gradient_checkpointing
        and not model.is_gradient_checkpointing
    )
    before = [(layer, {n: v for n, v in vars(layer).items() if n in _NAMES}) for layer in _outermost(model) if wanted]
    for layer, _ in before:
        vars(layer).update(zip(_NAMES, (True, partial(_run, layer)), strict=True))
    try:
        yield
    finally:
        for layer, own in before:
            for name in _NAMES:
                del vars(layer)[name]
            vars(layer).update(own)


def _outermost(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Layers of transformers' that stand in no other such layer."""
    for child in module.children():
        if isinstance(child, GradientCheckpointingLayer):
            yield child
        else:
            yield from _outermost(child)


# Layers that change a product in place: what is kept of it would not be what it was.
_CHANGING: WeakSet[torch.nn.Module] = WeakSet()


def _run(layer: torch.nn.Module, forward: Callable[..., Any], *args: Any) -> Any:
    if layer not in _CHANGING:
        kept = _Kept()
        contexts = partial(create_selective_checkpoint_contexts, kept.policy)
        result = checkpoint(forward, *args, use_reentrant=False, context_fn=contexts)
        if not kept.changed:
            return result
        _CHANGING.add(layer)
    return forward(*args)


class _Kept:
    """What to keep of a layer's forward, and whether any of it was changed."""

    def __init__(self) -> None:
        self.changed = False
        self._storages: set[int] = set()

    def policy(self, context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if operation in _PRODUCTS and not _is_thin(operation, args):
            # Some releases of PyTorch ask again as they compute again, when there is no result yet.
            if not context.is_recompute:
                result = context.op_output
                first = result[0] if isinstance(result, tuple) else result
                self._storages.add(first.untyped_storage().data_ptr())
            return CheckpointPolicy.MUST_SAVE
        if operation._schema.is_mutable:
            written = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
            self.changed |= any(value.untyped_storage().data_ptr() in self._storages for value in written)
        return CheckpointPolicy.PREFER_RECOMPUTE


def _is_thin(operation: Any, args: tuple[Any, ...]) -> bool:
    factor = {_ATEN.mm.default: 0, _ATEN.addmm.default: 1}.get(operation)
    return factor is not None and args[factor].shape[-1] < _THIN
