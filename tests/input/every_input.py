"""Inputs of every field and command by a seed,
and what becomes of each: the property of `test_every_input.py`.

A case sets one field, or two, of a command that is right without them: by words, in a YAML or JSON file, or from
Python. Its values follow from the field's declared type: right ones, edges, other types, and what a user mistypes.
Where a model would be loaded, the case ends with `Accepted`.

Comes from: the fields of each command, as `--help` lists them. Goes to: an `Outcome`.
"""

from __future__ import annotations

import contextlib
import datetime
import decimal
import functools
import json
import math
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lockstep.cli import help as of_commands
from lockstep.cli.main import TRAINING, main
from lockstep.errors import LockstepError

fields_of = functools.cache(of_commands.fields_of)

LONGEST = 500
# CPU seconds of a check, beside the import of libraries, which a process does once.
LATE = 5.0
HANGS = 60
FIELDS = (*TRAINING, "evaluate", "gateway", "verify")
CONFIGS = dict(zip(TRAINING, ("GRPO", "RLOO", "OnlineDPO", "ReinforcePP", "PPO"), strict=True))

# Commands without fields: their options by type. A number is the place of a word.
OPTIONS = {
    "serve": {
        "0": "model", "--host": "text", "--port": "int", "--key_file": "path", "--dtype": "text",
        "--quantization": "text",
        "--max_model_len": "int", "--max_num_seqs": "int", "--tensor_parallel_size": "int",
        "--data_parallel_size": "int", "--gpu_memory_utilization": "float",
    },
    "audit": {
        "0": "path", "--model": "model", "--temperature": "float", "--top_k": "int", "--top_p": "float",
        "--min_p": "float", "--repetition_penalty": "float", "--dtype": "text", "--earlier": "model",
        "--url": "text",
        "--max_tokens": "int", "--json": "path",
    },
    "merge": {"0": "path", "1": "path", "--base": "model"},
    "init": {"0": "path"},
    "report": {"0": "path", "--output": "path"},
    "compare": {"0": "path", "1": "path"},
    "rollouts": {"0": "path", "--step": "int", "--text": "text"},
    "completion": {"0": "text"},
    "demo": {"--recipe": "text", "--config": "path"},
    "grpo": {"--recipe": "text", "--config": "path"},
}  # fmt: skip


def _each(text: str) -> list[str]:
    return text.split()


PATHS = [
    "", " ", "a\0b", "\udcff", "a" * 300, "a/" * 3000, "a\nb", "\x1b[31m",
    *_each(". .. nowhere nowhere/x data.jsonl /dev/null /dev/null/x /dev/full"),
    *_each("/proc/1/mem ~ ~nobody/x [1] --x - x.json"),
]  # fmt: skip
WRONG = ["", " ", "\udcff", "a\0b", *_each("x None null [1] {} nan inf -inf ä ٣ --seed -")]
WORDS = {
    "int": [
        *WRONG, *_each("0 1 2 3 -1 010 0x10 1_000 1:30 1.5 2.0 1e3 true 100000000 2147483648 9223372036854775808"),
        "1" * 30, "1" * 5000,
    ],
    "float": [*WRONG, *_each("0 1 0.5 -0.5 2 1e3 1e30 1e308 1e400 1e-30 -1 1:30 0,5 5% true 1_0.5")],
    "bool": [*WRONG, *_each("true False yes no on off 1 0 2 T")],
    "choice": WRONG,
    "text": [
        *WRONG, *_each("<b> ~ $HOME /proc/1/mem /dev/full ../.. {broken true 7 1e3 none http://x file.py:f a=b"),
        "a" * 5000, "a\nb", "\x1b[31mred", '{"a": 1}', '{"a": NaN}', "[1, 2", "a b",
    ],
    "other": [*WRONG, "true", "1", '{"a": 1}'],
}  # fmt: skip
YAML = [
    *_each("~ null [] {} [~] [[1]] 010 1:30 1e3 1e-7 0x1F 0o17 0b11 1_000 2026-11-28 on off yes no n True FALSE .nan"),
    *_each(".inf -.Inf 1e400 '7' \"0.5\" *a = +7 -0 7. .5 2.0 1.5 12e03 190:20:30 0.0.1 1,000 ' 0777 08 1__0"),
    "", "[1, 2]", "{a: 1}", "{a: ~}", "2026-11-28 10:00:00", "&a 3", "!!str 3", "!!int '3'", "!!float 3",
    "!!binary aGk=", "!!set {a}", "|\n  a\n  b", '"\\ud800"', "x # y", "? a", "- a", "9" * 20, "{<<: {a: 1}}",
]  # fmt: skip
JSON = [
    *_each("null 0 1 -1 1.5 2.0 1e3 1E400 NaN -Infinity true false [] {} [null] [[1]] 01"), "1" * 30, "[1, 2]",
    *('""', '"7"', '"x"', '"true"', '{"a": 1}', '{"a": null}', '{"a": [1e-7]}', '"\\ud800"', '"a\\u0000b"'),
]  # fmt: skip


