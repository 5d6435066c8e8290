"""Causal attention by PyTorch's public function, for devices other than a CPU. The last row sees all columns."""

from __future__ import annotations

import torch
from torch.nn.attention.bias import causal_lower_right

_HALF = (torch.float16, torch.bfloat16)
# The widest heads that PyTorch's flash kernel takes.
_WIDEST = 256


def causal_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
    """Compute attention in which the last row sees all columns, and each earlier row one less.

    Args:
        query: (B, heads, Q, width).
        key, value: (B, heads, K, width), K >= Q. They may have fewer heads.

    Returns:
        (B, heads, Q, width of the values).
    """
    rows, columns = query.shape[2], key.shape[2]
    shared = query.shape[1] != key.shape[1] and _takes_fewer_key_heads(query, value)
    if not shared:
        key, value = with_all_heads(query, key, value)
    attend = torch.nn.functional.scaled_dot_product_attention
    if rows == columns:
        return attend(query, key, value, is_causal=True, scale=scale, enable_gqa=shared)
    # GPU kernels have this option.
    return attend(query, key, value, attn_mask=causal_lower_right(rows, columns), scale=scale, enable_gqa=shared)


def with_all_heads(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values with as many heads as the queries."""
    groups = query.shape[1] // key.shape[1]
    return (key, value) if groups == 1 else (key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1))


def _takes_fewer_key_heads(query: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether a fast kernel takes fewer key heads than query heads. Where none does, PyTorch makes all scores: T × T numbers."""
    return query.dtype in _HALF and query.shape[-1] == value.shape[-1] <= _WIDEST
