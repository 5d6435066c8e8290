"""Measure the cost of the proofs on the main recipe: as a share of a sync, and as a share of a training step.

    make proof-overhead   (recipes/arithmetic.yaml, without its evaluations; about five minutes on two cores)
    make proof-overhead ARGS="--steps 12 --filters none top_p=0.95 top_k=50"   (the recipe with each of these filters in turn)

Without `--filters` the recipe runs unchanged, on real vLLM, in this process. Nothing is switched off to make a baseline. Seconds
are those of the run itself, by proof (`benchmarks/proof_seconds.py`). Two threads compute the transport digest during a push, and
their seconds are added. Seconds are medians over the steps after the first two. Shares are computed from the sums over the same
steps. The first step also has what is proven at the start.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from proof_seconds import DIGEST, PROBE, Seconds

os.environ.setdefault("TQDM_DISABLE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

RECIPE = Path(__file__).parents[1] / "recipes" / "arithmetic.yaml"
_WARM_UP = 2


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__)
    words.add_argument("--steps", type=int, default=40)
    words.add_argument("--json", type=Path, default=Path("runs/bench/proof_overhead.json"))
    words.add_argument("--filters", nargs="+", default=["none"], metavar="FIELD=VALUE", help="one run with each filter")
    asked = words.parse_args()
    found: dict[str, Any] = {}
    for name in asked.filters:
        with tempfile.TemporaryDirectory() as folder:
            rows = measure(asked.steps, folder, [] if name == "none" else [f"--{name}"])
        figures = shares(rows[_WARM_UP:])
        print(f"filter {name}:")
        show(figures, rows[0])
        found[name] = {"figures": figures, "steps": rows}
    asked.json.parent.mkdir(parents=True, exist_ok=True)
    asked.json.write_text(json.dumps(found, indent=1) + "\n")


def measure(steps: int, folder: str, filters: list[str]) -> list[dict[str, Any]]:
    """The seconds of every step of a run, by part; under `proofs` those of each proof.

    Args:
        filters: words of the command line that set a filter.
    """
    from transformers import TrainerCallback

    from lockstep.cli.fields.arguments import RunArguments, build, read
    from lockstep.cli.fields.data import data_of
    from lockstep.cli.process.quiet import quiet_libraries
    from lockstep.report.log_lines import LogLines
    from lockstep.training.methods.grpo_config import GRPOConfig
    from lockstep.training.trainers.grpo import GRPOTrainer

    quiet_libraries()
    line = [
        "--config",
        str(RECIPE),
        "--max_steps",
        str(steps),
        "--save_strategy",
        "no",
        "--output_dir",
        folder,
        *filters,
    ]
    arguments, config = build(read([*line, "--disable_tqdm", "True"], "grpo"), GRPOConfig, RunArguments)
    data = data_of(arguments)
    seconds, proofs = Seconds(), []

    class Steps(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            proofs.append(seconds.take())

    with contextlib.ExitStack() as stack:
        stack.enter_context(seconds.counted())
        trainer = GRPOTrainer(arguments.model_name_or_path, list(data.rewards), config, data.train)
        stack.callback(trainer.close)
        trainer.remove_callback(LogLines)
        trainer.add_callback(Steps())
        trainer.train()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    return [
        {
            **{name.removeprefix("time/"): value for name, value in entry.items() if name.startswith("time/")},
            "groups_without_gradient": entry["frac_reward_zero_std"],
            "proofs": own,
        }
        for entry, own in zip(logs, proofs, strict=True)
    ]


def shares(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians of the seconds per step, and shares of the sync and of the whole step, in all and by proof."""

    def median(part: Callable[[dict[str, Any]], float]) -> float:
        return statistics.median(part(row) for row in rows)

    def total(part: Callable[[dict[str, Any]], float]) -> float:
        return sum(part(row) for row in rows)

    def of(proof: str) -> Callable[[dict[str, Any]], float]:
        return lambda row: row["proofs"].get(proof, 0.0)

    steps, syncs = total(lambda r: r["step"]), total(lambda r: r["sync"] + of(PROBE)(r))
    names = sorted({name for row in rows for name in row["proofs"]})
    return {
        "step_s": median(lambda r: r["step"]),
        "sync_s": median(lambda r: r["sync"] + of(PROBE)(r)),
        "generate_s": median(lambda r: r["generate"]),
        "learn_s": median(lambda r: r["forward_backward"] + r["optimizer"]),
        "share_of_sync": total(lambda r: of(DIGEST)(r) + of(PROBE)(r)) / syncs,
        "share_of_step": total(lambda r: sum(r["proofs"].values())) / steps,
        "groups_without_gradient": total(lambda r: r["groups_without_gradient"]) / len(rows),
        "proofs": {name: {"median_s": median(of(name)), "share": total(of(name)) / steps} for name in names},
    }


def show(figures: dict[str, Any], first: dict[str, Any]) -> None:
    """The figures as text, the dearest proof first.

    Args:
        first: the first step, with what is proven at the start only.
    """
    f = figures
    print(
        f"step {f['step_s']:.2f} s, of which sampling {f['generate_s']:.2f} s, learning {f['learn_s']:.2f} s, sync "
        f"{f['sync_s']:.3f} s; {f['groups_without_gradient']:.0%} of the groups have no gradient\n"
        f"{'proof':32} {'s per step':>11} {'of a step':>10} {'first step, s':>14}"
    )
    for name, own in sorted(f["proofs"].items(), key=lambda item: -item[1]["share"]):
        print(f"{name:32} {own['median_s']:11.4f} {own['share']:10.2%} {first['proofs'].get(name, 0.0):14.3f}")
    print(
        f"all proofs {f['share_of_step']:.1%} of a step (at most 5 %); digest and module probe {f['share_of_sync']:.1%} of a sync "
        "(at most 10 %)"
    )


if __name__ == "__main__":
    main()
