"""Kills commands at each of their file operations, or lets that operation fail, and runs the same command again.

    scripts/kill_sweep.py                     every command, a sample of 60 that the seed draws
    scripts/kill_sweep.py --only train        one command of this list:
    scripts/kill_sweep.py --ways kill,torn    some of the ways of the table below
    scripts/kill_sweep.py --most 100000       every operation, in every way; --begin 300 leaves out the first 300 of
    the sample scripts/kill_sweep.py --seconds 300       begins nothing further after this time

| way | what happens at operation N below the folder of the run |
|---|---|
| kill | SIGKILL before it |
| torn | half of a write, then SIGKILL |
| full | there is no room on the disk from here on (ENOSPC), until the command ends |
| broken | this operation alone fails (EIO) |
| moment | SIGKILL at the same share of the run's time, whatever the run does then |
| stop | SIGTERM at that moment |

| command | what runs |
|---|---|
| train, online-dpo, ppo | three steps of that method (train: GRPO) |
| tools, environment, apart | GRPO with a tool, with an environment, with an environment in a process of its own |
| agent, agent-command | GRPO with a function as the agent, with a program as the agent |
| resume, online-dpo-resume, … | each of these, gone on with after a kill in its last third |
| evaluate, merge, serve | the command of that name |
| packaged | the conversion of the packaged model; a tiny one stands in for it |

`scripts/kill_sweep.c` counts the operations. Each run is a fork of this process, which has imported the libraries, so
that a run of a tiny model with the transformers engine takes seconds. `serve` starts vLLM's server, twice per
operation, and takes minutes.

A case is right if the same command then ends with the same weights, to the bit, and the same log (`same`), or if the
run had ended before the kill and is whole (`done`), or if it refuses with one clear sentence and exit code 1 or 2
(`refused`). A traceback, an exit without a word, a second run beside the first, another result, a process or a
temporary file that is left behind is a failure. A command that could not write (full, broken) must itself end with
one clear sentence, or with the same result.

Agents, and environments in processes of their own, call at moments that the clock decides. So the engine computes
other rows together, and two unharmed runs differ in the last bits: their rewards and lengths must be equal, and their
weights near each other.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
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
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
WAYS = {"kill": 1, "torn": 2, "full": 3, "broken": 4, "moment": 5, "stop": 6}
SIGNALS = {WAYS["moment"]: signal.SIGKILL, WAYS["stop"]: signal.SIGTERM}
STEPS, RATE = 3, 1e-3
# Weights of two runs that sampled the same, in learning rates.
NEAR = 0.05
# Seconds after which a run hangs, and after which a process that a run has started is left behind.
LIMIT, GRACE = 300.0, 15.0
# Tools and agents write a file, so that a run is killed inside their calls too.
CODE = '''
import contextlib, json, os, time

def score(completion_ids, **_):
    return [float(sum(ids) % 7) for ids in completion_ids]

def note():
    with contextlib.suppress(OSError), open("calls", "a") as file:
        file.write("a call")

def multiply(a: int, b: int) -> int:
    """The product of two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    note()
    return a * b

class Board:
    def reset(self, **row):
        self.looks = 0

    def multiply(self, a: int, b: int) -> int:
        """The product of two numbers.

        Args:
            a: The first number.
            b: The second number.
        """
        note()
        time.sleep(0.02)
        self.looks += 1
        return a * b

    def get_reward(self):
        return float(self.looks)

def solve(base_url, api_key, row):
    import openai
    client, messages, said = openai.OpenAI(base_url=base_url, api_key=api_key), list(row["prompt"]), ""
    for _ in range(2):
        answer = client.chat.completions.create(model="policy", messages=messages, max_tokens=4)
        note()
        said += (text := answer.choices[0].message.content or "")
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "and 3?"}]
    return len(said) % 5
