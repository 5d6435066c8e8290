"""The parts of `make gpu-day` (`run.py`). Each part is a function that yields rows of its table.

Every part makes its own models with random weights, because a GPU machine may have no network. A part runs in a
separate process, on the GPU if there is one.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_day.measuring import (
    POSITIONS,
    Row,
    Sizes,
    autocast,
    device,
    distance,
    dtype_of,
    forget,
    give_memory_back,
    make_model,
    measured,
    peak,
    refusals,
    save_model,
    synchronize,
)
from benchmarks.gpu_day.push import push as push

_PACKAGES = (
    *(
        "torch",
        "triton",
        "transformers",
        "tokenizers",
        "huggingface_hub",
        "accelerate",
        "datasets",
        "pyarrow",
        "numpy",
    ),
    *("peft", "msgspec", "trl", "vllm"),
)
# Completions of a group.
_GROUP = 8


# ---- the machine
# ------------------------------------------------------------------------------------------------------


def machine(sizes: Sizes) -> Iterator[Row]:
    """The device, and the versions of the packages that matter."""
    from benchmarks.against_trl.floors import cpu_name

    where = device()
    if where.type == "cuda":
        properties = torch.cuda.get_device_properties(where)
        yield {"what": "device", "is": f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB"}
        yield {"what": "CUDA of torch", "is": str(torch.version.cuda)}
        yield {"what": "bf16 units", "is": str(torch.cuda.is_bf16_supported(including_emulation=False))}
    else:
        yield {"what": "device", "is": "no GPU: the CPU"}
    yield {"what": "processor", "is": f"{cpu_name()}, {os.cpu_count()} cores"}
    yield {"what": "python", "is": sys.version.split()[0]}
    yield {"what": "products in float32", "is": torch.get_float32_matmul_precision()}
    for package in _PACKAGES:
        try:
            yield {"what": package, "is": importlib.metadata.version(package)}
        except importlib.metadata.PackageNotFoundError:
            yield {"what": package, "is": "not installed"}


# ---- attention
# --------------------------------------------------------------------------------------------------------


def attention(sizes: Sizes) -> Iterator[Row]:
    """Attention of one layer over a pack: by blocks and by FlexAttention, beside SDPA in float32 with a dense mask."""
    from benchmarks.learning.long_context import KINDS, one_pack
    from lockstep.learn.attention import flex as flex_attention
    from lockstep.learn.attention.blocks import TreeAttention

    _let_flex_attention_learn_on_a_cpu()
    where, shape = device(), sizes.shape
    heads = shape["num_attention_heads"], shape["num_key_value_heads"]
    for dtype in map(dtype_of, sizes.dtypes):
        flex_attention.prove_flex_attention(heads, shape["head_dim"], where, dtype)
        yield {
            "pack": "the trees of prove_flex_attention",
            "dtype": str(dtype),
            "way": "FlexAttention, proven",
        }
    for kind in KINDS:
        for tokens in sizes.trees:
            ends = one_pack(kind, tokens).ends
            assert ends is not None
            draw = torch.Generator().manual_seed(tokens)
            counts = (heads[0], heads[1], heads[1], heads[0])
            drawn = [
                torch.randn(1, count, len(ends), shape["head_dim"], generator=draw).to(where)
                for count in counts
            ]
            exact, reference = _attended(
                lambda q, k, v, ends=ends: _dense(q, k, v, ends), drawn, sizes.repeats
            )
            same = {"pack": kind, "tokens": len(ends)}
            yield {**same, "dtype": "torch.float32", "way": "SDPA, dense mask (reference)", **reference}
            for dtype in map(dtype_of, sizes.dtypes):
                plan, blocks = (
                    TreeAttention.of(ends, where, dtype, only_blocks=only) for only in (False, True)
                )
                mask = flex_attention.block_mask(ends, where)
                ways: dict[str, Callable[..., torch.Tensor]] = {
                    # On a CPU both are blocks that compute in float32 (learn/attention/tree.py).
                    "paths": lambda q, k, v, plan=plan: plan(*_in_computed_dtype(q, k, v), None).to(q.dtype),
                    "blocks": lambda q, k, v, plan=blocks: plan(*_in_computed_dtype(q, k, v), None).to(
                        q.dtype
                    ),
                    "FlexAttention": lambda q, k, v, mask=mask: flex_attention._attend(q, k, v, mask, None),
                }
                for way, attend in ways.items():
                    row = {**same, "dtype": str(dtype), "way": way}
                    with refusals(row) as failed:
                        found, figures = _attended(attend, [part.to(dtype) for part in drawn], sizes.repeats)
                        distances = [distance(a.float(), b) for a, b in zip(found, exact, strict=True)]
                        row |= {**figures, "values": distances[0], "gradients": max(distances[1:])}
                    yield row | failed


def _let_flex_attention_learn_on_a_cpu() -> None:
    """Let a rehearsal use FlexAttention's backward on a CPU.

    PyTorch refuses this backward on a CPU. Lockstep's recomputation, which is only for CPUs, does not support this
    operation.
    """
    from torch.nn.attention import flex_attention

    from lockstep.learn import scoring

    if device().type == "cpu":
        flex_attention._validate_device = lambda *parts: None
        scoring.products_kept = lambda model: contextlib.nullcontext()


def _dense(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    nodes, there = torch.arange(len(ends), device=query.device), ends.to(query.device)
    mask = (nodes <= nodes[:, None]) & (nodes[:, None] < there)
    groups = query.shape[1] // key.shape[1]
    key, value = (part.repeat_interleave(groups, 1) for part in (key, value))
    return torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask[None, None])


def _in_computed_dtype(*parts: torch.Tensor) -> Sequence[torch.Tensor]:
    return [part.float() for part in parts] if parts[0].device.type == "cpu" else parts


def _attended(
    attend: Callable[..., torch.Tensor], drawn: Sequence[torch.Tensor], repeats: int
) -> tuple[list[torch.Tensor], Row]:
    """The output and the gradients of queries, keys and values; and the seconds and memory of forward and backward."""
    *parts, of = drawn
    own = [part.detach().requires_grad_() for part in parts]

    def work() -> list[torch.Tensor]:
        out = attend(*own)
        return [out.detach(), *torch.autograd.grad(out, own, of)]

    return measured(work, repeats)


# ---- forward and backward of the model
# --------------------------------------------------------------------------------


def passes(sizes: Sizes) -> Iterator[Row]:
    """Forward and backward of a group, compared with a padded forward of transformers with the same loss."""
    for tokens in sizes.tokens:
        yield from _passes(
            sizes, _sequences([tokens] * _GROUP, sizes.shape["vocab_size"]), f"{_GROUP} × {tokens:,}"
        )


def chain(sizes: Sizes) -> Iterator[Row]:
    """The same for one long text without branches."""
    yield from _passes(sizes, _sequences([sizes.chain], sizes.shape["vocab_size"]), f"1 × {sizes.chain:,}")


def _sequences(lengths: Sequence[int], vocabulary: int) -> list[Any]:
    from lockstep.learn.sequence import TrainingSequence

    draw = torch.Generator().manual_seed(0)
    prompt, *completions = (
        tuple(torch.randint(1, vocabulary, (length,), generator=draw).tolist()) for length in (97, *lengths)
    )
    return [TrainingSequence(f"#{i}", prompt, own, (0.0,) * len(own)) for i, own in enumerate(completions)]


def _passes(sizes: Sizes, sequences: list[Any], work: str) -> Iterator[Row]:
    from lockstep.learn.attention.flex import FLEX
    from lockstep.learn.attention.tree import TREE

    _let_flex_attention_learn_on_a_cpu()
    where, model = device(), make_model(sizes)
    model.to(where).train()

    def lockstep(attention: str) -> None:
        from lockstep.learn.pack import pack_sequences
        from lockstep.learn.scoring import score_pack

        model.set_attn_implementation(attention)
        for pack in pack_sequences(sequences, POSITIONS):
            with autocast(where):
                logps = score_pack(model, pack.to(where), 1.0, 2048).logps
            (logps * _weights([s.length for s in pack.sequences], where)).sum().backward()

    def padded(half: bool) -> None:
        model.set_attn_implementation("sdpa")
        longest = max(len(s.prompt_ids) + len(s.completion_ids) for s in sequences)
        count = max(1, POSITIONS // longest)
        for start in range(0, len(sequences), count):
            own = sequences[start : start + count]
            rows = torch.tensor([[*s.prompt_ids, *s.completion_ids] for s in own], device=where)
            first = len(own[0].prompt_ids)
            with autocast(where) if half else contextlib.nullcontext():
                logits = model(rows[:, :-1], use_cache=False, logits_to_keep=rows.shape[1] - first).logits
            targets = rows[:, first:]
            logps = torch.cat([_chosen(part, ids) for part, ids in zip(logits, targets, strict=True)])
            (logps * _weights([s.length for s in own], where)).sum().backward()

    ways: dict[str, Callable[[], None]] = {
        "transformers, padded, fp32 (reference)": lambda: padded(False),
        "transformers, padded": lambda: padded(True),
        "Lockstep, blocks": lambda: lockstep(TREE),
        "Lockstep, FlexAttention": lambda: lockstep(FLEX),
    }
    exact: torch.Tensor | None = None
    for way, learn in ways.items():
        row = {"work": work, "way": way}
        with refusals(row) as failed:

            def gradients(learn: Callable[[], None] = learn) -> torch.Tensor:
                model.zero_grad(set_to_none=True)
                learn()
                return torch.cat([p.grad.flatten() for p in model.parameters()])

            # The fp32 reference takes ten times as long as the others. It runs once, because its seconds are not
            # compared.
            found, figures = measured(gradients, 1 if way.endswith("(reference)") else sizes.repeats)
            row |= figures
            exact = found if exact is None and way.endswith("(reference)") else exact
            row["gradients"] = None if exact is None else distance(found, exact)
            del found
        give_memory_back()
        yield row | failed


def _chosen(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Log-probs of the chosen ids, for one row of the batch at a time, as TRL computes them."""
    return logits.float().log_softmax(-1).gather(1, ids[:, None])[:, 0]


