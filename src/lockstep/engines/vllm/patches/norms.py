"""RMS norms of vLLM on a CPU, in one kernel each. vLLM's default there is about ten of PyTorch's operations for each norm.

vLLM has the kernels (`_C.rms_norm`, `_C.fused_add_rms_norm`) and uses them on GPUs only. `register_norms` adds them to vLLM's list
of implementations (vLLM's IR operations), in every process of an engine. `engines/vllm/arguments.py` asks for them by name. A norm
that they do not support is computed by vLLM's default. On processors with AVX-512 and without its BF16 instructions, vLLM's kernels
cut bits off where they should round; there they compute no bf16.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

# The name of these implementations in vLLM's `ir_op_priority`.
CPU_NORMS = "lockstep_cpu"
# The kernels read vectors of this many numbers.
_VECTOR = 16


def register_norms() -> None:
    """Register the kernels with vLLM. It may be called several times."""
    from vllm import ir

    if CPU_NORMS in ir.ops.rms_norm.impls:
        return
    usable = not torch.cuda.is_available()
    ir.ops.rms_norm.register_impl(CPU_NORMS, supported=usable, supports_args=_supports_norm)(_norm)
    ir.ops.fused_add_rms_norm.register_impl(CPU_NORMS, supported=usable, supports_args=_supports_sum, inplace=True)(
        _norm_of_sum
    )


def _supports_norm(x: Any, weight: Any, epsilon: float, variance_size: int | None = None) -> bool:
    fits = variance_size is None and weight is not None and weight.dtype == x.dtype and x.shape[-1] % _VECTOR == 0
    return fits and (x.dtype == torch.float32 or kernels_round(x.dtype))


@cache
def kernels_round(dtype: torch.dtype) -> bool:
    """Whether vLLM's kernels round a sum of this dtype to the nearest number on this processor."""
    ones, parts = (
        torch.ones(1, _VECTOR, dtype=dtype),
        torch.full((1, _VECTOR), 0.75 * torch.finfo(dtype).eps, dtype=dtype),
    )
    due = ones + parts
    torch.ops._C.fused_add_rms_norm(parts, ones, torch.ones(_VECTOR, dtype=dtype), 1e-5)
    return torch.equal(ones, due)


def _norm(
    x: torch.Tensor, weight: torch.Tensor | None, epsilon: float, variance_size: int | None = None
) -> torch.Tensor:
    x = x.contiguous()
    result = torch.empty_like(x)
    torch.ops._C.rms_norm(result, x, weight, epsilon)
    return result


def _supports_sum(x: Any, x_residual: Any, weight: Any, epsilon: float, variance_size: int | None = None) -> bool:
    whole = x.is_contiguous() and x_residual.is_contiguous() and x_residual.dtype == x.dtype
    return whole and _supports_norm(x, weight, epsilon, variance_size)


def _norm_of_sum(
    x: torch.Tensor,
    x_residual: torch.Tensor,
    weight: torch.Tensor | None,
    epsilon: float,
    variance_size: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    torch.ops._C.fused_add_rms_norm(x, x_residual, weight, epsilon)
    return x, x_residual
