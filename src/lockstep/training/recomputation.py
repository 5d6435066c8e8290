"""What a forward leaves for its backward: the products and the attention of each layer; what is cheap is computed again.

Used by: `training/scoring.py`. A layer's norms, rotary embeddings, activations and casts leave several copies of its states behind,
which are most of a step's memory and take little time to make anew from what the matrix products gave. The gradients are the same
to the bit. On a CPU only: what it would cost on a GPU is not measured, and there Liger's kernels keep less by themselves.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

_ATEN = torch.ops.aten
_KEPT = [
    _ATEN.mm.default,
    _ATEN.addmm.default,
    _ATEN.bmm.default,
    _ATEN.baddbmm.default,
    _ATEN._grouped_mm.default,
    _ATEN.convolution.default,
    _ATEN._scaled_dot_product_flash_attention_for_cpu.default,
]


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
    layers: list[Any] = list(_outermost(model)) if wanted else []
    before = [dict(vars(layer)) for layer in layers]
    for layer in layers:
        layer.gradient_checkpointing, layer._gradient_checkpointing_func = True, _checkpointed
    try:
        yield
    finally:
        for layer, old in zip(layers, before, strict=True):
            for name in ("gradient_checkpointing", "_gradient_checkpointing_func"):
                vars(layer).pop(name)
                vars(layer).update({name: old[name]} if name in old else {})


def _outermost(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Layers of transformers' that stand in no other such layer."""
    for child in module.children():
        if isinstance(child, GradientCheckpointingLayer):
            yield child
        else:
            yield from _outermost(child)


# Under the name and with the arguments that transformers calls its own by.
_checkpointed = partial(
    checkpoint, use_reentrant=False, context_fn=partial(create_selective_checkpoint_contexts, _KEPT)
)
