"""Attention within a pack, computed only where its tree lets tokens see each other.

Comes from: the mask of `training/batch/pack.py`. Goes to: every attention layer of the model, by way of transformers' own
registry of attention functions. In a tree of a prompt and many completions most pairs of tokens do not see each other; a dense
mask computes them all and throws them away. Here the rows are cut into blocks, each block attends to the columns that any of its
rows sees, and what a single row may not see of those its part of the mask hides. The result is that of the dense mask.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.modeling_utils import AttentionInterface

# The name under which transformers finds it.
TREE = "lockstep_tree"
# Rows of a block: fewer see fewer columns in vain, more fill the kernel.
_ROWS = 128
# Each block keeps its own keys and values for the backward, so that there are not more of them than this.
_BLOCKS = 16
# Share of the dense mask's pairs above which cutting is not worth it: a single long text, say.
_WORTH = 0.5
# Columns in between that cost less to compute and hide than another piece would.
_GAP = 16


@dataclass(frozen=True, slots=True)
class Block:
    """Rows that are computed together.

    Attributes:
        start, end: the rows.
        pieces: indexes of the pieces of columns that they attend to.
        mask: (1, 1, end − start, columns) bool, True where a row sees a column; or what is added to the scores in its place.
    """

    start: int
    end: int
    pieces: tuple[int, ...]
    mask: torch.Tensor


@dataclass(frozen=True, slots=True)
class TreePlan:
    """How attention over a pack is computed.

    Attributes:
        sizes: lengths of the pieces that the columns are cut into.
        blocks: all rows, in order.
    """

    sizes: tuple[int, ...]
    blocks: tuple[Block, ...]

    def to(self, device: torch.device) -> TreePlan:
        """The same plan on another device."""
        return TreePlan(self.sizes, tuple(replace(block, mask=block.mask.to(device)) for block in self.blocks))

    def added(self, dtype: torch.dtype) -> TreePlan:
        """The same plan with masks that are added to scores of this dtype, which attention makes of others in every layer."""
        blocks = []
        for block in self.blocks:
            mask = torch.zeros_like(block.mask, dtype=dtype).masked_fill_(~block.mask, -torch.inf)
            blocks.append(replace(block, mask=mask))
        return TreePlan(self.sizes, tuple(blocks))


def plan_attention(mask: torch.Tensor) -> TreePlan | None:
    """Blocks for a (T, T) bool mask; None where cutting is not worth it."""
    size = len(mask)
    if size <= 2 * _ROWS:
        return None
    rows = max(_ROWS, -(-size // _BLOCKS))
    spans = []
    for start in range(0, size, rows):
        end = min(start + rows, size)
        spans.append((start, end, _runs(mask[start:end].any(0))))
    if sum((end - start) * (b - a) for start, end, runs in spans for a, b in runs) > _WORTH * size * size:
        return None
    cuts = sorted({0, size} | {edge for _, _, runs in spans for run in runs for edge in run})
    index = {cut: i for i, cut in enumerate(cuts)}
    blocks = []
    for start, end, runs in spans:
        columns = torch.cat([torch.arange(first, last, device=mask.device) for first, last in runs])
        pieces = tuple(piece for first, last in runs for piece in range(index[first], index[last]))
        blocks.append(Block(start, end, pieces, mask[start:end][:, columns][None, None].contiguous()))
    return TreePlan(tuple(b - a for a, b in pairwise(cuts)), tuple(blocks))


def _runs(seen: torch.Tensor) -> list[tuple[int, int]]:
    """Stretches of columns that are seen, small gaps included."""
    columns = seen.nonzero()[:, 0].tolist()
    runs: list[tuple[int, int]] = []
    for column in columns:
        if runs and column - runs[-1][1] <= _GAP:
            runs[-1] = (runs[-1][0], column + 1)
        else:
            runs.append((column, column + 1))
    return runs


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
    tree: TreePlan | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """An attention function of transformers.

    Args:
        query, key, value: (1, heads, T, width); keys and values may have fewer heads.
        attention_mask: used where there is no `tree`.

    Returns:
        (1, T, heads, width), and no weights.
    """
    if tree is None or not has_no_mask_of_its_own(attention_mask, kwargs):
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    scale = kwargs.get("scaling")
    if query.device.type != "cpu":
        return _attend_blocks(query, key, value, tree, scale), None
    # The half-precision backward of a CPU takes twice as long as that of float32.
    with torch.autocast("cpu", enabled=False):
        return _attend_blocks(_wide(query), _wide(key), _wide(value), tree, scale).to(value.dtype), None


def _wide(part: torch.Tensor) -> torch.Tensor:
    return part.to(torch.promote_types(part.dtype, torch.float32))


def _attend_blocks(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, tree: TreePlan, scale: float | None
) -> torch.Tensor:
    groups = query.shape[1] // key.shape[1]
    # Elsewhere than on a CPU a mask and fewer heads together have no fast kernel.
    repeated = 1 if query.device.type == "cpu" else groups
    # Pieces of one split: their gradients are joined once, where a slice each would fill a whole matrix each.
    keys, values = (part.split(tree.sizes, 2) for part in (key, value))
    queries = query.split([block.end - block.start for block in tree.blocks], 2)
    rows = []
    for block, q in zip(tree.blocks, queries, strict=True):
        k, v = (torch.cat([parts[i] for i in block.pieces], 2) for parts in (keys, values))
        if repeated > 1:
            k, v = (part.repeat_interleave(repeated, 1) for part in (k, v))
        rows.append(
            torch.nn.functional.scaled_dot_product_attention(
                q, k, v, attn_mask=block.mask, scale=scale, enable_gqa=groups > repeated
            )
        )
    return torch.cat(rows, 2).transpose(1, 2).contiguous()


def has_no_mask_of_its_own(attention_mask: torch.Tensor | None, kwargs: dict[str, Any]) -> bool:
    """Whether a layer attends by the pack's own mask, with nothing of its own that only a dense mask could carry."""
    own = kwargs.get("position_bias") is not None or kwargs.get("dropout")
    return not own and (attention_mask is None or attention_mask.dtype == torch.bool)


AttentionInterface.register(TREE, tree_attention_forward)
AttentionMaskInterface.register(TREE, sdpa_mask)
