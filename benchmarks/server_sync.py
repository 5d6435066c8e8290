"""What a push to a server costs, beside copying its bytes once. (docs/server.md)

    make server-sync      (real vLLM server, SmolLM2-135M; about four minutes on two cores)

In turn, in one run: the bytes copied into memory that is newly allocated and into memory that is already there; a whole push
through each transport, with digests, caches and version; the module probe after it. Medians; every push is probed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path

os.environ.setdefault("TQDM_DISABLE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

ROUNDS, WARM_UP = 12, 2


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__)
    words.add_argument("--json", type=Path, default=Path("runs/bench/server_sync.json"))
    asked = words.parse_args()
    from servers import serving

    from lockstep.cli.quiet import quiet_libraries

    quiet_libraries()
    with serving("--dtype", "float32", "--max_model_len", "512") as (url, _):
        rows = measure(url)
    medians = {name: statistics.median(row[name] for row in rows[WARM_UP:]) for name in rows[0]}
    for name, seconds in medians.items():
        ratios = f"{seconds / medians['copy, new memory']:6.2f} × {seconds / medians['copy, old memory']:6.1f} ×"
        print(f"{name:28s} {seconds:7.3f} s   {ratios}")
    print("(ratios: to a copy into newly allocated memory, and into memory already there)")
    asked.json.parent.mkdir(parents=True, exist_ok=True)
    asked.json.write_text(json.dumps({"medians": medians, "rounds": rows}, indent=1) + "\n")


def measure(url: str) -> list[dict[str, float]]:
    """Seconds of each part, by round."""
    import torch
    from servers import MODEL

    from lockstep.connection import connect
    from lockstep.models.policy import load_policy
    from lockstep.models.resolve import resolve_model
    from lockstep.parity.module_probe import ModuleProbe, check_probe
    from lockstep.sync.push import push_weights

    model = load_policy(resolve_model(MODEL), None)
    tensors = [p.detach() for p in model.parameters()]
    there = [torch.empty_like(t).fill_(0) for t in tensors]
    engines = {name: connect(url, transport=name).engine for name in ("shared_memory", "gloo")}
    probes = {name: ModuleProbe(model, engine, torch.float32) for name, engine in engines.items()}
    rows = []
    for version in range(ROUNDS):
        row = {"copy, new memory": timed(lambda: [t.clone() for t in tensors])}
        row["copy, old memory"] = timed(lambda: [a.copy_(b) for a, b in zip(there, tensors, strict=True)])
        for name, engine in engines.items():
            with torch.no_grad():
                for tensor in tensors:
                    tensor.mul_(1.001)
            row[f"push, {name}"] = push_weights(model, engine, version).seconds
            record = probes[name].measure(version, every=True)
            check_probe(record, version)
            row[f"probe of every module, {name}"] = record.seconds
        rows.append(row)
    for engine in engines.values():
        engine.close()
    return rows


def timed(work: object) -> float:
    start = time.perf_counter()
    kept = work()  # type: ignore[operator]
    seconds = time.perf_counter() - start
    del kept
    return seconds


if __name__ == "__main__":
    main()