def _weights(lengths: Sequence[int], where: torch.device) -> torch.Tensor:
    """A weight per token, which differs between the tokens of a completion.

    Weights are divided by the completion's length.
    """
    return torch.cat([torch.linspace(-1, 1, n + 1, device=where)[:n] / n for n in lengths])


# ---- a step of the trainers
# -------------------------------------------------------------------------------------------


def learning(sizes: Sizes, tokens: int) -> Iterator[Row]:
    """The learning half of a step, for both trainers, with the same recorded completions. Lockstep's proofs are on."""
    from benchmarks.against_trl import play
    from benchmarks.against_trl.workloads import workload, write_rollouts

    dtype, name = sizes.dtypes[-1], f"length-{tokens}"
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        model = save_model(sizes, Path(folder) / "model", even=True)
        work, rollouts = workload(name), Path(folder) / "rollouts.json"
        write_rollouts(rollouts, _given_rollouts(model, work, dtype))
        give_memory_back()
        own: float | None = None
        for program, player in (("lockstep", play.Lockstep), ("trl", play.TRL)):
            row = {"work": f"{work.completions} × {tokens:,}", "dtype": dtype, "way": program}
            with refusals(row, ImportError) as failed:
                row |= _measured_steps(partial(player, work, model, dtype, rollouts, program), sizes.repeats)
                own = row["seconds"] if program == "lockstep" else own
                row["÷ lockstep"] = None if own is None else row["seconds"] / own
            give_memory_back()
            yield row | failed


