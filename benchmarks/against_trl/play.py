"""One program in a process of its own: a trainer that takes a step on request and reports how long it took.

Started by `run.py`, which writes one line per step and reads one JSON line back. A step lasts from the moment when
the base class's loop begins it to the moment when the loop would begin the next one, so that nothing is left out.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

os.environ.setdefault("TQDM_DISABLE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

# A number of steps that is never reached.
_MANY = 10_000


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__)
    words.add_argument(
        "program", choices=["lockstep", "trl", "trl-continuous", "trl-bf16-weights", "trl-huge-pages"]
    )
    words.add_argument("workload")
    words.add_argument("model")
    words.add_argument("dtype", choices=["float32", "bfloat16"])
    words.add_argument("--rollouts", type=Path, help="learn from these instead of sampling")
    words.add_argument("--record", type=Path, help="keep the rollouts of the first step (lockstep)")
    asked = words.parse_args()
    # The output of libraries must not be mixed with the answers.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    from benchmarks.against_trl.workloads import workload

    work = workload(asked.workload)
    play = Lockstep if asked.program == "lockstep" else TRL
    player = play(work, asked.model, asked.dtype, asked.rollouts, asked.program)
    player.run(Gate(answers, player.take, lambda: player.record(asked.record)))


class Gate:
    """Holds the trainer before each step until a line comes in."""

    def __init__(
        self, answers: TextIO, take: Callable[[], dict[str, Any]], after: Callable[[], None]
    ) -> None:
        self._answers = answers
        self._take = take
        self._after = after
        self._since: float | None = None
        self._before: dict[str, int] = {}

    def wait(self) -> None:
        """Report the time of the previous step, wait for a line, and begin the next step."""
        if self._since is not None:
            seconds = time.perf_counter() - self._since
            after = memory()
            told = {
                "step": seconds,
                "peak_bytes": peak_bytes(),
                "memory": {"before": self._before, "after": after},
            }
            self._say({**told, **self._take()})
            self._after()
        else:
            self._say({"ready": True})
        if not sys.stdin.readline():
            os._exit(0)
        self._take()
        forget_peak()
        self._before = memory()
        self._since = time.perf_counter()

    def _say(self, answer: dict[str, Any]) -> None:
        print(json.dumps(answer), file=self._answers, flush=True)


class Timer:
    """Adds up the seconds of calls by the name of the called function."""

    def __init__(self) -> None:
        self._spent: dict[str, float] = {}

    def around(self, owner: Any, name: str, phase: str) -> None:
        """Time every call of `owner.name`."""
        real = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return real(*args, **kwargs)
            finally:
                self._spent[phase] = self._spent.get(phase, 0.0) + time.perf_counter() - start

        setattr(owner, name, timed)

    def take(self) -> dict[str, float]:
        spent, self._spent = self._spent, {}
        return spent


def forget_peak() -> None:
    """Start the count of this process's peak memory anew (Linux)."""
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")


def memory() -> dict[str, int]:
    """What this process holds now, in bytes, in all and in huge pages; and its page faults since its start (Linux)."""
    lines = Path("/proc/self/smaps_rollup").read_text(encoding="utf-8").splitlines()
    held = {
        name: int(line.split()[1]) * 1024
        for line in lines
        if (name := line.split(":")[0]) in ("Rss", "AnonHugePages")
    }
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    return {"resident": held["Rss"], "huge": held["AnonHugePages"], "faults": faults}


def peak_bytes() -> int:
    """Most memory that this process has had resident since `forget_peak`."""
    line = next(
        line
        for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
        if line.startswith("VmHWM")
    )
    return int(line.split()[1]) * 1024


def common(work: Any, dtype: str, rollouts: Path | None) -> dict[str, Any]:
    """Fields that both trainers are given."""
    import torch

    from benchmarks.against_trl.tool_model import AROUND

    return {
        "num_generations": work.completions,
        # With a tool, all turns and results; the last turn ends before the limit.
        "max_completion_length": work.tokens + work.inserted + (AROUND if work.calls else 0),
        "max_tool_calling_iterations": work.calls or None,
        "max_steps": _MANY,
        "learning_rate": learning_rate(work, rollouts),
        "lr_scheduler_type": "constant",
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "bf16": dtype == "bfloat16",
        # `run.py` hides GPUs. `make gpu-day` does not.
        "use_cpu": not torch.cuda.is_available(),
        "shuffle_dataset": False,
        "output_dir": "out",
    }


