"""Compare the time of rollouts with tools with the least possible ("floor"), and a step with tools with TRL's step.

    make tools                                   (two cores, on a quiet machine)
    make tools ARGS="--parts waits turns --rounds 2"
    make tools ARGS="--parts step --seconds 0 --rounds 1 --json runs/bench/tools_step.json"
    make tools ARGS="--size tiny --parts waits turns"
    make tools ARGS="--size tiny --parts waits --one_thread"

Real vLLM in this process. The model calls a tool at the end of every turn (`against_trl/tool_model.py`), and all
turns have the same length. Each figure is the median over the rounds after the first.

waits: 64 rollouts with 4 turns and 3 calls each. A call takes 0 to 2 s; the seed of its rollout decides how long. The
wall time of
    all rollouts is compared with two measured times:
    - the chain: the time of the rollout whose calls take longest, run alone with the same calls (`chains` is the
      ratio);
    - the floor: the larger one of the chain and the computing (`floors` is the ratio). The computing is the time of
      all rollouts with calls of 0 s. On few cores the rollouts share the engine, and no order of the work can be
      faster.
    The wall time may be 1.2 times the floor. With `--size tiny` the floor equals the chain. For comparison,
    `with_barriers_s` is the time with a barrier after every turn: the computing plus the longest call of each turn.
    It is added up, not measured. Each environment has a thread of its own (`tool_threads`). With `--one_thread` all
    calls run in the engine's thread, one after the other, as they do by default: then the wall time is the computing
    plus all calls (`all_calls_s`).
turns: sampled tokens per second of the same 64 rollouts with calls of 0 s, and of 64 rollouts of one turn that sample
as many
    tokens. The prompts of the single turns are longer by as many ids as the tools insert. So both runs compute the
    same number of ids, and the engine's cache starts empty. The rate with turns must be at least 0.9 of the rate
    without. (vLLM caches whole blocks of 32 ids. At each later turn it computes up to 31 earlier ids again. This is
    included in the figure.)
step: a whole training step of `GRPOTrainer` with `tools`, of Lockstep and of TRL in turn, each in a separate process,
with the same
    model, prompts, lengths and tool. TRL samples with transformers, its fastest way on a CPU (`against_trl/play.py`).
    Calls take 0 s, and then 0.1 s. TRL makes the calls of a plain function one after the other.

Prints the figures. Writes `runs/bench/tools.json` (machine, every round, figures, floors).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("TQDM_DISABLE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

from benchmarks.against_trl.answering import PLAY, AnsweringProcess
from benchmarks.against_trl.floors import cpu_name
from benchmarks.against_trl.tool_model import CONTEXT, LINE, RESULT, SIZES, TURN, make_tool_model, question
from lockstep.cli.process import kernel_setting, with_tunables
from lockstep.images.prompts import PromptReader
from lockstep.watch.custody import Record

PARTS = ("waits", "turns", "step")
# The goals: the largest wall time, divided by the floor, and the smallest rate with turns, divided by the rate of
# single turns.
MOST_FLOORS, LEAST_SHARE = 1.2, 0.9
ROLLOUTS, CALLS, LONGEST = 64, 3, 2.0
SAMPLED = (CALLS + 1) * TURN
Round = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=list(PARTS))
    parser.add_argument(
        "--size", choices=SIZES, default="135m", help="the model: of the packaged model's shape, or tiny"
    )
    parser.add_argument(
        "--rounds", type=int, default=3, help="measured rounds, after one that is not measured"
    )
    parser.add_argument(
        "--seconds", nargs="*", default=["0", "0.1"], help="part step: seconds that a call takes"
    )
    parser.add_argument(
        "--one_thread", action="store_true", help="parts waits and turns: no threads for environments"
    )
    parser.add_argument("--json", type=Path, default=Path("runs/bench/tools.json"))
    args = parser.parse_args()
    found: dict[str, Any] = {
        "machine": {"name": cpu_name(), "cores": os.cpu_count()},
        "size": args.size,
        "one_thread": args.one_thread,
        "floors": {"waits": MOST_FLOORS, "turns": LEAST_SHARE},
        "parts": {},
    }
    print(f"{found['machine']['name']}, {os.cpu_count()} cores; model: {args.size}", flush=True)
    args.json.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        model = make_tool_model(Path(folder) / "model", args.size)
        for part in args.parts:
            if part == "step":
                rounds = steps(model, args.rounds, args.seconds, Path(folder))
                figures: Any = {seconds: step_figures(own) for seconds, own in rounds.items()}
            else:
                with playing(model, threads=not args.one_thread) as play:
                    rounds = [rounds_of(part)(play, number) for number in range(args.rounds + 1)][1:]
                figures = figures_of(part)(rounds)
            found["parts"][part] = {"figures": figures, "rounds": rounds}
            print(json.dumps({part: figures}, indent=1), flush=True)
            args.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


# ---- rollouts
# ---------------------------------------------------------------------------------------------------------


class ToolEnvironment:
    """The environment of a rollout. The rollout's seed decides how long each call takes."""

    longest = 0.0

    def __init__(self) -> None:
        self.waits: list[float] = []

    def reset(self, seed: int, **row: Any) -> None:
        self._drawn, self.waits = random.Random(seed), []

    def look(self, n: int) -> str:
        """Look something up.

        Args:
            n: Where.
        """
        self.waits.append(self._drawn.uniform(0.0, self.longest))
        if self.waits[-1]:
            time.sleep(self.waits[-1])
        return RESULT


