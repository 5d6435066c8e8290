"""Attention over a tree of tokens path by path, causal attention, and attention with capped scores.

Many paths are one call (`learn/attention/plan.py`). Queries, keys and values are kept for the backward, nothing else.
The backward computes each call again. A node has a copy in each path that goes through it. The gradient of its key is
the sum over its copies: PyTorch's sum over bags of rows (`embedding_bag`), one kernel, which adds in float32 and always
in the same order. An empty bag gives zeros, so it also spreads the gradient of the result over the rows, of which some
are not used.

Capped scores are cap · tanh(score / cap), as in Gemma 2. PyTorch's kernels cannot cap scores, so all scores of a block
are computed.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.nn.attention.bias import causal_lower_right

from lockstep.devices import sent
from lockstep.learn.attention.plan import PathCall
from lockstep.learn.pack import Ints

_HALF = (torch.float16, torch.bfloat16)
# The widest heads that PyTorch's flash kernel takes.
_WIDEST = 256


def causal_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
) -> torch.Tensor:
    """(B, heads, Q, width of the values) attention in which the last row sees all columns, each earlier row one less.

    Args:
        query: (B, heads, Q, width).
        key, value: (B, heads, K, width), K >= Q. They may have fewer heads.
    """
    rows, columns = query.shape[2], key.shape[2]
    shared = query.shape[1] != key.shape[1] and _takes_fewer_key_heads(query, value)
    if not shared:
        key, value = with_all_heads(query, key, value)
    attention = torch.nn.functional.scaled_dot_product_attention
    attend = partial(attention, query, key, value, scale=scale, enable_gqa=shared)
    # The kernels of GPUs have the option of the second kind.
    return attend(is_causal=True) if rows == columns else attend(attn_mask=causal_lower_right(rows, columns))


def with_all_heads(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values with as many heads as the queries."""
    groups = query.shape[1] // key.shape[1]
    if groups == 1:
        return key, value
    return key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)


