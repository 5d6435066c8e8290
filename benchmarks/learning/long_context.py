"""Measure forward and backward over packs of up to 32,768 tokens: memory, time per token, gradients' error.

    make long-context                          (one core: about four minutes)
    make long-context ARGS="--longest 8192"    (a quick look)

There are two kinds of packs, each in five sizes: one text without branches, and a prompt with 8 completions (1,024 +
8 × 4,096 tokens at the largest). The model is a random Llama in float32 on a CPU, with one thread. Every point runs
in a separate process. Peak memory is the largest resident memory of the process in forward and backward, minus the
resident memory before. The number of operations is computed: 6 per weight and position (2 forward, 4 backward), and
14 per visible pair, unit of width and layer (2 products forward; 5 backward, because attention scores are computed
again). The reference scores each sequence in a separate row with PyTorch's causal attention.

Prints a table and writes `runs/bench/long_context.json` and `.svg`. (docs/internals/speed.md)
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.against_trl.floors import cpu_name
from benchmarks.against_trl.play import forget_peak, peak_bytes
from lockstep.learn.attention.tree import adopt_tree_attention
from lockstep.learn.pack import Pack, pack_sequences
from lockstep.learn.scoring import score_pack
from lockstep.learn.sequence import TrainingSequence

WIDTH, LAYERS, VOCABULARY = 128, 2, 512
LONGEST, SIZES = 32768, 5
# A pack with branches has 33 equal parts: the prompt has 1, and each of the eight completions has 4.
COMPLETIONS = 8
KINDS = {"one text": "one text without branches", "branches": "a prompt and 8 completions, 1 : 4 each"}
COLOURS = {"one text": "#1f6feb", "branches": "#d29922"}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--longest", type=int, default=LONGEST, help="tokens of the longest text")
    parser.add_argument("--point", nargs=3, metavar=("KIND", "SIZE", "TASK"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.point:
        kind, size, task = args.point
        print(json.dumps(compared(kind, int(size)) if task == "compare" else measured(kind, int(size))))
        return
    sizes = [args.longest >> k for k in reversed(range(SIZES))]
    points = {kind: [run_in_process(kind, size, "measure") for size in sizes] for kind in KINDS}
    found = {"cpu": cpu_name(), "points": points}
    found["gradients"] = {kind: run_in_process(kind, sizes[-1], "compare")["distance"] for kind in KINDS}
    folder = Path("runs/bench")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "long_context.json").write_text(json.dumps(found, indent=1), encoding="utf-8")
    (folder / "long_context.svg").write_text(drawing(points), encoding="utf-8")
    print(table(found))


def run_in_process(kind: str, size: int, task: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.learning.long_context", "--point", kind, str(size), task]
    answer = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, encoding="utf-8").stdout
    return json.loads(answer.splitlines()[-1])


def new_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=352,
        num_hidden_layers=LAYERS,
        num_attention_heads=WIDTH // 32,
        num_key_value_heads=WIDTH // 64,
        max_position_embeddings=LONGEST,
    )
    return LlamaForCausalLM(config).train()


def sequences(kind: str, size: int) -> list[TrainingSequence]:
    """The sequences of a pack.

    A text without branches has `size` positions. A prompt with completions has 33/32 × `size`.
    """
    draw = torch.Generator().manual_seed(size)

    def ids(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(1, VOCABULARY, (count,), generator=draw).tolist())

    prompt, completion = ids(size // 32), size - size // 32
    # The last token of a completion is only a target: it takes no position in the pack.
    lengths = [completion + 1] if kind == "one text" else [size // COMPLETIONS + 1] * COMPLETIONS
    return [
        TrainingSequence(f"{kind}#{i}", prompt, (i + 1, *ids(length - 1)), (0.0,) * length)
        for i, length in enumerate(lengths)
    ]


def one_pack(kind: str, size: int) -> Pack:
    (pack,) = pack_sequences(sequences(kind, size), 2 * LONGEST)
    return pack


def measured(kind: str, size: int) -> dict[str, Any]:
    """Peak memory, seconds and number of operations of forward and backward."""
    model, pack = new_model(), one_pack(kind, size)
    adopt_tree_attention(model)
    # Learn from a small pack first. Then memory that a process allocates only once, such as gradients, is not counted.
    (small,) = pack_sequences(sequences(kind, 256), 2 * LONGEST)
    learn(model, small)
    before = resident_bytes()
    forget_peak()
    start = time.perf_counter()
    learn(model, pack)
    seconds = time.perf_counter() - start
    positions = pack.input_ids.numel()
    weights = sum(p.numel() for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name)
    pairs = int((pack.position_ids + 1).sum())
    return {
        "positions": positions,
        "pairs": pairs,
        "bytes": peak_bytes() - before,
        "seconds": seconds,
        "operations": 6 * weights * positions + 14 * pairs * WIDTH * LAYERS,
    }


def resident_bytes() -> int:
    line = next(
        line
        for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
        if line.startswith("VmRSS")
    )
    return int(line.split()[1]) * 1024


def learn(model: LlamaForCausalLM, pack: Pack) -> None:
    # A loss in which every token has a different weight.
    (score_pack(model, pack, 1.0, 512).logps * torch.linspace(-1, 1, len(pack.targets))).sum().backward()


def compared(kind: str, size: int) -> dict[str, float]:
    """Relative distance between all gradients, as one vector, and the reference gradients."""
    model, plain, pack = new_model(), new_model(), one_pack(kind, size)
    adopt_tree_attention(model)
    learn(model, pack)
    weights = torch.linspace(-1, 1, len(pack.targets)).split(pack.sizes)
    for s, weight in zip(pack.sequences, weights, strict=True):
        ids, first = torch.tensor([[*s.prompt_ids, *s.completion_ids]]), len(s.prompt_ids)
        logits = plain(ids[:, :-1], use_cache=False).logits[0, first - 1 :]
        logps = logits.log_softmax(-1).gather(1, ids[0, first:, None])[:, 0]
        (logps * weight).sum().backward()
    gradients = [
        torch.cat([p.grad.flatten() for p in m.parameters() if p.grad is not None]) for m in (model, plain)
    ]
    return {"distance": float((gradients[0] - gradients[1]).norm() / gradients[1].norm())}


def growth(points: Sequence[dict[str, Any]]) -> float:
    """Seconds per operation at the longest pack, divided by those at a pack of an eighth of its size."""
    first, last = points[-4], points[-1]
    return (last["seconds"] / last["operations"]) / (first["seconds"] / first["operations"])


def table(found: dict[str, Any]) -> str:
    lines = [f"{found['cpu']}, one thread, {LAYERS} layers of width {WIDTH}", ""]
    lines += [
        "| | tokens | peak memory | KiB per token | seconds | µs per token | GFLOP/s |",
        "|---|---|---|---|---|---|---|",
    ]
    for kind, points in found["points"].items():
        for p in points:
            per_token = (
                f"{p['bytes'] / p['positions'] / 1024:.1f} | {p['seconds']:.1f} | "
                f"{1e6 * p['seconds'] / p['positions']:.0f}"
            )
            rate = f"{p['operations'] / p['seconds'] / 1e9:.0f}"
            lines.append(
                f"| {kind} | {p['positions']:,} | {p['bytes'] / 2**20:.0f} MiB | {per_token} | {rate} |"
            )
    for kind, points in found["points"].items():
        lines.append(
            f"{kind}: from an eighth of its size to the longest pack, time per operation grows to "
            f"{growth(points):.2f} ×;"
        )
        lines.append(f"    relative distance from the reference gradients {found['gradients'][kind]:.1e}")
    return "\n".join(lines)


def drawing(points: dict[str, list[dict[str, Any]]]) -> str:
    """An SVG plot of peak memory and seconds over tokens."""
    lines = [
        '<svg xmlns="http://www.w3.org/2000/svg" width="760" height="300" font-family="sans-serif" font-size="11">'
    ]
    panels = (("peak memory of forward and backward, MiB", "bytes", 2.0**20), ("seconds", "seconds", 1.0))
    longest = max(p["positions"] for of in points.values() for p in of)
    for place, (title, name, unit) in enumerate(panels):
        left, width, low, height = 50 + 380 * place, 300, 240, 200
        highest = max(p[name] for of in points.values() for p in of)
        lines.append(f'<text x="{left}" y="20">{title}</text>')
        lines.append(f'<path d="M{left} 40V{low}H{left + width}" fill="none" stroke="#8b949e"/>')
        lines.append(f'<text x="{left - 6}" y="48" text-anchor="end">{highest / unit:.0f}</text>')
        lines.append(f'<text x="{left + width}" y="{low + 16}" text-anchor="end">{longest:,} tokens</text>')
        for kind, of in points.items():
            dots = [(left + width * p["positions"] / longest, low - height * p[name] / highest) for p in of]
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in [(left, low), *dots])
            lines.append(f'<polyline points="{path}" fill="none" stroke="{COLOURS[kind]}" stroke-width="2"/>')
            lines += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{COLOURS[kind]}"/>' for x, y in dots]
    for place, (kind, label) in enumerate(KINDS.items()):
        lines.append(f'<rect x="{50 + 260 * place}" y="276" width="9" height="9" fill="{COLOURS[kind]}"/>')
        lines.append(f'<text x="{64 + 260 * place}" y="285">{label}</text>')
    return "\n".join([*lines, "</svg>", ""])


if __name__ == "__main__":
    main()
