"""Attention over a tree of tokens, piece by piece. Its memory grows linearly with the number of tokens.

`learn/attention/plan.py` plans the pieces. Queries, keys, values and the result are kept for the backward. No keys are
kept twice, and no attention scores are kept.

On a CPU the attention of a row has two parts: the columns that its block shares, and the block itself. PyTorch's
flash kernel computes each part separately. Let oₚ be the result of a part and lₚ the logarithm of its softmax's
denominator. The whole is l = log(Σ exp lₚ), o = Σ exp(lₚ − l) · oₚ. If the kernel's backward of a part gets the o and
l of the whole, it returns that part of the gradient. On other devices a tree is computed by paths (`paths.py`), or
PyTorch's public function computes each block with all of its columns, and the backward computes the block again.

A run in bf16 has a backward of its own, by matrix products in bf16, for processors that multiply in bf16 much faster
than in fp32. Its forward rounds queries, keys and values to bf16, as a GPU and the engine do, and computes in float32.
With the scores s = c·q·kᵀ and the gradient g of o, the backward is

    p = exp(s − l),   dv = pᵀ·g,   ds = p · (g·vᵀ − o·g),   dq = c·ds·k,   dk = c·dsᵀ·q.

Both differences are computed by a product, in float32, and rounded to bf16 afterwards. For this, queries have more
columns. Their sum is −l/c, and keys have ones there. (It is the same for g, o·g and the values.) The rounding that is
left is that of the kernels for GPUs, which round p and ds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import torch

from lockstep.devices import has_fast_bf16, sent
from lockstep.learn.attention.paths import PathAttention, capped_attention, causal_attention, with_all_heads
from lockstep.learn.attention.plan import (
    CHAIN_ROWS,
    ROWS,
    AttentionPlan,
    Block,
    Run,
    plan_attention,
    plan_paths,
    plan_window,
    positions,
    size_of,
    visible,
    window_ends,
)
from lockstep.learn.pack import Ints


def columns_of(part: torch.Tensor, runs: tuple[Run, ...]) -> torch.Tensor:
    """(…, columns, width): the columns of some runs, of a (…, T, width) tensor. It is a view if there is one run."""
    if len(runs) == 1:
        return part[..., slice(*runs[0]), :]
    return torch.cat([part[..., a:b, :] for a, b in runs], -2)


def add_to_columns(
    total: torch.Tensor, runs: tuple[Run, ...], part: torch.Tensor, scale: float = 1.0
) -> None:
    """Add `scale` times a (…, columns, width) tensor to the columns of some runs, of a (…, T, width) tensor."""
    start = 0
    for a, b in runs:
        total[..., a:b, :].add_(part[..., start : start + b - a, :], alpha=scale)
        start += b - a


# Columns for a number that the products subtract. Each of them holds 8 bits of it.
_MORE = 4
# Scores that are computed together, over all heads. Their bf16 numbers fit into a processor's cache.
_SCORES = 1 << 20
# The most columns that are computed together, at least `_CHAIN`. Few rows with many columns are slow.
_COLUMNS = 1024
# The fewest rows of a piece, and the most of a piece of a chain, where a product also computes hidden pairs.
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
    """The gradients of queries, keys and values, in their shapes and in the dtype of `out`.

    Args:
        of_out: (B, heads, T, width) gradient of the result.
        query, key, value: (B, heads, T, width), in the dtype of the products. Keys and values may have fewer heads.
        out: (B, heads, T, width) result of the forward.
        total: (B, heads, T) logarithm of each softmax's denominator.
        masks: one per block, as in `TreeAttention.masks`.
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


_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
# On other devices than a CPU: about this many blocks (each costs a kernel start), of at most this many rows.
_MOST_BLOCKS, _MOST_ROWS = 16, 1024
# There masks are made once per pack with all columns, if they have at most this many numbers (32 MiB in bf16).
_MOST_PAIRS = 1 << 24
# A custom operation of PyTorch cannot take a `TreeAttention` as an argument. It takes its number.
TREES: WeakValueDictionary[int, TreeAttention] = WeakValueDictionary()


