"""A whole training step of Lockstep and of TRL on the same work, step by step in turn; and how Lockstep's grows.

    make bench                                         (two cores: some hours; quiet machine)
    make bench ARGS="--parts short learning-short"     (ten minutes)

Each program lives in a process of its own and waits while the other one works. Figures are medians of the steps after the first.
With fast bf16 everything is run in both dtypes: fp32 alone, and bf16 autocast over fp32 weights.
Writes `runs/bench/step.json` (after every part) and `runs/bench/growth-DTYPE.svg`, prints the tables of docs/speed.md.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import product
from pathlib import Path
from typing import Any

from floors import floors, measure_machine
from plot import drawing
from workloads import Workload, make_model, workload

from lockstep.cli.huge_pages import kernel_setting, with_huge_pages
from lockstep.training.precision import has_fast_bf16

HERE = Path(__file__).parent
GROWTH = [f"completions-{n}" for n in (8, 16, 32, 64, 128, 256)] + [
    f"length-{n}" for n in (32, 64, 128, 256, 512, 1024)
]
PARTS = ("short", "learning-short", "long", "learning-long", "growth")
DTYPES = ("float32", "bfloat16")
RIVALS = ("trl", "trl-continuous", "trl-bf16-weights", "trl-huge-pages")
# `lockstep` starts its commands so; a script of TRL's does not.
HUGE_PAGES = ("lockstep", "trl-huge-pages")
Steps = list[dict[str, Any]]


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__)
    words.add_argument("--parts", nargs="*", choices=PARTS, default=list(PARTS))
    words.add_argument("--steps", type=int, default=5, help="measured steps; one more goes before them")
    words.add_argument("--dtypes", nargs="*", choices=DTYPES, help="default: all that are fast here")
    words.add_argument(
        "--rivals", nargs="*", choices=RIVALS, default=["trl"], help="programs to take whole steps beside"
    )
    words.add_argument("--folder", type=Path, default=Path("runs/bench"))
    asked = words.parse_args()
    asked.folder.mkdir(parents=True, exist_ok=True)
    dtypes = asked.dtypes or DTYPES[: 2 if has_fast_bf16() else 1]
    found: dict[str, Any] = {"machine": measure_machine(), "steps": {}, "growth": {}}
    show_machine(found["machine"])
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder) / "model")
        for part, dtype in product(asked.parts, dtypes):
            title = f"{part} in {dtype}"
            if part == "growth":
                steps = {
                    name: side_by_side(["lockstep"], name, model, dtype, asked.steps)["lockstep"] for name in GROWTH
                }
                found["growth"][dtype] = steps
                show_growth(title, steps)
                (asked.folder / f"growth-{dtype}.svg").write_text(drawing(steps))
            elif part.startswith("learning-"):
                name = part.removeprefix("learning-")
                rollouts = recorded(name, model, dtype, Path(folder) / f"{name}-{dtype}.json")
                found["steps"][title] = side_by_side(
                    ["lockstep", "trl"], name, model, dtype, asked.steps, "--rollouts", str(rollouts)
                )
                show_learning(title, found["steps"][title], found["machine"])
            else:
                found["steps"][title] = side_by_side(["lockstep", *asked.rivals], part, model, dtype, asked.steps)
                show_steps(title, workload(part), dtype, found["steps"][title], found["machine"])
            (asked.folder / "step.json").write_text(json.dumps(found, indent=1) + "\n")


# ---- processes --------------------------------------------------------------------------------------------------------


class Player:
    """A program of `play.py`."""

    def __init__(self, command: Sequence[str], folder: str, log: Path) -> None:
        self._log = log
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "play.py"), *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log.open("w"),
            text=True,
            cwd=folder,
            env=environment(command[0]),
        )
        self._answer()

    def step(self) -> dict[str, Any]:
        """Take one step."""
        assert self._process.stdin is not None
        self._process.stdin.write("step\n")
        self._process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{' '.join(map(str, self._process.args))} ended:\n{self._log.read_text()[-3000:]}")
        return json.loads(line)


def environment(program: str) -> dict[str, str]:
    """What a program is started with."""
    # The comparison is of CPUs: TRL's vLLM and ours would not be the same thing on a GPU.
    given = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    return (with_huge_pages(given, kernel_setting()) if program in HUGE_PAGES else None) or given


@contextmanager
def playing(program: str, name: str, model: str, dtype: str, *more: str) -> Iterator[Player]:
    """A program, ready for its first step."""
    with tempfile.TemporaryDirectory() as folder:
        player = Player([program, name, model, dtype, *more], folder, Path(folder) / "log")
        try:
            yield player
        finally:
            player.close()


def side_by_side(
    programs: Sequence[str], name: str, model: str, dtype: str, steps: int, *more: str
) -> dict[str, Steps]:
    """Steps of all programs, taken in turn; the first of each is left out."""
    with ExitStack() as stack:
        players = {program: stack.enter_context(playing(program, name, model, dtype, *more)) for program in programs}
        rounds = []
        for number in range(steps + 1):
            rounds.append({program: player.step() for program, player in players.items()})
            taken = ", ".join(f"{program} {step['step']:.2f} s" for program, step in rounds[-1].items())
            print(f"  {name}, {dtype}, step {number}{'' if number else ' (left out)'}: {taken}", flush=True)
    return {program: [taken[program] for taken in rounds[1:]] for program in programs}


def recorded(name: str, model: str, dtype: str, path: Path) -> Path:
    """Rollouts of a workload, sampled by vLLM from the model as it is."""
    with playing("lockstep", name, model, dtype, "--record", str(path)) as player:
        player.step()
    return path


# ---- figures ----------------------------------------------------------------------------------------------------------


def median(steps: Steps, key: str) -> float:
    return statistics.median(step[key] for step in steps)


def learning(steps: Steps) -> float:
    """Seconds of everything that is not sampling, rewards or a push."""
    return statistics.median(step["step"] - step["rollout"] for step in steps)


def show_machine(machine: dict[str, Any]) -> None:
    print(
        f"{machine['name']}, {os.cpu_count()} cores: {machine['flops']['float32'] / 1e9:.0f} GFLOP/s in fp32, "
        f"{machine['flops']['bfloat16'] / 1e9:.0f} in bf16, {machine['bytes'] / 1e9:.1f} GB/s read",
        flush=True,
    )


def show_steps(title: str, work: Workload, dtype: str, steps: dict[str, Steps], machine: dict[str, Any]) -> None:
    rival = min((p for p in steps if p != "lockstep"), key=lambda p: median(steps[p], "step"))
    ratio = median(steps[rival], "step") / median(steps["lockstep"], "step")
    print(f"\n{title}: {work.prompts} prompts × {work.completions} completions × {work.tokens} tokens, a whole step")
    for program, taken in steps.items():
        own = sorted(step["step"] for step in taken)
        print(
            f"  {program:16} {median(taken, 'step'):8.2f} s  ({own[0]:.2f} to {own[-1]:.2f})  "
            f"sampling {median(taken, 'rollout'):.2f} s, the rest {learning(taken):.2f} s"
        )
    print(f"  {rival} / lockstep: {ratio:.2f}")
    bounds = floors(work, dtype, machine, steps["lockstep"])
    for phase, floor in bounds.items():
        taken = statistics.median(step["phases"][phase] for step in steps["lockstep"])
        times = f": {taken / floor:.1f} times" if floor else ""
        print(f"  {phase:16} {taken:8.2f} s, floor {floor:.2f} s{times}")


def show_learning(title: str, steps: dict[str, Steps], machine: dict[str, Any]) -> None:
    own, other = steps["lockstep"], steps["trl"]
    peaks = [max(step["peak_bytes"] for step in taken) / 2**30 for taken in (own, other)]
    print(
        f"\n{title}, same rollouts: lockstep {learning(own):.2f} s, trl {learning(other):.2f} s: "
        f"{learning(other) / learning(own):.2f}\n"
        f"  peak memory of the process: lockstep {peaks[0]:.2f} GiB, trl {peaks[1]:.2f} GiB: {peaks[0] / peaks[1]:.2f} of it"
        f" (weights, gradients and AdamW's state of both are {machine['state_bytes'] / 2**30:.2f} GiB)"
    )


def show_growth(title: str, growth: dict[str, Steps]) -> None:
    print(f"\n{title}: milliseconds a sampled token, and the share of each phase")
    for name, steps in growth.items():
        tokens, seconds = median(steps, "sampled_tokens"), median(steps, "step")
        shares = {p: statistics.median(s["phases"][p] / s["step"] for s in steps) for p in steps[0]["phases"]}
        listed = ", ".join(f"{phase} {share:.0%}" for phase, share in shares.items() if share >= 0.005)
        print(f"  {name:16} {seconds:8.2f} s  {1000 * seconds / tokens:7.2f} ms  {listed}")


if __name__ == "__main__":
    main()
