"""Products and embedding rows that the CUDA wheel compiles, in plain PyTorch: fp8, adapters, a float32 result.

References: `stand_ins.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

_KEPT: list[torch.library.Library] = []
# What vLLM asks of its compiled kernels when its modules are imported. The answer here is no: vLLM then takes
# PyTorch's product.
_QUESTIONS = (
    "cutlass_scaled_mm_supports_fp8",
    "cutlass_scaled_mm_supports_block_fp8",
    "cutlass_scaled_mm_supports_fp4",
    "cutlass_group_gemm_supported",
    "cutlass_sparse_scaled_mm_supported",
)


def patch() -> None:
    _load_cpu_wheel()
    asked = torch.library.Library("_C", "FRAGMENT")
    for name in _QUESTIONS:
        asked.define(f"{name}(int capability) -> bool")
        asked.impl(name, lambda capability: False, "CompositeExplicitAutograd")
    _KEPT.extend((asked, _products_with_a_dtype()))
    import vllm._custom_ops as custom_ops
    import vllm.lora.punica_wrapper.punica_gpu as punica
    import vllm.utils.torch_utils as torch_utils

    from .views import as_cuda

    torch_utils.get_accelerator_view_from_cpu_tensor = as_cuda
    custom_ops.scaled_fp8_quant = scaled_fp8_quant
    custom_ops.vocab_parallel_embedding = vocab_parallel_embedding
    # vLLM tries these kernels with thousands of rows at its start, which takes minutes if they are interpreted.
    punica.lora_shrink, punica.lora_expand = lora_shrink, lora_expand


def _load_cpu_wheel() -> None:
    """Load the kernels of the CPU wheel. vLLM's CPU platform would have done so."""
    import vllm

    kinds = ["_C_AVX512", "_C_AVX2", "_C"] if torch.cpu._is_avx512_supported() else ["_C_AVX2", "_C"]
    folder = Path(vllm.__file__).parent
    library = next(path for kind in kinds for path in folder.glob(f"{kind}.*so"))
    torch.ops.load_library(str(library))


def _products_with_a_dtype() -> torch.library.Library:
    """Products that PyTorch's CPU kernels lack: another dtype for the result, and codes of 8 bits with scales."""
    aten = torch.library.Library("aten", "IMPL")

    def addmm(
        c: Any, a: Any, b: Any, dtype: torch.dtype, *, beta: float = 1, alpha: float = 1
    ) -> torch.Tensor:
        return beta * c.to(dtype) + alpha * (a.to(dtype) @ b.to(dtype))

    aten.impl("mm.dtype", lambda a, b, dtype: a.to(dtype) @ b.to(dtype), "CUDA")
    aten.impl("bmm.dtype", lambda a, b, dtype: a.to(dtype) @ b.to(dtype), "CUDA")
    aten.impl("addmm.dtype", addmm, "CUDA")
    aten.impl("_scaled_mm", scaled_mm, "CUDA")
    return aten


def scaled_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    bias: torch.Tensor | None = None,
    scale_result: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
) -> torch.Tensor:
    """`torch._scaled_mm`: codes times their scales. (M, K) × (K, N), with scales of (M, 1) and (1, N), or one each."""
    product = (a.float() @ b.float()) * scale_a * scale_b
    return (product if bias is None else product + bias.float()).to(out_dtype or torch.bfloat16)