def _takes_fewer_key_heads(query: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether a fast kernel takes fewer key heads than query heads. Where none does, PyTorch makes all T × T scores."""
    return query.dtype in _HALF and query.shape[-1] == value.shape[-1] <= _WIDEST


@dataclass(frozen=True, slots=True)
class Bags:
    """Which rows each sum adds: those from one offset to the next."""

    rows: torch.Tensor
    offsets: torch.Tensor

    def sums(self, part: torch.Tensor) -> torch.Tensor:
        """(bags, width) sums of rows of a (rows, width) tensor."""
        return torch.nn.functional.embedding_bag(self.rows, part, self.offsets, mode="sum")


@dataclass(frozen=True, slots=True)
class CallOnDevice:
    """One call. All indices are on the device.

    Attributes:
        paths: number of paths.
        rows, columns: the nodes of the rows and of the columns of all paths.
        used: the rows whose results are used, in the order of their nodes.
        of_rows: for each row its node, if its result is used.
        of_nodes: for each node its copies among the columns.
    """

    paths: int
    rows: torch.Tensor
    columns: torch.Tensor
    used: torch.Tensor
    of_rows: Bags
    of_nodes: Bags

    def parts(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, width: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(B, heads, rows or columns, width) queries, keys and values of the paths, from the nodes' (T, heads × width).

        `width` is that of a head of the queries and keys.
        """
        of_values = width * value.shape[1] // key.shape[1]
        return (
            self.by_path(query.index_select(0, self.rows), width),
            self.by_path(key.index_select(0, self.columns), width),
            self.by_path(value.index_select(0, self.columns), of_values),
        )

    def by_path(self, part: torch.Tensor, width: int) -> torch.Tensor:
        """(B, heads, rows, width) of a (B × rows, heads × width) tensor."""
        return part.view(self.paths, -1, part.shape[1] // width, width).transpose(1, 2)


@dataclass(frozen=True, slots=True)
class PathAttention:
    """The attention pattern of a pack.

    Attributes:
        order: place of each node's result among the used results of all calls; None: they are in the order of the
            nodes.
    """

    calls: tuple[CallOnDevice, ...]
    order: torch.Tensor | None

    @classmethod
    def of(cls, plan: tuple[PathCall, ...], size: int, device: torch.device) -> PathAttention:
        """Send the plan of a tree of `size` nodes to a device, in one copy."""
        parts: list[Ints] = []
        nodes = []
        for call in plan:
            used = np.flatnonzero(call.used)
            of_used = call.rows.reshape(-1)[used]
            nodes.append(np.sort(of_used))
            marks = call.used.reshape(-1)
            known = _known(call)
            columns = np.flatnonzero(known)
            of_columns = call.columns.reshape(-1)[columns]
            parts += [call.rows.reshape(-1), call.columns.reshape(-1), used[of_used.argsort()]]
            parts += [of_used, np.cumsum(marks) - marks]
            counts = np.bincount(of_columns, minlength=size)
            parts += [columns[of_columns.argsort(kind="stable")], np.cumsum(counts) - counts]
        order = np.concatenate(nodes).argsort() if len(plan) > 1 else np.zeros(0, dtype=np.int64)
        flat = torch.from_numpy(np.concatenate([*parts, order]))
        there = list(sent(flat, device).split([len(part) for part in (*parts, order)]))
        calls = tuple(_on_device(len(call.columns), there[7 * i : 7 * i + 7]) for i, call in enumerate(plan))
        return cls(calls, there[-1] if len(plan) > 1 else None)

    def __call__(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """(1, heads, T, width of the values) attention.

        Args:
            query, key, value: (1, heads, T, width). Keys and values may have fewer heads. Values may have another
                width.
        """
        return _OverPaths.apply(query, key, value, self, scale)

    def in_order(self, used: list[torch.Tensor]) -> torch.Tensor:
        """(T, width) results of all nodes, from the used rows of each call."""
        return used[0] if self.order is None else torch.cat(used).index_select(0, self.order)


class _OverPaths(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        paths: PathAttention,
        scale: float,
    ) -> torch.Tensor:
        ctx.save_for_backward(query, key, value)
        ctx.paths, ctx.scale = paths, scale
        flat, width = (_flat(query), _flat(key), _flat(value)), query.shape[-1]
        used: list[torch.Tensor] = []
        for call in paths.calls:
            q, k, v = call.parts(*flat, width)
            used.append(_flat(causal_attention(q, k, v, scale)).index_select(0, call.used))
        return _by_head(paths.in_order(used), query.shape[1])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, of_out: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value = ctx.saved_tensors
        paths: PathAttention = ctx.paths
        flat, of = (_flat(query), _flat(key), _flat(value)), _flat(of_out)
        of_used: list[torch.Tensor] = []
        sums: list[torch.Tensor] = []
        for call in paths.calls:
            q, k, v = (part.detach().requires_grad_() for part in call.parts(*flat, query.shape[-1]))
            with torch.enable_grad():
                out = causal_attention(q, k, v, ctx.scale)
            of_rows = call.by_path(call.of_rows.sums(of), of_out.shape[-1])
            of_q, *others = torch.autograd.grad(out, (q, k, v), of_rows)
            of_used.append(_flat(of_q).index_select(0, call.used))
            found = [call.of_nodes.sums(_flat(part)) for part in others]
            sums = [total.add_(part) for total, part in zip(sums, found, strict=True)] if sums else found
        of_key, of_value = (_by_head(part, key.shape[1]) for part in sums)
        return _by_head(paths.in_order(of_used), query.shape[1]), of_key, of_value, None, None


def _flat(part: torch.Tensor) -> torch.Tensor:
    """(B × T, heads × width) of a (B, heads, T, width) tensor. It is a view if a row's heads are adjacent in memory."""
    return part.transpose(1, 2).flatten(2).flatten(0, 1)


def _by_head(part: torch.Tensor, heads: int) -> torch.Tensor:
    """(1, heads, T, width) of a (T, heads × width) tensor."""
    return part.unflatten(1, (heads, -1)).transpose(0, 1)[None]


def _known(call: PathCall) -> np.ndarray:
    """(B × C,) bool: the columns that are not padding."""
    used_until = call.columns.shape[1] - call.used[:, ::-1].argmax(1)
    known: np.ndarray = np.arange(call.columns.shape[1]) < used_until[:, None]
    return known.reshape(-1)


def _on_device(paths: int, parts: list[torch.Tensor]) -> CallOnDevice:
    rows, columns, used, *bags = parts
    return CallOnDevice(paths, rows, columns, used, Bags(*bags[:2]), Bags(*bags[2:]))


def capped_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    cap: float,
) -> torch.Tensor:
    """(B, heads, Q, width of the values) attention with capped scores.

    Args:
        query: (B, heads, Q, width).
        key, value: (B, heads, K, width). They may have fewer heads.
        mask: (…, Q, K) bool, True where a row sees a column. None: the last row sees all columns, each earlier row one
            less.
        cap: the largest score, before the softmax.
    """
    key, value = with_all_heads(query, key, value)
    rows, columns = query.shape[2], key.shape[2]
    scores = torch.tanh(query @ key.transpose(-1, -2) * (scale / cap)) * cap
    if mask is None:
        mask = torch.ones(rows, columns, dtype=torch.bool, device=query.device).tril(columns - rows)
    wide = torch.promote_types(scores.dtype, torch.float32)
    shares = scores.masked_fill(~mask, -torch.inf).softmax(-1, dtype=wide)
    return shares.to(value.dtype) @ value
