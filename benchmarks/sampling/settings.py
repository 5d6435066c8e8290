"""Measure the tokens per second of vLLM under the settings that a run can choose.

Lockstep's defaults are based on these figures.

    make sampling                                    (two cores: about twelve minutes; quiet machine)
    make sampling ARGS="--parts prefix --rounds 2"   (a quick look)

Each setting has a Lockstep engine in a separate process (`engine.py`). The engines start one after the other. The
engines of a part then sample the same requests in turn; each engine waits while another engine works. The model is
SmolLM2-135M with an end token that it never samples, in the dtype that training chooses on this machine, on a CPU.
Every round begins with an empty prefix cache, as every step does after its push. Figures are medians of the rounds
after the first. Prints one table per part and writes `runs/bench/sampling.json`. (docs/internals/speed.md)
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.against_trl.answering import AnsweringProcess
from benchmarks.against_trl.floors import cpu_name
from benchmarks.against_trl.workloads import make_model
from lockstep.cli.process import kernel_setting, with_tunables
from lockstep.config.run import engine_dtype
from lockstep.engines.vllm.arguments import usual_sequences

Round = dict[str, Any]


@dataclass(frozen=True)
class Setting:
    """How an engine is started, and what it samples.

    Attributes:
        vllm: further arguments of `vllm.LLM`, as `vllm_engine_kwargs` takes them.
    """

    max_num_seqs: int = field(default_factory=usual_sequences)
    vllm: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Part:
    """Settings that are compared, by name, and the workloads (of `against_trl/workloads.py`) that each one samples."""

    settings: Mapping[str, Setting]
    workloads: Sequence[str]


PARTS = {
    # The second start reads from the cache what the first start compiled.
    "compile": Part(
        {
            "eager": Setting(),
            "compiled": Setting(vllm={"enforce_eager": False}),
            "compiled, started again": Setting(vllm={"enforce_eager": False}),
        },
        ("short", "completions-64"),
    ),
    "batch": Part({f"{n} together": Setting(max_num_seqs=n) for n in (16, 64, 128, 256)}, ("many",)),
    "prefix": Part(
        {
            "prefix cache": Setting(),
            "no prefix cache": Setting(vllm={"enable_prefix_caching": False}),
        },
        ("short", "long"),
    ),
    "block": Part(
        {f"blocks of {n}": Setting(vllm={"block_size": n}) for n in (16, 32, 128)},
        ("short", "completions-64"),
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=list(PARTS))
    parser.add_argument(
        "--rounds", type=int, default=5, help="measured rounds, after one that is not measured"
    )
    parser.add_argument("--json", type=Path, default=Path("runs/bench/sampling.json"))
    args = parser.parse_args()
    found: dict[str, Any] = {"machine": machine(), "parts": {}}
    print(", ".join(f"{name} {value}" for name, value in found["machine"].items()), flush=True)
    args.json.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder) / "model")
        for name in args.parts:
            found["parts"][name] = measure(PARTS[name], model, args.rounds, Path(folder) / name)
            show(name, found["parts"][name])
            args.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def machine() -> dict[str, Any]:
    """The machine and the settings for which the figures were measured."""
    dtype = str(engine_dtype("auto")).removeprefix("torch.")
    return {"name": cpu_name(), "cores": os.cpu_count(), "threads": torch.get_num_threads(), "dtype": dtype}


# ---- measuring
# --------------------------------------------------------------------------------------------------------


def measure(part: Part, model: str, rounds: int, folder: Path) -> dict[str, Any]:
    """Figures and rounds of every setting of a part, by workload."""
    folder.mkdir()
    with ExitStack() as stack:
        engines = {}
        for name, setting in part.settings.items():
            engines[name] = stack.enter_context(closing(Engine(setting, model, folder, name)))
            print(f"  {name}: {engines[name].said}", flush=True)
        taken = {workload: in_turn(engines, workload, rounds) for workload in part.workloads}
    return {
        name: {
            "setting": asdict(part.settings[name]),
            **engine.said,
            "workloads": {
                workload: {"figures": figures(by_name[name]), "rounds": by_name[name]}
                for workload, by_name in taken.items()
                if name in by_name
            },
        }
        for name, engine in engines.items()
    }


def in_turn(engines: Mapping[str, Engine], workload: str, rounds: int) -> dict[str, list[Round]]:
    """Rounds of every engine that runs, without the first round. In every round another engine is the first."""
    names = [name for name, engine in engines.items() if engine.runs]
    found: dict[str, list[Round]] = {name: [] for name in names}
    for number in range(rounds + 1):
        first = number % max(len(names), 1)
        for name in names[first:] + names[:first]:
            found[name].append(engines[name].sample(workload, number))
        rates = ", ".join(f"{name} {rate(taken[-1]):.0f}" for name, taken in found.items())
        print(f"  {workload}, round {number}{'' if number else ' (left out)'}: {rates} tokens/s", flush=True)
    return {name: taken[1:] for name, taken in found.items()}


class Engine(AnsweringProcess):
    """An engine (`engine.py`).

    Its first answer is the seconds that its start took, or the reason why vLLM refused to start.
    """

    def __init__(self, setting: Setting, model: str, folder: Path, name: str) -> None:
        command = ["benchmarks.sampling.engine", model, json.dumps(asdict(setting))]
        super().__init__(command, folder / f"{name}.log", environment(folder))

    @property
    def runs(self) -> bool:
        return "refused" not in self.said

    def sample(self, workload: str, number: int) -> Round:
        """Sample one round of a workload. The number of the round gives its seeds."""
        return self.ask(json.dumps([workload, number]))


def environment(folder: Path) -> dict[str, str]:
    """The environment of an engine: a `lockstep` command's, with a compile cache for the engines of this part."""
    caches = {"VLLM_CACHE_ROOT": str(folder / "vllm"), "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor")}
    given = {**os.environ, "CUDA_VISIBLE_DEVICES": "", **caches}
    return with_tunables(given, kernel_setting()) or given


