"""The second call of `make gpu-day`: what is slow on a GPU. The parts run one after the other."""

from __future__ import annotations

import contextlib
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_day.broken import told
from benchmarks.gpu_day.measuring import Row, Sizes, device, give_memory_back, synchronize
from benchmarks.gpu_day.parts import (
    _given_rollouts,
    _let_flex_attention_learn_on_a_cpu,
    _StopTraining,
    save_model,
)

# Heads of queries, of keys, and their width: of a model of 7B.
_HEADS, _KEYS, _WIDTH = 32, 8, 128
# Completions and tokens of a pack of about 4,096 positions, after a prompt of 256 tokens.
_PACKS = ((8, 480), (64, 60), (2, 1900))


def seconds_of(work: Callable[[], Any]) -> float:
    synchronize()
    start = time.perf_counter()
    work()
    synchronize()
    return time.perf_counter() - start


# ---- attention
# -----------------------------------------------------------------------------------------------------------


def sdpa(sizes: Sizes) -> Iterator[Row]:
    """Attention of one layer over packs of new lengths, forward and backward; and again over the same pack."""
    from lockstep.learn.attention import flex as flex_attention
    from lockstep.learn.attention.blocks import TreeAttention

    _let_flex_attention_learn_on_a_cpu()
    where, full = device(), sizes.repeats > 1
    dtype = torch.bfloat16 if full else torch.float32
    heads = (_HEADS, _KEYS, _WIDTH) if full else (2, 1, 16)
    for count, tokens in _PACKS if full else ((2, 12),):
        draw = torch.Generator().manual_seed(count)
        packs = [_ends(count, tokens, draw) for _ in range(4)]
        ways = ("paths, without cuDNN", "blocks, cuDNN allowed", "blocks, without cuDNN", "FlexAttention")
        for way in (*ways, "plain rows, without cuDNN"):
            row: Row = {"pack": f"{count} × about {tokens}", "way": way}
            with told(row):
                torch.backends.cuda.enable_cudnn_sdp("allowed" in way)
                first, again = [], []
                for ends, lengths in packs:
                    make: Any
                    if way.startswith(("paths", "blocks")):
                        only = way.startswith("blocks")
                        make = partial(TreeAttention.of, ends, where, dtype, only_blocks=only)
                    elif way == "FlexAttention":
                        make = lambda ends=ends: flex_attention.block_mask(ends, where)  # noqa: E731
                    else:
                        make = lambda lengths=lengths: lengths  # noqa: E731
                    plan_seconds = seconds_of(make)
                    plan = make()
                    both = partial(_both, way, plan, ends, where, dtype, heads)
                    first.append(seconds_of(both))
                    again.append(seconds_of(both))
                row |= {
                    "ms of a new pack": 1e3 * statistics.median(first[1:]),
                    "first pack": 1e3 * first[0],
                    "ms again": 1e3 * statistics.median(again),
                    "ms of the plan": 1e3 * plan_seconds,
                    "launches": _launches(both),
                }
            yield row
    torch.backends.cuda.enable_cudnn_sdp(True)