def objects() -> list[Any]:
    """Values from Python."""
    return [
        None, True, False, 0, 1, -1, 2, 3, 1.5, 2.0, math.nan, math.inf, -math.inf, 1e308, 5e-324, 2**31, 2**63, 10**30,
        -(10**30), "", "x", "false", "1", "1e-3", "\ud800", "a" * 5000, b"x", [], [1], ["x"], [None], [[1]], (), (1,),
        {}, {"a": 1}, {1: 2}, {"x"}, np.float32(0.5), np.int64(3), np.bool_(True), np.nan, np.array([1, 2]),
        np.array(1), torch.tensor(3), torch.float32, Path("x"), decimal.Decimal("0.5"), datetime.date(2026, 11, 28),
        object(), int, len, 1j, iter([1]), Ellipsis,
    ]  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A command, a way to give fields, and what is given. From Python a value is an object, else its text."""

    command: str
    way: str
    given: tuple[tuple[str, Any], ...]

    def __str__(self) -> str:
        values = "  ".join(f"{name} = {value!r:.90}" for name, value in self.given)
        return f"{self.command} [{self.way}] {values}"


@dataclass
class Outcome:
    """What became of a case.

    Attributes:
        kind: accepted, refused, traceback, hangs, or exit N.
        said: the lines on standard error and output, or the error's text.
        seconds: CPU seconds.
        faults: why the property does not hold.
    """

    kind: str
    said: str
    seconds: float
    faults: list[str] = field(default_factory=list)


class Accepted(BaseException):
    """A case has come to where a model is loaded."""


class Hangs(BaseException):
    """A case has not ended."""


def _accept(*_: Any, **__: Any) -> Any:
    raise Accepted


class Place:
    """A folder with a tiny model and data, in which cases run one after the other.

    Args:
        folder: an empty folder.
    """

    def __init__(self, folder: Path) -> None:
        import tiny

        self.folder = folder
        self.model = str(tiny.save_model(folder / "model"))
        self.data = folder / "data.jsonl"
        self.data.write_text(
            "".join(f'{{"prompt": "what is {i} + {i}"}}\n' for i in range(8)), encoding="utf-8"
        )
        (folder / "agent.py").write_text(
            "def agent(base_url, api_key, row):\n    return 1.0\n", encoding="utf-8"
        )
        self.work = folder / "work"

    def base(self, command: str) -> dict[str, Any]:
        """Fields with which the command is right."""
        if command == "verify":
            return {"model": self.model, "use_vllm": False, "bf16": False}
        right = {
            "model_name_or_path": self.model, "dataset_name": str(self.data), "reward_funcs": ["length"],
            "output_dir": "run", "use_vllm": False, "bf16": False, "max_steps": 1, "save_strategy": "no",
            "per_device_train_batch_size": 4, "report_to": "none",
        }  # fmt: skip
        if command == "online-dpo":
            return {**right, "max_new_tokens": 4}
        if command == "evaluate":
            right["eval_size"] = 2
        if command == "gateway":
            right["agent"] = f"{self.folder / 'agent.py'}:agent"
            del right["reward_funcs"]
        return {**right, "num_generations": 4, "max_completion_length": 4}

    def words(self, case: Case) -> list[str]:
        """The command line of a case that is no call from Python; writes its config file."""
        if case.way == "options":
            given = dict(case.given)
            right = {
                "serve": [self.model], "audit": [str(self.data), f"--model={self.model}"],
                "merge": ["adapter", "merged"], "init": ["new"], "report": ["run"], "compare": ["run", "run"],
                "rollouts": ["run"], "completion": ["bash"],
            }.get(case.command, [])  # fmt: skip
            words = [given.pop(str(i), word) for i, word in enumerate(right)]
            more = ["--dry_run"] if case.command in ("serve", "demo", "grpo") else []
            return [case.command, *words, *more, *(f"{name}={value}" for name, value in given.items())]
        base = {n: v for n, v in self.base(case.command).items() if n not in dict(case.given)}
        words = [case.command]
        for name, value in base.items():
            words += [f"--{name}", *map(str, value if isinstance(value, list) else [value])]
        if case.way == "words":
            return words + [f"--{name}={value}" for name, value in case.given]
        if case.way == "YAML":
            text = "".join(f"{name}: {value}\n" for name, value in case.given)
        else:
            text = "{" + ", ".join(f"{json.dumps(name)}: {value}" for name, value in case.given) + "}"
        Path("c.yaml").write_text(text, encoding="utf-8", errors="surrogatepass")
        return [*words, "--config", "c.yaml"]

    def run(self, case: Case) -> Outcome:
        """Run a case and judge it."""
        shutil.rmtree(self.work, ignore_errors=True)
        self.work.mkdir()
        (self.work / "run").mkdir() if case.way == "options" else None
        with contextlib.chdir(self.work), seams(), _captured() as said:
            start = time.process_time()
            text = ""
            try:
                with _in_time():
                    code = self._call(case) if case.way == "Python" else main(self.words(case))
                kind = "accepted" if code == 0 else "refused" if code == 2 else f"exit {code}"
            except Accepted:
                kind = "accepted"
            except Hangs:
                kind = "hangs"
            except LockstepError as error:
                kind, text = "refused", f"lockstep: {error}"
            except SystemExit as stop:
                kind = f"SystemExit {stop.code}"
            except Exception:  # noqa: BLE001
                kind, text = "traceback", traceback.format_exc(limit=-4)
            seconds = time.process_time() - start
        found = Outcome(kind, text or said[0], seconds)
        found.faults = faults_of(case, found)
        return found

    def _call(self, case: Case) -> int:
        import lockstep

        name = CONFIGS[case.command]
        base = self.base(case.command)
        given = {n: base.pop(n) for n in ("model_name_or_path", "dataset_name", "reward_funcs")}
        config = getattr(lockstep, f"{name}Config")(**{**base, **dict(case.given)})
        from datasets import Dataset

        data = Dataset.from_list([{"prompt": f"what is {i}"} for i in range(8)])
        getattr(lockstep, f"{name}Trainer")(
            given["model_name_or_path"],
            reward_funcs=lambda completions, **_: [0.0 for _ in completions],
            args=config,
            train_dataset=data,
        )
        return 0


@contextlib.contextmanager
def seams() -> Iterator[None]:
    """Within the block, a command ends with `Accepted` where it would load a model or start a server."""
    from lockstep.extras.verify import stage
    from lockstep.models import adapters, policy
    from lockstep.run.trainers import online

    places: list[tuple[Any, str]] = [
        (adapters, "load_adapted"),
        (online, "open_policy"),
        (policy, "load_policy"),
        (stage, "open_stage"),
    ]
    kept = [(where, name, getattr(where, name)) for where, name in places]
    try:
        for where, name, _ in kept:
            setattr(where, name, _accept)
        yield
    finally:
        for where, name, value in kept:
            setattr(where, name, value)


@contextlib.contextmanager
def _captured() -> Iterator[list[str]]:
    """Collect what is written to the descriptors 1 and 2, in one text."""
    said: list[str] = []
    sys.stdout.flush()
    sys.stderr.flush()
    with tempfile.TemporaryFile() as file:
        kept = [os.dup(number) for number in (1, 2)]
        try:
            for number in (1, 2):
                os.dup2(file.fileno(), number)
            yield said
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            for number, copy in zip((1, 2), kept, strict=True):
                os.dup2(copy, number)
                os.close(copy)
            file.seek(0)
            said.append(file.read().decode(errors="backslashreplace"))


@contextlib.contextmanager
def _in_time() -> Iterator[None]:
    def late(*_: Any) -> None:
        raise Hangs

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(HANGS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


# What says how far a command has come.
PROGRESS = re.compile(r".*(…$| · \d+ s$)|notes and warnings of libraries|.*: \d+ s$")
OURS = re.compile(r"lockstep[ :]|Lockstep")


def faults_of(case: Case, found: Outcome) -> list[str]:
    """Why the property does not hold; empty: it holds."""
    faults = []
    lines = [line for line in found.said.splitlines() if line.strip() and not PROGRESS.match(line)]
    if found.kind not in ("accepted", "refused"):
        faults.append(found.kind)
    if found.seconds > LATE:
        faults.append("late")
    names = [name for name, _ in case.given]
    if found.kind == "refused":
        last = lines[-1] if lines else ""
        if not last.startswith("lockstep: "):
            faults.append("not one sentence")
        elif len(last) - len("lockstep: ") > LONGEST:
            faults.append("long")
        if case.way != "options" and not any(said_in(name, value, last) for name, value in case.given):
            faults.append("names no field")
    if found.kind in ("accepted", "refused"):
        # The lines of such a command may be its result.
        noise = [line for line in lines if not OURS.match(line)] if case.way != "options" else []
        faults += [f"noise: {line:.150}" for line in noise[:1]]
        if len(set(lines)) < len(lines):
            faults.append("said twice")
    if found.kind == "accepted" and len(names) == 1 and case.way != "options" and (why := wrong_type(case)):
        faults.append(f"taken: {why}")
    return faults


# How a sentence names what a field holds.
CALLED = {
    "reward_funcs": "reward function", "tools": "tool ", "environment_factory": "environment ",
    "dataset_name": "data ",
    "model_name_or_path": "model ", "model": "model ",
    "dataset_test_split": " split ", "dataset_train_split": " split ",
}  # fmt: skip


def said_in(name: str, value: Any, sentence: str) -> bool:
    """Whether a sentence names a field, its short name, or a value of it that is no everyday word."""
    if (
        re.search(rf"\b{name}\b|config file c.yaml is not YAML", sentence)
        or CALLED.get(name, name) in sentence
    ):
        return True
    return len(str(value)) > 3 and str(value).strip("'\"") in sentence


def wrong_type(case: Case) -> str | None:
    """Why a single value cannot be one of its field; None: it may be."""
    name, value = case.given[0]
    entry = fields_of(case.command)[name]
    kind = entry["type"]
    if case.way == "words":
        try:
            if kind == "int":
                int(value)
            elif kind == "float" and math.isnan(float(value)):
                return "NaN"
            elif kind == "bool" and value.lower() not in [
                "true",
                "false",
                "yes",
                "no",
                "t",
                "f",
                "y",
                "n",
                "1",
                "0",
            ]:
                return "no truth value"
            elif kind == "choice" and value not in entry["choices"]:
                return "no choice"
        except ValueError:
            return f"no {kind}"
    return None


def ways(command: str) -> tuple[str, ...]:
    return ("words", "YAML", "JSON", *(["Python"] if command in CONFIGS else []))


def values(command: str, name: str, way: str) -> list[Any]:
    """All values of a field, in one way."""
    entry = fields_of(command)[name]
    if way == "Python":
        return [*objects(), *entry.get("choices", ())]
    if way == "YAML":
        return [*YAML, *entry.get("choices", ())]
    if way == "JSON":
        return [*JSON, *map(json.dumps, entry.get("choices", ()))]
    found = [*WORDS[entry["type"]]]
    for choice in entry.get("choices", ()):
        found += [choice, choice.upper(), choice[:-1]]
    if "default" in entry:
        found.append(entry["default"])
    return found


def options(command: str) -> list[Case]:
    """Every value of every option of a command."""
    return [
        Case(command, "options", ((name, value),))
        for name, kind in OPTIONS[command].items()
        for value in (PATHS if kind in ("path", "model") else WORDS[kind])
    ]


def singles(command: str) -> list[Case]:
    """Every value of every field in every way."""
    return [
        Case(command, way, ((name, value),))
        for name in fields_of(command)
        for way in ways(command)
        if way != "Python" or name in config_fields(command)
        for value in values(command, name, way)
    ]


@functools.cache
def config_fields(command: str) -> set[str]:
    import dataclasses

    import lockstep

    return {f.name for f in dataclasses.fields(getattr(lockstep, f"{CONFIGS[command]}Config")) if f.init}


def pairs(command: str, draw: random.Random, count: int) -> list[Case]:
    """Pairs of fields with values that are mostly right alone."""
    names = list(fields_of(command))
    found = []
    for _ in range(count):
        way = draw.choice(("words", "YAML", "JSON"))
        first, second = draw.sample(names, 2)
        found.append(Case(command, way, tuple((n, likely(command, n, way, draw)) for n in (first, second))))
    return found


def likely(command: str, name: str, way: str, draw: random.Random) -> str:
    """A value that the field may well take, and sometimes another."""
    entry = fields_of(command)[name]
    if draw.random() < 0.15:
        return draw.choice(values(command, name, way))
    kind = entry["type"]
    text = draw.choice(
        entry["choices"] if kind == "choice" else
        ["true", "false"] if kind == "bool" else
        ["0", "1", "2", "3", "4", "8", "16", "100"] if kind == "int" else
        ["0", "0.1", "0.5", "0.9", "1", "1.5", "2", "10"] if kind == "float" else
        ["x", '{"a": 1}', "a,b", "1", "run", "/tmp", entry.get("default", "y")]
    )  # fmt: skip
    if way == "words" or (kind in ("bool", "int", "float") and way == "JSON"):
        return text
    return json.dumps(text) if way == "JSON" or kind == "text" else text
