"""On a CPU vLLM computes its RMS norms in one kernel each, and the results are those of its own definition."""

from __future__ import annotations

import pytest
import torch
from conftest import needs_vllm
from draws import draws
from hypothesis import given
from hypothesis import strategies as st

from lockstep.engines.vllm.port.patches import CPU_NORMS, kernels_round

pytestmark = [
    needs_vllm,
    pytest.mark.usefixtures("tied_vllm"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="for CPUs only"),
]
EPSILON = 1e-5
# The largest relative error of one rounding.
ROUNDING = {torch.float32: 2**-24, torch.bfloat16: 2**-8}
SIZES = st.tuples(st.integers(1, 5), st.integers(1, 3), st.sampled_from([16, 48, 576]))


def inputs(
    seed: int, size: tuple[int, ...], dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    made = torch.Generator().manual_seed(seed)
    x, residual = ((torch.randn(size, generator=made) * 4).to(dtype) for _ in range(2))
    return x, residual, (1 + 0.1 * torch.randn(size[-1], generator=made)).to(dtype)


def defined(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The norm in float64."""
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + EPSILON).sqrt() * weight.double()


def close(found: torch.Tensor, wanted: torch.Tensor, dtype: torch.dtype, roundings: int = 1) -> bool:
    """Whether the numbers differ by this number of roundings to the dtype, and by float32's arithmetic."""
    return bool(
        (
            (found.double() - wanted).abs()
            <= wanted.abs() * (1.01 * roundings * ROUNDING[dtype] + 1e-6) + 1e-7
        ).all()
    )


@draws(25)
@given(st.integers(0, 2**31), SIZES, st.sampled_from(list(ROUNDING)), st.booleans())
def test_a_norm_is_the_defined_one_and_leaves_its_input(
    seed: int, size: tuple[int, int, int], dtype: torch.dtype, part: bool
) -> None:
    from vllm import ir

    x, _, weight = inputs(seed, size, dtype)
    if part:
        # Heads of queries are a part of a larger tensor, whose rows do not follow each other.
        x = torch.cat([x, x], dim=1)[:, : size[1]]
    kernel, before = ir.ops.rms_norm.impls[CPU_NORMS], x.clone()
    if not kernel.supports_args(x, weight, EPSILON):
        assert dtype == torch.bfloat16
        assert not kernels_round(dtype)
        return
    assert close(kernel.impl_fn(x, weight, EPSILON), defined(x, weight), dtype)
    assert torch.equal(x, before)


@draws(25)
@given(st.integers(0, 2**31), SIZES, st.sampled_from(list(ROUNDING)))
def test_a_norm_of_a_sum_also_returns_the_sum(
    seed: int, size: tuple[int, int, int], dtype: torch.dtype
) -> None:
    from vllm import ir

    x, residual, weight = inputs(seed, size, dtype)
    total, wanted = (x.float() + residual.float()).to(dtype), defined(x.double() + residual.double(), weight)
    kernel = ir.ops.fused_add_rms_norm.impls[CPU_NORMS]
    if not kernel.supports_args(x, residual, weight, EPSILON):
        assert dtype == torch.bfloat16
        assert not kernels_round(dtype)
        return
    normed, summed = kernel.impl_fn(x, residual, weight, EPSILON)
    assert torch.equal(summed, total)
    # The kernel reads the rounded sum. vLLM's definition rounds as often: before and after it multiplies by the weight.
    assert close(normed, wanted, dtype, roundings=2)


def test_what_the_kernels_cannot_compute_is_left_to_vllm() -> None:
    from vllm import ir

    x, residual, weight = inputs(0, (2, 1, 48), torch.bfloat16)
    norm, of_sum = (op.impls[CPU_NORMS].supports_args for op in (ir.ops.rms_norm, ir.ops.fused_add_rms_norm))
    for refused in ((x, None), (x, weight.float()), (x[..., :40], weight[:40])):
        assert not norm(*refused, EPSILON)
    assert not norm(x, weight, EPSILON, 16)
    assert not of_sum(x, residual.float(), weight, EPSILON)
    assert not of_sum(torch.cat([x, x], -1)[..., :48], residual, weight, EPSILON)


def test_the_engine_asks_for_the_kernels() -> None:
    from vllm import ir

    for op in (ir.ops.rms_norm, ir.ops.fused_add_rms_norm):
        # vLLM's own implementation is the second one.
        assert op.get_priority() == [CPU_NORMS, "native"]
