"""Count false alarms: how often a proof stops a sync or a step that has no fault ("clean"), with all proofs on.

    make false-alarms       (500 syncs of the 135M model, 500 steps of a tiny model, real vLLM; 15 minutes on two cores)
    make false-alarms ARGS="--dtype bfloat16 --syncs 0 --step-models qwen2 qwen3 llama"
    make false-alarms ARGS="--dtype bfloat16 --syncs 0 --steps 40 --step-models smollm2-135m-instruct"
    make false-alarms ARGS="--syncs 0 --steps 40 --engine transformers"
    make false-alarms ARGS="--syncs 0 --filters top_p=0.95 top_k=50 min_p=0.01"
    make false-alarms ARGS="--steps 0 --minutes 20 --seed 1"    (a part of a long run: each seed gives other syncs and
    steps)

Before each sync every weight changes by 1e-3 of its size. After the sync all modules are probed and the canary is
scored. A `GRPOTrainer` takes the steps, with a tiny model of the tests (given by its kind) or a real model (given by
its name). The program prints the alarms, and the largest figure of each proof with its limit. After the clean steps,
the engine reports one token's log-prob per prompt too low by `--fault` nats, and the program prints whether a proof
stopped that step. With `--filters` the run samples with filters, and the figures of the proof of kept sets are
printed too.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

os.environ.setdefault("TQDM_DISABLE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--syncs", type=int, default=500)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--step-models", nargs="+", default=["llama"])
    parser.add_argument("--fault", type=float, default=1.5)
    parser.add_argument("--filters", nargs="+", default=[], metavar="FIELD=NUMBER", help="such as top_p=0.95")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument(
        "--seed", type=int, default=0, help="draws the changes of the weights, and what the steps sample"
    )
    parser.add_argument(
        "--minutes", type=float, help="time limit for the syncs, and for the steps of each model"
    )
    parser.add_argument(
        "--engine", default="vllm", choices=["vllm", "transformers"], help="the engine of the steps"
    )
    parser.add_argument("--json", type=Path, default=Path("runs/bench/false_alarms.json"))
    args = parser.parse_args()
    from lockstep.cli.output import quiet_libraries

    quiet_libraries()
    found: dict[str, Any] = {}
    if args.syncs:
        found["syncs"] = clean_syncs(args.model, args.syncs, args.dtype, args.seed, _deadline(args.minutes))
    if args.steps:
        found["steps"] = {
            model: clean_steps(
                model,
                args.steps,
                args.dtype,
                args.fault,
                _fields(args.filters),
                args.engine,
                args.seed,
                _deadline(args.minutes),
            )
            for model in args.step_models
        }
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(
        json.dumps({"dtype": args.dtype, "seed": args.seed, **found}, indent=1) + "\n", encoding="utf-8"
    )


def _deadline(minutes: float | None) -> float:
    """The time of the monotonic clock after `minutes`; infinite if there is no limit."""
    return math.inf if minutes is None else time.monotonic() + 60 * minutes


def clean_syncs(model: str, max_syncs: int, dtype: str, seed: int, deadline: float) -> dict[str, float]:
    """Push changed weights `max_syncs` times, or until the deadline.

    After each push, probe every module and score the canary.
    """
    from lockstep.errors import ProofError
    from lockstep.extras.verify.stage import open_stage, stage_config
    from lockstep.watch.gap import over_limits
    from lockstep.watch.push import score_canary
    from lockstep.watch.tolerances import probe_limit

    worst = {"module_probe": 0.0, "canary_mean": 0.0, "canary_max": 0.0, "canary_k3": 0.0}
    alarms, count, noise = 0, 0, torch.randn(1 << 21, generator=torch.Generator().manual_seed(seed))
    with (
        tempfile.TemporaryDirectory() as folder,
        open_stage(model, stage_config(folder, bf16=dtype == "bfloat16")) as stage,
    ):
        proofs, context = stage.trainer.proofs, stage.engine.settings().max_model_len
        while count < max_syncs and time.monotonic() < deadline:
            _change_weights(stage.model, noise, count)
            count += 1
            try:
                probed = stage.push(every_module=True)
            except ProofError as error:
                alarms += 1
                print(error, flush=True)
                continue
            gap = score_canary(stage.model, stage.engine, context, stage.precision)
            figures = (probed.worst[1], gap.mean_abs, gap.max_abs, gap.k3)
            alarms += bool(over_limits(gap, proofs.limit))
            worst = {name: max(old, new) for (name, old), new in zip(worst.items(), figures, strict=True)}
            _progress("syncs", count, max_syncs)
        largest = proofs.limit.largest(gap.tokens)
        limits = (probe_limit(proofs.engine_dtype), proofs.limit.mean, largest, proofs.limit.k3)
    print(
        f"{count} clean syncs of {model}, {dtype}: {alarms} alarms; largest figures: {_beside_limits(worst, limits)}",
        flush=True,
    )
    return {"count": count, "alarms": alarms, **worst}


def _change_weights(model: torch.nn.Module, noise: torch.Tensor, turn: int) -> None:
    """Change every weight by 1e-3 of its tensor's mean size.

    The noise is shifted each time, which is cheaper than new noise.
    """
    with torch.no_grad():
        for i, p in enumerate(model.parameters()):
            shifted = noise.roll(7919 * turn + 104729 * i).repeat(-(-p.numel() // len(noise)))
            p += 1e-3 * p.abs().mean() * shifted[: p.numel()].view_as(p)


def _fields(words: list[str]) -> dict[str, float]:
    """Fields of a config, from words such as "top_k=50"."""
    return {name: json.loads(value) for name, _, value in (word.partition("=") for word in words)}


def clean_steps(
    model: str,
    max_steps: int,
    dtype: str,
    fault: float,
    filters: dict[str, float],
    engine: str,
    seed: int,
    deadline: float,
) -> dict[str, Any]:
    """Train for `max_steps` clean steps, or until the deadline, and then for one step with a fault.

    An alarm in a clean step ends the run.

    Args:
        fault: how much too low the log-probs of the last step are, in nats.
        engine: vllm or transformers.
    """
    import datasets
    import tiny

    from lockstep.errors import ProofError
    from lockstep.extras.verify.stage import stage_config
    from lockstep.report.live import LogLines
    from lockstep.run.trainers.methods import GRPOTrainer
    from lockstep.watch.draws import DrawEvidence
    from lockstep.watch.receipt import RECEIPT, read_receipt

    with tempfile.TemporaryDirectory() as folder:
        small = model in tiny.KINDS
        path = (
            str(tiny.save_model(Path(folder) / "model", kind=model, tied=model == "llama"))
            if small
            else model
        )
        changes = {
            "max_steps": max_steps + 1,
            "seed": seed,
            "learning_rate": 1e-4 if small else 1e-6,
            "max_completion_length": 48,
        }
        changes |= {"logging_steps": 1, "disable_tqdm": True, "use_vllm": engine == "vllm", **filters}
        config = stage_config(folder, bf16=dtype == "bfloat16", shuffle_dataset=True, **changes)
        data = datasets.Dataset.from_dict({"prompt": [f"what is {i} + {7 * i}" for i in range(60)]})
        trainer = GRPOTrainer(path, _parity_reward, config, data)
        trainer.remove_callback(LogLines)
        fault_switch = FaultAtTheEnd(trainer.engine, max_steps, fault, deadline)
        trainer.add_callback(fault_switch.callback())
        sets = KeptSetRecord(trainer.proofs)
        trainer.add_callback(sets.callback())
        alarm = ""
        try:
            trainer.train()
        except ProofError as error:
            alarm = str(error)
        finally:
            trainer.close()
        steps = [line for line in read_receipt(Path(folder) / RECEIPT) if line["kind"] == "step"]
        limit = trainer.proofs.limit
    early = fault_switch.clean == 0
    clean = steps if early else steps[: fault_switch.clean]
    if early:
        print(alarm, flush=True)
    tokens = sum(line["checked_tokens"] for line in clean)
    nearest = max(clean, key=lambda line: line["max_abs_gap"] / line["max_allowed"])
    found = {
        "mean_abs_gap": max(
            line["sum_abs_gap"] / line["checked_tokens"] for line in clean if line["checked_tokens"]
        ),
        "k3": max(line["sum_k3"] / line["checked_tokens"] for line in clean if line["checked_tokens"]),
        "max_abs_gap": max(line["max_abs_gap"] for line in clean),
        "nearest": nearest["max_abs_gap"] / nearest["max_allowed"],
        "tail": sum(line["sum_fourths"] for line in clean) / (4 * sum(line["sum_cubes"] for line in clean)),
        "allowed_first": clean[0]["max_allowed"],
        "allowed_last": clean[-1]["max_allowed"],
        "bets": sum(line["draws"]["tokens"] for line in clean),
        "log10_evidence": max(DrawEvidence.of(line["draws"]).log_evidence for line in clean) / math.log(10),
    }
    outcome = "not tried" if early else "stopped" if alarm else "passed"
    print(
        f"{len(clean)} clean steps of {model}, {tokens} tokens, {dtype}: {int(early)} alarms; largest figures: "
        f"mean {found['mean_abs_gap']:.2g} of {limit.mean:g}, k3 {found['k3']:.2g} of {limit.k3:g}, "
        f"max {found['max_abs_gap']:.2g}, at most {found['nearest']:.0%} of its step's limit "
        f"({found['allowed_first']:.2g} at the first step, {found['allowed_last']:.2g} at the last); "
        f"tail {found['tail']:.2g} of {limit.tail:g}; evidence of the draws at most "
        f"1e{found['log10_evidence']:.1f} of 1e6 over "
        f"{found['bets']} tokens; one token per prompt wrong by {fault:g}: {outcome}",
        flush=True,
    )
    if filters:
        found |= sets.figures(len(clean))
        print(
            f"  kept sets under {filters}: {found['edge_differences']:.2g} ids differ per drawn token; "
            f"rounding at most "
            f"{found['set_mean']:.2g} nats in a step's mean, {found['set_mean_nearest']:.0%} of its limit, and at most "
            f"{found['set_nearest']:.0%} of its limit at one token",
            flush=True,
        )
    return {"count": len(clean), "alarms": int(early), "tokens": tokens, "stopped": bool(alarm), **found}


class KeptSetRecord:
    """What the proof of kept sets found at each optimizer step.

    Args:
        proofs: the proofs of the run.
    """

    def __init__(self, proofs: Any) -> None:
        self._proofs = proofs
        self._found: list[Any] = []

    def callback(self) -> Any:
        """A callback that reads the figures after each step."""
        from transformers import TrainerCallback

        from lockstep.watch.kept_sets import mean_limit

        found, proofs = self._found, self._proofs

        class Reader(TrainerCallback):
            def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                sets = proofs.kept_sets
                found.append((sets, mean_limit(sets.tokens, proofs.distribution.sampling, proofs.tail.limit)))

        return Reader()

    def figures(self, steps: int) -> dict[str, float]:
        """The largest figures of the first steps."""
        found = self._found[:steps]
        return {
            "edge_differences": sum(f.differences for f, _ in found)
            / max(sum(f.tokens for f, _ in found), 1),
            "set_mean": max(f.mean_rounding for f, _ in found),
            "set_mean_nearest": max(f.mean_rounding / limit for f, limit in found),
            "set_nearest": max(f.nearest for f, _ in found),
        }


class FaultAtTheEnd:
    """Ends the clean steps. From then on the engine reports wrong log-probs.

    The log-prob of the first token of one completion per prompt is too low. All prompts have the fault, because one
    prompt alone could have a group with equal rewards, and most of these groups do not go through the model.

    Args:
        most: largest number of clean steps.
        size: size of the fault, in nats.
        deadline: time of the monotonic clock at which the clean steps end at the latest.

    Attributes:
        clean: number of clean steps; 0 while they go on.
    """

    def __init__(self, engine: Any, most: int, size: float, deadline: float) -> None:
        self._engine, self._most, self._size, self._deadline = engine, most, size, deadline
        self.clean = 0

    def callback(self) -> Any:
        """A callback that checks after each step whether the clean steps are over."""
        from transformers import TrainerCallback

        last = self

        class Switch(TrainerCallback):
            def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                step = state.global_step
                if last.clean:
                    # The step with the fault has passed.
                    control.should_training_stop = True
                elif step >= last._most or time.monotonic() >= last._deadline:
                    last._begin(step)
                _progress("steps", step, last._most)

        return Switch()

    def _begin(self, step: int) -> None:
        from lockstep.extras.selftest.seams import Between

        self.clean, real = step, self._engine.serve
        self._engine.serve = lambda inbox: real(Between(inbox, answers=self._wrong))

    def _wrong(self, requests: Any, answers: list[Any]) -> list[Any]:
        return [
            replace(answer, logprobs=[float(answer.logprobs[0]) - self._size, *answer.logprobs[1:]])
            if answer.key.sample == 0
            else answer
            for answer in answers
        ]


def _parity_reward(completions: list, **columns: Any) -> list[float]:
    return [float(len(completion) % 2) for completion in completions]


def _beside_limits(worst: dict[str, float], limits: tuple[float, ...]) -> str:
    return ", ".join(
        f"{name} {value:.2g} of {limit:g}" for (name, value), limit in zip(worst.items(), limits, strict=True)
    )


def _progress(what: str, done: int, of: int) -> None:
    if done % 50 == 0:
        print(f"  {done} of {of} {what}", flush=True)


if __name__ == "__main__":
    main()