# ---- figures
# ----------------------------------------------------------------------------------------------------------


def rate(taken: Round) -> float:
    """Sampled tokens per second."""
    return taken["sampled"] / taken["seconds"]


def figures(rounds: Sequence[Round]) -> dict[str, float]:
    """The printed and saved figures of a setting's rounds: medians, and the slowest and fastest round."""
    rates = [rate(taken) for taken in rounds]
    return {
        "tokens_per_s": statistics.median(rates),
        "slowest": min(rates),
        "fastest": max(rates),
        "seconds": statistics.median(taken["seconds"] for taken in rounds),
        "cpu_seconds": statistics.median(taken["cpu_seconds"] for taken in rounds),
        "prompt_tokens": statistics.median(taken["prompt"] for taken in rounds),
        "computed_prompt_tokens": statistics.median(taken["prompt"] - taken["cached"] for taken in rounds),
    }


def show(part: str, found: Mapping[str, Any]) -> None:
    print(f"\n{part}")
    for name, setting in found.items():
        if "refused" in setting:
            print(f"  {name:24} refused: {setting['refused'][:160]}")
            continue
        print(f"  {name:24} starts in {setting['start_s']:.1f} s")
        for workload, taken in setting["workloads"].items():
            own = taken["figures"]
            print(
                f"    {workload:22} {own['tokens_per_s']:7.1f} tokens/s  ({own['slowest']:.1f} to "
                f"{own['fastest']:.1f})  "
                f"{own['seconds']:.2f} s, of processors {own['cpu_seconds']:.2f} s; "
                f"{own['computed_prompt_tokens']:.0f} of {own['prompt_tokens']:.0f} prompt tokens computed"
            )
    print(flush=True)


if __name__ == "__main__":
    main()
