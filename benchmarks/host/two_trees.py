"""Measure whether the recipe's step is slower than in another checkout: pairs of steps, in turn, in two processes.

    git worktree add ../before COMMIT
    make two-trees ARGS="--other ../before"     (six minutes on two cores)

Both processes train the recipe with the same seed and the same packages; each imports `src/` and `benchmarks/` of its
own tree, with vLLM in the process. Only one takes a step at a time: while one works, the other waits for a line. The
order changes with every pair, so that what the machine does meanwhile falls on both. Prints for each pair the seconds
of both, and at the end the median of the ratios (this tree / the other) with its 95 % interval from order statistics.
Losses and gradient norms are compared too: `equal` says whether both trees printed the same figures in every step.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import ROOT
from benchmarks.against_trl.answering import AnsweringProcess
from benchmarks.against_trl.floors import cpu_name
from lockstep.cli.process import kernel_setting, with_tunables

# Steps of each process before the pairs: the first has the proofs at the start of a run.
_WARM_UP = 3
_SAME = ("loss", "grad_norm", "reward")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--other", type=Path, required=True, metavar="TREE", help="the checkout to compare with"
    )
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--json", type=Path, default=Path("runs/bench/two_trees.json"))
    args = parser.parse_args()
    pairs = measure(ROOT, args.other.resolve(), args.pairs)
    found = {"cpu": cpu_name(), "pairs": pairs, **summary(pairs)}
    low, high = found["interval"]
    print(
        f"{len(pairs)} pairs on {found['cpu']}: the median ratio this / other is {found['median']:.4f} "
        f"[{low:.4f}, {high:.4f}]; figures equal: {found['equal']}"
    )
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def measure(this: Path, other: Path, pairs: int) -> list[dict[str, Any]]:
    """Take `pairs` steps of both trees in turn. Each row has the step's seconds and figures of both."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        sides = {
            name: _started(tree, Path(folder) / name, pairs)
            for name, tree in (("this", this), ("other", other))
        }
        try:
            for step in range(_WARM_UP + pairs):
                order = list(sides) if step % 2 else list(sides)[::-1]
                row = {name: sides[name].ask("step") for name in order}
                if step >= _WARM_UP:
                    rows.append(row)
                    print(*(f"{name} {row[name]['seconds']:.3f} s" for name in sides), sep="   ", flush=True)
        finally:
            for side in sides.values():
                side.close()
    return rows


def _started(tree: Path, folder: Path, pairs: int) -> AnsweringProcess:
    folder.mkdir()
    env = {**os.environ, "PYTHONPATH": str(tree / "src")}
    command = ["benchmarks.host.two_trees_inside", str(tree), str(folder / "run"), str(_WARM_UP + pairs)]
    return AnsweringProcess(
        command, folder / "log", with_tunables(env, kernel_setting()) or env, cwd=str(tree)
    )


def summary(pairs: list[dict[str, Any]]) -> dict[str, Any]:
    """The median ratio of the seconds, its 95 % interval, and whether both sides had the same figures."""
    ratios = sorted(row["this"]["seconds"] / row["other"]["seconds"] for row in pairs)
    outside = outside_the_interval(len(ratios))
    return {
        "median": statistics.median(ratios),
        "interval": (ratios[outside], ratios[-1 - outside]),
        "equal": all(row["this"][name] == row["other"][name] for row in pairs for name in _SAME),
    }


def outside_the_interval(count: int) -> int:
    """How many sorted values lie outside the 95 % interval of their median, on each side (by the sign test)."""
    below, outside = 1 / 2**count, 0
    while below + math.comb(count, outside + 1) / 2**count <= 0.025:
        outside += 1
        below += math.comb(count, outside) / 2**count
    return outside


if __name__ == "__main__":
    main()