class Run(NamedTuple):
    """Wall time and processor time in seconds, the rollouts, and for each rollout the seconds of its calls."""

    seconds: float
    cpu_seconds: float
    rollouts: list[Any]
    waits: list[list[float]]


class Play:
    """One engine, and the program that makes rollouts with it."""

    def __init__(self, model: str, *, threads: bool) -> None:
        from lockstep.config.run import engine_dtype
        from lockstep.engines.vllm.in_process import VLLMInProcess
        from lockstep.models.policy import load_policy
        from lockstep.rollouts.programs.environments import Environments
        from lockstep.rollouts.programs.tool_program import ToolProgram
        from lockstep.rollouts.programs.tools import ToolCalls
        from lockstep.tokens.chat import load_tokenizer
        from lockstep.tokens.extension import Extension
        from lockstep.weights.push import push_weights

        self.tokenizer = load_tokenizer(model)
        dtype = engine_dtype("auto")
        self.engine = VLLMInProcess(model, dtype=dtype, max_model_len=CONTEXT, max_num_seqs=ROLLOUTS)
        push_weights(load_policy(model), self.engine, 0)
        self.calls = ToolCalls(60.0, threads=threads)
        environments = Environments(ToolEnvironment, self.calls)
        kinds = self.calls.finish(environments.probe(), 60.0)
        self.extension = Extension(
            self.tokenizer, [self.tokenizer.eos_token_id], tools=list(kinds[None].schemas)
        )
        self.program = ToolProgram(
            {None: self.extension}, {}, self.calls, environments, CALLS, 40, PromptReader(self.tokenizer)
        )

    def starts(self, number: int) -> list[Any]:
        """The starts of the rollouts of a round. Each has its own prompt."""
        rows = [question(number * ROLLOUTS + row) for row in range(ROLLOUTS)]
        return self._starts([(row, self.extension.prompt(row)) for row in rows], number, CONTEXT - 128)

    def single_starts(self, starts: Sequence[Any], inserted: int, number: int) -> list[Any]:
        """Starts of rollouts of one turn that sample as many tokens.

        Their prompts are longer by the ids that the tools insert.
        """
        line = self.tokenizer(LINE, add_special_tokens=False)["input_ids"]
        result_ids = self.tokenizer(RESULT * inserted, add_special_tokens=False)["input_ids"][
            : inserted - len(line)
        ]
        longer = [(s.prompt.source, [*s.prompt.ids.tolist(), *result_ids, *line]) for s in starts]
        return self._starts(longer, number, SAMPLED)

    @staticmethod
    def _starts(prompts: Sequence[tuple[Any, Any]], number: int, tokens: int) -> list[Any]:
        from lockstep.contract.sampling import Sampling
        from lockstep.rollouts.driver import starts_for
        from lockstep.rollouts.group import Prompt

        rows = [Prompt(str(row), ids, source) for row, (source, ids) in enumerate(prompts)]
        return starts_for(rows, Sampling(tokens), num_generations=1, run_seed=number, version=0)

    def run(self, starts: Sequence[Any], longest: float | None) -> Run:
        """Make one rollout per start, from an empty prefix cache.

        Args:
            longest: longest time of a call; None: rollouts of one turn.
        """
        from lockstep.rollouts.conversation import single_turn
        from lockstep.rollouts.driver import Driver

        # A training step never finds blocks of the generation before.
        assert self.engine.reset_caches(), "vLLM did not empty its prefix cache"
        ToolEnvironment.longest = longest or 0.0
        with Driver(self.engine, self.tokenizer, Record, self.calls) as driver:
            start, used = time.perf_counter(), time.process_time()
            found = driver.run(starts, single_turn if longest is None else self.program)
            seconds, used = time.perf_counter() - start, time.process_time() - used
        rollouts = [found[start.key] for start in starts]
        waits = (
            [[]] * len(rollouts)
            if longest is None
            else [self.program.environment_of(r).waits for r in rollouts]
        )
        self.program.release(rollouts)
        check_work(rollouts, [1 if longest is None else CALLS + 1] * len(rollouts))
        return Run(seconds, used, rollouts, waits)

    def close(self) -> None:
        self.program.close()
        self.engine.close()