def _ends(count: int, tokens: int, draw: torch.Generator) -> tuple[torch.Tensor, list[int]]:
    """`ends` of a pack of a prompt and completions whose lengths are drawn; and the lengths."""
    prompt = 4 * tokens if tokens < 64 else 256
    lengths = (tokens + torch.randint(-tokens // 8, tokens // 8 + 1, (count,), generator=draw)).tolist()
    size = prompt + sum(lengths)
    ends, at = torch.full((size,), size), prompt
    for length in lengths:
        ends[at : at + length] = at + length
        at += length
    return ends, [prompt, *lengths]


def _both(
    way: str, plan: Any, ends: torch.Tensor, where: torch.device, dtype: torch.dtype, heads: Any
) -> None:
    from lockstep.learn.attention import flex as flex_attention

    def drawn(many: int, size: int, rows: int = 1) -> torch.Tensor:
        return torch.randn(rows, many, size, heads[2], device=where, dtype=dtype, requires_grad=True)

    if way.startswith("plain rows"):
        prompt, *lengths = plan
        longest, rows = prompt + max(lengths), len(lengths)
        parts = drawn(heads[0], longest, rows), drawn(heads[1], longest, rows), drawn(heads[1], longest, rows)
        out = torch.nn.functional.scaled_dot_product_attention(*parts, is_causal=True, enable_gqa=True)
    else:
        size = len(ends)
        parts = drawn(heads[0], size), drawn(heads[1], size), drawn(heads[1], size)
        out = flex_attention._attend(*parts, plan, None) if way == "FlexAttention" else plan(*parts, None)
    out.backward(torch.ones_like(out))


def _launches(work: Callable[[], Any]) -> int | None:
    """Kernels that the work starts; None without a GPU."""
    if device().type != "cuda":
        return None
    return len(_kernels(work))


def _kernels(work: Callable[[], Any]) -> list[Any]:
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        work()
        synchronize()
    return [event for event in seen.events() if event.device_type == DeviceType.CUDA]


def variants(sizes: Sizes) -> Iterator[Row]:
    """FlexAttention's compiled variants: how many a plain run needs, and whether a ninth one still uses the kernel."""
    from lockstep.learn.attention import flex as flex_attention

    _let_flex_attention_learn_on_a_cpu()
    where, full = device(), sizes.repeats > 1
    kinds = ((_HEADS, _KEYS, 128), (16, 16, 64), (8, 2, 64), (9, 3, 64)) if full else ((2, 1, 16),)
    for dtype in (torch.bfloat16, torch.float32) if full else (torch.float32,):
        for heads, keys, width in kinds:
            row: Row = {"heads": f"{heads} over {keys} of {width}", "dtype": str(dtype)}
            with told(row):
                row["seconds"] = seconds_of(
                    lambda heads=heads, keys=keys, width=width, dtype=dtype: (
                        flex_attention.prove_flex_attention((heads, keys), width, where, dtype)
                    )
                )
                counters = torch._dynamo.utils.counters
                row["graphs"] = counters["stats"].get("unique_graphs", 0)
                row["fell back"] = sum(counters.get("recompile_limit", {}).values())
                row["memory of a pack, MiB"] = _flex_memory(heads, keys, width, dtype, where)
            yield row


def _flex_memory(heads: int, keys: int, width: int, dtype: torch.dtype, where: torch.device) -> float | None:
    """Peak memory of a pack of about 4,100 positions. T × T scores would be 4 GiB for 64 heads in float32."""
    if where.type != "cuda":
        return None
    from lockstep.learn.attention import flex as flex_attention

    ends, _ = _ends(8, 480, torch.Generator().manual_seed(1))
    mask = flex_attention.block_mask(ends, where)
    give_memory_back()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    _both("FlexAttention", mask, ends, where, dtype, (heads, keys, width))
    return (torch.cuda.max_memory_allocated() - before) / 2**20


# ---- digests
# -------------------------------------------------------------------------------------------------------------


def digests(sizes: Sizes) -> Iterator[Row]:
    """GB/s of ways to digest weights that lie on the device."""
    from lockstep.contract.tensors import device_digests, digest_texts, tensor_digest, tensor_specs

    where, full = device(), sizes.repeats > 1
    count, shape = (24, (4096, 8192)) if full else (4, (64, 64))
    named = [(f"{i}", torch.randn(shape, device=where).to(torch.bfloat16)) for i in range(count)]
    size = sum(tensor.nbytes for _, tensor in named)
    pinned = torch.empty(named[0][1].nbytes, dtype=torch.uint8, pin_memory=where.type == "cuda")
    import xxhash

    def by_pinned() -> None:
        for _, tensor in named:
            pinned.copy_(tensor.flatten().view(torch.uint8))
            xxhash.xxh3_128_hexdigest(pinned.numpy().data)

    ways: dict[str, Callable[[], Any]] = {
        "tensor_specs, in main memory": lambda: tensor_specs(named),
        "tensor_digest, one thread": lambda: [tensor_digest(tensor) for _, tensor in named],
        "pageable copy alone": lambda: [tensor.cpu() for _, tensor in named],
        "pinned copy alone": lambda: [pinned.copy_(t.flatten().view(torch.uint8)) for _, t in named],
        "pinned copy and xxh3, one thread": by_pinned,
        "keyed digest on the device": lambda: digest_texts(device_digests(named, 7)),
    }
    for way, work in ways.items():
        row: Row = {"way": way, "MB": size / 1e6}
        with told(row):
            work()
            seconds = statistics.median(seconds_of(work) for _ in range(3))
            row |= {"seconds": seconds, "GB/s": size / seconds / 1e9}
        yield row


# ---- a step
# --------------------------------------------------------------------------------------------------------------

SHAPE_HALF_B = {
    "vocab_size": 151_936,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "head_dim": 64,
}


def timeline(sizes: Sizes) -> Iterator[Row]:
    """The learning half of a 0.5B model's step, by phase; kernels, how long the GPU computes; beside TRL's step."""
    from benchmarks.against_trl import play
    from benchmarks.against_trl.workloads import workload, write_rollouts

    full = sizes.repeats > 1
    shaped = Sizes(**{**vars(sizes), "shape": SHAPE_HALF_B if full else sizes.shape})
    name = "length-1024" if full else "length-16"
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        model = save_model(shaped, Path(folder) / "model", even=True)
        work, rollouts = workload(name), Path(folder) / "rollouts.json"
        write_rollouts(rollouts, _given_rollouts(model, work, "bfloat16" if full else "float32"))
        give_memory_back()
        for program, player, timed in (
            ("lockstep", play.Lockstep, False),
            ("lockstep, a wait at each phase's end", play.Lockstep, True),
            ("trl", play.TRL, False),
        ):
            row: Row = {"way": program, "work": f"{work.completions} × {work.tokens}"}
            with told(row):
                row |= _steps(player, work, model, rollouts, full, timed)
            give_memory_back()
            yield row


def _steps(player_of: Any, work: Any, model: str, rollouts: Path, full: bool, timed: bool) -> Row:
    steps: list[Row] = []
    kernels: list[Any] = []
    profiler: Any = None

    class Gate:
        since = 0.0

        def wait(self) -> None:
            nonlocal profiler
            synchronize()
            if self.since:
                took = time.perf_counter() - self.since
                if profiler is not None:
                    profiler.__exit__(None, None, None)
                    from torch.autograd import DeviceType

                    kernels.extend(e for e in profiler.events() if e.device_type == DeviceType.CUDA)
                    raise _StopTraining
                steps.append({"step": took, **player.take()})
            if len(steps) >= 4 and device().type == "cuda" and not timed:
                from torch.profiler import ProfilerActivity, profile

                profiler = profile(activities=[ProfilerActivity.CUDA])
                profiler.__enter__()
            elif len(steps) >= 4:
                raise _StopTraining
            self.since = time.perf_counter()

    if timed:
        _wait_at_phases()
    player = player_of(work, model, "bfloat16" if full else "float32", rollouts, "lockstep")
    if device().type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    with contextlib.suppress(_StopTraining):
        player.run(Gate())
    if close := getattr(player.trainer, "close", None):
        close()
    kept = steps[1:]
    row: Row = {
        "seconds": statistics.median(s["step"] - s["rollout"] for s in kept),
        "step seconds": statistics.median(s["step"] for s in kept),
        "each": str([round(s["step"] - s["rollout"], 3) for s in steps]),
        "phases": str({name: round(value, 3) for name, value in kept[-1].get("phases", {}).items()}),
    }
    if device().type == "cuda":
        row["MiB"] = torch.cuda.max_memory_allocated() / 2**20
    if kernels:
        row |= {"launches": len(kernels), "GPU seconds": sum(k.device_time for k in kernels) / 1e6}
    return row


def _wait_at_phases() -> None:
    """Let each phase wait for the GPU at its end, so that its seconds are its own."""
    from lockstep.report.phases import PhaseClock

    stop = PhaseClock.stop

    def stopped(self: Any, name: str) -> None:
        synchronize()
        stop(self, name)

    PhaseClock.stop = stopped  # type: ignore[method-assign]
