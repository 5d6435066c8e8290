"""Measure the cost of the proofs in the main recipe: as a share of a sync, and as a share of a training step.

    make proof-overhead   (recipes/arithmetic.yaml, without its evaluations; about five minutes on two cores)
    make proof-overhead ARGS="--steps 12 --filters none top_p=0.95 top_k=50"   (the recipe with each of these filters
    in turn) make proof-overhead ARGS="--steps 6 --tokens 1024 8192"   (steps of 1024 and 8192 sampled tokens, instead
    of the recipe's 190)

With `--tokens` the recipe has prompts for open text with 8 completions of up to 64 tokens. Half of the groups have
equal rewards.

Without `--filters` the recipe runs unchanged, on real vLLM, in this process. The seconds of each proof are measured
in the run itself (`benchmarks/proofs/seconds.py`), and not by a second run without proofs. Two threads compute the
transport digest during a push. A second in which both threads compute counts once by the clock. Seconds are medians
over the steps after the first two. Shares are computed from the sums over the same steps. The first step also
contains the proofs at the start of a run.

If other programs use the machine, read the processor seconds, with one thread: `OMP_NUM_THREADS=1 make proof-overhead`.
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

from benchmarks import ROOT
from benchmarks.proofs.seconds import DIGEST, NOTHING, PROBE, Seconds, Spent, now

os.environ.setdefault("TQDM_DISABLE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

RECIPE = ROOT / "recipes" / "arithmetic.yaml"
_WARM_UP = 2
# Largest number of tokens per completion of open text.
_LENGTH = 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--json", type=Path, default=Path("runs/bench/proof_overhead.json"))
    parser.add_argument(
        "--filters", nargs="+", default=["none"], metavar="FIELD=VALUE", help="one run with each filter"
    )
    parser.add_argument(
        "--tokens", nargs="+", type=int, default=[], help="sampled tokens per step; one run for each number"
    )
    args = parser.parse_args()
    found: dict[str, Any] = {}
    runs = {f"filter {name}": ([] if name == "none" else [f"--{name}"], 0) for name in args.filters}
    if args.tokens:
        runs = {f"{tokens} tokens": (_of_open_text(tokens), tokens) for tokens in args.tokens}
    for name, (fields, tokens) in runs.items():
        with tempfile.TemporaryDirectory() as folder:
            rows = measure(args.steps, folder, fields, tokens)
        figures = shares(rows[_WARM_UP:])
        print(f"{name}:")
        show(figures, rows[0])
        found[name.removeprefix("filter ")] = {"figures": figures, "steps": rows}
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def _of_open_text(tokens: int) -> list[str]:
    """The fields of a run whose steps sample about `tokens` tokens."""
    completions = max(8, tokens // _LENGTH // 8 * 8)
    sizes = {"per_device_train_batch_size": completions, "vllm_max_num_seqs": min(completions, 128)}
    return [
        word
        for name, value in (sizes | {"max_completion_length": _LENGTH}).items()
        for word in (f"--{name}", str(value))
    ]


def _open_text(count: int) -> Any:
    """Prompts for open text. The completions of every second prompt get equal rewards."""
    import datasets

    subjects = (
        "a river",
        "an old house",
        "the sea at night",
        "two friends",
        "a long train ride",
        "a lost key",
    )
    return datasets.Dataset.from_list(
        [
            {
                "prompt": f"Write a long story, number {i}, about {subjects[i % len(subjects)]}.\n",
                "learned": i % 2,
            }
            for i in range(count)
        ]
    )


def _some_differ(completion_ids: list[list[int]], learned: list[int], **_: Any) -> list[float]:
    return [float(len(set(ids)) * learns) for ids, learns in zip(completion_ids, learned, strict=True)]


def measure(steps: int, folder: str, fields: list[str], tokens: int = 0) -> list[dict[str, Any]]:
    """The seconds of every step of a run, by part. `proofs` has the seconds of each proof.

    Args:
        fields: words of the command line that set fields of the run.
        tokens: about how many tokens a step samples, of open text; 0: the recipe's own prompts.
    """
    from transformers import TrainerCallback

    from lockstep.cli.fields import RunArguments, build, data_of, read
    from lockstep.cli.output import quiet_libraries
    from lockstep.learn.methods.grpo import GRPOConfig
    from lockstep.report.live import LogLines
    from lockstep.run.trainers.methods import GRPOTrainer

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
        *fields,
    ]
    arguments, config = build(read([*line, "--disable_tqdm", "True"], "grpo"), GRPOConfig, RunArguments)
    data = data_of(arguments)
    rewards, prompts = list(data.rewards), data.train
    if tokens:
        rewards, prompts = [_some_differ], _open_text(steps * max(1, tokens // _LENGTH // 8))
    seconds, proofs, clocks = Seconds(), list[dict[str, Spent]](), [now()]

    class Steps(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            proofs.append(seconds.take())
            clocks.append(now())

    with contextlib.ExitStack() as stack:
        stack.enter_context(seconds.counted())
        trainer = GRPOTrainer(arguments.model_name_or_path, rewards, config, prompts)
        stack.callback(trainer.close)
        trainer.remove_callback(LogLines)
        trainer.add_callback(Steps())
        trainer.train()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    return [
        {
            **{
                name.removeprefix("time/"): value for name, value in entry.items() if name.startswith("time/")
            },
            "groups_without_gradient": entry["frac_reward_zero_std"],
            "tokens": entry["sampling/tokens"],
            "cpu": (end - start).cpu,
            "proofs": own,
        }
        for entry, own, start, end in zip(logs, proofs, clocks[:-1], clocks[1:], strict=True)
    ]


def shares(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians of the seconds per step, and the proofs' share of the sync and of the step, in total and by proof."""

    def median(part: Callable[[dict[str, Any]], float]) -> float:
        return statistics.median(part(row) for row in rows)

    def total(part: Callable[[dict[str, Any]], float]) -> float:
        return sum(part(row) for row in rows)

    def of(proof: str, clock: str = "wall") -> Callable[[dict[str, Any]], float]:
        return lambda row: getattr(row["proofs"].get(proof, NOTHING), clock)

    steps, syncs = total(lambda r: r["step"]), total(lambda r: r["sync"] + of(PROBE)(r))
    processor = total(lambda r: r["cpu"])
    names = sorted({name for row in rows for name in row["proofs"]})
    return {
        "step_s": median(lambda r: r["step"]),
        "sync_s": median(lambda r: r["sync"] + of(PROBE)(r)),
        "generate_s": median(lambda r: r["generate"]),
        "learn_s": median(lambda r: r["forward_backward"] + r["optimizer"]),
        "share_of_sync": total(lambda r: of(DIGEST)(r) + of(PROBE)(r)) / syncs,
        "cpu_s": median(lambda r: r["cpu"]),
        "share_of_step": sum(total(of(name)) for name in names) / steps,
        "share_of_cpu": sum(total(of(name, "cpu")) for name in names) / processor,
        "groups_without_gradient": total(lambda r: r["groups_without_gradient"]) / len(rows),
        "tokens": total(lambda r: r["tokens"]) / len(rows),
        "proofs": {
            name: {
                "median_s": median(of(name)),
                "share": total(of(name)) / steps,
                "share_of_cpu": total(of(name, "cpu")) / processor,
            }
            for name in names
        },
    }