def _given_rollouts(model: str, work: Any, dtype: str) -> list[Any]:
    """Random completions with the engine's log-probs, for a model whose tokens are practically equally likely."""
    from benchmarks.against_trl.workloads import Recorded, prompts
    from lockstep.engines.transformers_engine import TransformersEngine
    from lockstep.tokens.chat import load_tokenizer

    tokenizer = load_tokenizer(model)
    engine = TransformersEngine(model, tokenizer, dtype=dtype_of(dtype), max_model_len=POSITIONS)
    engine.commit_version(0)
    vocabulary, draw = engine.settings().vocab_size, torch.Generator().manual_seed(0)
    found = []
    for text in prompts(work, model):
        prompt = tokenizer(text)["input_ids"]
        for _ in range(work.completions):
            # Id 0 is the end token. It is never drawn, so that every completion reaches its length limit.
            ids = torch.randint(1, vocabulary, (work.tokens,), generator=draw).tolist()
            logprobs = engine.score({"given": (*prompt, *ids)})["given"][-len(ids) :]
            found.append(Recorded(text, prompt, ids, list(logprobs)))
    engine.close()
    return found


class _StopTraining(Exception):
    """Ends a trainer's loop."""


def _measured_steps(start: Callable[[], Any], repeats: int) -> Row:
    """Run a program of `against_trl/play.py`. Returns medians over its steps after the first."""
    steps: list[Row] = []

    class Gate:
        """Called before each step. It replaces the gate at which a program waits for another program."""

        since: float | None = None

        def wait(self) -> None:
            synchronize()
            if self.since is not None:
                steps.append({"step": time.perf_counter() - self.since, "bytes": peak(), **player.take()})
            if len(steps) > repeats:
                raise _StopTraining
            player.take()
            forget()
            self.since = time.perf_counter()

    player = start()
    with contextlib.suppress(_StopTraining):
        player.run(Gate())
    if close := getattr(player.trainer, "close", None):
        close()
    kept = steps[1:]
    return {
        "seconds": statistics.median(step["step"] - step["rollout"] for step in kept),
        "step seconds": statistics.median(step["step"] for step in kept),
        "MiB": max(step["bytes"] for step in kept) / 2**20,
    }