def check_work(rollouts: Sequence[Any], turns: Sequence[int]) -> None:
    """Check that every rollout has the number of turns and tokens that the comparison needs.

    Raises:
        SystemExit: a rollout has another number.
    """
    found = [(len(r.turns), sum(len(c.sampled_places) for c in r.branches)) for r in rollouts]
    wrong = [one for one, count in zip(found, turns, strict=True) if one != (count, SAMPLED)]
    if wrong:
        raise SystemExit(
            f"{len(wrong)} rollouts differ from {turns[0]} turns and {SAMPLED} tokens: {wrong[:3]}"
        )


@contextmanager
def playing(model: str, *, threads: bool) -> Iterator[Play]:
    play = Play(model, threads=threads)
    try:
        yield play
    finally:
        play.close()


def waits_round(play: Play, number: int) -> Round:
    """One round of the part `waits`."""
    starts = play.starts(number)
    computing, together = play.run(starts, 0.0).seconds, play.run(starts, LONGEST)
    slowest = max(range(len(starts)), key=lambda place: sum(together.waits[place]))
    alone = play.run([starts[slowest]], LONGEST)
    assert alone.waits == [together.waits[slowest]], "the replayed rollout made other calls"
    wall, chain = together.seconds, alone.seconds
    print(
        f"  waits, round {number}: wall {wall:.2f} s, chain {chain:.2f} s, computing {computing:.2f} s",
        flush=True,
    )
    return {
        "wall_s": wall,
        "chain_s": chain,
        "computing_s": computing,
        "waits": together.waits,
        "slowest": slowest,
    }


def turns_round(play: Play, number: int) -> Round:
    """One round of the part `turns`. In every second round the single turns come first."""
    starts = play.starts(number)
    taken: dict[str, Run] = {}
    inserted = CALLS * inserted_ids(play)
    singles = play.single_starts(starts, inserted, number)
    for name in ("turns", "single") if number % 2 else ("single", "turns"):
        own, longest = (starts, 0.0) if name == "turns" else (singles, None)
        taken[name] = play.run(own, longest)
    turns, single = taken["turns"], taken["single"]
    print(
        f"  turns, round {number}: {turns.seconds:.2f} s with turns (of processors {turns.cpu_seconds:.2f} s), "
        f"{single.seconds:.2f} s without ({single.cpu_seconds:.2f} s)",
        flush=True,
    )
    return {
        "turns_s": turns.seconds,
        "single_s": single.seconds,
        "turns_cpu_s": turns.cpu_seconds,
        "single_cpu_s": single.cpu_seconds,
        "sampled": ROLLOUTS * SAMPLED,
        "inserted": inserted,
    }


def inserted_ids(play: Play) -> int:
    """Number of ids that one result inserts."""
    (rollout,) = play.run(play.starts(0)[:1], 0.0).rollouts
    return int((~rollout.completion.sampled).sum()) // CALLS


# ---- steps -------------------------------------------------------------------------------------------------------


def steps(model: str, rounds: int, calls: Sequence[str], folder: Path) -> dict[str, list[Round]]:
    """Steps of both trainers in turn, by the seconds of a call. The first step of each is left out."""
    found: dict[str, list[Round]] = {}
    for seconds in calls:
        players = {}
        for program in ("lockstep", "trl"):
            own = folder / f"{program}-{seconds}"
            own.mkdir()
            command = [PLAY, program, f"calls-{seconds}", model, "float32"]
            players[program] = AnsweringProcess(command, own / "log", environment(program), str(own))
        try:
            taken = []
            for number in range(rounds + 1):
                taken.append({program: player.ask("step") for program, player in players.items()})
                print(f"  step, calls of {seconds} s, {round_line(number, taken[-1])}", flush=True)
            found[seconds] = taken[1:]
        finally:
            for player in players.values():
                player.close()
    return found


