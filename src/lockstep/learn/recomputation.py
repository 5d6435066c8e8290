"""Selective recomputation: in long packs, layers keep only products and attention; the backward recomputes the rest.

The norms, rotary embeddings, activations and casts of a layer save several copies of its hidden states. In a long pack
these copies are most of a step's memory, and the backward can recompute them from the matrix products in little time.
The first layers of a forward keep everything, as long as this takes no more memory than the model's weights; so a
short pack recomputes nothing. The gradients are bitwise equal. The module is active on a CPU only: its cost on a GPU
is not measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

# This import registers the attention operation whose result is kept.
import lockstep.learn.attention.blocks  # noqa: F401

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
# A product over fewer columns, such as the second one of an adapter, is cheap to recompute, and its result is large.
_THIN = 64
# The layers that keep everything take at most this many times the memory of the model's weights.
WEIGHTS_OF_ROOM = 1.0
# The attributes by which transformers knows whether and how a layer is checkpointed.
_NAMES = ("gradient_checkpointing", "_gradient_checkpointing_func")


@contextmanager
def products_kept(model: PreTrainedModel) -> Iterator[None]:
    """A context in which layers that have no room for more keep only products and attention of one forward.

    The backward runs once, perhaps after the context has ended. The context changes nothing if the model is not on a
    CPU or is in evaluation mode, if transformers cannot checkpoint its layers, if the user has switched gradient
    checkpointing on, or if gradients are off. PyTorch before 2.12 does not show the results that it would keep; with it
    nothing is recomputed.
    """
    wanted = (
        torch.is_grad_enabled()
        and model.device.type == "cpu"
        and model.supports_gradient_checkpointing
        and not model.is_gradient_checkpointing
        and hasattr(SelectiveCheckpointContext(is_recompute=False), "op_output")
    )
    if not wanted:
        yield
        return
    before = [(layer, {n: v for n, v in vars(layer).items() if n in _NAMES}) for layer in outermost(model)]
    room = _Room(WEIGHTS_OF_ROOM * sum(p.numel() * p.element_size() for p in model.parameters()))
    for layer, _ in before:
        vars(layer).update(zip(_NAMES, (True, partial(_run, layer, room)), strict=True))
    try:
        yield
    finally:
        for layer, own in before:
            for name in _NAMES:
                del vars(layer)[name]
            vars(layer).update(own)


def outermost(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Layers of transformers that are not part of another such layer."""
    for child in module.children():
        if isinstance(child, GradientCheckpointingLayer):
            yield child
        else:
            yield from outermost(child)


# Layers that change a product in place. A kept product would have the wrong values.
_CHANGING: WeakSet[torch.nn.Module] = WeakSet()


def layers_computed_twice() -> int:
    """The number of layers that change a product in place. The forward that found one has computed it twice."""
    return len(_CHANGING)


def _run(
    layer: torch.nn.Module, room: _Room, forward: Callable[..., Any], hidden: torch.Tensor, *args: Any
) -> Any:
    if layer in _CHANGING:
        return forward(hidden, *args)
    kind, positions = _kind(layer, hidden), hidden.shape[:-1].numel()
    if kind not in KEPT_BYTES:
        with _bytes_kept(layer, positions) as per_position:
            result = forward(hidden, *args)
        KEPT_BYTES[kind] = per_position()
        return result
    if room.takes(KEPT_BYTES[kind] * positions):
        return forward(hidden, *args)
    kept = _Kept()
    contexts = partial(create_selective_checkpoint_contexts, kept.policy)
    result = checkpoint(forward, hidden, *args, use_reentrant=False, context_fn=contexts)
    if not kept.changed:
        return result
    _CHANGING.add(layer)
    return forward(hidden, *args)


class _Room:
    """The memory, in bytes, in which layers of one forward may keep everything."""

    def __init__(self, size: float) -> None:
        self._left = size

    def takes(self, needed: float) -> bool:
        """Whether there is room for this many bytes. If so, the room is taken."""
        if fits := needed <= self._left:
            self._left -= needed
        return fits


# Bytes per position that a layer of each kind keeps if nothing is recomputed, measured when a layer first runs.
KEPT_BYTES: dict[tuple[object, ...], float] = {}


def _kind(layer: torch.nn.Module, hidden: torch.Tensor) -> tuple[object, ...]:
    autocast = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
    return type(layer), sum(p.numel() for p in layer.parameters()), hidden.dtype, autocast


@contextmanager
def _bytes_kept(layer: torch.nn.Module, positions: int) -> Iterator[Callable[[], float]]:
    """A context for a layer's forward. It gives a function that returns, afterwards, the bytes kept per position."""
    # The weights and their casts are kept in any case.
    weights = {shape for p in layer.parameters() for shape in (p.shape, p.shape[::-1])}
    found: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.shape not in weights:
            storage = tensor.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        yield lambda: sum(found.values()) / positions


class _Kept:
    """Decides which results of a layer's forward are kept, and checks whether the layer has changed one of them."""

    def __init__(self) -> None:
        self.changed = False
        self._storages: set[int] = set()

    def policy(self, context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if operation in _PRODUCTS and not _is_thin(operation, args):
            # Some releases of PyTorch call this again during the recomputation, when there is no result yet.
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
