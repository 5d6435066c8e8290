"""Attention within a pack, computed only for pairs of tokens that see each other in the tree.

A pack's `ends` come with every call, through transformers' registry of attention functions. The result is that of a
dense mask, but the dense mask is never made. Plain rows without padding at the front need no dense mask either: they
attend causally, and a layer with a window shorter than a row attends block by block.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, TypeGuard

import torch
from transformers import PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, causal_mask_function, sdpa_mask
from transformers.modeling_utils import AttentionInterface

from lockstep.errors import InputError
from lockstep.learn.attention.blocks import TreeAttention
from lockstep.learn.attention.paths import capped_attention
from lockstep.models.arithmetic import autocast_dtype

# The name in transformers' registry.
TREE = "lockstep_tree"


def is_flash(asked: Any) -> TypeGuard[str]:
    """Whether an `attn_implementation` is FlashAttention, of any version or source."""
    return isinstance(asked, str) and "flash" in asked.lower()


def adopt_tree_attention(model: PreTrainedModel) -> None:
    """Let a model with 'sdpa' attention also accept a `tree`. Without a tree it attends as before.

    FlashAttention becomes 'sdpa' first, which computes the same. Some models (Falcon, StableLM) cannot get another
    attention in transformers. They stay as they are, and learn from plain rows.
    """
    if is_flash(model.config._attn_implementation):
        model.set_attn_implementation("sdpa")
    if model.config._attn_implementation == "sdpa" and model._supports_attention_backend:
        model.set_attn_implementation(TREE)


class _Arrived(Exception):
    """Raised by the attention of a trial: the tree has come there."""


@torch.no_grad()
def passes_trees_on(model: PreTrainedModel) -> bool:
    """Whether a model's layers pass a `tree` on to their attention. Some (Nemotron) drop it.

    The model's forward is tried, and ended at the attention of its first layer.
    """

    def trial(*args: Any) -> torch.Tensor:
        raise _Arrived

    device = model.device
    ids, positions = torch.zeros(1, 2, dtype=torch.long, device=device), torch.arange(2, device=device)[None]
    masks = {"attention_mask": no_mask(device), "position_ids": positions}
    try:
        model.base_model(input_ids=ids, use_cache=False, tree=trial, **masks)
    except _Arrived:
        return True
    except (RuntimeError, TypeError, ValueError) as error:
        # An InputError says what the layer adds to its attention. It is raised again when the model is first used.
        return isinstance(error, InputError)
    return False


def tree_attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    tree: TreeAttention | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """An attention function of transformers.

    Args:
        query, key, value: (B, heads, T, width), B = 1 with a tree. Keys and values may have fewer heads.
        attention_mask: the mask if there is no `tree`. With a tree it is `no_mask`.

    Returns:
        (B, T, heads, width), and None in place of the attention weights.
    """
    if tree is None:
        return attend_without_tree(module, query, key, value, attention_mask, **kwargs)
    check_nothing_added(module, attention_mask, kwargs)
    return _attend(tree, query, key, value, kwargs.get("scaling"), kwargs.get("softcap")), None


def attend_without_tree(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention as by 'sdpa', except for windows, for which `window_or_mask` makes no mask, and for capped scores."""
    window = attention_mask.shape[-1] if attention_mask is not None and not attention_mask.numel() else 0
    cap, scale = kwargs.get("softcap"), kwargs.get("scaling")
    if not window and cap is not None:
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        found = capped_attention(query, key, value, attention_mask, scale, cap)
        return found.transpose(1, 2).contiguous(), None
    if not window:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    check_nothing_added(module, attention_mask, kwargs)
    kind = query.device.type
    dtype = (
        torch.promote_types(value.dtype, query.dtype) if kind == "cpu" else autocast_dtype(kind, value.dtype)
    )
    return _attend(_window(window, query.shape[2], query.device, dtype), query, key, value, scale, cap), None