def show(figures: dict[str, Any], first: dict[str, Any]) -> None:
    """Print the figures. The most expensive proof comes first.

    Args:
        first: the first step, which contains the proofs at the start of a run.
    """
    f = figures
    print(
        f"{f['tokens']:.0f} tokens per step; step {f['step_s']:.2f} s ({f['cpu_s']:.2f} s of the processor), "
        f"of which sampling {f['generate_s']:.2f} s, learning {f['learn_s']:.2f} s, sync {f['sync_s']:.3f} s\n"
        f"{f['groups_without_gradient']:.0%} of the groups have no gradient\n"
        f"{'proof':32} {'s per step':>11} {'of a step':>10} {'of its processor':>17} {'first step, s':>14}"
    )
    for name, own in sorted(f["proofs"].items(), key=lambda item: -item[1]["share_of_cpu"]):
        print(
            f"{name:32} {own['median_s']:11.4f} {own['share']:10.2%} {own['share_of_cpu']:17.2%} "
            f"{first['proofs'].get(name, NOTHING).wall:14.3f}"
        )
    print(
        f"all proofs {f['share_of_step']:.1%} of a step, {f['share_of_cpu']:.1%} of its processor seconds (at "
        f"most 5 %); "
        f"digest and module probe {f['share_of_sync']:.1%} of a sync (at most 10 %)"
    )


if __name__ == "__main__":
    main()
