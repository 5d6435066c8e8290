"""Kills commands at each of their file operations, or lets that operation fail, and runs the same command again.

    scripts/kill_sweep.py                     every command, a sample of 60 that the seed draws
    scripts/kill_sweep.py --only train        one command: train, resume, evaluate, merge, serve
    scripts/kill_sweep.py --ways kill,torn    some of the ways of the table below
    scripts/kill_sweep.py --most 100000       every operation, in every way; --begin 300 leaves out the first 300 of the sample
    scripts/kill_sweep.py --seconds 300       begins nothing further after this time

| way | what happens at operation N below the folder of the run |
|---|---|
| kill | SIGKILL before it |
| torn | half of a write, then SIGKILL |
| full | there is no room on the disk from here on (ENOSPC), until the command ends |
| broken | this operation alone fails (EIO) |

`scripts/kill_sweep.c` counts the operations. Each run is a fork of this process, which has imported the libraries, so that a run of
a tiny model with the transformers engine takes seconds. `serve` starts vLLM's server, twice per operation, and takes minutes.

A case is right if the same command then ends with the same weights, to the bit, and the same log (`same`), or if the run had ended
before the kill and is whole (`done`), or if it refuses with one clear sentence and exit code 1 or 2 (`refused`). A traceback, an
exit without a word, a second run beside the first, or another result is a failure. A command that could not write (full, broken)
must itself end with one clear sentence, or with the same result.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
WAYS = {"kill": 1, "torn": 2, "full": 3, "broken": 4}
STEPS = 3
# Seconds after which a run hangs.
LIMIT = 300.0
REWARD = "def score(completion_ids, **_):\n    return [float(sum(ids) % 7) for ids in completion_ids]\n"
_CLOCK = ("time/", "push/", "checked/", "step_time")


@dataclass(frozen=True)
class Ended:
    """How a command has ended: exit code (minus the signal's number if it was killed), and what it printed on standard error."""

    code: int
    said: str

    @property
    def is_clear(self) -> bool:
        """Whether it is an error of one sentence that says what went wrong."""
        lines = [line for line in self.said.splitlines() if line.startswith("lockstep: ")]
        return self.code in (1, 2) and len(lines) == 1 and "Traceback" not in self.said


@dataclass(frozen=True)
class Command:
    """A command to attack.

    Attributes:
        prepare: makes the folder in which it runs.
        run: runs it; gets the operation and the way, or (0, 0).
        judge: None: the folder has the right result. Else what is wrong.
    """

    prepare: Callable[[], None]
    run: Callable[[int, int], Ended]
    judge: Callable[[], str | None]
    finished: Callable[[], bool] = lambda: False


class Sweep:
    """Runs commands as forks of this process, in one folder that is made anew for each case."""

    def __init__(self, place: Path) -> None:
        self.home, self.kept, self.library = place / "home", place / "kept", place / "kill_sweep.so"
        self.counter, self.model = place / "counter", place / "model"
        self.home.mkdir()
        self.kept.mkdir()
        self.counter.write_bytes(bytes(8))

    @property
    def count(self) -> int:
        """The operations of the last run."""
        return int.from_bytes(self.counter.read_bytes(), sys.byteorder)

    def fork(self, work: Callable[[], int], number: int, way: int) -> Ended:
        """Run a function in a fork, with its operations counted."""
        self._reset()
        with (
            tempfile.TemporaryFile("w+", encoding="utf-8") as said,
            tempfile.TemporaryFile("w+", encoding="utf-8") as out,
        ):
            sys.stdout.flush()
            child = os.fork()
            if not child:
                os.setsid()
                os.dup2(out.fileno(), 1)
                os.dup2(said.fileno(), 2)
                os.environ["TMPDIR"] = tempfile.tempdir = str(self.home / "tmp")
                os.chdir(self.home)
                library = ctypes.CDLL(str(self.library))
                library.kill_sweep_arm(
                    os.fsencode(self.home), os.fsencode(self.counter), ctypes.c_long(number), ctypes.c_int(way)
                )
                code = 70
                try:
                    code = work()
                except BaseException:  # noqa: BLE001 - the traceback is what is looked for
                    import traceback

                    traceback.print_exc()
                finally:
                    sys.stderr.flush()
                    os._exit(code)
            status, until = None, time.monotonic() + LIMIT
            while status is None and time.monotonic() < until:
                pid, found = os.waitpid(child, os.WNOHANG)
                status = found if pid else None
                time.sleep(0.02)
            if status is None:
                os.killpg(child, signal.SIGKILL)
                status = os.waitpid(child, 0)[1]
            said.seek(0)
            return Ended(os.waitstatus_to_exitcode(status), said.read())

    def _reset(self) -> None:
        with self.counter.open("r+b") as file, mmap.mmap(file.fileno(), 8) as memory:
            memory[:] = bytes(8)

    # ---- the commands -----------------------------------------------------------------------------------------------

    def words(self, *more: str) -> list[str]:
        fields = {
            "model_name_or_path": self.model, "dataset_name": self.home / "data.jsonl", "eval_size": 2,
            "reward_funcs": f"{self.home / 'r.py'}:score", "output_dir": self.home / "run", "use_vllm": "false", "bf16": "false",
            "max_steps": STEPS, "logging_steps": 1, "save_strategy": "steps", "save_steps": 1, "save_total_limit": 2,
            "learning_rate": "1e-3", "per_device_train_batch_size": 4, "num_generations": 4, "max_completion_length": 4,
            "report_to": "none",
        }  # fmt: skip
        return [word for name, value in fields.items() for word in (f"--{name}", str(value))] + list(more)

    def main(self, words: list[str], number: int, way: int) -> Ended:
        def work() -> int:
            from lockstep.cli.main import main

            return main(words)

        return self.fork(work, number, way)

    def fresh(self) -> None:
        shutil.rmtree(self.home)
        (self.home / "tmp").mkdir(parents=True)
        (self.home / "r.py").write_text(REWARD, encoding="utf-8")
        rows = (json.dumps({"prompt": f"what is {i} + {i}"}) for i in range(8))
        (self.home / "data.jsonl").write_text("".join(f"{row}\n" for row in rows), encoding="utf-8")

    def from_kept(self, name: str) -> None:
        shutil.rmtree(self.home)
        shutil.copytree(self.kept / name, self.home)

    def keep(self, name: str) -> None:
        shutil.rmtree(self.kept / name, ignore_errors=True)
        shutil.copytree(self.home, self.kept / name)

    def commands(self) -> dict[str, Command]:
        grpo = lambda number, way: self.main(["grpo", *self.words()], number, way)  # noqa: E731
        run = self.home / "run"
        return {
            "train": Command(self.fresh, grpo, lambda: self.judge_run(run), lambda: (run / "summary.json").exists()),
            "resume": Command(
                lambda: self.from_kept("interrupted"), grpo, lambda: self.judge_run(run),
                lambda: (run / "summary.json").exists(),
            ),
            "evaluate": Command(
                lambda: self.from_kept("finished"),
                lambda number, way: self.main(
                    ["evaluate", *self.words("--model_name_or_path", str(run / f"checkpoint-{STEPS}"))], number, way
                ),
                lambda: self.judge_run(run),
            ),
            "merge": Command(
                lambda: self.from_kept("adapter"),
                lambda number, way: self.main(
                    ["merge", str(run / "checkpoint-1"), str(self.home / "merged")], number, way
                ),
                self.judge_merged,
                lambda: (self.home / "merged").exists(),
            ),
            "serve": Command(self.fresh, self.serve, lambda: None),
        }  # fmt: skip

    def make_references(self, names: set[str]) -> None:
        """Runs without a fault, which others are compared with or begin from."""
        self.fresh()
        if names & {"train", "resume", "evaluate"}:
            self._must("train", self.main(["grpo", *self.words()], 0, 0))
            self.keep("finished")
        if "resume" in names:
            # Killed in its last third: behind at least one checkpoint.
            operations = self.count
            self.fresh()
            self.main(["grpo", *self.words()], operations * 2 // 3, WAYS["kill"])
            assert list(self.home.glob("run/checkpoint-*/trainer_state.json")), "the first part has no checkpoint"
            self.keep("interrupted")
        if "merge" in names:
            self.fresh()
            lora = ["--use_peft", "true", "--lora_r", "4", "--eval_size", "0", "--max_steps", "1"]
            self._must("the adapter", self.main(["grpo", *self.words(*lora)], 0, 0))
            self.keep("adapter")
            words = ["merge", str(self.home / "run" / "checkpoint-1"), str(self.home / "merged")]
            self._must("merge", self.main(words, 0, 0))
            self.keep("merged")

    @staticmethod
    def _must(what: str, ended: Ended) -> None:
        assert ended.code == 0, f"{what} without a fault ended with {ended.code}: {ended.said[-2000:]}"

    # ---- what is right ----------------------------------------------------------------------------------------------

    def judge_run(self, run: Path) -> str | None:
        whole = self.kept / "finished" / "run"
        if (run.parent / "run-2").exists():
            return "it trained anew in run-2"
        for name in (f"checkpoint-{STEPS}/model.safetensors", f"checkpoint-{STEPS}/optimizer.pt"):
            if not (run / name).exists() or (run / name).read_bytes() != (whole / name).read_bytes():
                return f"{name} differs"
        if curve(run) != curve(whole):
            return "metrics.jsonl differs"
        if missing := {path.name for path in whole.iterdir()} - {path.name for path in run.iterdir()} - {".lock"}:
            return f"{sorted(missing)} are gone"
        summaries = [json.loads((folder / "summary.json").read_text(encoding="utf-8")) for folder in (whole, run)]
        for name in ("eval_reward_before", "eval_reward_after", "steps"):
            if summaries[0][name] != summaries[1][name]:
                return f"{name} of the summary differs"
        from lockstep.parity.receipt import check_receipt

        check_receipt(run / "receipt.jsonl")
        return None

    def judge_merged(self) -> str | None:
        there, whole = self.home / "merged", self.kept / "merged" / "merged"
        for path in whole.iterdir():
            if not (there / path.name).exists() or (there / path.name).read_bytes() != path.read_bytes():
                return f"{path.name} differs"
        return None

    def serve(self, number: int, way: int) -> Ended:
        """Start a server until it is healthy or has ended, and stop it."""
        self._reset()
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        settings = {
            "LD_PRELOAD": str(self.library), "KILL_SWEEP_FOLDER": str(self.home), "KILL_SWEEP_COUNTER": str(self.counter),
            "KILL_SWEEP_NUMBER": str(number), "KILL_SWEEP_MODE": str(way), "TMPDIR": str(self.home / "tmp"),
            "HOME": str(self.home), "XDG_CACHE_HOME": str(self.home / "cache"), "HF_HUB_OFFLINE": "1",
        }  # fmt: skip
        words = [sys.executable, "-m", "lockstep.cli.main", "serve", str(self.model), "--port", str(port)]
        with tempfile.TemporaryFile("w+", encoding="utf-8") as said:
            server = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=said,
                env={**os.environ, **settings}, start_new_session=True,
            )  # fmt: skip
            until, healthy = time.monotonic() + LIMIT, False
            while server.poll() is None and not healthy and time.monotonic() < until:
                time.sleep(0.5)
                try:
                    with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2) as answer:
                        healthy = answer.status == 200
                except OSError:
                    continue
            code = 0 if healthy else server.poll()
            try:
                os.killpg(server.pid, signal.SIGTERM)
                server.wait(60)
            except (ProcessLookupError, subprocess.TimeoutExpired):
                pass
            finally:
                # A process of it may have been killed, and others may wait for it.
                with suppress(ProcessLookupError):
                    os.killpg(server.pid, signal.SIGKILL)
                server.wait()
            said.seek(0)
            return Ended(-signal.SIGKILL if code is None else code, said.read())