@lru_cache(maxsize=4)
def _window(window: int, size: int, device: torch.device, dtype: torch.dtype) -> TreeAttention:
    return TreeAttention.within(window, size, device, dtype)


def _attend(
    tree: TreeAttention,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float | None,
    cap: float | None,
) -> torch.Tensor:
    if query.device.type == "cpu":
        # PyTorch's kernels for a CPU are not faster in half precision. `blocks.py` rounds again where that pays.
        (query, key, value), dtype = (_wide(part) for part in (query, key, value)), value.dtype
    else:
        query, key, value = in_one_dtype(query, key, value)
        dtype = value.dtype
    with torch.autocast(query.device.type, enabled=False):
        return tree(query, key, value, scale, cap).to(dtype).transpose(1, 2).contiguous()


def in_one_dtype(*parts: torch.Tensor) -> list[torch.Tensor]:
    """Queries, keys and values in autocast's dtype, or in the dtype of the values if autocast is off.

    Under autocast, rotated queries and keys have a wider dtype than the values. Autocast is off in a backward that
    recomputes them.
    """
    kind = parts[0].device.type
    dtype = autocast_dtype(kind, parts[-1].dtype)
    return [part.to(dtype) for part in parts]


def _wide(part: torch.Tensor) -> torch.Tensor:
    return part.to(torch.promote_types(part.dtype, torch.float32))


def no_mask(device: torch.device) -> torch.Tensor:
    """(1, 1, 0, 0) bool, with which a model makes no mask. It fits no scores: a layer that used it would fail."""
    return torch.empty(1, 1, 0, 0, dtype=torch.bool, device=device)


def window_or_mask(
    *args: Any,
    q_length: int,
    kv_length: int,
    local_size: int | None = None,
    attention_mask: torch.Tensor | None = None,
    mask_function: Callable[..., Any] = causal_mask_function,
    allow_is_causal_skip: bool = True,
    **kwargs: Any,
) -> torch.Tensor | None:
    """A mask function of transformers: the mask of 'sdpa', except for whole, unpadded rows with a shorter window.

    For these it returns a (1, 1, 0, window) bool tensor. A layer that used it as a mask would fail, as with `no_mask`.
    """
    whole = q_length == kv_length and not kwargs.get("q_offset") and not kwargs.get("kv_offset")
    alone = whole and allow_is_causal_skip and attention_mask is None
    if alone and local_size and local_size < kv_length and _is_window(mask_function, local_size):
        return torch.empty(1, 1, 0, local_size, dtype=torch.bool, device=kwargs.get("device"))
    return sdpa_mask(
        *args,
        q_length=q_length,
        kv_length=kv_length,
        local_size=local_size,
        attention_mask=attention_mask,
        mask_function=mask_function,
        allow_is_causal_skip=allow_is_causal_skip,
        **kwargs,
    )


def _is_window(mask_function: Callable[..., Any], size: int) -> bool:
    """Whether the function is a sliding window, not chunks. In a window, token `size` sees token 1."""
    nothing, row, column = torch.tensor(0), torch.tensor(size), torch.tensor(min(size, 1))
    return bool(mask_function(nothing, nothing, row, column))


def check_nothing_added(
    module: torch.nn.Module, attention_mask: torch.Tensor | None, kwargs: dict[str, Any]
) -> None:
    """Refuse a layer whose attention has a separate bias or mask, or dropout, beside the pack's tree."""
    own = "a bias of its own" if kwargs.get("position_bias") is not None else ""
    own = own or ("dropout" if kwargs.get("dropout") else "")
    own = own or ("a mask of its own" if attention_mask is None or attention_mask.numel() else "")
    if own:
        raise InputError(
            f"{type(module).__name__} gives its attention {own}, which packed sequences cannot be trained "
            "with; use another model, or set its dropout to 0"
        )


AttentionInterface.register(TREE, tree_attention_forward)
AttentionMaskInterface.register(TREE, window_or_mask)
