"""Floors (lower bounds) of the phases of a step: the necessary work divided by the speed that this machine reaches.

Operations are counted from the model's matrices and the tokens that must go through them once. Norms, activations,
attention scores and everything else are not counted, so that a floor is never above the necessary work.
"""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from lockstep.devices import has_fast_bf16

# The 135M model: the weights that multiply every token, and those that multiply only a predicting token.
_TRUNK, _HEAD = 106_168_320, 28_311_552
_WEIGHTS = _TRUNK + _HEAD + 35_136


def measure_machine() -> dict[str, Any]:
    """Operations per second of a large matrix product, bytes per second to and from memory: the best of several."""
    return {
        "name": cpu_name(),
        "cores": os.cpu_count(),
        # On a machine that emulates bf16 a large product would take minutes.
        "flops": {
            "float32": _flops(torch.float32, 2048),
            "bfloat16": _flops(torch.bfloat16, 2048 if has_fast_bf16() else 512),
        },
        "bytes": _bandwidth(),
        # The size of weights, gradients and two moments, in fp32.
        "state_bytes": 4 * 4 * _WEIGHTS,
    }


def _flops(dtype: torch.dtype, size: int) -> float:
    left, right = (torch.randn(size, size).to(dtype) for _ in range(2))
    return 2 * size**3 / _best(lambda: left @ right)


def _bandwidth() -> float:
    """The fastest of several ways to use memory.

    A floor needs a speed that no phase exceeds, and one sum over one array is too slow.
    """
    arrays = [torch.ones(2**27 // 4) for _ in range(4)]
    first, second, third, _ = arrays
    with ThreadPoolExecutor(len(arrays)) as threads:
        # The number of arrays that are read or written. They are changed in place, as by an optimizer.
        ways: list[tuple[int, Callable[[], object]]] = [
            (1, lambda: first.sum()),
            (2, lambda: first.mul_(1.0)),
            (3, lambda: first.add_(second, alpha=1e-9)),
            (4, lambda: first.addcmul_(second, third, value=1e-9)),
            (4, lambda: list(threads.map(torch.sum, arrays))),
        ]
        return max(count * first.nbytes / _best(work) for count, work in ways)


def _best(work: Callable[[], object]) -> float:
    seconds = []
    for _ in range(6):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def cpu_name() -> str:
    """The name of the processor as Linux gives it, or else as Python gives it."""
    lines = (
        Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        if Path("/proc/cpuinfo").exists()
        else []
    )
    return next(
        (line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor()
    )


def floors(work: Any, dtype: str, machine: dict[str, Any], steps: list[dict[str, Any]]) -> dict[str, float]:
    """The lower bound in seconds of each phase of a Lockstep step, for the median of the steps' work.

    Generation multiplies every sampled token with all matrices once, and every token that a tool inserts with those
    of the trunk. It reads the matrices once per decoding step (all sequences decode together). Its prompts are not
    counted. Learning multiplies every position of the packs three times (forward, gradient of the input, gradient of
    the weights). Verifying multiplies every position without a gradient once; its other work (a probe of the engine,
    comparisons) is not counted. A reference model, if there is one, multiplies all positions once. The optimizer
    reads four and writes three fp32 numbers per weight. A push reads every fp32 weight and writes it in the engine's
    dtype.
    """
    sampled = work.sequences * work.tokens
    positions, still, unmoved, whole = (
        statistics.median(step[name] for step in steps)
        for name in ("positions", "still_positions", "still_tokens", "all_positions")
    )
    flops = machine["flops"][dtype]
    products = 2 * (sampled * (_TRUNK + _HEAD) + work.sequences * work.inserted * _TRUNK)
    kept, served = 4 * _WEIGHTS, {"float32": 4, "bfloat16": 2}[dtype] * _WEIGHTS
    has_reference = any(step["phases"]["reference"] for step in steps)
    return {
        "generate": max(products / flops, work.tokens * served / machine["bytes"]),
        "reference": 2 * (whole * _TRUNK + sampled * _HEAD) / flops if has_reference else 0.0,
        "forward_backward": 6 * (positions * _TRUNK + (sampled - unmoved) * _HEAD) / flops,
        "verify": 2 * (still * _TRUNK + unmoved * _HEAD) / flops,
        "optimizer": 7 * kept / machine["bytes"],
        "sync": (kept + served) / machine["bytes"],
    }