@dataclass(frozen=True, slots=True, weakref_slot=True)
class TreeAttention:
    """The attention pattern of a pack, or of a window over plain rows. All layers use the same object.

    Attributes:
        masks: one mask per block, added to the scores; None for a chain. Its shape is (1, 1, rows, columns): first the
            columns that only some rows see, then those of the block itself. On other devices it may begin with the
            columns that all rows see.
        fast: whether a CPU's backward multiplies in bf16.
        paths: the same attention by paths, which is computed in place of the pieces; None: the pieces are computed.
    """

    plan: AttentionPlan
    masks: tuple[torch.Tensor | None, ...]
    fast: bool = False
    paths: PathAttention | None = None

    def __post_init__(self) -> None:
        TREES[id(self)] = self

    @classmethod
    def of(
        cls,
        ends: torch.Tensor,
        device: torch.device,
        dtype: torch.dtype,
        half: torch.dtype | None = None,
        *,
        only_blocks: bool = False,
    ) -> TreeAttention:
        """Plan attention over a pack.

        Args:
            ends: (T,) `ends` of the pack.
            dtype: dtype of the model. A CPU computes attention at least in float32.
            half: the half precision in which the run multiplies; None: it multiplies in `dtype`. On a CPU, chains are
                then cut. (In float32 the rounding of the parts would make gradients less exact by a half.) If the CPU
                multiplies fast in bf16, the backward does so too.
            only_blocks: not by paths. Capped scores need it: all scores of a piece are in memory, and blocks are small.
        """
        known = ends.numpy()
        cut = half is not None and device.type == "cpu"
        plan = plan_attention(known, _rows(len(known), device), CHAIN_ROWS if cut else None)
        paths = None if device.type == "cpu" or only_blocks else plan_paths(known, plan)
        if paths is not None:
            return cls(plan, (), paths=PathAttention.of(paths, len(known), device))
        multiplied = dtype if device.type == "cpu" else half or dtype
        return cls._planned(
            plan, known, device, multiplied, fast=cut and half is torch.bfloat16 and has_fast_bf16()
        )

    @classmethod
    def within(cls, window: int, size: int, device: torch.device, dtype: torch.dtype) -> TreeAttention:
        """Plan attention over plain rows of `size` tokens, each of which sees itself and the `window` − 1 before it."""
        plan = plan_window(size, window, _rows(size, device))
        return cls._planned(plan, window_ends(size, window), device, dtype)

    @classmethod
    def _planned(
        cls, plan: AttentionPlan, ends: Ints, device: torch.device, dtype: torch.dtype, fast: bool = False
    ) -> TreeAttention:
        if device.type == "cpu":
            # PyTorch would convert a boolean mask to a float mask in every layer.
            return cls(plan, tuple(_masks(plan, ends, torch.promote_types(dtype, torch.float32))), fast)
        pairs = sum((b.stop - b.start) * size_of(_all_columns(b)) for b in plan.blocks if not b.chain)
        masks = _masks(plan, ends, dtype, whole=pairs <= _MOST_PAIRS)
        return cls(plan, tuple(mask if mask is None else _aligned(mask, device) for mask in masks), fast)

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float | None,
        cap: float | None = None,
    ) -> torch.Tensor:
        """(B, heads, T, width of the values) attention.

        Args:
            query, key, value: (B, heads, T, width). Keys and values may have fewer heads. Values may have another
                width.
            cap: bound of the scores (`paths.py`); None: they have none.
        """
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        if self.paths is not None:
            return self.paths(query, key, value, scale)
        if query.device.type != "cpu" or cap is not None:
            return Recomputed.apply(query, key, value, self, scale, cap)
        # The kernel needs equal widths. Zeros at the end do not change the products.
        width = value.shape[-1]
        widest = max(width, query.shape[-1])
        query, key, value = (_padded(part, widest) for part in (query, key, value))
        return _Merged.apply(query, key, value, self, scale)[..., :width]


def _padded(part: torch.Tensor, width: int) -> torch.Tensor:
    missing = width - part.shape[-1]
    return torch.nn.functional.pad(part, (0, missing)) if missing else part