def round_line(number: int, taken: Mapping[str, Round]) -> str:
    """The line of a round of both trainers, with its ratio.

    It is printed at once, for the case that the program is ended early.
    """
    said = ", ".join(f"{program} {step['step']:.2f} s" for program, step in taken.items())
    kind = "" if number else " (warm-up, not counted)"
    return f"round {number}{kind}: {said}, ratio {trl_over_lockstep(taken):.2f}"


def trl_over_lockstep(taken: Mapping[str, Round]) -> float:
    return float(taken["trl"]["step"] / taken["lockstep"]["step"])


def environment(program: str) -> dict[str, str]:
    """The environment of a program. `lockstep` starts its commands with huge pages; a script that uses TRL does not."""
    given = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    return (with_tunables(given, kernel_setting()) if program == "lockstep" else None) or given


# ---- figures
# ----------------------------------------------------------------------------------------------------------


def rounds_of(part: str) -> Callable[[Play, int], Round]:
    return {"waits": waits_round, "turns": turns_round}[part]


def figures_of(part: str) -> Callable[[Sequence[Round]], dict[str, Any]]:
    return {"waits": waits_figures, "turns": turns_figures}[part]


def with_barriers(computing: float, waits: Sequence[Sequence[float]]) -> float:
    """Seconds that the same calls would take if every turn waited for the calls of all rollouts."""
    return computing + sum(max(calls) for calls in zip(*waits, strict=True))


def waits_figures(rounds: Sequence[Round]) -> dict[str, Any]:
    """Medians over the rounds: the wall time, what it is compared with, and its ratios to the chain and the floor."""
    chains = [own["wall_s"] / own["chain_s"] for own in rounds]
    ratios = [own["wall_s"] / max(own["chain_s"], own["computing_s"]) for own in rounds]
    return {
        "wall_s": statistics.median(own["wall_s"] for own in rounds),
        "chain_s": statistics.median(own["chain_s"] for own in rounds),
        "all_calls_s": statistics.median(sum(map(sum, own["waits"])) for own in rounds),
        "longest_calls_s": statistics.median(max(map(sum, own["waits"])) for own in rounds),
        "computing_s": statistics.median(own["computing_s"] for own in rounds),
        "with_barriers_s": statistics.median(
            with_barriers(own["computing_s"], own["waits"]) for own in rounds
        ),
        "chains": statistics.median(chains),
        "floors": statistics.median(ratios),
        "reached": statistics.median(ratios) <= MOST_FLOORS,
    }


def turns_figures(rounds: Sequence[Round]) -> dict[str, Any]:
    """Medians over the rounds: sampled tokens per second with turns and without, and the share (with / without)."""
    shares = [own["single_s"] / own["turns_s"] for own in rounds]
    return {
        "turns_tokens_per_s": statistics.median(own["sampled"] / own["turns_s"] for own in rounds),
        "single_tokens_per_s": statistics.median(own["sampled"] / own["single_s"] for own in rounds),
        "share": statistics.median(shares),
        "cpu_share": statistics.median(own["single_cpu_s"] / own["turns_cpu_s"] for own in rounds),
        "reached": statistics.median(shares) >= LEAST_SHARE,
    }


def step_figures(rounds: Sequence[Mapping[str, Round]]) -> dict[str, Any]:
    """Medians over the rounds: seconds per step of both trainers, and their ratio.

    Also the number of sampled tokens.
    """
    tokens = {program: {own[program]["sampled_tokens"] for own in rounds} for program in ("lockstep", "trl")}
    if tokens["lockstep"] != tokens["trl"]:
        raise SystemExit(f"the two trainers sampled different numbers of tokens: {tokens}")
    return {
        "lockstep_s": statistics.median(own["lockstep"]["step"] for own in rounds),
        "trl_s": statistics.median(own["trl"]["step"] for own in rounds),
        "sampled_tokens": max(tokens["lockstep"]),
        "trl_over_lockstep": statistics.median(map(trl_over_lockstep, rounds)),
    }


if __name__ == "__main__":
    main()
