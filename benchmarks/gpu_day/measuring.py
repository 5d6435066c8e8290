"""Sizes, models and measurements of the parts of `make gpu-day` (`parts.py`).

`FULL` is for a GPU. `REHEARSAL` has sizes that a CPU computes in seconds. A rehearsal shows only that the code runs;
its figures have no meaning.
"""

from __future__ import annotations

import contextlib
import gc
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.against_trl.tool_model import SHAPE_135M

Row = dict[str, Any]
# Largest number of positions in one forward, for every program. It is also the context length of the models.
POSITIONS = 40_960


@dataclass(frozen=True)
class Sizes:
    """How large the parts are.

    Attributes:
        shape: fields of the model's config.
        trees: tokens of the texts in the part `attention`.
        tokens: tokens per completion in the parts that learn.
        chain: tokens of the text without branches.
        host: completions × tokens, as for `make host-cost`.
        repeats: number of measurements, whose median counts.
        models: models of the part `limits`: kinds of tests/tiny.py, and "shape" for a model of this shape.
        steps: optimizer steps per model in the part `limits`.
    """

    shape: dict[str, int]
    trees: tuple[int, ...]
    tokens: tuple[int, ...]
    chain: int
    host: tuple[str, ...]
    repeats: int
    models: tuple[str, ...]
    steps: int
    dtypes: tuple[str, ...] = field(default=("float32", "bfloat16"))


_SHAPE_TINY = {
    "vocab_size": 384,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 16,
}
FULL = Sizes(
    shape=SHAPE_135M,
    trees=(4096, 32768),
    tokens=(1024, 8192, 32768),
    chain=32768,
    host=("64x512", "256x1024"),
    repeats=3,
    models=("llama", "qwen3", "shape"),
    steps=20,
)
REHEARSAL = Sizes(
    shape=_SHAPE_TINY,
    trees=(160,),
    tokens=(12, 16, 20),
    chain=64,
    host=("8x16",),
    repeats=1,
    models=("qwen2",),
    steps=1,
    # Many CPUs emulate bf16. The parts `passes` and `chain` use it all the same.
    dtypes=("float32",),
)


# ---- models and measuring ----------------------------------------------------------------------------------------


def device() -> torch.device:
    """The GPU if there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def dtype_of(name: str) -> torch.dtype:
    return getattr(torch, name)


def autocast(where: torch.device) -> Any:
    return torch.autocast(where.type, torch.bfloat16)


def make_model(sizes: Sizes, *, even: bool = False) -> Any:
    """A Llama model with random fp32 weights.

    Args:
        even: whether the head's weights are so small that all tokens have practically the same probability. Then
            random ids are samples of the model.
    """
    import tiny

    model = tiny.make_model("llama", scale=0.05, max_position_embeddings=POSITIONS, **sizes.shape)
    if even:
        with torch.no_grad():
            model.lm_head.weight *= 1e-3
    return model


def save_model(sizes: Sizes, folder: Path, *, even: bool = False) -> str:
    """The directory of such a model, with a tokenizer."""
    import tiny

    return str(tiny.save(make_model(sizes, even=even), folder))


def measured(work: Callable[[], Any], repeats: int) -> tuple[Any, Row]:
    """The result of `work`, the median of its seconds, and its peak memory. Before the measurement `work` runs once."""
    result = work()
    synchronize()
    del result
    before = torch.cuda.memory_allocated() if torch.cuda.is_available() else 0
    forget()
    seconds = []
    result = None
    for _ in range(repeats):
        del result
        start = time.perf_counter()
        result = work()
        synchronize()
        seconds.append(time.perf_counter() - start)
    return result, {"seconds": statistics.median(seconds), "MiB": (peak() - before) / 2**20}


def synchronize() -> None:
    """Wait until the GPU has done all its work."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def forget() -> None:
    """Reset the count of peak memory."""
    from benchmarks.against_trl.play import forget_peak

    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    else:
        forget_peak()


def peak() -> int:
    """Peak memory in bytes: of the GPU, or without a GPU of the process."""
    from benchmarks.against_trl.play import peak_bytes

    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else peak_bytes()


def distance(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found.float() - exact).norm() / exact.norm())


@contextlib.contextmanager
def refusals(row: Row, *more: type[Exception]) -> Iterator[Row]:
    """Catch the error of a row that cannot be measured, so that other rows are still measured.

    The dict gets the error's text.
    """
    from lockstep.errors import LockstepError

    said: Row = {}
    try:
        yield said
    except (RuntimeError, LockstepError, *more) as error:
        # torch raises RuntimeError if memory is exhausted, a kernel is missing, or a compiler fails.
        said["failed"] = f"{type(error).__name__}: {str(error).strip()[:600]}"
        print(f"{row}: {said['failed']}", flush=True)


def give_memory_back() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
