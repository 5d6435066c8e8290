"""Compare a whole training step of Lockstep with TRL's on the same work, in turn, and how Lockstep's step grows.

    make bench                                         (two cores: some hours; quiet machine)
    make bench ARGS="--parts short learning-short"     (ten minutes)

Each program runs in a process of its own and waits while the other one works. Figures are medians of the steps after
the first. On a machine with fast bf16 everything is run in both dtypes: fp32 alone, and bf16 autocast over fp32
weights. Prints the figures that docs/internals/speed.md sums up. Writes `runs/bench/step.json` after every part
(machine, every step, and the printed figures), and `runs/bench/growth-DTYPE.svg`.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.against_trl.answering import PLAY, AnsweringProcess
from benchmarks.against_trl.figures import Steps, check_tokens, growth, learning_halves, measured, whole_steps
from benchmarks.against_trl.floors import floors, measure_machine
from benchmarks.against_trl.plot import drawing
from benchmarks.against_trl.tool_model import make_tool_model
from benchmarks.against_trl.workloads import make_model, workload
from lockstep.cli.process import kernel_setting, with_tunables
from lockstep.devices import has_fast_bf16

GROWTH = [f"completions-{n}" for n in (8, 16, 32, 64, 128, 256)] + [
    f"length-{n}" for n in (32, 64, 128, 256, 512, 1024)
]
PARTS = ("short", "learning-short", "long", "learning-long", "agent", "growth")
DTYPES = ("float32", "bfloat16")
RIVALS = ("trl", "trl-continuous", "trl-bf16-weights", "trl-huge-pages")
# `lockstep` starts its commands with this; a script that uses TRL does not.
HUGE_PAGES = ("lockstep", "trl-huge-pages")


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
    found: dict[str, Any] = {"machine": measure_machine(), "figures": {}, "steps": {}}
    show_machine(found["machine"])
    with tempfile.TemporaryDirectory() as folder:
        for part, dtype in product(asked.parts, dtypes):
            model = model_of(part, Path(folder))
            title = f"{part} in {dtype}"
            steps = found["steps"][title] = steps_of(part, model, dtype, asked, Path(folder))
            figures = found["figures"][title] = figures_of(part, dtype, steps, found["machine"])
            show(title, part, figures, found["machine"])
            if part == "growth":
                (asked.folder / f"growth-{dtype}.svg").write_text(drawing(steps), encoding="utf-8")
            (asked.folder / "step.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def model_of(part: str, folder: Path) -> str:
    """The directory of a part's model. It is made once."""
    work = workload(GROWTH[0] if part == "growth" else part.removeprefix("learning-"))
    own = folder / ("calling" if work.calls else "plain")
    if not own.exists():
        _ = make_tool_model(own, "135m") if work.calls else make_model(own)
    return str(own)


def steps_of(part: str, model: str, dtype: str, asked: argparse.Namespace, folder: Path) -> dict[str, Steps]:
    """The steps of a part, by program; for the part `growth`, by size."""
    if part == "growth":
        return {
            name: side_by_side(["lockstep"], name, model, dtype, asked.steps)["lockstep"] for name in GROWTH
        }
    if part.startswith("learning-"):
        name = part.removeprefix("learning-")
        rollouts = recorded(name, model, dtype, folder / f"{name}-{dtype}.json")
        return side_by_side(["lockstep", "trl"], name, model, dtype, asked.steps, "--rollouts", str(rollouts))
    return side_by_side(["lockstep", *asked.rivals], part, model, dtype, asked.steps)


def figures_of(part: str, dtype: str, steps: dict[str, Steps], machine: dict[str, Any]) -> dict[str, Any]:
    """The printed text of a part."""
    if part == "growth":
        return growth(steps)
    if part.startswith("learning-"):
        return learning_halves(steps)
    work = workload(part)
    if work.calls:
        # A model that calls a tool can leave its walk.
        check_tokens(steps, work.sequences * work.tokens)
    return whole_steps(steps, floors(work, dtype, machine, steps["lockstep"]))


# ---- processes
# --------------------------------------------------------------------------------------------------------


class Player(AnsweringProcess):
    """A program of `play.py`."""

    def __init__(self, command: Sequence[str], folder: str, log: Path) -> None:
        super().__init__([PLAY, *command], log, environment(command[0]), folder)

    def step(self) -> dict[str, Any]:
        """Take one step."""
        return self.ask("step")


