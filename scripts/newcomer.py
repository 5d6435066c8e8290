#!/usr/bin/env python3
"""Plays somebody who installs Lockstep for the first time: wheel, fresh environment, and every command of README's "Start here".

    .venv/bin/python scripts/newcomer.py              (make newcomer: installs everything into an environment of its own)
    .venv/bin/python scripts/newcomer.py --reuse      (CI: installs only the wheel; heavy packages are those of this environment)

Each command runs on a terminal of its own, in an empty folder without the clone. Printed are its exit code, wall seconds, CPU
seconds, and the longest time without any output, with the last words before it where it is long. Runs are shortened to `--steps`
steps of 16 completions. Exit code 1: a command ended otherwise than it should, or one that only answers took more than one CPU
second.
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
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# CPU seconds that a command may take if it only answers.
ANSWER = 1.0
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
    """

    words: str
    code: int = 0
    answers: bool = False
    says: str = ""


def steps(count: int) -> list[Step]:
    """The commands in the order of README.md, and the mistakes that people make on the way."""
    short = f"--max_steps {count} --save_steps {count} --eval_size 4 --per_device_train_batch_size 16"
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
        ),
        Step("init mine", answers=True, says="wrote mine/config.yaml"),
        Step(f"grpo --config mine/config.yaml {short}", says="checkpoint-"),
        Step("compare runs/arithmetic runs/mine", answers=True, says="settings that differ"),
        Step("rollouts runs/mine --best < /dev/null", says="reward"),
    ]


def main() -> int:
    """Install, run everything, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--reuse", action="store_true", help="take the heavy packages from this environment")
    parser.add_argument(
        "--extra", default="demo", help="extra of the wheel to install: demo, or vllm on a machine with a GPU"
    )
    parser.add_argument("--steps", type=int, default=2)
    asked = parser.parse_args()
    failed = []
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        start = time.monotonic()
        lockstep = install(home, asked.extra, reuse=asked.reuse)
        print(
            f"{time.monotonic() - start:8.1f} s  wheel and environment {'(reused)' if asked.reuse else ''}", flush=True
        )
        print(f"{'exit':>4}  {'wall s':>7}  {'CPU s':>6}  {'silent s':>8}  command", flush=True)
        for step in steps(asked.steps):
            code, wall, cpu, silent, said, before = run(f"{shlex.quote(str(lockstep))} {step.words}", home)
            print(f"{code:4d}  {wall:7.1f}  {cpu:6.2f}  {silent:8.1f}  lockstep {step.words}", flush=True)
            if silent > SILENT:
                print(f"{'':>29}silent after: {before}", flush=True)
            wrong = [f"exit code {code} instead of {step.code}"] if code != step.code else []
            wrong += [f"{cpu:.1f} CPU s for an answer"] if step.answers and cpu > ANSWER else []
            wrong += [f"it does not say {step.says!r}"] if step.says not in said else []
            if wrong:
                failed.append(step.words)
                print(f"      {'; '.join(wrong)}. Its last lines:\n{said[-2000:]}", flush=True)
    print(
        f"{len(failed)} of {len(steps(asked.steps))} commands failed" if failed else "every command did what it should"
    )
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
    venv.create(made, with_pip=True)
    own = [str(made / "bin" / "python"), "-m", "pip", "install", "--quiet"]
    if reuse:
        site = next((made / "lib").glob("python*")) / "site-packages"
        # A line of a .pth file adds a folder at the end of the path, without the .pth files in it: so not this clone's source.
        (site / "heavy_packages.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
        subprocess.run([*own, "--no-deps", "--force-reinstall", str(wheel)], check=True)
    else:
        subprocess.run([*own, f"{wheel}[{extra}]"], check=True)
    return made / "bin" / "lockstep"


def run(command: str, folder: Path) -> tuple[int, float, float, float, str, str]:
    """Run a command on a terminal of its own.

    Returns:
        Its exit code, wall seconds, CPU seconds with all its children, the longest seconds without output, its output, and the end
        of the output before the longest silence.
    """
    place = folder / "work"
    place.mkdir(exist_ok=True)
    terminal, inside = pty.openpty()
    clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    process = subprocess.Popen(
        ["bash", "-c", command], cwd=place, stdin=inside, stdout=inside, stderr=inside,
        env={**clean, "COLUMNS": "100", "LINES": "40", "TERM": "xterm-256color"}, start_new_session=True,
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