def curve(run: Path) -> list[dict[str, Any]]:
    """The metrics without the seconds."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [{name: value for name, value in line.items() if not name.startswith(_CLOCK)} for line in lines]


def attacked(command: Command, number: int, way: str) -> tuple[str, str]:
    """Attack a command at one operation, and run it again; returns `same`, `done`, `refused` or `FAILED`, and what was found."""
    command.prepare()
    first = command.run(number, WAYS[way])
    if first.code not in (0, -signal.SIGKILL) and not first.is_clear:
        return "FAILED", f"the attacked command ended with {first.code}: {first.said[-600:]}"
    if way in ("kill", "torn") and first.code == 0:
        return "FAILED", "it was not killed"
    if first.code == 0 or command.finished():
        wrong = command.judge()
        return ("FAILED", f"it said that it is done: {wrong}") if wrong else ("done", "")
    second = command.run(0, 0)
    if second.is_clear:
        return "refused", second.said.strip().splitlines()[-1]
    if second.code:
        return "FAILED", f"the second command ended with {second.code}: {second.said[-600:]}"
    wrong = command.judge()
    return ("FAILED", wrong) if wrong else ("same", "")


def sweep(
    place: Path, names: Sequence[str], ways: Sequence[str], most: int, seed: int, seconds: float, begin: int
) -> int:
    """Attack the commands and print the table; returns the exit code."""
    started, work = time.monotonic(), Sweep(place)
    # Programs that are started here have functions of their own.
    os.environ.pop("LD_PRELOAD", None)
    import_all(work)
    work.make_references(set(names))
    commands, cases, operations = work.commands(), [], {}
    for name in names:
        commands[name].prepare()
        work._must(name, commands[name].run(0, 0))
        operations[name] = work.count
        cases += [(name, number, way) for way in ways for number in range(1, work.count + 1)]
    random.Random(seed).shuffle(cases)
    # Servers take minutes: few of each sample.
    drawn = [case for case in cases if case[0] != "serve"][begin : begin + most]
    drawn += [case for case in cases if case[0] == "serve"][: max(most // 30, 1)]
    found: Counter[tuple[str, str, str]] = Counter()
    failed = 0
    for index, (name, number, way) in enumerate(drawn):
        if time.monotonic() - started > seconds:
            print(f"the time is over after {index} of {len(drawn)}: go on with --begin {begin + index}", flush=True)
            break
        verdict, said = attacked(commands[name], number, way)
        found[name, way, verdict] += 1
        if verdict in ("FAILED", "refused"):
            failed += verdict == "FAILED"
            print(f"{verdict} {name} {way} {number}: {said}", flush=True)
    ran = found.total()
    print(f"\n{'command':10} {'way':8} {'same':>6} {'done':>6} {'refused':>8} {'FAILED':>7} {'of':>6}")
    for name in names:
        for way in ways:
            counts = [found[name, way, verdict] for verdict in ("same", "done", "refused", "FAILED")]
            if sum(counts):
                print(f"{name:10} {way:8} {counts[0]:6} {counts[1]:6} {counts[2]:8} {counts[3]:7} {operations[name]:6}")
    print(f"{ran - failed} of {ran} cases were right, of {len(cases)} cases; seed {seed}", flush=True)
    return int(bool(failed) or not ran)


def import_all(work: Sweep) -> None:
    """Import what the commands import, and make the tiny model."""
    sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]
    os.environ |= {"TOKENIZERS_PARALLELISM": "false", "TQDM_DISABLE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    import datasets
    import peft
    import tiny
    import torch
    import transformers.trainer

    import lockstep
    import lockstep.training.run  # noqa: F401  for its modules

    torch.set_num_threads(1)
    _ = datasets, peft, transformers.trainer, lockstep.GRPOTrainer, lockstep.GRPOConfig
    if not work.model.exists():
        tiny.save_model(work.model)


def main() -> int:
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("--only", default="")
    words.add_argument("--ways", default=",".join(WAYS))
    words.add_argument("--most", type=int, default=60)
    words.add_argument("--begin", type=int, default=0)
    words.add_argument("--seed", type=int, default=1)
    words.add_argument("--seconds", type=float, default=float("inf"))
    words.add_argument("--place", type=Path, help=argparse.SUPPRESS)
    asked = words.parse_args()
    known = ["train", "resume", "evaluate", "merge", "serve"]
    names = [name for name in known if name in (asked.only.split(",") if asked.only else known)]
    if not names:
        words.error(f"no command is called {asked.only!r}; there are: {', '.join(known)}")
    if asked.place is None:
        with tempfile.TemporaryDirectory(prefix="kill-sweep-") as folder:
            library = Path(folder).resolve() / "kill_sweep.so"
            source = ROOT / "scripts" / "kill_sweep.c"
            subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"], check=True)
            # The functions of the process are replaced when it starts.
            settings = {**os.environ, "LD_PRELOAD": str(library), "OMP_NUM_THREADS": "1"}
            again = [sys.executable, __file__, *sys.argv[1:], "--place", str(library.parent)]
            return subprocess.run(again, env=settings, check=False).returncode
    ways = [way for way in WAYS if way in asked.ways.split(",")]
    return sweep(asked.place, names, ways, asked.most, asked.seed, asked.seconds, asked.begin)


if __name__ == "__main__":
    sys.exit(main())