def environment(program: str) -> dict[str, str]:
    """The environment of a program."""
    # The comparison is for CPUs. On a GPU, TRL's vLLM and ours would not be comparable.
    given = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    return (with_tunables(given, kernel_setting()) if program in HUGE_PAGES else None) or given


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
    """The steps of all programs, taken in turn; the first step of each program is left out."""
    with ExitStack() as stack:
        players = {
            program: stack.enter_context(playing(program, name, model, dtype, *more)) for program in programs
        }
        rounds: list[dict[str, Any]] = []
        for number in range(steps + 1):
            rounds.append({program: player.step() for program, player in players.items()})
            taken = ", ".join(f"{program} {step['step']:.2f} s" for program, step in rounds[-1].items())
            print(f"  {name}, {dtype}, step {number}{'' if number else ' (left out)'}: {taken}", flush=True)
    return measured(rounds)


def recorded(name: str, model: str, dtype: str, path: Path) -> Path:
    """The rollouts of a workload, sampled by vLLM from the unchanged model."""
    with playing("lockstep", name, model, dtype, "--record", str(path)) as player:
        player.step()
    return path


# ---- tables
# -----------------------------------------------------------------------------------------------------------


def show_machine(machine: dict[str, Any]) -> None:
    print(
        f"{machine['name']}, {machine['cores']} cores: {machine['flops']['float32'] / 1e9:.0f} GFLOP/s in fp32, "
        f"{machine['flops']['bfloat16'] / 1e9:.0f} in bf16, {machine['bytes'] / 1e9:.1f} GB/s read",
        flush=True,
    )


def show(title: str, part: str, figures: dict[str, Any], machine: dict[str, Any]) -> None:
    if part == "growth":
        show_growth(title, figures)
    elif part.startswith("learning-"):
        show_learning(title, figures, machine["state_bytes"])
    else:
        show_steps(title, part, figures)


def show_steps(title: str, part: str, figures: dict[str, Any]) -> None:
    work = workload(part)
    turns = f" in {work.calls + 1} turns" if work.calls else ""
    print(
        f"\n{title}: {work.prompts} prompts × {work.completions} completions × {work.tokens} tokens{turns}, a "
        f"whole step"
    )
    for program, own in figures["programs"].items():
        print(
            f"  {program:16} {own['step_s']:8.2f} s  ({own['smallest_step_s']:.2f} to {own['largest_step_s']:.2f})  "
            f"sampling {own['rollout_s']:.2f} s, the rest {own['rest_s']:.2f} s; {own['tokens_per_s']:.1f} tokens/s"
        )
    if "rival" in figures:
        print(f"  {figures['rival']} / lockstep: {figures['ratio']:.2f}")
    for phase, found in figures["phases"].items():
        if found["seconds"] or found["floor_s"]:
            times = f": {found['times']:.1f} times" if found["times"] else ""
            print(f"  {phase:16} {found['seconds']:8.2f} s, floor {found['floor_s']:.2f} s{times}")


def show_learning(title: str, figures: dict[str, Any], state_bytes: int) -> None:
    own, other = (figures["programs"][program] for program in ("lockstep", "trl"))
    print(f"\n{title}, same rollouts: trl / lockstep {figures['ratio']:.2f}")
    for program, found in figures["programs"].items():
        print(
            f"  {program:16} {found['rest_s']:8.2f} s  ({found['smallest_rest_s']:.2f} to "
            f"{found['largest_rest_s']:.2f})"
        )
    print(
        f"  peak memory of the process: lockstep {own['peak_bytes'] / 2**30:.2f} GiB, trl "
        f"{other['peak_bytes'] / 2**30:.2f} "
        f"GiB: {figures['peak_bytes_ratio']:.2f} of it"
        f" (weights, gradients and AdamW's state of both are {state_bytes / 2**30:.2f} GiB)"
    )


def show_growth(title: str, figures: dict[str, Any]) -> None:
    print(f"\n{title}: milliseconds per sampled token, and the share of each phase")
    for name, found in figures.items():
        listed = ", ".join(
            f"{phase} {share:.0%}" for phase, share in found["shares"].items() if share >= 0.005
        )
        print(
            f"  {name:16} {found['step_s']:8.2f} s  {found['ms_per_token']:7.2f} ms  "
            f"{found['tokens_per_s']:6.1f} tokens/s  {listed}"
        )


if __name__ == "__main__":
    main()
