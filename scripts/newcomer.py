#!/usr/bin/env python3
"""Plays somebody who installs Lockstep for the first time: wheel, fresh environment, and every command of README's "Start here".

    .venv/bin/python scripts/newcomer.py              (make newcomer: installs everything into an environment of its own)
    .venv/bin/python scripts/newcomer.py --reuse      (installs only the wheel; heavy packages are those of this environment)
    .venv/bin/python scripts/newcomer.py --short      (.ci/run: as --reuse, and in a minute)

Each command runs on a terminal of its own, in an empty folder without the clone. Printed are its exit code, wall seconds, CPU
seconds, and the longest time without any output, with the last words before it where it is long. Runs are shortened to `--steps`
steps of 16 completions. Exit code 1: a command did not end as it should, one that only answers took more than one CPU second, or
README's "Start here" has a command that is not typed.

`--short` takes about 60 CPU seconds. Each run takes one step of 8 completions, with one thread and without torch's compiler. The
second run trains a tiny model and keeps no checkpoint. The commands that load the model once more are named and left out. An
answer may take 3 CPU seconds: more than a slow machine needs, and less than the imports of torch and transformers.
"""

from __future__ import annotations

import argparse
import os
import pty
import re
import resource
import select
import shlex
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

ROOT = Path(__file__).resolve().parent.parent
# CPU seconds that a command may take if it only answers, and with `--short`.
ANSWER, SHORT_ANSWER = 1.0, 3.0
# Environment of the commands with `--short`, as in the tests. Threads that wait for each other use the processor too, and the
# compiler takes up to 10 CPU seconds.
SHORT_SETTINGS = {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}
# What moves the cursor and sets colors on a terminal.
CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
# Time limit in seconds of one command.
LIMIT = 900.0
# Seconds of silence after which the words before it are printed.
SILENT = 5.0


@dataclass(frozen=True)
class Step:
    """One command of the newcomer, without the leading `lockstep`.

    Attributes:
        code: its exit code.
        answers: whether it only answers, so that it may not import anything heavy.
        says: text that must be among its output.
        long: whether `--short` leaves it out, because it loads the model once more.
    """

    words: str
    code: int = 0
    answers: bool = False
    says: str = ""
    long: bool = False


def steps(count: int, *, tiny: bool = False) -> list[Step]:
    """The commands in the order of README.md, and the mistakes that people make on the way.

    Args:
        count: steps of each run.
        tiny: whether the second run trains the model of the folder `tiny`, without a checkpoint.
    """
    few = f"--max_steps {count} --eval_size {2 if tiny else 4} --per_device_train_batch_size {8 if tiny else 16}"
    short = f"{few} --save_steps {count}"
    own = f"{few} --model_name_or_path tiny --save_strategy no" if tiny else short
    return [
        Step("--version", answers=True, says="lockstep "),
        Step("", answers=True, says="what to do next"),
        Step("--help", answers=True, says="usage: lockstep COMMAND"),
        Step("grpo --help", answers=True, says="--reward_funcs"),
        Step("grpo --learning_rat 1e-5", code=2, answers=True, says="did you mean 'learning_rate'?"),
        Step("grpo --recipe arithmetc", code=2, answers=True, says="did you mean 'arithmetic'?"),
        Step(f"demo {short}", says="lockstep rollouts runs/arithmetic"),
        Step("verify --explain runs/arithmetic", answers=True, says="tokens checked"),
        Step("verify --receipt runs/arithmetic/receipt.jsonl", answers=True, says="PASS"),
        Step(
            "evaluate --recipe arithmetic --eval_size 4 --model_name_or_path runs/arithmetic/checkpoint-" + str(count),
            says="held-out reward",
            long=True,
        ),
        Step("init mine", answers=True, says="wrote mine/config.yaml"),
        Step(f"grpo --config mine/config.yaml {own}", says="runs/mine"),
        Step("compare runs/arithmetic runs/mine", answers=True, says="settings that differ"),
        Step("rollouts runs/mine --best < /dev/null", says="reward"),
    ]


def start_here() -> list[str]:
    """The commands of README's "Start here", without the leading `lockstep`."""
    section = (ROOT / "README.md").read_text().partition("## Start here")[2].partition("\n## ")[0]
    blocks = re.findall(r"^```bash\n(.*?)^```", section, re.M | re.S)
    lines = [shlex.split(line, comments=True) for line in "".join(blocks).splitlines()]
    return [" ".join(words[1:]) for words in lines if words[:1] == ["lockstep"]]


