"""The fast dtype of this machine, and the number of positions that it computes well in one forward."""

from __future__ import annotations

import torch


def has_fast_bf16() -> bool:
    """Whether bf16 is faster than fp32 on this machine.

    On a CPU without AMX or AVX-512 BF16 (or Arm's BF16) it is slower: oneDNN emulates it, at a fifth of fp32's speed on an
    AVX2 machine (19 against 105 GFLOP/s on two cores of an EPYC 7003).
    """
    if torch.cuda.is_available():
        return torch.cuda.is_bf16_supported(including_emulation=False)
    capabilities = torch.cpu.get_capabilities()
    return any(bool(capabilities.get(name)) for name in ("amx_bf16", "avx512_bf16", "bf16"))


def usual_token_budgets() -> tuple[int, int]:
    """Positions of one forward that fill this machine's kernels and fit into usual memory (docs/internals/training.md).

    Returns:
        The number for a forward, and the number for a forward with all completions of one prompt. On a CPU the second is larger,
        because a CPU has more memory for its speed than a GPU.
    """
    return (4096, 4096) if torch.cuda.is_available() else (2048, 5120)


def engine_dtype(name: str) -> torch.dtype:
    """The dtype for `float32`, `bfloat16` or `auto`; `auto` is chosen as in training."""
    return getattr(torch, ("bfloat16" if has_fast_bf16() else "float32") if name == "auto" else name)
