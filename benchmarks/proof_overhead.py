"""Measure the cost of the proofs on the main recipe: as a share of a sync, and as a share of a training step.

    make proof-overhead   (recipes/arithmetic.yaml, without its evaluations; about five minutes on two cores)

The recipe runs unchanged, on real vLLM, in this process. Nothing is switched off to make a baseline. Seconds are those of the run
itself. Two threads compute the transport digest during a push; their seconds are added. Seconds are medians over the steps after
the first two. Shares are computed from the sums over the same steps.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

os.environ.setdefault("TQDM_DISABLE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

RECIPE = Path(__file__).parents[1] / "recipes" / "arithmetic.yaml"
_WARM_UP = 2


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__)
    words.add_argument("--steps", type=int, default=40)
    words.add_argument("--json", type=Path, default=Path("runs/bench/proof_overhead.json"))
    asked = words.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(asked.steps, folder)
    figures = shares(rows[_WARM_UP:])
    show(figures)
    asked.json.parent.mkdir(parents=True, exist_ok=True)
    asked.json.write_text(json.dumps({"figures": figures, "steps": rows}, indent=1) + "\n")


def measure(steps: int, folder: str) -> list[dict[str, float]]:
    """The seconds of every step of a run, by part."""
    from transformers import PrinterCallback

    import lockstep.engines.tensor_specs as reading
    import lockstep.parity.proven_push as proofs
    from lockstep.cli.fields.arguments import RunArguments, build, read
    from lockstep.cli.fields.data import data_of
    from lockstep.cli.process.quiet import quiet_libraries
    from lockstep.parity.module_probe import ModuleProbe
    from lockstep.training.methods.grpo_config import GRPOConfig
    from lockstep.training.trainers.grpo import GRPOTrainer

    quiet_libraries()
    line = ["--config", str(RECIPE), "--max_steps", str(steps), "--save_strategy", "no", "--output_dir", folder]
    arguments, config = build(read([*line, "--disable_tqdm", "True"], "grpo"), GRPOConfig, RunArguments)
    data = data_of(arguments)
    trainer = GRPOTrainer(arguments.model_name_or_path, list(data.rewards), config, data.train)
    trainer.remove_callback(PrinterCallback)
    digests, pushes, probes = [], [], []
    push = proofs.push_weights

    def counted(*args: Any) -> Any:
        digests.clear()
        record = push(*args)
        pushes.append(sum(digests))
        return record

    with contextlib.ExitStack() as stack:
        stack.callback(trainer.close)
        # Separate threads compute the digests while the tensors are sent and loaded.
        stack.enter_context(timed(reading, "tensor_digest", digests))
        stack.enter_context(patch.object(proofs, "push_weights", counted))
        stack.enter_context(timed(ModuleProbe, "measure", probes))
        trainer.train()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    # The first push belongs to the start of training.
    return [
        {
            **{name.removeprefix("time/"): value for name, value in entry.items() if name.startswith("time/")},
            "digest": digest,
            "probe": probe,
            "groups_without_gradient": entry["frac_reward_zero_std"],
        }
        for entry, digest, probe in zip(logs, pushes[1:], probes[1:], strict=True)
    ]


@contextlib.contextmanager
def timed(owner: Any, name: str, spent: list[float]) -> Iterator[None]:
    """Append the seconds of every call of `owner.name` to `spent`."""
    real = getattr(owner, name)

    def clocked(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        try:
            return real(*args, **kwargs)
        finally:
            spent.append(time.perf_counter() - start)

    with patch.object(owner, name, clocked):
        yield


def shares(rows: list[dict[str, float]]) -> dict[str, float]:
    """Medians of the seconds per step, and shares of the sync and of the whole step."""

    def median(part: Callable[[dict[str, float]], float]) -> float:
        return statistics.median(part(row) for row in rows)

    def total(part: Callable[[dict[str, float]], float]) -> float:
        return sum(part(row) for row in rows)

    steps, syncs = total(lambda r: r["step"]), total(lambda r: r["sync"] + r["probe"])
    return {
        "step_s": median(lambda r: r["step"]),
        "sync_s": median(lambda r: r["sync"] + r["probe"]),
        "digest_s": median(lambda r: r["digest"]),
        "probe_s": median(lambda r: r["probe"]),
        "scoring_without_gradient_s": median(lambda r: r["verify"] - r["probe"]),
        "share_of_sync": total(lambda r: r["digest"] + r["probe"]) / syncs,
        "share_of_step": total(lambda r: r["digest"] + r["verify"]) / steps,
        "of_which_scoring_without_gradient": total(lambda r: r["verify"] - r["probe"]) / steps,
        "groups_without_gradient": total(lambda r: r["groups_without_gradient"]) / len(rows),
    }


def show(figures: dict[str, float]) -> None:
    """The figures as text."""
    f = figures
    print(
        f"sync {f['sync_s']:.3f} s, of which transport digest {f['digest_s']:.3f} s and module probe {f['probe_s']:.3f} s: "
        f"{f['share_of_sync']:.1%} of a sync (at most 10 %)\n"
        f"step {f['step_s']:.2f} s; all proofs {f['share_of_step']:.1%} of a step (at most 5 %), of which "
        f"{f['of_which_scoring_without_gradient']:.1%} is the forward over groups without a gradient "
        f"({f['groups_without_gradient']:.0%} of the groups)"
    )


if __name__ == "__main__":
    main()
