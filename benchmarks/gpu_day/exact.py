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
    words = (
        "time/",
        "step_time",
        "train_runtime",
        "per_second",
        "memory",
        "seconds",
        "tokens_per",
        "checked/",
    )
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
            row |= clean_steps(
                path, steps, dtype, 1.5, fields, engine="transformers", seed=0, deadline=math.inf
            )
    yield row


def memory(sizes: Sizes) -> Iterator[Row]:
    """What `learn/memory.py` says before a model is loaded, beside what the device allocates.

    The rows of one optimizer step compare exact counts. The other rows compare the estimate of activations with the
    peak of a forward and its backward.
    """
    import torch

    from benchmarks.gpu_day.measuring import forget, make_model, peak, synchronize
    from benchmarks.gpu_day.parts import _GROUP, _sequences
    from lockstep.learn.attention.tree import adopt_tree_attention
    from lockstep.learn.memory import (
        LargestForward,
        activation_bytes,
        layer_shape,
        moment_bytes,
        sizes_of,
        weight_bytes,
    )
    from lockstep.learn.pack import pack_sequences
    from lockstep.learn.scoring import score_pack

    where, chunk = device(), 512
    on_gpu = where.type == "cuda"
    model: Any
    parameter: Any
    optimizer: Any
    (pack,) = pack_sequences(
        _sequences([500 if sizes.repeats > 1 else 12] * _GROUP, sizes.shape["vocab_size"]), 10**6
    )
    for weights, half in ((torch.float32, False), (torch.float32, True), (torch.bfloat16, True)):
        for checkpointing in (False, True):
            name = (
                f"weights {str(weights)[6:]}{', autocast bf16' if half and weights == torch.float32 else ''}"
            )
            row: Row = {"what": f"activations of {pack.input_ids.numel()} positions", "dtype": name}
            row["recomputed"] = "layers" if checkpointing else "nothing"
            model = parameter = optimizer = None
            give_memory_back()
            with told(row):
                empty = torch.cuda.memory_allocated() if on_gpu else 0
                model = make_model(sizes).to(weights)
                adopt_tree_attention(model)
                model.to(where).train()
                if checkpointing:
                    model.gradient_checkpointing_enable({"use_reentrant": False})
                for parameter in model.parameters():
                    parameter.grad = torch.zeros_like(parameter)
                # The first pass makes what libraries keep, such as the workspace of cuBLAS.
                for _ in range(2):
                    synchronize()
                    held = torch.cuda.memory_allocated() if on_gpu else 0
                    forget()
                    with torch.autocast(where.type, torch.bfloat16, enabled=half):
                        logps = score_pack(model, pack.to(where), 1.0, chunk).logps
                    logps.sum().backward()
                    synchronize()
                    highest = peak() - held
                    del logps
                shape = layer_shape(model)
                assert shape is not None
                work = LargestForward(
                    pack.input_ids.numel(), weights.itemsize, 2 if half else weights.itemsize, chunk, checkpointing,
                    None if on_gpu else weight_bytes(model),
                )  # fmt: skip
                row |= _beside(activation_bytes(shape, work), highest if on_gpu else None)
            yield row
            if not checkpointing:
                row = {"what": "weights, gradients and moments after a step", "dtype": name, "recomputed": ""}
                with told(row):
                    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
                    optimizer.step()
                    trained = sizes_of(model.parameters())
                    counted = weight_bytes(model) + sum(size.size for size in trained)
                    counted += moment_bytes(trained, torch.optim.AdamW, {"fused": True})
                    row |= _beside(counted, torch.cuda.memory_allocated() - empty if on_gpu else None)
                yield row


def _beside(said: int, allocated: int | None) -> Row:
    """The two figures, and how far the first is from the second. Without a GPU nothing is measured."""
    row: Row = {"said, MiB": said / 2**20}
    if allocated is None:
        return row | {"is": "not measured without a GPU"}
    return row | {"allocated, MiB": allocated / 2**20, "said ÷ allocated": said / allocated}
