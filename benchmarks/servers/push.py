"""Compare the time of a push to a server with the time of copying its bytes once. (docs/internals/server.md)

    make server-sync      (real vLLM server, SmolLM2-135M; about four minutes on two cores)

Each round measures a copy of the bytes into newly allocated memory, a copy into memory that was allocated before, and
a whole push through each transport, with digests, caches and version. After each push every module is probed, and the
parity gap is measured on tokens that the server then samples. If a probe or gap is outside its limits, the benchmark
ends. Memory is the peak of trainer and server during a push, minus their memory before it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("TQDM_DISABLE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

ROUNDS, WARM_UP = 12, 2
# The goal: a push takes at most this many times as long as copying its bytes once.
GOALS = {"shared_memory": 3.0, "gloo": 6.0}
NEW, OLD = "copy, new memory", "copy, old memory"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument(
        "--dtype",
        default="float32",
        choices=("float32", "bfloat16"),
        help="dtype of the server; the trainer has fp32",
    )
    parser.add_argument("--json", type=Path, default=Path("runs/bench/server_sync.json"))
    args = parser.parse_args()
    from benchmarks.servers.started import engine_process, serving
    from lockstep.cli.output import quiet_libraries

    quiet_libraries()
    with serving("--dtype", args.dtype, "--max_model_len", "512") as (url, supervisor):
        rows = measure(url, engine_process(supervisor), args.dtype, args.rounds)
    medians = {name: statistics.median(row[name] for row in rows[WARM_UP:]) for name in rows[0]}
    report(medians)
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps({"medians": medians, "rounds": rows}, indent=1) + "\n", encoding="utf-8")


def report(medians: dict[str, float]) -> None:
    for name, value in medians.items():
        if name.startswith("gap"):
            print(f"{name:36s} {value:9.1e}")
        elif name.startswith("MiB"):
            print(f"{name:36s} {value:7.1f}")
        else:
            print(f"{name:36s} {value:7.3f} s   {value / medians[NEW]:6.2f} × {value / medians[OLD]:6.1f} ×")
    print(
        "(the two ratios: to a copy into newly allocated memory, and to a copy into memory that was allocated before)"
    )
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    print(
        f"(copied in this process, with GLIBC_TUNABLES={tunables!r}: huge pages only where that asks for them)"
    )
    for name, limit in GOALS.items():
        found = medians[f"push, {name}"] / medians[NEW]
        print(
            f"{name}: the goal is at most {limit:.0f} × a copy, reached {found:.2f} ×: "
            f"{'yes' if found <= limit else 'NO'}"
        )


def measure(url: str, server: int, dtype: str, rounds: int) -> list[dict[str, float]]:
    """The seconds of each part, and the memory and the gap of each push, one dict per round."""
    import torch

    from benchmarks.servers.started import MODEL, Peak
    from lockstep.connection import connect
    from lockstep.models.policy import load_policy
    from lockstep.models.resolve import resolve_model
    from lockstep.watch.modules import ModuleProbe, check_probe
    from lockstep.weights.push import push_weights

    model = load_policy(resolve_model(MODEL), None)
    tensors = [p.detach() for p in model.parameters()]
    old_memory = [torch.empty_like(t).fill_(0) for t in tensors]
    engines = {name: connect(url, transport=name).engine for name in GOALS}
    engine_dtype = getattr(torch, dtype)
    probes = {name: ModuleProbe(model, engine, engine_dtype) for name, engine in engines.items()}
    rows = []
    for version in range(rounds):
        row = {NEW: timed(lambda: [t.clone() for t in tensors])}
        row[OLD] = timed(lambda: [a.copy_(b) for a, b in zip(old_memory, tensors, strict=True)])
        for name, engine in engines.items():
            with torch.no_grad():
                for tensor in tensors:
                    tensor.mul_(1.001)
            peaks = {"server": Peak(server), "trainer": Peak(os.getpid())}
            row[f"push, {name}"] = push_weights(model, engine, version).seconds
            row |= {f"MiB more, {who}, {name}": peak.bytes() / 2**20 for who, peak in peaks.items()}
            record = probes[name].measure(version, every=True)
            check_probe(record, version)
            row[f"probe of every module, {name}"] = record.seconds
            row[f"gap (mean, nats), {name}"] = gap_of(engine, model, engine_dtype, version)
        rows.append(row)
    for engine in engines.values():
        engine.close()
    return rows


def gap_of(engine: Any, model: Any, held: Any, version: int) -> float:
    """The parity gap on a few completions that the server samples now."""
    import torch

    from lockstep.contract.protocol import GenerationRequest, RequestKey
    from lockstep.contract.sampling import Sampling
    from lockstep.watch.gap import GapStats, measure_gap, over_limits
    from lockstep.watch.tolerances import tolerance

    draw = torch.Generator().manual_seed(version)
    prompts = torch.randint(100, 40_000, (4, 16), generator=draw).tolist()
    requests = [
        GenerationRequest(RequestKey(f"p{i}", 0), tuple(ids), Sampling(8), i) for i, ids in enumerate(prompts)
    ]
    stats = GapStats()
    for completion in engine.generate(requests).values():
        ids = torch.tensor([[*completion.prompt_ids.tolist(), *completion.token_ids.tolist()]])
        with torch.no_grad():
            scores = model(ids).logits[0, len(completion.prompt_ids) - 1 : -1].float().log_softmax(-1)
        policy = scores.gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]
        stats += measure_gap(torch.tensor(completion.logprobs), policy, [str(completion.key)], [len(policy)])
    over = over_limits(stats, tolerance(held, torch.float32))
    if over:
        sys.exit(f"after push {version} the gap is outside its limits: {', '.join(over)}")
    return stats.mean_abs


def timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    kept = work()
    seconds = time.perf_counter() - start
    del kept
    return seconds


if __name__ == "__main__":
    main()
