"""Two functions that stop vLLM from compiling on a CPU although `enforce_eager` is set. They save seconds of its start.

vLLM 0.32.0 does two things for the compiler even with `enforce_eager`:

- Its import loads the compiler's table of operations and adds its own operations. `import_without_compiler` prevents this.
- Its sampler computes the rank of each token: the number of tokens that are at least as probable. Lockstep does not use ranks. vLLM
  compiles the function that computes them at its first call, and again for each new kind of input. `count_without_compiling`
  replaces it by a function of NumPy, which is as fast as the compiled one. PyTorch's own operations would take ten times as long.

`engines/vllm/in_process.py` calls both functions.
"""

from __future__ import annotations

import sys

import numpy as np
import torch

_TABLE = "torch._inductor.lowering"


def import_without_compiler() -> None:
    """Import vLLM without the compiler's table of operations. vLLM skips its own operations if the table cannot be imported."""
    if _TABLE in sys.modules or "vllm" in sys.modules:
        return
    # If `sys.modules` holds None for a module, Python raises ImportError for its import.
    sys.modules[_TABLE] = None  # type: ignore[assignment]
    try:
        import vllm  # noqa: F401
    finally:
        del sys.modules[_TABLE]


def count_at_least(x: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """(rows,) int64 number of values in each row of `x` that are at least the row's value in `values`.

    Args:
        x: (rows, V) values on a CPU.
        values: (rows, 1) value of each row.
    """
    at_least = (x >= values).numpy()
    return torch.tensor([np.count_nonzero(row) for row in at_least], dtype=torch.int64)


def count_without_compiling() -> None:
    """Let vLLM's sampler count ranks with `count_at_least`. Called after vLLM is imported, in the process that samples."""
    from vllm.v1.sample import sampler

    sampler.batched_count_greater_than = count_at_least
