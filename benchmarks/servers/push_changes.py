"""Measure bytes and seconds per push of changed elements and of all weights. (docs/internals/sync.md)

    make push-changes      (real vLLM server in bf16, SmolLM2-135M; about five minutes on two cores)

Trains `recipes/arithmetic.yaml` with a server over gloo, at the recipe's learning rate and at 1e-6, without warm-up,
so that the learning rate is the same in all steps. Every optimizer step is a real one, and every push is proven as in
any run. The figures are metrics of the run (`push/bytes`, `push/seconds`, `push/changed`). The pushes before the
first optimizer step are left out.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks import ROOT

STEPS = 12
RATES = (5e-6, 1e-6)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--json", type=Path, default=Path("runs/bench/push_changes.json"))
    args = parser.parse_args()
    from benchmarks.servers.started import serving

    runs = {}
    with (
        serving("--dtype", "bfloat16", "--max_model_len", "512") as (url, _),
        tempfile.TemporaryDirectory() as folder,
    ):
        for rate in RATES:
            for deltas in (True, False):
                name = f"learning rate {rate:g}, {'changed elements' if deltas else 'all weights'}"
                runs[name] = pushes(url, Path(folder) / str(len(runs)), rate, deltas, args.steps)
                report(name, runs[name])
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps(runs, indent=1) + "\n", encoding="utf-8")


def pushes(url: str, folder: Path, rate: float, deltas: bool, steps: int) -> list[dict[str, float]]:
    """The metrics of every push that follows an optimizer step of a run."""
    fields = {
        "output_dir": folder,
        "vllm_server_base_url": url,
        "vllm_weight_transport": "gloo",
        "vllm_weight_deltas": deltas,
        "learning_rate": rate,
        "warmup_steps": 0,
        "max_steps": steps,
        "save_strategy": "no",
        "eval_strategy": "no",
    }
    command = [
        sys.executable,
        "-m",
        "lockstep.cli.main",
        "grpo",
        "--config",
        str(ROOT / "recipes" / "arithmetic.yaml"),
    ]
    command += [word for name, value in fields.items() for word in (f"--{name}", str(value))]
    done = subprocess.run(
        command, capture_output=True, text=True, encoding="utf-8", env={**os.environ, "TQDM_DISABLE": "1"}
    )
    if done.returncode:
        sys.exit(f"the run failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    found = [
        {name: line[name] for name in line if name.startswith("push/")}
        for line in lines
        if "push/bytes" in line
    ]
    return found[1:]


def report(name: str, found: Sequence[dict[str, float]]) -> None:
    def median(metric: str) -> float:
        return statistics.median(push[metric] for push in found)

    line = f"{name:48s} {median('push/bytes') / 1e6:8.2f} MB   {median('push/seconds'):6.3f} s per push"
    changed = [push["push/changed"] for push in found if "push/changed" in push]
    if changed:
        line += f"   changed: {changed[0]:.2%} in the first step, {statistics.median(changed):.2%} in the median step"
    print(line, flush=True)


if __name__ == "__main__":
    main()