'''
APART = (
    'from lockstep.rollouts.programs.environments import in_process\nboards = in_process("mine.py:Board")\n'
)
# An agent that does not look after its trainer: it lasts longer than a run may.
PROGRAM = """
import json, os, sys, time, urllib.request
body = json.dumps({"messages": json.load(sys.stdin)["prompt"], "max_tokens": 4}).encode()
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
try:
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    with urllib.request.urlopen(urllib.request.Request(url, body, headers)) as answer:
        said = json.load(answer)["choices"][0]["message"]["content"]
except OSError:
    time.sleep(3600)
time.sleep(0.1)
print(json.dumps({"reward": len(said or "") % 5}))
"""
_ACTING = {"model_name_or_path": "../caller", "dataset_name": "messages.jsonl", "max_completion_length": 60}
_AGENT = {"dataset_name": "messages.jsonl", "max_completion_length": 40, "vllm_max_model_length": 256}
# The command of a run, and its fields beside those of all runs; None: it does not have this field.
RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "train": ("grpo", {}),
    "online-dpo": (
        "online-dpo",
        {"per_device_train_batch_size": 2, "max_new_tokens": 4, "max_length": 60, "num_generations": None,
         "max_completion_length": None},
    ),
    "ppo": ("ppo", {"num_generations": 1}),
    "tools": ("grpo", {**_ACTING, "tools": "mine.py:multiply", "max_tool_calling_iterations": 2}),
    "environment": ("grpo", {**_ACTING, "environment_factory": "mine.py:Board"}),
    "apart": ("grpo", {**_ACTING, "environment_factory": "apart.py:boards"}),
    "agent": ("grpo", {**_AGENT, "agent": "mine.py:solve"}),
    "agent-command": ("grpo", {**_AGENT, "agent_command": f"{sys.executable} -I -S program.py"}),
}  # fmt: skip
_SUBREAPER = 36
# Whose engine is called by the clock, and what is equal all the same.
_BY_THE_CLOCK = ("apart", "agent", "agent-command")
_SAMPLED = ("reward", "completions/", "step", "agent/", "environments/")
_CLOCK = ("time/", "push/", "checked/", "step_time")


@dataclass(frozen=True)
class Ended:
    """How a command has ended.

    Attributes:
        code: the exit code; minus the signal's number if it was killed.
        said: what it printed on standard error.
        left: command lines of the processes that it left behind.
    """

    code: int
    said: str
    left: tuple[str, ...] = ()

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
        self.counter, self.model, self.milliseconds = place / "counter", place / "model", 0
        self.home.mkdir()
        self.kept.mkdir()
        self.counter.write_bytes(bytes(8))

    @property
    def count(self) -> int:
        """The operations of the last run. `milliseconds` are its time."""
        return int.from_bytes(self.counter.read_bytes(), sys.byteorder)

    def fork(self, work: Callable[[], int], number: int, way: int, below: str) -> Ended:
        """Run a function in a fork, with its operations below a folder of the run counted."""
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
                os.environ["XDG_CACHE_HOME"] = str(self.home / "cache")
                os.environ["TMPDIR"] = tempfile.tempdir = str(self.home / "tmp")
                os.chdir(self.home)
                library = ctypes.CDLL(str(self.library))
                library.kill_sweep_arm(
                    os.fsencode(self.home / below),
                    os.fsencode(self.counter),
                    ctypes.c_long(number),
                    ctypes.c_int(way),
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
            started, status = time.monotonic(), None
            moment = started + number / 1000 if way in SIGNALS else math.inf
            while status is None and (now := time.monotonic()) < started + LIMIT:
                pid, found = os.waitpid(child, os.WNOHANG)
                status = found if pid else None
                if not pid and now > moment:
                    os.kill(child, SIGNALS[way])
                    moment = math.inf
                time.sleep(0.02)
            if status is None:
                os.killpg(child, signal.SIGKILL)
                status = os.waitpid(child, 0)[1]
            self.milliseconds = int((time.monotonic() - started) * 1000)
            left = left_behind()
            said.seek(0)
            return Ended(os.waitstatus_to_exitcode(status), said.read(), left)

    def _reset(self) -> None:
        with self.counter.open("r+b") as file, mmap.mmap(file.fileno(), 8) as memory:
            memory[:] = bytes(8)

    # ---- the commands -----------------------------------------------------------------------------------------------

    def words(self, *more: str, **fields: Any) -> list[str]:
        """The arguments of a run, with other fields where some are given; None: without this field."""
        usual = {
            "model_name_or_path": self.model, "dataset_name": self.home / "data.jsonl", "eval_size": 2,
            "reward_funcs": f"{self.home / 'mine.py'}:score", "output_dir": self.home / "run", "use_vllm": "false",
            "bf16": "false",
            "max_steps": STEPS, "logging_steps": 1, "save_strategy": "steps", "save_steps": 1, "save_total_limit": 2,
            "learning_rate": RATE, "per_device_train_batch_size": 4, "num_generations": 4, "max_completion_length": 4,
            "report_to": "none",
        }  # fmt: skip
        given = {name: value for name, value in {**usual, **fields}.items() if value is not None}
        return [word for name, value in given.items() for word in (f"--{name}", str(value))] + list(more)

    def main(self, words: list[str], number: int, way: int, below: str = "") -> Ended:
        def work() -> int:
            from lockstep.cli.main import main

            return main(words)

        return self.fork(work, number, way, below)

    def fresh(self) -> None:
        shutil.rmtree(self.home)
        (self.home / "tmp").mkdir(parents=True)
        (self.home / "cache" / "lockstep" / "models").mkdir(parents=True)
        for name, text in (("mine.py", CODE), ("apart.py", APART), ("program.py", PROGRAM)):
            (self.home / name).write_text(text, encoding="utf-8")
        texts = [f"what is {i} + {i}" for i in range(8)]
        chats = [[{"role": "user", "content": text}] for text in texts]
        for name, prompts in (("data.jsonl", texts), ("messages.jsonl", chats)):
            (self.home / name).write_text(
                "".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts), encoding="utf-8"
            )

    def from_kept(self, name: str) -> None:
        shutil.rmtree(self.home)
        shutil.copytree(self.kept / name, self.home)

    def keep(self, name: str) -> None:
        shutil.rmtree(self.kept / name, ignore_errors=True)
        shutil.copytree(self.home, self.kept / name)

    def commands(self) -> dict[str, Command]:
        run = self.home / "run"
        whole = lambda: (run / "summary.json").exists()  # noqa: E731
        made: dict[str, Command] = {}
        for name, (method, fields) in RUNS.items():
            train = partial(self.main, [method, *self.words(**fields)])
            judge = partial(self.judge_run, run, name)
            made[name] = Command(self.fresh, train, judge, whole)
            made[resumed(name)] = Command(partial(self.from_kept, resumed(name)), train, judge, whole)
        return {
            **made,
            "evaluate": Command(
                lambda: self.from_kept("train"),
                lambda number, way: self.main(
                    ["evaluate", *self.words("--model_name_or_path", str(run / f"checkpoint-{STEPS}"))], number, way
                ),
                partial(self.judge_run, run, "train"),
            ),
            "merge": Command(
                lambda: self.from_kept("adapter"),
                lambda number, way: self.main(
                    ["merge", str(run / "checkpoint-1"), str(self.home / "merged")], number, way
                ),
                self.judge_merged,
                lambda: (self.home / "merged").exists(),
            ),
            "packaged": Command(self.fresh, self.convert, self.judge_packaged),
            "serve": Command(self.fresh, self.serve, lambda: None),
        }  # fmt: skip

    def make_references(self, names: set[str]) -> None:
        """Runs without a fault, which others are compared with or begin from."""
        for name, (method, fields) in RUNS.items():
            if not names & {name, resumed(name)} and not (name == "train" and "evaluate" in names):
                continue
            words = [method, *self.words(**fields)]
            self.fresh()
            self._must(name, self.main(words, 0, 0))
            self.keep(name)
            if resumed(name) in names:
                # Killed in its last third: behind at least one checkpoint.
                operations = self.count
                self.fresh()
                self.main(words, operations * 2 // 3, WAYS["kill"])
                assert list(self.home.glob("run/checkpoint-*/trainer_state.json")), (
                    "the first part has no checkpoint"
                )
                self.keep(resumed(name))
        if "merge" in names:
            self.fresh()
            lora = ["--use_peft", "true", "--lora_r", "4", "--eval_size", "0", "--max_steps", "1"]
            self._must("the adapter", self.main(["grpo", *self.words(*lora)], 0, 0))
            self.keep("adapter")
            words = ["merge", str(self.home / "run" / "checkpoint-1"), str(self.home / "merged")]
            self._must("merge", self.main(words, 0, 0))
            self.keep("merged")

        if "packaged" in names:
            self.fresh()
            self._must("packaged", self.convert(0, 0))
            self.keep("packaged")

    def convert(self, number: int, way: int) -> Ended:
        """One step of a run with the packaged model, whose conversion alone is attacked."""
        fields = {
            "model_name_or_path": "smollm2-135m-instruct",
            "max_steps": 1,
            "eval_size": 0,
            "save_strategy": "no",
        }
        shutil.rmtree(self.home / "run", ignore_errors=True)
        return self.main(["grpo", *self.words(**fields)], number, way, "cache/lockstep/models")

    @staticmethod
    def _must(what: str, ended: Ended) -> None:
        assert ended.code == 0, f"{what} without a fault ended with {ended.code}: {ended.said[-2000:]}"

    # ---- what is right ----------------------------------------------------------------------------------------------

    def judge_run(self, run: Path, kept: str) -> str | None:
        whole = self.kept / kept / "run"
        if (run.parent / "run-2").exists():
            return "it trained anew in run-2"
        by_the_clock = kept in _BY_THE_CLOCK
        for name in (f"checkpoint-{STEPS}/model.safetensors", f"checkpoint-{STEPS}/optimizer.pt"):
            if not (run / name).exists():
                return f"{name} is gone"
            if not by_the_clock and (run / name).read_bytes() != (whole / name).read_bytes():
                return f"{name} differs"
        if by_the_clock and (apart := distance(run, whole)) > NEAR:
            return f"the weights are {apart:.2g} apart"
        if curve(run, _SAMPLED if by_the_clock else "") != curve(whole, _SAMPLED if by_the_clock else ""):
            return "metrics.jsonl differs"
        if temporary := [
            path.name for path in (run.parent / "tmp").iterdir() if not path.is_dir() or any(path.iterdir())
        ]:
            return f"{temporary} are left in the temporary folder"
        if (
            missing := {path.name for path in whole.iterdir()}
            - {path.name for path in run.iterdir()}
            - {".lock"}
        ):
            return f"{sorted(missing)} are gone"
        summaries = [
            json.loads((folder / "summary.json").read_text(encoding="utf-8")) for folder in (whole, run)
        ]
        for name in ("eval_reward_before", "eval_reward_after", "steps"):
            if summaries[0][name] != summaries[1][name]:
                return f"{name} of the summary differs"
        from lockstep.watch.receipt import check_receipt

        check_receipt(run / "receipt.jsonl")
        return None

    def judge_packaged(self) -> str | None:
        (whole,) = (self.kept / "packaged" / "cache" / "lockstep" / "models").iterdir()
        there = self.home / "cache" / "lockstep" / "models"
        if left := {path.name for path in there.iterdir() if path.is_file() or any(path.iterdir())} - {
            whole.name
        }:
            return f"{sorted(left)} are left"
        return self.judge_folder(there / whole.name, whole)

    def judge_merged(self) -> str | None:
        return self.judge_folder(self.home / "merged", self.kept / "merged" / "merged")

    @staticmethod
    def judge_folder(there: Path, whole: Path) -> str | None:
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
            "LD_PRELOAD": str(self.library), "KILL_SWEEP_FOLDER": str(self.home),
            "KILL_SWEEP_COUNTER": str(self.counter),
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


def resumed(name: str) -> str:
    """The name of the command that goes on with a run."""
    return "resume" if name == "train" else f"{name}-resume"


def left_behind() -> tuple[str, ...]:
    """Command lines of processes that have lost their parent and do not end by themselves; they are killed."""
    left: dict[int, str] = {}
    until = time.monotonic() + GRACE
    while True:
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        children = Path(f"/proc/self/task/{os.getpid()}/children").read_text(encoding="utf-8").split()
        if not children:
            return tuple(left.values())
        if time.monotonic() > until:
            for child in map(int, children):
                with suppress(OSError):
                    line = (
                        Path(f"/proc/{child}/cmdline").read_text(encoding="utf-8").replace("\0", " ").strip()
                    )
                    left.setdefault(child, line)
                    os.kill(child, signal.SIGKILL)
        time.sleep(0.02)


def curve(run: Path, begin: str | tuple[str, ...] = "") -> list[dict[str, Any]]:
    """The metrics whose names begin so, without the seconds."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [
        {
            name: value
            for name, value in line.items()
            if name.startswith(begin) and not name.startswith(_CLOCK)
        }
        for line in lines
    ]


def distance(run: Path, other: Path) -> float:
    """The mean distance of the weights of the last checkpoints, as a share of the learning rate."""
    from safetensors.torch import load_file

    first, second = (
        load_file(folder / f"checkpoint-{STEPS}" / "model.safetensors") for folder in (run, other)
    )
    apart = sum(float((first[name] - second[name]).abs().sum()) for name in second)
    return apart / sum(tensor.numel() for tensor in second.values()) / RATE


def attacked(command: Command, number: int, way: str) -> tuple[str, str]:
    """Attack a command at one operation, and run it again; returns `same`, `done`, `refused` or `FAILED`, and why."""
    command.prepare()
    first = command.run(number, WAYS[way])
    if first.left:
        return "FAILED", f"the attacked command left processes behind: {first.left}"
    # At its start a command has not yet another way to end by SIGTERM than that of every program.
    stopped = (-signal.SIGTERM, 128 + signal.SIGTERM) if way == "stop" else ()
    if first.code not in (0, -signal.SIGKILL, *stopped) and not first.is_clear:
        return "FAILED", f"the attacked command ended with {first.code}: {first.said[-600:]}"
    if way in ("kill", "torn") and first.code == 0:
        return "FAILED", "it was not killed"
    if first.code == 0 or command.finished():
        wrong = command.judge()
        return ("FAILED", f"it said that it is done: {wrong}") if wrong else ("done", "")
    second = command.run(0, 0)
    if second.left:
        return "FAILED", f"the second command left processes behind: {second.left}"
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
    # Processes that lose their parent become children of this one.
    ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)
    import_all(work)
    work.make_references(set(names))
    commands, cases, operations = work.commands(), [], {}
    for name in names:
        commands[name].prepare()
        work._must(name, commands[name].run(0, 0))
        if wrong := commands[name].judge():
            print(f"FAILED {name}: two unharmed runs differ: {wrong}", flush=True)
            return 1
        operations[name], moments = work.count, work.milliseconds
        for way in ways:
            every = range(1, work.count + 1)
            cases += [(name, n * moments // work.count if WAYS[way] in SIGNALS else n, way) for n in every]
    random.Random(seed).shuffle(cases)
    # Servers take minutes: few of each sample.
    drawn = [case for case in cases if case[0] != "serve"][begin : begin + most]
    drawn += [case for case in cases if case[0] == "serve"][: max(most // 30, 1)]
    found: Counter[tuple[str, str, str]] = Counter()
    failed = 0
    for index, (name, number, way) in enumerate(drawn):
        if time.monotonic() - started > seconds:
            print(
                f"the time is over after {index} of {len(drawn)}: go on with --begin {begin + index}",
                flush=True,
            )
            break
        verdict, said = attacked(commands[name], number, way)
        found[name, way, verdict] += 1
        if verdict in ("FAILED", "refused"):
            failed += verdict == "FAILED"
            print(f"{verdict} {name} {way} {number}: {said}", flush=True)
        if index % 100 == 99:
            print(f"{index + 1} of {len(drawn)}: {index + 1 - failed} right", flush=True)
    ran = found.total()
    print(f"\n{'command':20} {'way':8} {'same':>6} {'done':>6} {'refused':>8} {'FAILED':>7} {'of':>6}")
    for name in names:
        for way in ways:
            counts = [found[name, way, verdict] for verdict in ("same", "done", "refused", "FAILED")]
            if sum(counts):
                print(
                    f"{name:20} {way:8} {counts[0]:6} {counts[1]:6} {counts[2]:8} {counts[3]:7} {operations[name]:6}"
                )
    print(f"{ran - failed} of {ran} cases were right, of {len(cases)} cases; seed {seed}", flush=True)
    return int(bool(failed) or not ran)


def import_all(work: Sweep) -> None:
    """Import what the commands import, and make the tiny model."""
    sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]
    os.environ |= {"TOKENIZERS_PARALLELISM": "false", "TQDM_DISABLE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    import caller
    import datasets
    import openai
    import peft
    import tiny
    import tiny_package
    import torch
    import transformers.trainer

    import lockstep
    import lockstep.run.run  # noqa: F401  for its modules

    torch.set_num_threads(1)
    _ = datasets, openai, peft, transformers.trainer, lockstep.GRPOTrainer, lockstep.GRPOConfig
    if not work.model.exists():
        tiny.save_model(work.model)
        caller.save_caller(work.model.with_name("caller"))
        tiny_package.save_package(work.model.with_name("site"))
    sys.path.insert(0, str(work.model.with_name("site")))


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
    known = [
        *(both for name in RUNS for both in (name, resumed(name))),
        "evaluate",
        "merge",
        "packaged",
        "serve",
    ]
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
