"""The backward of attention by products in bf16: its algebra in float64, its rounding, and where it is used."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from blocks import tree_ends
from draws import draws
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention

from lockstep.learn.attention import blocks as block_attention
from lockstep.learn.attention import blocks as half_backward
from lockstep.learn.attention.blocks import TreeAttention
from lockstep.learn.attention.plan import plan_attention

CPU, SCALE = torch.device("cpu"), 0.3


def gradients(
    ends: torch.Tensor, parts: list[torch.Tensor], dtype: torch.dtype
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Gradients of queries, keys and values: by `half_backward` in `dtype`, and with the dense mask in float64."""
    query, key, value, of = parts
    tree = TreeAttention._planned(plan_attention(ends.numpy(), 4, 3), ends.numpy(), CPU, query.dtype)
    out, total = block_attention.attend(query, key, value, tree, SCALE)
    q, k, v = (part.to(dtype) for part in (query, key, value))
    found = half_backward.half_backward(of, q, k, v, out, total, tree.plan, tree.masks, SCALE)
    own = [part.double().requires_grad_() for part in (query, key, value)]
    nodes = torch.arange(len(ends))
    mask = (nodes <= nodes[:, None]) & (nodes[:, None] < ends)
    dense = scaled_dot_product_attention(own[0], own[1], own[2], attn_mask=mask, scale=SCALE, enable_gqa=True)
    return list(found), list(torch.autograd.grad(dense, own, of.double()))


def drawn(size: int, heads: tuple[int, int], dtype: torch.dtype) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(size)
    shapes = [(2, count, size, 6) for count in (heads[0], heads[1], heads[1], heads[0])]
    return [torch.randn(shape, generator=draw, dtype=dtype) * 2 for shape in shapes]


@draws(60)
@given(
    ends=tree_ends(),
    heads=st.sampled_from([(4, 2), (3, 3), (3, 1)]),
    scores=st.integers(1, 300),
    columns=st.integers(4, 12),
)
def test_without_rounding_the_gradients_are_those_of_the_dense_mask(
    ends: torch.Tensor, heads: tuple[int, int], scores: int, columns: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"_SCORES": scores, "_COLUMNS": columns, "_FEWEST": 2, "_CHAIN": 4}.items():
            patch.setattr(half_backward, name, value)
        found, right = gradients(ends, drawn(len(ends), heads, torch.float64), torch.float64)
    for one, other in zip(found, right, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("common", [0.0, 5.0, 30.0])
def test_the_rounding_is_that_of_pytorchs_kernel_in_bf16(common: float) -> None:
    """Also where all keys have much in common: it is in every score of a row, and in its denominator's logarithm."""
    ends = torch.full((200,), 200)
    parts = [part.bfloat16().float() for part in drawn(200, (4, 2), torch.float32)]
    parts[1] = (parts[1] + common).bfloat16().float()
    found, right = gradients(ends, parts, torch.bfloat16)
    own = [part.bfloat16().requires_grad_() for part in parts[:3]]
    out = scaled_dot_product_attention(own[0], own[1], own[2], is_causal=True, scale=SCALE, enable_gqa=True)
    kernel = torch.autograd.grad(out, own, parts[3].bfloat16())
    for one, other, its in zip(found, right, kernel, strict=True):
        assert (one - other).norm() <= 2 * (its - other).norm(), common


@pytest.mark.parametrize(
    ("half", "fast", "used"),
    [
        (torch.bfloat16, True, True),
        (torch.bfloat16, False, False),
        (torch.float16, True, False),
        (None, True, False),
    ],
)
def test_only_a_run_in_bf16_on_a_processor_with_fast_bf16_has_this_backward(
    half: torch.dtype | None, fast: bool, used: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_attention, "has_fast_bf16", lambda: fast)
    dtypes: list[torch.dtype] = []
    real = half_backward.half_backward

    def counted(*given: Any) -> Any:
        dtypes.extend(part.dtype for part in given[1:4])
        return real(*given)

    monkeypatch.setattr(block_attention, "half_backward", counted)
    tree = TreeAttention.of(torch.tensor([6, 6, 6, 4, 6, 6]), CPU, torch.float32, half)
    query, key, value, _ = (part.requires_grad_() for part in drawn(6, (4, 2), torch.float32))
    out = tree(query, key, value, None)
    out.sum().backward()
    assert dtypes == ([torch.bfloat16] * 3 if used else [])
    # The forward has the same queries, keys and values as this backward.
    rounded = [part.bfloat16().float() if used else part for part in (query, key, value)]
    assert torch.equal(out, block_attention.attend(*rounded, tree, 6**-0.5)[0])
