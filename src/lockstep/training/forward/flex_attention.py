"""Attention within a pack by PyTorch's FlexAttention: on a GPU, for those who set `attn_implementation: flex_attention`.

Comes from: `ends` of `training/batch/pack.py`. Goes to: every attention layer, in place of
`training/forward/tree_attention.py`. Its kernel is made on the machine it runs on, so that its values and gradients are held
against SDPA's there before a policy gets it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from transformers import PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

from lockstep.errors import InputError, ProofError
from lockstep.training.forward.tree_attention import (
    attend_without_tree,
    check_nothing_added,
    in_one_dtype,
    window_or_mask,
)

# The name under which transformers finds it.
FLEX = "lockstep_flex"
# What the user calls it.
ASKED = "flex_attention"
# Largest relative distance (norms) from the same attention in float32. Rounding to half precision takes a fifth of it or less
# (float32 may be computed as TF32); four keys in 333 that get no gradient take more.
_LIMITS = {torch.float32: 3e-3, torch.bfloat16: 1.5e-2, torch.float16: 3e-3, torch.float64: 3e-3}
# Trees whose rows are no whole number of blocks. Two, since PyTorch makes another kernel for sizes that change.
_SIZES = (333, 700)
# Rows and columns that its kernel takes together.
_BLOCK = 128
_COMPARED = ("values", "gradient of queries", "of keys", "of values")

_Attention = Callable[..., torch.Tensor]
_sdpa = torch.nn.functional.scaled_dot_product_attention


def adopt_flex_attention(model: PreTrainedModel, device: torch.device, dtype: torch.dtype) -> None:
    """Let a model attend by FlexAttention where it gets a `tree`, and by SDPA without one, once that is proven.

    Args:
        device: where it will be trained.
        dtype: what attention is computed in.

    Raises:
        InputError: FlexAttention does not run there.
        ProofError: it computes something else than SDPA does.
    """
    if device.type == "cpu":
        raise InputError(
            f"attn_implementation is {ASKED!r}, which PyTorch cannot train with on a CPU: leave it out (packs are attended to "
            "tree by tree then, docs/training.md)"
        )
    config = model.config.get_text_config()
    heads = config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    prove_flex_attention((heads, getattr(config, "num_key_value_heads", None) or heads), width, device, dtype)
    model.set_attn_implementation(FLEX)


def block_mask(ends: torch.Tensor, device: torch.device) -> BlockMask:
    """What FlexAttention takes as a tree: which blocks of pairs to leave out, which to compute whole, and the rest pair by pair.

    Args:
        ends: (T,) of a pack, on the CPU.
        device: where attention is computed.
    """
    size, there = len(ends), ends.to(device)
    count = -(-size // _BLOCK)
    # Behind the last node there is nothing to see.
    padded = torch.nn.functional.pad(ends, (0, count * _BLOCK - size)).view(count, _BLOCK)
    first = torch.arange(count)[:, None] * _BLOCK
    before = torch.ones(count, count, dtype=torch.bool).tril(-1)
    whole = before & (padded.amin(1) >= first + _BLOCK)
    some = (before & (padded.amax(1) > first) & ~whole) | torch.eye(count, dtype=torch.bool)

    def sees(batch: torch.Tensor, head: torch.Tensor, row: torch.Tensor, column: torch.Tensor) -> torch.Tensor:
        return (column <= row) & (row < there[column])

    return BlockMask.from_kv_blocks(
        *_listed(some, device), *_listed(whole, device), BLOCK_SIZE=_BLOCK, mask_mod=sees, seq_lengths=(size, size)
    )


def _listed(blocks: torch.Tensor, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """How many blocks of columns each block of rows has, and which, those first."""
    counts = blocks.sum(1, dtype=torch.int32)
    which = blocks.int().argsort(dim=1, descending=True, stable=True).int()
    return counts[None, None].to(device), which[None, None].to(device)


def flex_attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    tree: BlockMask | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """An attention function of transformers, as `tree_attention.tree_attention_forward`."""
    if tree is None:
        return attend_without_tree(module, query, key, value, attention_mask, **kwargs)
    check_nothing_added(module, attention_mask, kwargs)
    return _attend(query, key, value, tree, kwargs.get("scaling")).transpose(1, 2).contiguous(), None


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, tree: BlockMask, scale: float | None
) -> torch.Tensor:
    kind, parts = query.device.type, in_one_dtype(query, key, value)
    with torch.autocast(kind, enabled=False):
        return _kernel(kind)(*parts, block_mask=tree, scale=scale, enable_gqa=query.shape[1] != key.shape[1])


def prove_flex_attention(heads: tuple[int, int], width: int, device: torch.device, dtype: torch.dtype) -> None:
    """Hold FlexAttention's values and gradients over two trees against SDPA's with the same mask, in float32.

    Args:
        heads: of queries, and of keys and values.
        width: of a head.

    Raises:
        InputError: there is no kernel for this machine.
        ProofError: they differ by more than rounding.
    """
    limit = _LIMITS[dtype]
    for size in _SIZES:
        found = _distances(size, heads, width, device, dtype)
        if not all(distance <= limit for distance in found.values()):
            raise ProofError(
                "attention",
                f"FlexAttention is {', '.join(f'{found[name]:.1e} ({name})' for name in found)} from SDPA over a tree of {size} "
                f"tokens in {dtype}, and may be {limit:.1e}",
                "PyTorch's kernel for this GPU is wrong, or computes in a dtype of its own",
                "leave attn_implementation out; if PyTorch is the newest, report it there",
            )


def _distances(
    size: int, heads: tuple[int, int], width: int, device: torch.device, dtype: torch.dtype
) -> dict[str, float]:
    """Relative distances of values and gradients over a tree of so many tokens, by name."""
    ends = _example(size)
    nodes = torch.arange(size)
    mask = ((nodes <= nodes[:, None]) & (nodes[:, None] < ends)).to(device)[None, None]
    draw = torch.Generator().manual_seed(size)
    shapes = [(1, count, size, width) for count in (heads[0], heads[1], heads[1], heads[0])]
    *parts, of = (torch.randn(shape, generator=draw).to(device, dtype) for shape in shapes)
    try:
        found = _with_gradients(partial(_attend, tree=block_mask(ends, device), scale=None), parts, of)
    except (RuntimeError, NotImplementedError, ValueError) as error:
        # PyTorch's compiler and kernels have no kind of error in common but these.
        raise InputError(
            f"attn_implementation is {ASKED!r}, which does not run on {device} in {dtype} with heads of {width}: "
            f"{str(error).strip()[:400]}; leave it out"
        ) from error
    right = _with_gradients(partial(_sdpa, attn_mask=mask, enable_gqa=True), [p.float() for p in parts], of.float())
    return {
        name: float((one.float() - other).norm() / other.norm())
        for name, one, other in zip(_COMPARED, found, right, strict=True)
    }


def _with_gradients(attend: _Attention, parts: list[torch.Tensor], of: torch.Tensor) -> list[torch.Tensor]:
    own = [part.detach().requires_grad_() for part in parts]
    # Whatever the caller has switched off.
    with torch.enable_grad():
        out = attend(*own)
        return [out.detach(), *torch.autograd.grad(out, own, of)]


def _example(size: int) -> torch.Tensor:
    """(T,) `ends` of a prompt of half the tokens, completions of 31 tokens, and another prompt."""
    prompt, last = size // 2, size - size // 7
    ends = torch.full((size,), size)
    ends[:prompt] = last
    completions = torch.arange(prompt, last)
    ends[prompt:last] = (completions + 31 - (completions - prompt) % 31).clamp(max=last)
    return ends


@cache
def _compiled() -> _Attention:
    compiled: _Attention = torch.compile(flex_attention)
    return compiled


def _kernel(kind: str) -> _Attention:
    # Not compiled it is plain products: for tests, where there is no GPU.
    plain: _Attention = flex_attention
    return plain if kind == "cpu" else _compiled()


AttentionInterface.register(FLEX, flex_attention_forward)
AttentionMaskInterface.register(FLEX, window_or_mask)