def main() -> int:
    """Install, run everything, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--reuse", action="store_true", help="take the heavy packages from this environment")
    parser.add_argument(
        "--extra", default="demo", help="extra of the wheel to install: demo, or vllm on a machine with a GPU"
    )
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--short", action="store_true", help="as --reuse, in a minute")
    asked = parser.parse_args()
    reuse, limit = asked.reuse or asked.short, SHORT_ANSWER if asked.short else ANSWER
    every = steps(1, tiny=True) if asked.short else steps(asked.steps)
    settings = SHORT_SETTINGS if asked.short else {}
    typed = [step for step in every if not (asked.short and step.long)]
    failed = [words for words in start_here() if not any(step.words.startswith(words) for step in typed)]
    for words in failed:
        print(f"README's \"Start here\" has 'lockstep {words}', which this script does not type")
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        (home / "work").mkdir()
        start = time.monotonic()
        lockstep = install(home, asked.extra, reuse=reuse)
        if asked.short:
            make_tiny(home / "work" / "tiny")
        print(f"{time.monotonic() - start:8.1f} s  wheel and environment {'(reused)' if reuse else ''}", flush=True)
        print(f"{'exit':>4}  {'wall s':>7}  {'CPU s':>6}  {'silent s':>8}  command", flush=True)
        for step in typed:
            code, wall, cpu, silent, said, before = run(
                f"{shlex.quote(str(lockstep))} {step.words}", home / "work", settings
            )
            print(f"{code:4d}  {wall:7.1f}  {cpu:6.2f}  {silent:8.1f}  lockstep {step.words}", flush=True)
            if silent > SILENT:
                print(f"{'':>29}silent after: {before}", flush=True)
            wrong = [f"exit code {code} instead of {step.code}"] if code != step.code else []
            wrong += [f"{cpu:.1f} CPU s for an answer"] if step.answers and cpu > limit else []
            wrong += [f"it does not say {step.says!r}"] if step.says not in said else []
            if wrong:
                failed.append(step.words)
                print(f"      {'; '.join(wrong)}. Its last lines:\n{said[-2000:]}", flush=True)
    for step in every:
        if step not in typed:
            print(f"left out: lockstep {step.words}")
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(f"{used.ru_utime + used.ru_stime:.1f} CPU s in all")
    print(f"{len(failed)} commands failed" if failed else "every command did what it should")
    return 1 if failed else 0


def install(home: Path, extra: str, *, reuse: bool) -> Path:
    """Build the wheel and install it into a fresh environment; returns its `lockstep` command."""
    dist, made = home / "dist", home / "env"
    # setuptools writes beside the sources and takes what it finds there, so it gets a copy of them.
    copy = home / "clone"
    for name in ("src", "recipes", "examples"):
        aside = shutil.ignore_patterns("__pycache__", "*.egg-info")
        shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=aside)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(dist)]
    subprocess.run([*pip, *(["--no-build-isolation"] if reuse else []), str(copy)], check=True)
    (wheel,) = dist.glob("*.whl")
    venv.create(made, with_pip=not reuse)
    python = str(made / "bin" / "python")
    if reuse:
        # This environment's pip installs into the other one, which has none.
        own = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index"]
        subprocess.run([*own, str(wheel)], check=True)
        site = next((made / "lib").glob("python*")) / "site-packages"
        # A line of a .pth file adds a folder at the end of the path, without the .pth files in it: so not this clone's source.
        (site / "heavy_packages.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    else:
        subprocess.run([python, "-m", "pip", "install", "--quiet", f"{wheel}[{extra}]"], check=True)
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    where = [python, "-c", "import lockstep; print(lockstep.__file__)"]
    place = subprocess.run(where, check=True, capture_output=True, text=True, env=clean, cwd=home).stdout
    if not place.startswith(str(made)):
        raise RuntimeError(f"the new environment imports lockstep from {place.strip()}, not from the wheel")
    return made / "bin" / "lockstep"


def make_tiny(folder: Path) -> None:
    """Save the tiny model of the tests, with its tokenizer."""
    make = "import sys, pathlib, tiny; tiny.save_model(pathlib.Path(sys.argv[1]))"
    subprocess.run([sys.executable, "-c", make, str(folder)], cwd=ROOT / "tests", check=True, capture_output=True)


def run(command: str, folder: Path, settings: Mapping[str, str]) -> tuple[int, float, float, float, str, str]:
    """Run a command on a terminal of its own, with `settings` in its environment.

    Returns:
        Its exit code, wall seconds, CPU seconds with all its children, the longest seconds without output, its output, and the end
        of the output before the longest silence.
    """
    terminal, inside = pty.openpty()
    clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
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
        if now - start > LIMIT:
            os.killpg(process.pid, 9)
    code = process.wait()
    os.close(terminal)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    seen = CONTROL.sub("", said[:before_silence].decode(errors="replace"))
    return code, time.monotonic() - start, cpu, silent, said.decode(errors="replace"), seen.strip()[-100:]


if __name__ == "__main__":
    sys.exit(main())
