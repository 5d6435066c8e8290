"""What runs at night, in three hours: whole self-tests, and a sample of what is too long for CI. `make nightly`

| part | what runs |
|---|---|
| self-test | `lockstep verify --self-test` on the packaged model, in float32 and in bfloat16, whole |
| vLLM for GPUs | vLLM's second model runner on the pretend GPU: a server, `verify`, and a whole self-test of a tiny model |
| inputs | thousands of inputs of every field and command (`tests/input/test_every_input.py`), drawn by the seed |
| kill sweep | a sample of the cases of `scripts/kill_sweep.py`: commands that are killed at one of their file operations |
| release tests | the tests marked `release`, in an order that the seed draws, until the time of this part is over |
| mutations | the cases of `scripts/mutation_cases.py`, in an order that the seed draws, until the three hours are over |

    --seed N     draws the same sample again (default: the date, for example 20261126; each night has another sample)
    --hours H    limit in all (3)
    --only WORD  only the parts whose name contains WORD

The program prints one table at its end. Exit code 1: something failed, or a part ran nothing. Two programs run at a
time, with one thread each. What has not ended when its time is over is killed. It then counts as not run; a self-test
counts as failed.
"""  # noqa: E501

from __future__ import annotations

import argparse
import datetime
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
MODEL = "smollm2-135m-instruct"
PYTHON = Path(sys.executable)
# Programs that run at a time.
LANES = 2
# Lines of a failed program that are printed.
SHOWN = 40


@dataclass(frozen=True)
class Result:
    """One row of the table.

    Attributes:
        ran, of: how many tests, faults or cases were judged, and how many there are.
        failed: how many of those that ran failed.
        said: why the part failed as a whole, or empty.
    """

    part: str
    ran: int
    of: int
    seconds: float
    failed: int = 0
    said: str = ""

    @property
    def passed(self) -> bool:
        return self.ran > 0 and not self.failed and not self.said

    def row(self) -> str:
        state = (
            "passed" if self.passed else self.said or (f"{self.failed} FAILED" if self.ran else "NOTHING RAN")
        )
        return f"{self.part:26}  {self.ran:5d} of {self.of:5d}  {self.seconds:7.0f} s  {state}"


@dataclass(frozen=True)
class Part:
    """A part of the night.

    Attributes:
        share: the part must end after this share of the night.
        run: gets the seed and the time of its end, by the monotonic clock.
    """

    name: str
    share: float
    run: Callable[[int, float], list[Result]]


def run_program(
    command: Sequence[object], until: float, log: Path, root: Path = ROOT, env: Mapping[str, str] = os.environ
) -> int | None:
    """Run a program with one thread.

    Returns its exit code; None: its time was over, and it was killed with its children.
    """
    settings = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "VLLM_LOGGING_LEVEL": "ERROR"}
    with log.open("w", encoding="utf-8") as output:
        process = subprocess.Popen(
            [str(word) for word in command],
            cwd=root,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**env, **settings},
            start_new_session=True,
        )
        try:
            return process.wait(max(until - time.monotonic(), 0.0))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return None


def show_end(title: str, log: Path) -> None:
    """Print the last lines of a program that failed."""
    print(
        f"---- {title}",
        *log.read_text(encoding="utf-8", errors="replace").splitlines()[-SHOWN:],
        sep="\n",
        flush=True,
    )


# ---- the parts
# ----------------------------------------------------------------------------------------------------------


def self_tests(
    seed: int, until: float, words: Sequence[object] = (PYTHON.parent / "lockstep",)
) -> list[Result]:
    """The whole self-test in both dtypes, beside each other.

    Args:
        words: the command line before `verify`.
    """

    def one(dtype: str) -> Result:
        return _self_test(f"self-test, {dtype}", words, MODEL, dtype, until)

    with ThreadPoolExecutor(LANES) as pool:
        return list(pool.map(one, ("float32", "bfloat16")))