def _rows(size: int, device: torch.device) -> int:
    return ROWS if device.type == "cpu" else min(max(ROWS, size // _MOST_BLOCKS), _MOST_ROWS)


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, tree: TreeAttention, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention on a CPU, without gradient, and the (B, heads, T) logarithm of each softmax's denominator."""
    blocks = tree.plan.blocks
    if len(blocks) == 1:
        return _FORWARD(query, key, value, 0.0, blocks[0].chain, attn_mask=tree.masks[0], scale=scale)
    # The memory layout that the layer needs: the heads of a row are adjacent.
    out = query.new_empty(query.shape[0], query.shape[2], query.shape[1], query.shape[3]).transpose(1, 2)
    total = query.new_empty(out.shape[0], out.shape[2], out.shape[1]).transpose(1, 2)
    for block, mask in zip(blocks, tree.masks, strict=True):
        rows = slice(block.start, block.stop)
        k, v = columns_of(key, block.columns), columns_of(value, block.columns)
        out[:, :, rows], total[:, :, rows] = _FORWARD(
            query[:, :, rows], k, v, 0.0, block.chain, attn_mask=mask, scale=scale
        )
    for part in tree.plan.shared:
        rows = slice(part.start, part.stop)
        k, v = columns_of(key, part.columns), columns_of(value, part.columns)
        found, denominator = _FORWARD(query[:, :, rows], k, v, scale=scale)
        torch.logaddexp(total[:, :, rows].clone(), denominator, out=total[:, :, rows])
        # The weight of the other part is its share of the whole denominator.
        out[:, :, rows].lerp_(found, (denominator - total[:, :, rows]).exp_()[..., None])
    return out, total


@torch.library.custom_op("lockstep::attend", mutates_args=(), device_types="cpu")
def attend_as_one(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, tree: int, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """`attend` as one operation of PyTorch. `recomputation.py` then keeps its result only, without the parts."""
    return attend(query, key, value, TREES[tree], scale)


class _Merged(torch.autograd.Function):
    """Attention on a CPU: the two parts of each row are joined with the denominators of their softmax."""

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        tree: TreeAttention,
        scale: float,
    ) -> torch.Tensor:
        kept = tuple(part.bfloat16() for part in (query, key, value)) if tree.fast else (query, key, value)
        out, total = attend_as_one(*(part.to(query.dtype) for part in kept), id(tree), scale)
        ctx.save_for_backward(*kept, out, total)
        ctx.tree, ctx.scale = tree, scale
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, of_out: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, out, total = ctx.saved_tensors
        tree: TreeAttention = ctx.tree
        if tree.fast:
            saved = query, key, value, out, total
            return (*half_backward(of_out, *saved, tree.plan, tree.masks, ctx.scale), None, None)
        of_query, of_key, of_value = (torch.zeros_like(part) for part in (query, key, value))

        def add(
            start: int, stop: int, columns: tuple[Run, ...], chain: bool, mask: torch.Tensor | None
        ) -> None:
            rows = slice(start, stop)
            k, v = columns_of(key, columns), columns_of(value, columns)
            of_o, q, o, sums = (part[:, :, rows] for part in (of_out, query, out, total))
            of_q, of_k, of_v = _BACKWARD(of_o, q, k, v, o, sums, 0.0, chain, attn_mask=mask, scale=ctx.scale)
            of_query[:, :, rows] += of_q
            add_to_columns(of_key, columns, of_k)
            add_to_columns(of_value, columns, of_v)

        for block, mask in zip(tree.plan.blocks, tree.masks, strict=True):
            add(block.start, block.stop, block.columns, block.chain, mask)
        for part in tree.plan.shared:
            add(part.start, part.stop, part.columns, False, None)
        return of_query, of_key, of_value, None, None


class Recomputed(torch.autograd.Function):
    """Attention on other devices, and with capped scores: block by block, and the backward computes each again."""

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        tree: TreeAttention,
        scale: float,
        cap: float | None,
    ) -> torch.Tensor:
        ctx.save_for_backward(query, key, value)
        ctx.tree, ctx.scale, ctx.cap = tree, scale, cap
        blocks = zip(tree.plan.blocks, tree.masks, strict=True)
        parts = [_block(_parts(query, key, value, block), block, mask, scale, cap) for block, mask in blocks]
        return torch.cat(parts, 2)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, of_out: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value = ctx.saved_tensors
        found = [torch.zeros_like(part) for part in (query, key, value)]
        for block, mask in zip(ctx.tree.plan.blocks, ctx.tree.masks, strict=True):
            parts = tuple(part.detach().requires_grad_() for part in _parts(query, key, value, block))
            with torch.enable_grad():
                out = _block(parts, block, mask, ctx.scale, ctx.cap)
            of_q, of_k, of_v = torch.autograd.grad(out, parts, of_out[:, :, block.start : block.stop])
            found[0][:, :, block.start : block.stop] = of_q
            add_to_columns(found[1], _all_columns(block), of_k)
            add_to_columns(found[2], _all_columns(block), of_v)
        return (*found, None, None, None)


def _all_columns(block: Block) -> tuple[Run, ...]:
    return (*block.above, *block.columns)


def _parts(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, block: Block
) -> tuple[torch.Tensor, ...]:
    columns = _all_columns(block)
    return query[:, :, block.start : block.stop], columns_of(key, columns), columns_of(value, columns)


def _block(
    parts: tuple[torch.Tensor, ...], block: Block, mask: torch.Tensor | None, scale: float, cap: float | None
) -> torch.Tensor:
    """Attention of a block's rows to its columns."""
    query, key, value = parts
    if cap is not None:
        seen = None if mask is None else _added(mask, query, key) == 0
        return capped_attention(query, key, value, seen, scale, cap)
    if mask is None:
        return causal_attention(query, key, value, scale)
    # No fast kernel takes both fewer key heads and a mask.
    key, value = with_all_heads(query, key, value)
    attend = torch.nn.functional.scaled_dot_product_attention
    return attend(query, key, value, attn_mask=_added(mask, query, key), scale=scale)


def _added(mask: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """A block's mask in the dtype of the queries, with the columns before those of `mask`, which all rows see."""
    mask, missing = mask.to(query.dtype), key.shape[2] - mask.shape[-1]
    return torch.nn.functional.pad(mask, (missing, 0)) if missing else mask


def _masks(
    plan: AttentionPlan, ends: Ints, dtype: torch.dtype, *, whole: bool = False
) -> list[torch.Tensor | None]:
    """The masks of `TreeAttention`; with the columns that all rows see, if they are to be `whole`."""
    masks: list[torch.Tensor | None] = []
    for block in plan.blocks:
        if block.chain:
            masks.append(None)
            continue
        columns = positions(_all_columns(block) if whole else block.columns)
        seen = torch.from_numpy(visible(ends, (block.start, block.stop), columns))[None, None]
        masks.append(torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, -torch.inf))
    return masks


def _aligned(mask: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The mask on a device, with rows at multiples of eight numbers; otherwise PyTorch would copy it in every layer."""
    width = mask.shape[-1]
    return sent(torch.nn.functional.pad(mask, (0, -width % 8)), device)[..., :width]
