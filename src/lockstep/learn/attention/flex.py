"""Attention within a pack by PyTorch's FlexAttention, on a GPU. `attn_implementation: flex_attention` selects it.

The input is `ends` of `learn/pack.py`. Every attention layer calls this module instead of
`learn/attention/tree.py`. PyTorch compiles the kernel on the machine that runs it. Therefore it is
proven on that machine, before the policy uses it.

Proof `attention`.
Shows: FlexAttention's values and gradients are those of SDPA in float32, over three trees (only where FlexAttention
is chosen).
Does not show: other trees.
When: start.
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

from lockstep.errors import InputError, LockstepError, ProofError
from lockstep.learn.attention.tree import (
    attend_without_tree,
    check_nothing_added,
    in_one_dtype,
    window_or_mask,
)

# The name under which transformers finds it.
FLEX = "lockstep_flex"
# The name in the user's configuration.
ASKED = "flex_attention"
# Largest allowed distance from the same attention in float32, as a relative norm. Rounding to half precision causes a
# fifth of it or less (float32 may be computed as TF32). Four keys of 333 that get no gradient cause more than the
# limit.
LIMITS = {torch.float32: 3e-3, torch.bfloat16: 1.5e-2, torch.float16: 3e-3, torch.float64: 3e-3}
# Sizes of trees; their rows do not fill the last block. Two sizes, because PyTorch compiles another kernel if sizes
# change. A third one, because it may choose another kernel for fewer than 128 rows.
_SIZES = (333, 700, 90)
# Number of rows and of columns per block of the kernel.
_BLOCK = 128
_COMPARED = ("values", "gradient of queries", "of keys", "of values")

_Attention = Callable[..., torch.Tensor]
_sdpa = torch.nn.functional.scaled_dot_product_attention


def adopt_flex_attention(model: PreTrainedModel, device: torch.device, dtype: torch.dtype) -> None:
    """Prove FlexAttention on a device, then let a model use it if it gets a `tree`. Without a tree it uses SDPA.

    Args:
        dtype: dtype in which attention is computed.

    Raises:
        InputError: FlexAttention does not run on that device.
        ProofError: its results differ from SDPA's.
    """
    if device.type == "cpu":
        raise InputError(
            f"attn_implementation is {ASKED!r}, which PyTorch cannot train with on a CPU: leave it out "
            "(packs are attended to tree by tree then, docs/internals/training.md)"
        )
    config = model.config.get_text_config()
    heads = config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    prove_flex_attention((heads, getattr(config, "num_key_value_heads", None) or heads), width, device, dtype)
    model.set_attn_implementation(FLEX)


def block_mask(ends: torch.Tensor, device: torch.device) -> BlockMask:
    """A pack's (T,) `ends` as FlexAttention needs them: blocks to leave out, to compute fully, and with a mask."""
    size, there = len(ends), ends.to(device)
    count = -(-size // _BLOCK)
    # No node sees the padding after the last node.
    padded = torch.nn.functional.pad(ends, (0, count * _BLOCK - size)).view(count, _BLOCK)
    first = torch.arange(count)[:, None] * _BLOCK
    before = torch.ones(count, count, dtype=torch.bool).tril(-1)
    whole = before & (padded.amin(1) >= first + _BLOCK)
    some = (before & (padded.amax(1) > first) & ~whole) | torch.eye(count, dtype=torch.bool)

    def sees(
        batch: torch.Tensor, head: torch.Tensor, row: torch.Tensor, column: torch.Tensor
    ) -> torch.Tensor:
        return (column <= row) & (row < there[column])

    return BlockMask.from_kv_blocks(
        *_listed(some, device),
        *_listed(whole, device),
        BLOCK_SIZE=_BLOCK,
        mask_mod=sees,
        seq_lengths=(size, size),
    )


def _listed(blocks: torch.Tensor, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """For each block of rows: the number of its blocks of columns, and their indices at the beginning of a list."""
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
    """An attention function of transformers, like `tree_attention_forward`."""
    if tree is None:
        return attend_without_tree(module, query, key, value, attention_mask, **kwargs)
    check_nothing_added(module, attention_mask, kwargs)
    return _attend(query, key, value, tree, kwargs.get("scaling")).transpose(1, 2).contiguous(), None


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, tree: BlockMask, scale: float | None
) -> torch.Tensor:
    kind, parts = query.device.type, in_one_dtype(query, key, value)
    # For few rows PyTorch would choose its kernel for decoding, which 2.11 cannot compile for sizes that change.
    more: dict[str, Any] = {} if kind == "cpu" else {"kernel_options": {"FORCE_USE_FLEX_ATTENTION": True}}
    with torch.autocast(kind, enabled=False):
        return _kernel(kind)(
            *parts, block_mask=tree, scale=scale, enable_gqa=query.shape[1] != key.shape[1], **more
        )


def prove_flex_attention(
    heads: tuple[int, int], width: int, device: torch.device, dtype: torch.dtype
) -> None:
    """Compare FlexAttention's values and gradients over three trees with SDPA's in float32, with the same mask.

    Args:
        heads: number of heads of the queries, and of the keys and values.
        width: width of a head.

    Raises:
        InputError: there is no kernel for this machine.
        ProofError: they differ by more than rounding explains.
    """
    limit = LIMITS[dtype]
    for size in _SIZES:
        found = _distances(size, heads, width, device, dtype)
        if not all(distance <= limit for distance in found.values()):
            raise ProofError(
                "attention",
                f"FlexAttention is {', '.join(f'{found[name]:.1e} ({name})' for name in found)} from SDPA "
                f"over a tree of {size} tokens in {dtype}, and may be {limit:.1e}",
                "PyTorch's kernel for this GPU is wrong, or computes in a dtype of its own",
                "leave attn_implementation out; if PyTorch is the newest, report it there",
            )


def _distances(
    size: int, heads: tuple[int, int], width: int, device: torch.device, dtype: torch.dtype
) -> dict[str, float]:
    """Relative distances of values and gradients over a tree of `size` tokens, by name."""
    ends = _example(size)
    nodes = torch.arange(size)
    mask = ((nodes <= nodes[:, None]) & (nodes[:, None] < ends)).to(device)[None, None]
    draw = torch.Generator().manual_seed(size)
    shapes = [(1, count, size, width) for count in (heads[0], heads[1], heads[1], heads[0])]
    *parts, of = (torch.randn(shape, generator=draw).to(device, dtype) for shape in shapes)
    try:
        found = _with_gradients(partial(_attend, tree=block_mask(ends, device), scale=None), parts, of)
    except (RuntimeError, NotImplementedError, ValueError) as error:
        # PyTorch's compiler and kernels have no narrower error types in common.
        raise InputError(
            f"attn_implementation is {ASKED!r}, which does not run on {device} in {dtype} with heads of "
            f"{width}: {str(error).strip()[:400]}; leave it out"
        ) from error
    right = _with_gradients(
        partial(_sdpa, attn_mask=mask, enable_gqa=True), [p.float() for p in parts], of.float()
    )
    return {
        name: float((one.float() - other).norm() / other.norm())
        for name, one, other in zip(_COMPARED, found, right, strict=True)
    }


def _with_gradients(attend: _Attention, parts: list[torch.Tensor], of: torch.Tensor) -> list[torch.Tensor]:
    own = [part.detach().requires_grad_() for part in parts]
    # The caller may have switched gradients off.
    with torch.enable_grad():
        out = attend(*own)
        return [out.detach(), *torch.autograd.grad(out, own, of)]


def _example(size: int) -> torch.Tensor:
    """(T,) `ends` of an example: a prompt of half the tokens, completions of 31 tokens, and another prompt."""
    prompt, last = size // 2, size - size // 7
    ends = torch.full((size,), size)
    ends[:prompt] = last
    completions = torch.arange(prompt, last)
    ends[prompt:last] = (completions + 31 - (completions - prompt) % 31).clamp(max=last)
    return ends


# Variants of the kernel per process: dtypes, numbers and widths of heads, with and without gradients.
MOST_VARIANTS = 64


@cache
def _compiled() -> _Attention:
    return never_plain(torch.compile(flex_attention))


def never_plain(compiled: _Attention) -> _Attention:
    """A compiled function that raises an error where PyTorch would stop compiling it.

    PyTorch compiles a function for eight kinds of input. For a ninth one it computes plain products without an error,
    and those hold all T × T scores.
    """

    def attend(*args: Any, **kwargs: Any) -> torch.Tensor:
        with torch._dynamo.config.patch(recompile_limit=MOST_VARIANTS, fail_on_recompile_limit_hit=True):
            try:
                return compiled(*args, **kwargs)
            except torch._dynamo.exc.FailOnRecompileLimitHit as error:
                raise LockstepError(
                    f"PyTorch has compiled FlexAttention for {MOST_VARIANTS} kinds of input in this process "
                    "and compiles no more: leave attn_implementation out, or train fewer models in one "
                    "process"
                ) from error

    return attend


def _kernel(kind: str) -> _Attention:
    # Without compilation it computes plain products. Tests use this on machines without a GPU.
    plain: _Attention = flex_attention
    return plain if kind == "cpu" else _compiled()


AttentionInterface.register(FLEX, flex_attention_forward)
AttentionMaskInterface.register(FLEX, window_or_mask)
