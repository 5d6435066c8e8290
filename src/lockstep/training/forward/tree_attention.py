"""Attention within a pack, computed only where its tree lets tokens see each other.

Comes from: a pack's `ends`, by way of `training/forward/scoring.py`. Goes to: every attention layer of the model, through
transformers' own registry of attention functions. The result is that of a dense mask, which is never made. Nor is one made for
plain rows without padding in front: they attend causally, and layers with a window shorter than a row attend block by block.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, causal_mask_function, sdpa_mask
from transformers.modeling_utils import AttentionInterface

from lockstep.errors import InputError
from lockstep.training.forward.block_attention import TreeAttention

# The name under which transformers finds it.
TREE = "lockstep_tree"


def adopt_tree_attention(model: PreTrainedModel) -> None:
    """Let a model that attends by 'sdpa' take a `tree` as well; without one it attends as before."""
    if model.config._attn_implementation == "sdpa":
        model.set_attn_implementation(TREE)


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
        query, key, value: (B, heads, T, width), B = 1 with a tree; keys and values may have fewer heads.
        attention_mask: used where there is no `tree`; beside one it is `no_mask`.

    Returns:
        (B, T, heads, width), and no weights.

    Raises:
        InputError: the layer adds to its attention what a tree cannot carry.
    """
    if tree is None:
        return attend_without_tree(module, query, key, value, attention_mask, **kwargs)
    check_nothing_added(module, attention_mask, kwargs)
    return _attend(tree, query, key, value, kwargs.get("scaling")), None


def attend_without_tree(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """As 'sdpa' attends, but for a window that `window_or_mask` has left unmade."""
    window = attention_mask.shape[-1] if attention_mask is not None and not attention_mask.numel() else 0
    if not window:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    check_nothing_added(module, attention_mask, kwargs)
    plan = _window(window, query.shape[2], query.device, value.dtype, query.dtype)
    return _attend(plan, query, key, value, kwargs.get("scaling")), None


@lru_cache(maxsize=4)
def _window(window: int, size: int, device: torch.device, *dtypes: torch.dtype) -> TreeAttention:
    return TreeAttention.within(window, size, device, torch.promote_types(*dtypes))


def _attend(
    tree: TreeAttention, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None
) -> torch.Tensor:
    if query.device.type == "cpu":
        # The half-precision backward of a CPU takes twice as long as that of float32.
        (query, key, value), dtype = (_wide(part) for part in (query, key, value)), value.dtype
    else:
        query, key, value = in_one_dtype(query, key, value)
        dtype = value.dtype
    with torch.autocast(query.device.type, enabled=False):
        return tree(query, key, value, scale).to(dtype).transpose(1, 2).contiguous()


def in_one_dtype(*parts: torch.Tensor) -> list[torch.Tensor]:
    """Queries, keys and values in autocast's dtype, or without it in that of the values.

    Autocast leaves rotated queries and keys wider than the values, and is not in force in a backward that computes them again.
    """
    kind = parts[0].device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else parts[-1].dtype
    return [part.to(dtype) for part in parts]


def _wide(part: torch.Tensor) -> torch.Tensor:
    return part.to(torch.promote_types(part.dtype, torch.float32))


def no_mask(device: torch.device) -> torch.Tensor:
    """What a model is given as its mask beside a `tree`, so that it makes none: (1, 1, 0, 0) bool.

    A layer that used it would fail: it fits no scores.
    """
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
    """A mask function of transformers: 'sdpa's own, but (1, 1, 0, window) bool for whole rows that a window alone hides from.

    A layer that used that as a mask would fail, as with `no_mask`.
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
    """Whether it is a window that hides, and not a chunk: token `size` sees token 1."""
    nothing, row, column = torch.tensor(0), torch.tensor(size), torch.tensor(min(size, 1))
    return bool(mask_function(nothing, nothing, row, column))


def check_nothing_added(module: torch.nn.Module, attention_mask: torch.Tensor | None, kwargs: dict[str, Any]) -> None:
    """Check that a layer attends by the pack's tree and by nothing else.

    Raises:
        InputError: it has a bias or a mask of its own, or dropout.
    """
    own = "a bias of its own" if kwargs.get("position_bias") is not None else ""
    own = own or ("dropout" if kwargs.get("dropout") else "")
    own = own or ("a mask of its own" if attention_mask is None or attention_mask.numel() else "")
    if own:
        raise InputError(
            f"{type(module).__name__} gives its attention {own}, which packed sequences cannot be trained with; "
            "use another model, or set its dropout to 0"
        )


AttentionInterface.register(TREE, tree_attention_forward)
AttentionMaskInterface.register(TREE, window_or_mask)
