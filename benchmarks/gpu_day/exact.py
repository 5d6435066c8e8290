"""The third call of `make gpu-day`: what is exact on a GPU. The parts run beside each other."""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.gpu_day.broken import _FP32, _GROUPS, _train, told
from benchmarks.gpu_day.measuring import Row, Sizes, device, give_memory_back, save_model


def repeats(sizes: Sizes) -> Iterator[Row]:
    """The same run twice, with and without `full_determinism`: the first step whose log differs."""
    # cuBLAS reads it when CUDA starts.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    for name, fields in (
        ("bf16", {}),
        ("fp32", _FP32),
        ("bf16, full_determinism", {"full_determinism": True}),
        ("fp32, full_determinism", {**_FP32, "full_determinism": True}),
    )[: 4 if sizes.repeats > 1 else 1]:
        row: Row = {"run": name}
        with told(row):
            first, second = (
                _logs({**_GROUPS, **fields, "max_steps": 6, "max_completion_length": 48}) for _ in range(2)
            )
            row["is"] = _difference(first, second)
        yield row


def _logs(fields: dict[str, Any]) -> list[dict[str, Any]]:
    from transformers import Trainer

    kept: list[dict[str, Any]] = []
    real = Trainer.log

    def log(self: Any, logs: dict[str, float], *args: Any, **more: Any) -> Any:
        kept.append(dict(logs))
        return real(self, logs, *args, **more)

    Trainer.log = log
    try:
        with tempfile.TemporaryDirectory() as folder:
            _train(Path(folder), "GRPO", fields)
    finally:
        Trainer.log = real
    give_memory_back()
    return kept


def _difference(first: list[dict[str, Any]], second: list[dict[str, Any]]) -> str:
    # How many modules are probed again is a matter of time.
    words = ("time/", "step_time", "train_runtime", "per_second", "memory", "seconds", "tokens_per", "checked/")
    for step, (one, other) in enumerate(zip(first, second, strict=True), 1):
        found = [
            name
            for name in one
            if not any(word in name for word in words)
            and one[name] != other.get(name)
            and not (isinstance(one[name], float) and math.isnan(one[name]))
        ]
        if found:
            return f"first difference at log {step} of {len(first)}: {', '.join(found[:8])}"
    return f"equal in all {len(first)} logs"


def gaps(sizes: Sizes, number: int) -> Iterator[Row]:
    """Steps of the shape of a real model in bf16, fp32 or fp32 with TF32: the gap against its limits, and one fault."""
    from benchmarks.proofs.false_alarms import clean_steps

    dtype, fields = (("bfloat16", {}), ("float32", {}), ("float32", {"tf32": True}))[number]
    row: Row = {"model": "shape of 135M", "dtype": f"{dtype}{', TF32' if fields else ''}"}
    with told(row), tempfile.TemporaryDirectory() as folder:
        path = save_model(sizes, Path(folder) / "model") if sizes.repeats > 1 else "qwen2"
        if fields and device().type != "cuda":
            row["is"] = "needs a GPU"
        else:
            steps = 12 if sizes.repeats > 1 else 1
            row |= clean_steps(path, steps, dtype, 1.5, fields, engine="transformers", seed=0, deadline=math.inf)
    yield row