# ---- host cost, limits, proofs
# ----------------------------------------------------------------------------------------


def host(sizes: Sizes) -> Iterator[Row]:
    """Microseconds of processor time per sampled token, without model and engine (`benchmarks/host/cost.py`).

    The tokenizer is the small one of the tests. Therefore "decoding to text" differs from what `make host-cost` prints.
    """
    import tiny

    from benchmarks.host.cost import Tokenizer, measured, total

    tokenizer_of = partial(Tokenizer, real=tiny.make_tokenizer())
    # The first call loads libraries.
    measured("8x16", tokenizer_of)
    for size in sizes.host:
        found = measured(size, tokenizer_of)
        yield {"work": size, "µs per token": total(found), **found}


def limits(sizes: Sizes) -> Iterator[Row]:
    """Training runs with the transformers engine and every proof: the gap beside its limits, and one fault."""
    from benchmarks.proofs.false_alarms import clean_steps

    with tempfile.TemporaryDirectory() as folder:
        for model in sizes.models:
            for dtype in sizes.dtypes:
                path = save_model(sizes, Path(folder) / "shape") if model == "shape" else model
                found = clean_steps(
                    path, sizes.steps, dtype, 1.5, {}, engine="transformers", seed=0, deadline=math.inf
                )
                yield {"model": model, "dtype": dtype} | found
                give_memory_back()


def verify(sizes: Sizes) -> Iterator[Row]:
    """`lockstep verify` with the transformers engine: every proof on a model of this shape."""
    from lockstep.extras.verify.verify_command import run

    with tempfile.TemporaryDirectory() as folder:
        model = save_model(sizes, Path(folder) / "model")
        for dtype in sizes.dtypes:
            table = Path(folder) / f"{dtype}.json"
            arguments = ["--model", model, "--engine", "transformers", "--dtype", dtype, "--json", str(table)]
            code = run([*arguments, "--vllm_max_model_length", "512"])
            for found in json.loads(table.read_text(encoding="utf-8"))["rows"]:
                yield {"dtype": dtype, **found}
            yield {"dtype": dtype, "proof": "exit code", "figure": code, "passed": code == 0}