def scaled_fp8_quant(
    input: torch.Tensor,
    scale: torch.Tensor | None = None,
    num_token_padding: int | None = None,
    scale_ub: torch.Tensor | None = None,
    use_per_token_if_dynamic: bool = False,
    output: torch.Tensor | None = None,
    group_shape: tuple[int, int] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """vLLM's quantiser to e4m3: (rows, n) → codes, and one scale for all or one per row.

    The conversion rounds to nearest, even.

    Without a `scale`, the largest value gets the largest code. Padding rows get zeros.
    """
    if group_shape is not None:
        raise NotImplementedError("scales per group")
    largest = torch.finfo(torch.float8_e4m3fn).max
    rows = input.float()
    if scale is None:
        tops = rows.abs().amax(-1, keepdim=True) if use_per_token_if_dynamic else rows.abs().amax()[None]
        if scale_ub is not None:
            tops = tops.minimum(scale_ub)
        scale = (tops / largest).clamp(min=1 / (largest * 512))
    shape = (max(num_token_padding or 0, input.shape[0]), input.shape[1])
    if output is None:
        output = torch.zeros(shape, dtype=torch.float8_e4m3fn, device=input.device)
    output[: len(rows)] = (rows / scale).clamp(-largest, largest).to(output.dtype)
    if scale.dim() == 2 and 1 < len(scale) < shape[0]:
        scale = torch.cat([scale, scale.new_ones(shape[0] - len(scale), 1)])
    return output, scale


def vocab_parallel_embedding(
    ids: torch.Tensor,
    weight: torch.Tensor,
    first: int,
    end: int,
    padding: int,
    added_first: int,
    added_end: int,
) -> torch.Tensor:
    """The rows of the ids that this rank holds, and zeros for others.

    Added words follow the original ones and their padding.
    """
    own, added = (ids >= first) & (ids < end), (ids >= added_first) & (ids < added_end)
    rows = torch.where(own, ids - first, torch.where(added, ids - added_first + (end - first) + padding, 0))
    return weight[rows.long()].masked_fill(~(own | added)[:, None], 0)


def lora_shrink(
    inputs: torch.Tensor,
    downs: Sequence[torch.Tensor],
    output: torch.Tensor,
    mapping: torch.Tensor,
    sorted_indices: Any,
    per_lora: Any,
    starts: Any,
    lora_ids: Any,
    no_lora: torch.Tensor,
    active: Any,
    scaling: float,
) -> None:
    """`output[part, row]` = `scaling` × A of the row's adapter × input.

    Args:
        inputs: (rows, in) half precision: vLLM's kernel takes nothing else.
        downs: per part, (slots, 1, rank, in) the matrices A.
        output: (parts, rows, rank) float32.
        mapping: (rows,) slot of each row's adapter; −1: none.
    """
    assert inputs.dtype in (torch.float16, torch.bfloat16), "vLLM's kernel takes half precision only"
    for slot, rows in _rows_by_slot(mapping, len(inputs), no_lora):
        for part, down in enumerate(downs):
            found = inputs[rows].float() @ down.flatten(0, -3)[slot].float().T
            output[part, rows] = (found * scaling).to(output.dtype)


def lora_expand(
    inputs: torch.Tensor,
    ups: Sequence[torch.Tensor],
    output: torch.Tensor,
    mapping: torch.Tensor,
    sorted_indices: Any,
    per_lora: Any,
    starts: Any,
    lora_ids: Any,
    no_lora: torch.Tensor,
    active: Any,
    offset_start: int = 0,
    add_inputs: bool = False,
) -> None:
    """`output[row]` = (or += with `add_inputs`) B of the row's adapter × `inputs[part, row]`, part beside part."""
    for slot, rows in _rows_by_slot(mapping, inputs.shape[1], no_lora):
        start = offset_start
        for part, up in enumerate(ups):
            weight = up.flatten(0, -3)[slot]
            found = (inputs[part, rows].to(weight.dtype).float() @ weight.float().T).to(output.dtype)
            columns = slice(start, start + len(weight))
            output[rows, columns] = output[rows, columns] + found if add_inputs else found
            start += len(weight)


def _rows_by_slot(mapping: torch.Tensor, count: int, no_lora: torch.Tensor) -> list[tuple[int, torch.Tensor]]:
    """Each slot that these rows use, and which rows use it."""
    if no_lora.item():
        # The mapping is an older step's then.
        return []
    mapping = mapping[:count]
    return [(slot, mapping == slot) for slot in sorted(set(mapping.tolist())) if slot >= 0]
