"""Measure how long a training command takes from its start to the first sampled token, and how long each stage takes.

    make start-up                                          (warm files, a quiet machine)
    make start-up ARGS="--runs 5 -- --recipe agent"

Each run is a separate process (`start_up_inside.py`), in a new output directory. The first run brings the files into
the cache of the operating system, and is not counted. A stage lasts until the next stage begins. Prints the median of
each stage, in seconds and in processor seconds of all cores. Writes `runs/bench/start_up.json` (machine, every run).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.against_trl.floors import cpu_name
from benchmarks.host.start_up_inside import FIRST_TOKEN

# The arguments of the README's first command: `lockstep demo` runs the same.
_WORDS = ["grpo", "--recipe", "arithmetic"]
_LONGEST = 300
Stage = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=3, help="measured runs, after one that is not measured")
    parser.add_argument("--json", type=Path, default=Path("runs/bench/start_up.json"))
    parser.add_argument("command", nargs="*", default=_WORDS, help="the training command, after --")
    args = parser.parse_args()
    machine = {"name": cpu_name(), "cores": os.cpu_count()}
    print(f"{machine['name']}, {machine['cores']} cores: lockstep {' '.join(args.command)}", flush=True)
    runs = []
    for number in range(args.runs + 1):
        runs.append(stages(args.command))
        last = runs[-1][-1]
        kind = "" if number else " (not counted)"
        print(f"  run {number}{kind}: {last['at']:.2f} s, {last['cpu']:.2f} s of processors", flush=True)
    for stage in figures(runs[1:]):
        print(
            f"  {stage['at']:7.2f} s  {stage['seconds']:6.2f} s  {stage['cpu']:6.2f} s of processors  {stage['stage']}"
        )
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(
        json.dumps({"machine": machine, "command": args.command, "runs": runs}, indent=1) + "\n",
        encoding="utf-8",
    )


def stages(command: list[str]) -> list[Stage]:
    """The stages of one run, with the time and the processor seconds since its start.

    Raises:
        SystemExit: the command ended before it sampled a token, or took too long.
    """
    with tempfile.TemporaryDirectory() as folder:
        noted, log = Path(folder) / "stages", Path(folder) / "log"
        own = [
            sys.executable,
            "-m",
            "benchmarks.host.start_up_inside",
            *command,
            "--output_dir",
            str(Path(folder) / "run"),
        ]
        began = time.monotonic()
        with log.open("w", encoding="utf-8") as output:
            done = subprocess.run(
                own,
                stdout=output,
                stderr=output,
                env={**os.environ, "LOCKSTEP_STAGES": str(noted)},
                timeout=_LONGEST,
                check=False,
            )
        found = (
            [json.loads(line) for line in noted.read_text(encoding="utf-8").splitlines()]
            if noted.exists()
            else []
        )
        if not found or found[-1]["stage"] != FIRST_TOKEN:
            raise SystemExit(
                f"the command ended with {done.returncode} and sampled "
                f"nothing:\n{log.read_text(encoding='utf-8')[-3000:]}"
            )
    return [{**stage, "at": stage["at"] - began} for stage in found]


def figures(runs: list[list[Stage]]) -> list[Stage]:
    """The median of each stage: when it begins, how long it lasts until the next one begins, and its processor seconds.

    All runs must have the same stages in the same order. If a stage begins with a new process, its processor seconds
    are those of this process.
    """
    names = [[stage["stage"] for stage in run] for run in runs]
    assert all(own == names[0] for own in names), "the runs had different stages"
    found = []
    for place, name in enumerate(names[0]):
        following = min(place + 1, len(names[0]) - 1)
        found.append(
            {
                "stage": name,
                "at": statistics.median(run[place]["at"] for run in runs),
                "seconds": statistics.median(run[following]["at"] - run[place]["at"] for run in runs),
                "cpu": statistics.median(run[following]["cpu"] - run[place]["cpu"] for run in runs),
            }
        )
    return found


if __name__ == "__main__":
    main()
