"""What a step must do at least, over what this machine's cores reach: floors of its phases.

Operations are counted from the model's matrices and the tokens that must go through them once; norms, activations, attention
scores and everything else are left out, so that a floor is never above what must be done.
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

from lockstep.training.config.precision import has_fast_bf16

# The 135M model: rows that multiply every token, and those that only a predicting token meets.
_TRUNK, _HEAD = 106_168_320, 28_311_552
_WEIGHTS = _TRUNK + _HEAD + 35_136


def measure_machine() -> dict[str, Any]:
    """Operations a second of a large matrix product and bytes a second to and from memory, the best of several."""
    return {
        "name": cpu_name(),
        "cores": os.cpu_count(),
        # Where bf16 is emulated a large product would take minutes.
        "flops": {
            "float32": _flops(torch.float32, 2048),
            "bfloat16": _flops(torch.bfloat16, 2048 if has_fast_bf16() else 512),
        },
        "bytes": _bandwidth(),
        # Weights, gradients and two moments, in fp32.
        "state_bytes": 4 * 4 * _WEIGHTS,
    }


def _flops(dtype: torch.dtype, size: int) -> float:
    left, right = (torch.randn(size, size).to(dtype) for _ in range(2))
    return 2 * size**3 / _best(lambda: left @ right)


def _bandwidth() -> float:
    """The most of several ways: what a floor divides by must be as fast as any phase, and one array that is summed is not."""
    arrays = [torch.ones(2**27 // 4) for _ in range(4)]
    first, second, third, _ = arrays
    with ThreadPoolExecutor(len(arrays)) as threads:
        # How many arrays are read or written. In place, so that what is written was read before, as an optimizer does it.
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
    """What Linux calls the processor, or Python."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())


def floors(work: Any, dtype: str, machine: dict[str, Any], steps: list[dict[str, Any]]) -> dict[str, float]:
    """Seconds below which each phase of a Lockstep step cannot be, for the median of what the steps had to do.

    Generation multiplies every sampled token with all matrices once, and reads them once a decoding step (all sequences decode
    together); its prompts are left out. Learning multiplies every position of the shared-prefix rows three times (forward,
    gradient of the input, gradient of the weights), and verifying multiplies those that nothing is learned from once; what else is
    verified (a probe of the engine, comparisons) is left out. A reference, where a step has one, multiplies all of them once. The
    optimizer reads four and writes three fp32 numbers a weight. A push reads every fp32 weight and writes it in the engine's dtype.
    """
    sampled = work.sequences * work.tokens
    positions, still, unmoved, whole = (
        statistics.median(step[name] for step in steps)
        for name in ("positions", "still_positions", "still_tokens", "all_positions")
    )
    flops = machine["flops"][dtype]
    kept, served = 4 * _WEIGHTS, {"float32": 4, "bfloat16": 2}[dtype] * _WEIGHTS
    has_reference = any(step["phases"]["reference"] for step in steps)
    return {
        "generate": max(2 * sampled * (_TRUNK + _HEAD) / flops, work.tokens * served / machine["bytes"]),
        "reference": 2 * (whole * _TRUNK + sampled * _HEAD) / flops if has_reference else 0.0,
        "forward_backward": 6 * (positions * _TRUNK + (sampled - unmoved) * _HEAD) / flops,
        "verify": 2 * (still * _TRUNK + unmoved * _HEAD) / flops,
        "optimizer": 7 * kept / machine["bytes"],
        "sync": (kept + served) / machine["bytes"],
    }
