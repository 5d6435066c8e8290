"""Attention whose scores are capped: cap · tanh(score / cap), as in Gemma 2.

PyTorch's kernels cannot cap scores, so all scores of a block are computed. It is called block by block, or for plain
rows. vLLM's kernels cap the scores themselves.
"""

from __future__ import annotations

import torch


def capped_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    cap: float,
) -> torch.Tensor:
    """Compute attention with capped scores.

    Args:
        query: (B, heads, Q, width).
        key, value: (B, heads, K, width). They may have fewer heads.
        mask: (…, Q, K) bool, True where a row sees a column. None: the last row sees all columns, each earlier row one less.
        cap: the largest score, before the softmax.

    Returns:
        (B, heads, Q, width of the values).
    """
    groups = query.shape[1] // key.shape[1]
    key, value = (part.repeat_interleave(groups, 1) if groups > 1 else part for part in (key, value))
    rows, columns = query.shape[2], key.shape[2]
    scores = torch.tanh(query @ key.transpose(-1, -2) * (scale / cap)) * cap
    if mask is None:
        mask = torch.ones(rows, columns, dtype=torch.bool, device=query.device).tril(columns - rows)
    shares = scores.masked_fill(~mask, -torch.inf).softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32))
    return shares.to(value.dtype) @ value