def _self_test(
    name: str,
    words: Sequence[object],
    model: str,
    dtype: str,
    until: float,
    env: Mapping[str, str] = os.environ,
) -> Result:
    """One whole self-test.

    Args:
        words: the command line before `verify`.
    """
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        file, log = Path(folder) / "verdicts.json", Path(folder) / "log"
        command = [*words, "verify", "--model", model, "--self-test", "--dtype", dtype, "--json", file]
        code = run_program(command, until, log, env=env)
        seconds = time.monotonic() - start
        if code:
            show_end(f"{name}: exit code {code}", log)
        if not file.exists():
            said = "NOT ENDED in its time" if code is None else f"NO VERDICTS, exit code {code}"
            return Result(name, 0, 0, seconds, said=said)
        found = json.loads(file.read_text(encoding="utf-8"))
    injected, errors = found["injected"], found["errors"]
    faults = sum(verdict["id"] != "-" for verdict in found["faults"])
    failed = injected - found["caught"] + errors
    # A false alarm of a control is in no count of faults.
    said = "" if code == 0 or failed else f"FAILED, exit code {code}"
    if not found["ended"]:
        said = "NOT ENDED in its time" if code is None else f"NOT ENDED, exit code {code}"
    return Result(name, injected + errors, faults, seconds, failed, said)


def _tests_of(name: str, file: str, until: float, env: Mapping[str, str] = os.environ) -> Result:
    """The release tests of one file."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        log, report = Path(folder) / "log", Path(folder) / "report.xml"
        pytest = [
            PYTHON,
            "-m",
            "pytest",
            "-m",
            "release",
            "-q",
            "-p",
            "no:cacheprovider",
            "--junitxml",
            report,
        ]
        code = run_program([*pytest, file], until, log, env=env)
        found = counted(report) if report.exists() else Counter(failed=1)
        if code or found["failed"]:
            show_end(f"{name}: exit code {code}", log)
    said = "NOT ENDED in its time" if code is None else ""
    failed = found["failed"] or int(bool(code))
    return Result(name, found["ran"], found["ran"], time.monotonic() - start, failed, said)


def gpu_runner(
    seed: int, until: float, words: Sequence[object] = (PYTHON.parent / "lockstep",)
) -> list[Result]:
    """vLLM's second model runner on the pretend GPU: the tests of its server and of `verify`, and a whole self-test.

    Args:
        words: the command line before `verify`.
    """
    sys.path.insert(0, str(ROOT / "tests"))
    from pretend_cuda.vllm.environment import environment

    name, start = "vLLM for GPUs", time.monotonic()

    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(LANES) as pool:
        log, model = Path(folder) / "log", Path(folder) / "model"
        save = f"import sys; sys.path.insert(0, {str(ROOT / 'tests')!r}); from pathlib import Path; import tiny; "
        made = run_program([PYTHON, "-c", f"{save}tiny.save_model(Path({str(model)!r}))"], until, log)
        if made != 0:
            show_end(f"{name}: no model, exit code {made}", log)
            return [Result(name, 0, 0, time.monotonic() - start, said="NO MODEL")]
        beside = pool.submit(_tests_of, f"{name}, tests", "tests/pretend_cuda/vllm/test_vllm_runs.py", until)
        faults = _self_test(f"{name}, self-test", words, str(model), "float32", until, environment())
        return [beside.result(), faults]


def inputs(seed: int, until: float) -> list[Result]:
    """Inputs of every field and command: each is taken, or refused in one sentence."""
    env = {**os.environ, "LOCKSTEP_INPUT_SEED": str(seed)}
    return [_tests_of("inputs", "tests/input/test_every_input.py", until, env)]


def kill_sweep(seed: int, until: float, more: Sequence[str] = ("--most", "100000")) -> list[Result]:
    """Cases of the kill sweep in the order of the seed.

    Args:
        more: further arguments of `scripts/kill_sweep.py`.
    """
    return _cases("kill sweep", "scripts/kill_sweep.py", "cases were right", seed, until, more)


def release_tests(seed: int, until: float, root: Path = ROOT) -> list[Result]:
    """Files with tests marked `release`, in the order of the seed.

    A file that does not end in time counts as not run.
    """
    start, pytest = time.monotonic(), [PYTHON, "-m", "pytest", "-m", "release", "-p", "no:cacheprovider"]
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "collected"
        code = run_program([*pytest, "--collect-only", "-q", "tests"], until, log, root)
        per_file = Counter(re.findall(r"^(tests/\S+?\.py)::", log.read_text(encoding="utf-8"), re.M))
        if code != 0 or not per_file:
            show_end(f"release tests: nothing was collected, exit code {code}", log)
            return [Result("release tests", 0, 0, time.monotonic() - start)]
        files, counts, lock = sampled(per_file, seed), Counter[str](), threading.Lock()

        def lane(number: int) -> None:
            while time.monotonic() < until:
                with lock:
                    if not files:
                        return
                    file = files.pop(0)
                log, report = Path(folder) / f"log{number}", Path(folder) / f"report{number}.xml"
                report.unlink(missing_ok=True)
                code = run_program([*pytest, "-q", "--junitxml", report, file], until, log, root)
                if code is None:
                    print(f"not ended in its time: {file}", flush=True)
                    continue
                found = counted(report) if report.exists() else Counter(failed=1)
                if code or found["failed"]:
                    show_end(f"{file}: exit code {code}", log)
                with lock:
                    counts.update(found)
                    counts["failed"] += bool(code and not found["failed"])

        with ThreadPoolExecutor(LANES) as pool:
            list(pool.map(lane, range(LANES)))
    ran, failed = counts["ran"], counts["failed"]
    return [Result("release tests", ran, per_file.total(), time.monotonic() - start, failed)]


def counted(report: Path) -> Counter[str]:
    """How many tests of a JUnit file ran, and how many of them failed. A skipped test has run."""
    suites = list(ElementTree.parse(report).getroot().iter("testsuite"))
    total = {
        name: sum(int(suite.get(name, 0)) for suite in suites) for name in ("tests", "failures", "errors")
    }
    return Counter(ran=total["tests"], failed=total["failures"] + total["errors"])


def mutations(seed: int, until: float, more: Sequence[str] = ()) -> list[Result]:
    """Mutation cases in the order of the seed.

    Args:
        more: further arguments of `scripts/mutations.py`.
    """
    jobs = ("--jobs", str(LANES))
    return _cases("mutations", "scripts/mutations.py", "faults were caught", seed, until, (*jobs, *more))


def _cases(name: str, script: str, judged: str, seed: int, until: float, more: Sequence[str]) -> list[Result]:
    """Cases of a script that takes a seed and a number of seconds, and that prints "N of M `judged`, of K cases"."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        # The cases that have begun may end.
        seconds = max((until - start) * 0.8, 1.0)
        code = run_program([PYTHON, script, "--seed", seed, "--seconds", f"{seconds:.0f}", *more], until, log)
        said = re.search(rf"^(\d+) of (\d+) {judged}, of (\d+) cases", log.read_text(encoding="utf-8"), re.M)
        if code or said is None:
            show_end(f"{name}: exit code {code}", log)
        if said is None:
            why = "NOT ENDED in its time" if code is None else f"NO VERDICTS, exit code {code}"
            return [Result(name, 0, 0, time.monotonic() - start, said=why)]
    right, ran, cases = map(int, said.groups())
    why = "" if code == 0 or right < ran else f"FAILED, exit code {code}"
    return [Result(name, ran, cases, time.monotonic() - start, ran - right, why)]