def learning_rate(work: Any, rollouts: Path | None) -> float:
    """The optimizer does the same work at any rate.

    Given rollouts belong to the policy only if the policy does not change. A model that calls a tool must go on
    sampling its walk.
    """
    if rollouts:
        return 0.0
    return 1e-9 if work.calls else 1e-6


def acting(work: Any) -> dict[str, Any]:
    """The tools of a workload, as an argument of both trainers."""
    from benchmarks.against_trl.workloads import tool

    return {"tools": [tool(work)]} if work.calls else {}


def dataset(work: Any, model: str) -> Any:
    import datasets

    from benchmarks.against_trl.workloads import prompts

    return datasets.Dataset.from_dict({"prompt": prompts(work, model)})


class Lockstep:
    """Lockstep's GRPOTrainer, with its defaults for everything except the sizes of the workload."""

    def __init__(self, work: Any, model: str, dtype: str, rollouts: Path | None, program: str) -> None:
        from benchmarks.against_trl.workloads import reward
        from lockstep import GRPOConfig, GRPOTrainer

        config = GRPOConfig(
            **common(work, dtype, rollouts),
            per_device_train_batch_size=work.sequences,
            logging_steps=1,
            vllm_max_num_seqs=min(work.sequences, 256),
        )
        data = dataset(work, model)
        engine = recorded_engine(model, dtype, rollouts) if rollouts else None
        self.trainer = GRPOTrainer(model, reward, config, data, engine=engine, **acting(work))
        self._sequences = work.sequences
        self._timer = Timer()
        self._timer.around(self.trainer.loop, "rollout", "rollout")
        self._log: dict[str, float] = {}
        real = self.trainer.log

        def log(logs: dict[str, float], *args: Any) -> None:
            real(logs, *args)
            self._log = dict(logs)

        self.trainer.log = log  # type: ignore[method-assign]

    def take(self) -> dict[str, Any]:
        found: dict[str, Any] = {"rollout": 0.0, **self._timer.take()}
        phases = {k.removeprefix("time/"): v for k, v in self._log.items() if k.startswith("time/")}
        phases.pop("step", None)
        return found | {
            "phases": phases,
            "sampled_tokens": self._log.get("completions/mean_length", 0) * self._sequences,
            "max_gap": self._log.get("parity/max_abs_gap"),
            "skipped_groups": self._log.get("frac_reward_zero_std"),
            **self._positions(),
        }

    def _positions(self) -> dict[str, int]:
        """Positions of the last step: learned from, only verified, and all (shared ones once).

        Also tokens only verified.
        """
        from lockstep.learn.pack import pack_sequences

        generation, objective = self.trainer.loop.generation, self.trainer.objective
        found = {"positions": 0, "still_positions": 0, "all_positions": 0, "still_tokens": 0}
        for batch in generation.micro_batches if generation is not None else ():
            still = [s for s in batch if not objective.has_gradient(s)]
            moving = [s for s in batch if objective.has_gradient(s)]
            for name, sequences in (
                ("positions", moving),
                ("still_positions", still),
                ("all_positions", batch),
            ):
                packs = pack_sequences(sequences, self.trainer.config.token_budget)
                found[name] += sum(pack.input_ids.numel() for pack in packs)
            found["still_tokens"] += sum(len(s.completion_ids) for s in still)
        return found

    def record(self, path: Path | None) -> None:
        """Keep the generation that was just learned from."""
        from benchmarks.against_trl.workloads import Recorded, write_rollouts

        if path is None or path.exists():
            return
        groups = self.trainer.loop.generation.groups  # type: ignore[union-attr]
        write_rollouts(
            path,
            [
                Recorded(
                    group.prompt.source, c.prompt_ids.tolist(), c.token_ids.tolist(), c.logprobs.tolist()
                )
                for group in groups
                for c in (rollout.completion for rollout in group.rollouts)
            ],
        )

    def run(self, gate: Gate) -> None:
        self.trainer.add_callback(gated(gate))
        self.trainer.train()


