"""Keeps vLLM from compiling where it is told to compile nothing (`enforce_eager`, on a CPU): its start takes seconds less.

vLLM 0.32.0 does two things for compiling in any case:

- Its import loads the compiler's table of operations, to add its own ones to it.
- Its sampler gives the rank of a token with each log-prob: how many tokens are at least as probable. Nothing here reads it. The
  function that counts is compiled when it is first called, and again for another kind of input. NumPy, one row at a time, counts as
  fast as the compiled function; PyTorch's own operations take ten times as long.

`engines/vllm/in_process.py` uses both functions.
"""

from __future__ import annotations

import sys

import numpy as np
import torch

_TABLE = "torch._inductor.lowering"


def import_without_compiler() -> None:
    """Import vLLM, whose first import adds its operations to the compiler's table if there is one."""
    if _TABLE in sys.modules or "vllm" in sys.modules:
        return
    # Python's import system reads None as "there is no such module".
    sys.modules[_TABLE] = None  # type: ignore[assignment]
    try:
        import vllm  # noqa: F401
    finally:
        del sys.modules[_TABLE]


def count_at_least(x: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """(rows,) int64: how many numbers of each row are at least the row's value.

    Args:
        x: (rows, V) numbers on a CPU.
        values: (rows, 1) numbers.
    """
    at_least = (x >= values).numpy()
    return torch.tensor([np.count_nonzero(row) for row in at_least], dtype=torch.int64)


def count_without_compiling() -> None:
    """Let vLLM's sampler count ranks with `count_at_least`. Called after vLLM is imported, in the process that samples."""
    from vllm.v1.sample import sampler

    sampler.batched_count_greater_than = count_at_least
