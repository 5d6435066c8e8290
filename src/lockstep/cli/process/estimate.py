"""How long the recipe `arithmetic` takes on this machine, for the first lines of `lockstep demo` and `make train`.

The figure is rough: seconds that were measured on one machine, times a factor for the speed of this one at the moment. The command
line prints it before the run; after the first step the panel shows the time that is left.
"""

from __future__ import annotations

import time

import torch

# Measured with `make train` on two cores of an AMD EPYC with AVX-512 BF16 (README.md): seconds up to the first step, per evaluated
# problem, and per step; and the GFLOP/s of `product_rate` there, in bf16 on both cores.
_START, _PROBLEM, _STEP = 40.0, 0.09, 2.2
MEASURED_RATE = 300.0
# Share of the seconds that shrinks with faster matrix products. From the same run on two AVX2 cores.
_IN_PRODUCTS = 0.6
# The shape of the product: tokens of a pack, and the model's widths.
_SHAPE = (1024, 576, 1536)
_SECONDS = 0.1


def product_rate(dtype: torch.dtype) -> float:
    """GFLOP/s of a matrix product in the widths of the packaged model, on all threads, now. Takes a tenth of a second."""
    rows, inner, columns = _SHAPE
    a, b = torch.ones(rows, inner, dtype=dtype), torch.ones(inner, columns, dtype=dtype)
    _ = a @ b
    products, start = 0, time.monotonic()
    while (spent := time.monotonic() - start) < _SECONDS:
        _ = a @ b
        products += 1
    return products * 2 * rows * inner * columns / spent / 1e9


def estimated_seconds(steps: int, problems: int, rate: float) -> float:
    """Seconds of the recipe with this many steps, and this many problems in the evaluations before and after training.

    Args:
        rate: the result of `product_rate`.
    """
    slower = 1 - _IN_PRODUCTS + _IN_PRODUCTS * MEASURED_RATE / rate
    return (_START + 2 * problems * _PROBLEM + steps * _STEP) * slower


def said(seconds: float) -> str:
    """The estimate as a line of text."""
    time_ = f"{seconds / 60:.0f} minutes" if seconds >= 90 else f"{max(round(seconds / 10), 1) * 10} seconds"
    return f"this takes about {time_} here, by the speed of a matrix product now; the first run also converts the model"