def recorded_engine(model: str, dtype: str, path: Path) -> Any:
    """A transformers engine whose completions were sampled before; its weights, and all proofs of them, are real."""
    import torch

    from benchmarks.against_trl.workloads import read_rollouts
    from lockstep.contract.protocol import Completion
    from lockstep.engines.transformers_engine import TransformersEngine
    from lockstep.tokens.chat import load_tokenizer

    waiting: dict[tuple[int, ...], list[Any]] = {}
    for rollout in read_rollouts(path):
        waiting.setdefault(tuple(rollout.prompt_ids), []).append(rollout)

    class RecordedEngine(TransformersEngine):
        def _round(self, requests: Any, inbox: Any) -> None:
            assert self.version is not None
            for request in requests:
                found = waiting[tuple(request.prompt_ids.tolist())][request.key.sample]
                completion = Completion(
                    key=request.key,
                    prompt_ids=request.prompt_ids,
                    token_ids=tuple(found.completion_ids),
                    logprobs=tuple(found.logprobs),
                    weight_versions=(self.version,) * len(found.completion_ids),
                    finish_reason="length",
                )
                inbox.answer(completion, [self.version])

    longest = max(len(r.prompt_ids) + len(r.completion_ids) for r in read_rollouts(path))
    return RecordedEngine(
        model, load_tokenizer(model), dtype=getattr(torch, dtype), max_model_len=longest + 1
    )


class TRL:
    """TRL's GRPOTrainer with its fastest settings here: no gradient checkpointing, and transformers generates."""

    def __init__(self, work: Any, model: str, dtype: str, rollouts: Path | None, program: str) -> None:
        from trl import GRPOConfig, GRPOTrainer

        from benchmarks.against_trl.workloads import reward

        batch = work.trl_learning_batch if rollouts else work.trl_batch
        config = GRPOConfig(
            **common(work, dtype, rollouts),
            per_device_train_batch_size=batch,
            gradient_accumulation_steps=work.sequences // batch,
            gradient_checkpointing=False,
            logging_steps=_MANY,
            use_transformers_continuous_batching=program == "trl-continuous",
            # TRL's own default, except for the rival with weights that are not fp32.
            model_init_kwargs={"dtype": "bfloat16" if program == "trl-bf16-weights" else "float32"},
        )
        rollout_func = recorded_rollouts(rollouts) if rollouts else None
        data = dataset(work, model)
        self.trainer = GRPOTrainer(model, reward, config, data, rollout_func=rollout_func, **acting(work))
        self._timer = Timer()
        self._tokens = 0
        self._timer.around(self.trainer, "_generate_and_score_completions", "rollout")
        self._timer.around(self.trainer, "_generate_single_turn", "generate")

    def take(self) -> dict[str, Any]:
        spent = self._timer.take()
        lengths = self.trainer._metrics["train"]["completions/mean_length"]
        tokens = lengths[-1] * self.trainer.args.generation_batch_size if lengths else 0
        return {
            "rollout": spent.get("rollout", 0.0),
            "phases": {"generate": spent.get("generate", 0.0)},
            "sampled_tokens": tokens,
        }

    def record(self, path: Path | None) -> None:
        assert path is None, "rollouts are recorded by lockstep"

    def run(self, gate: Gate) -> None:
        self.trainer.add_callback(gated(gate))
        self.trainer.train()


def recorded_rollouts(path: Path) -> Callable[[list[str], Any], dict[str, Any]]:
    """TRL's rollout function for completions that were sampled before."""
    from benchmarks.against_trl.workloads import read_rollouts

    def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
        waiting: dict[str, list[Any]] = {}
        for found in read_rollouts(path):
            waiting.setdefault(found.prompt, []).append(found)
        chosen = [waiting[prompt].pop(0) for prompt in prompts]
        return {
            "prompt_ids": [found.prompt_ids for found in chosen],
            "completion_ids": [found.completion_ids for found in chosen],
            "logprobs": [found.logprobs for found in chosen],
        }

    return rollout


def gated(gate: Gate) -> Any:
    """A callback of the loop that uses the gate."""
    from transformers import TrainerCallback

    class Gated(TrainerCallback):
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            gate.wait()

    return Gated()


if __name__ == "__main__":
    with suppress(BrokenPipeError):
        main()
