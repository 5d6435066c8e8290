"""Measure whether a step is slower after the trainer has waited: steps of workload `short`, a wait, steps again.

    make waiting                                        (ten minutes, on a quiet machine)
    make waiting ARGS="--wait 30 --memory kept"

A trainer waits for slow rewards, evaluations and servers. During the wait it may lose memory that it has freed: under
a hypervisor, Linux reports free memory to the host. The host takes this memory away, and gives it back when it is
used again. The program takes Lockstep's steps (`against_trl/play.py`) in one process, and prints for each step:

    faults: pages that the kernel had to give to the process in this step
    resident, huge: memory of the process before the step, and the part of it in huge pages
    reported: memory that Linux has reported to its host as free since the step before (if the system counts it)
    MHz: the clock of the first core after the step, as the kernel reports it

`--memory` says what the C library does with freed memory: `returned` (it goes back to Linux, the library's default;
with huge pages) or `kept` (the setting of `lockstep` commands, `cli/process.py`). Each setting runs in a separate
process, one after the other. Writes `runs/bench/waiting.json`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.against_trl.answering import PLAY, AnsweringProcess
from benchmarks.against_trl.floors import cpu_name
from benchmarks.against_trl.workloads import make_model
from lockstep.cli.process import kernel_setting, with_tunables
from lockstep.devices import has_fast_bf16

MEMORY = ("returned", "kept")
_REPORTED = Path("/sys/module/page_reporting/parameters")
Step = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--steps", type=int, default=4, help="measured steps before each wait and after the last one"
    )
    parser.add_argument("--wait", type=float, default=100.0, help="seconds of each wait")
    parser.add_argument("--waits", type=int, default=2)
    parser.add_argument("--memory", nargs="*", choices=MEMORY, default=list(MEMORY))
    parser.add_argument("--json", type=Path, default=Path("runs/bench/waiting.json"))
    args = parser.parse_args()
    found: dict[str, Any] = {"machine": {"name": cpu_name(), "cores": os.cpu_count()}, "wait_s": args.wait}
    print(f"{cpu_name()}, {os.cpu_count()} cores; waits of {args.wait:.0f} s", flush=True)
    args.json.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder) / "model")
        for memory in args.memory:
            steps = steps_of(memory, model, args, Path(folder))
            found[memory] = {"figures": figures(steps), "steps": steps}
            print(json.dumps({memory: found[memory]["figures"]}), flush=True)
            args.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def steps_of(memory: str, model: str, args: argparse.Namespace, folder: Path) -> list[Step]:
    """The steps of one process; the first one is left out."""
    own = folder / memory
    own.mkdir()
    dtype = "bfloat16" if has_fast_bf16() else "float32"
    command = [PLAY, "lockstep", "short", model, dtype]
    player = AnsweringProcess(command, own / "log", environment(memory), str(own))
    found: list[Step] = []
    try:
        player.ask("step")
        reported = reported_bytes()
        for waited in range(args.waits + 1):
            if waited:
                time.sleep(args.wait)
            for place in range(args.steps):
                gone = reported_bytes()
                step = {**player.ask("step"), "after_wait": bool(waited) and place == 0}
                step |= {"reported": gone - reported, "mhz": clock()}
                reported = reported_bytes()
                found.append(step)
                print(line(memory, step), flush=True)
    finally:
        player.close()
    return found


def environment(memory: str) -> dict[str, str]:
    """The environment of the process, for one setting of `--memory`."""
    given = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    if memory == "returned":
        return {**given, "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
    return with_tunables(given, kernel_setting()) or given


def reported_bytes() -> int:
    """Bytes that Linux has reported to its host as free since the machine started; 0 if it does not count them."""
    counted = _REPORTED / "reported_kib"
    return int(counted.read_text(encoding="utf-8")) * 1024 if counted.exists() else 0


def clock() -> float:
    """MHz of the first core, as the kernel reports it; 0 if it does not report it."""
    lines = (
        Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        if Path("/proc/cpuinfo").exists()
        else []
    )
    return next((float(line.split(":")[1]) for line in lines if line.startswith("cpu MHz")), 0.0)


def line(memory: str, step: Step) -> str:
    """The printed line of a step."""
    before, after = step["memory"]["before"], step["memory"]["after"]
    phases = ", ".join(
        f"{phase} {seconds:.2f}" for phase, seconds in step["phases"].items() if seconds >= 0.05
    )
    return (
        f"  {memory:9}{'after a wait' if step['after_wait'] else '':13} {step['step']:6.2f} s ({phases}); "
        f"{after['faults'] - before['faults']} faults, resident {before['resident'] / 2**30:.2f} GiB, huge "
        f"{before['huge'] / 2**30:.2f}, peak {step['peak_bytes'] / 2**30:.2f}; reported "
        f"{step['reported'] / 2**30:.2f} GiB; "
        f"{step['mhz']:.0f} MHz"
    )


def figures(steps: list[Step]) -> dict[str, float]:
    """The median step that follows a wait, the median of the others, and their ratio; the median faults of both."""
    waited, usual = ([step for step in steps if step["after_wait"] == kind] for kind in (True, False))
    after, other = (statistics.median(step["step"] for step in own) for own in (waited, usual))
    return {
        "after_wait_s": after,
        "other_s": other,
        "ratio": after / other,
        "after_wait_faults": statistics.median(map(faults, waited)),
        "other_faults": statistics.median(map(faults, usual)),
        "peak_bytes": max(step["peak_bytes"] for step in steps),
    }


def faults(step: Step) -> int:
    return step["memory"]["after"]["faults"] - step["memory"]["before"]["faults"]


if __name__ == "__main__":
    main()