PARTS = (
    Part("self-test", 0.6, self_tests),
    # Its self-test alone takes 40 minutes of a loaded processor.
    Part("vLLM for GPUs", 0.85, gpu_runner),
    Part("inputs", 0.88, inputs),
    Part("kill sweep", 0.9, kill_sweep),
    Part("release tests", 0.94, release_tests),
    Part("mutations", 1.0, mutations),
)


# ---- the night
# ----------------------------------------------------------------------------------------------------------


def sampled(names: Iterable[str], seed: int) -> list[str]:
    """The names in the order that the seed draws."""
    drawn = sorted(names)
    random.Random(seed).shuffle(drawn)
    return drawn


def night(parts: Sequence[Part], seed: int, hours: float) -> int:
    """Run the parts one after the other and print the table.

    A part that ends early leaves its time to the next ones.
    """
    start = time.monotonic()
    print(f'seed {seed}: make nightly ARGS="--seed {seed}" draws the same sample', flush=True)
    results: list[Result] = []
    try:
        for part in parts:
            print(f"{time.monotonic() - start:7.0f} s  {part.name} …", flush=True)
            results += part.run(seed, start + part.share * hours * 3600)
    finally:
        print(f"\n{'part':26}  {'ran':>14}  {'seconds':>9}")
        print(*(result.row() for result in results), sep="\n")
        print(f"seed {seed}, {time.monotonic() - start:.0f} s of {hours * 3600:.0f} s", flush=True)
    return 0 if results and all(result.passed for result in results) else 1


def main() -> int:
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument(
        "--seed", type=int, default=int(datetime.datetime.now(datetime.UTC).strftime("%Y%m%d"))
    )
    words.add_argument("--hours", type=float, default=3.0)
    words.add_argument("--only", default="")
    asked = words.parse_args()
    parts = [part for part in PARTS if asked.only in part.name]
    if not parts:
        words.error(f"no part holds {asked.only!r}; the parts are {', '.join(part.name for part in PARTS)}")
    return night(parts, asked.seed, asked.hours)


if __name__ == "__main__":
    sys.exit(main())
