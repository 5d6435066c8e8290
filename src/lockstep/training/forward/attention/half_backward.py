"""The backward of attention over a tree, by matrix products in bf16. For processors that multiply in bf16 much faster than in fp32.

The forward rounds queries, keys and values to bf16, as a GPU and the engine do, and computes in float32. It gives the
result o of each row, and l, the logarithm of its softmax's denominator. With the scores s = c·q·kᵀ and the gradient g
of o, the backward is

    p = exp(s − l),   dv = pᵀ·g,   ds = p · (g·vᵀ − o·g),   dq = c·ds·k,   dk = c·dsᵀ·q.

Both differences are computed by a product, in float32, and rounded to bf16 afterwards. For this, queries have more columns. Their
sum is −l/c, and keys have ones there. (It is the same for g, o·g and the values.) The rounding that is left is that of the kernels
for GPUs, which round p and ds.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from lockstep.training.forward.attention.attention_plan import AttentionPlan, Run, size_of
from lockstep.training.forward.attention.columns import add_to_columns, columns_of

# Columns for a number that the products subtract. Each of them holds 8 bits of it.
_MORE = 4
# Scores that are computed together, over all heads. Their bf16 numbers fit into a processor's cache.
_SCORES = 1 << 20
# The most columns that are computed together, at least `_CHAIN`. Few rows with many columns are slow.
_COLUMNS = 1024
# The fewest rows of a piece, and the most of a piece of a chain: there a product also computes the pairs that rows do not see.
_FEWEST, _CHAIN = 32, 128


def half_backward(
    of_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    total: torch.Tensor,
    plan: AttentionPlan,
    masks: tuple[torch.Tensor | None, ...],
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute the gradients of queries, keys and values.

    Args:
        of_out: (B, heads, T, width) gradient of the result.
        query, key, value: (B, heads, T, width), in the dtype of the products. Keys and values may have fewer heads.
        out: (B, heads, T, width) result of the forward.
        total: (B, heads, T) logarithm of each softmax's denominator.
        masks: one per block, as in `TreeAttention.masks`.

    Returns:
        Gradients in the shapes of `query`, `key` and `value`, and in the dtype of `out`.
    """
    batch, heads, size, width = query.shape
    groups, dtype = heads // key.shape[1], query.dtype
    q = _with_columns(query, total / scale, groups, dtype)
    g = _with_columns(of_out, (out * of_out).sum(-1), groups, dtype)
    k, v, nothing = _with_ones(key), _with_ones(value), query.new_zeros(1, 1, 1)
    of_query, of_k, of_v = (torch.zeros_like(part, dtype=out.dtype) for part in (query, key, value))
    of_q = of_query.view(batch, -1, groups, size, width).transpose(2, 3)

    def parted(product: torch.Tensor) -> torch.Tensor:
        """(B, key heads, rows, width): a product over all heads."""
        return product.view(*key.shape[:2], -1, width)

    for (first, last), runs, hidden in _pieces(plan, masks, batch * heads):
        rows = slice(first * groups, last * groups)
        some_q, some_g, some_k, some_v = q[:, rows], g[:, rows], columns_of(k, runs), columns_of(v, runs)
        # A row of scores per key, because then only one of the three products below has to transpose them.
        shares = torch.baddbmm(nothing, some_k, some_q.transpose(1, 2), beta=0, alpha=scale).exp_()
        if hidden is not None:
            shares[:, -hidden.shape[-1] :].masked_fill_(hidden.T.repeat_interleave(groups, 1), 0.0)
        add_to_columns(of_v, runs, parted(torch.bmm(shares, some_g[..., :width])))
        scores = shares.mul_(torch.bmm(some_v, some_g.transpose(1, 2)))
        of_some = parted(torch.bmm(scores.transpose(1, 2), some_k[..., :width])).unflatten(2, (-1, groups))
        of_q[:, :, first:last].add_(of_some, alpha=scale)
        add_to_columns(of_k, runs, parted(torch.bmm(scores, some_q[..., :width])), scale)
    return of_query, of_k, of_v


def _with_columns(part: torch.Tensor, less: torch.Tensor, groups: int, dtype: torch.dtype) -> torch.Tensor:
    """(B × key heads, T × groups, width + 4): rows of a tensor, with four columns whose sum is −`less`."""
    batch, heads, size, width = part.shape
    found = part.new_empty(batch, heads // groups, size, groups, width + _MORE, dtype=dtype)
    found[..., :width] = part.view(batch, -1, groups, size, width).transpose(2, 3)
    rest = less.view(batch, -1, groups, size).transpose(2, 3).neg()
    for column in range(width, width + _MORE):
        found[..., column] = rest
        rest -= found[..., column]
    return found.view(-1, size * groups, width + _MORE)


def _with_ones(part: torch.Tensor) -> torch.Tensor:
    """(B × heads, T, width + 4): rows of a tensor, with four columns of ones."""
    batch, heads, size, width = part.shape
    found = part.new_ones(batch, heads, size, width + _MORE)
    found[..., :width] = part
    return found.view(-1, size, width + _MORE)


def _pieces(
    plan: AttentionPlan, masks: tuple[torch.Tensor | None, ...], heads: int
) -> Iterator[tuple[Run, tuple[Run, ...], torch.Tensor | None]]:
    """Rows, their columns, and what is hidden of the last columns: (rows, columns) bool."""
    later = torch.ones(_CHAIN, _CHAIN, dtype=torch.bool).triu_(1)
    for block, mask in zip(plan.blocks, masks, strict=True):
        if mask is not None:
            yield (block.start, block.stop), block.columns, mask[0, 0] != 0
            continue
        for first in range(block.start, block.stop, _CHAIN):
            last = min(first + _CHAIN, block.stop)
            done = max(block.start, last - _COLUMNS)
            for start in range(block.start, done, _COLUMNS):
                yield (first, last), ((start, min(start + _COLUMNS, done)),), None
            yield (first, last), ((done, last),), later[: last - first, : last - first]
    for part in plan.shared:
        for runs in _halves(part.columns):
            width = size_of(runs)
            step = max(_FEWEST, _SCORES // (heads * width))
            for first in range(part.start, part.stop, step):
                yield (first, min(first + step, part.stop)), runs, None


def _halves(runs: tuple[Run, ...]) -> Iterator[tuple[Run, ...]]:
    """Runs of at most `_COLUMNS` columns together."""
    some: list[Run] = []
    room = _COLUMNS
    for start, stop in runs:
        while start < stop:
            end = min(stop, start + room)
            some.append((start, end))
            room -= end - start
            start = end
            if not room:
                yield tuple(some)
                some, room = [], _COLUMNS
    if some:
        yield tuple(some)
