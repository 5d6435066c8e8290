"""Break the source in one place at a time, and check that the tests of that place fail. `make mutations`

The working tree is not changed: each fault goes into a copy of `src/`, and the tests import the copy. First, every test of every
case must pass without a fault. Exit code 1: no test caught a fault, or a case no longer fits the source or its tests.

    --only WORD   run only the cases whose file or description contains WORD
    --jobs N      number of cases that run at the same time (2)
    --seed N      take the cases in an order that the seed draws
    --seconds S   begin no further cases after this time
    --fit         run nothing; only check that each case still fits the source (`make lint` does)
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from mutation_cases import MUTATIONS, Mutation

ROOT = Path(__file__).parents[1]
# Time limit in seconds for the tests of one case. A fault may make a test hang.
LIMIT = 900
# Exit codes of pytest. Any other code (a test cannot be imported, for example) does not prove that a test caught the fault.
PASSED, FAILED = 0, 1
# Cases between two looks at the time limit of all.
PORTION = 10
STRANGE = 99


def mutated(mutation: Mutation) -> str:
    """The text of the file with the fault.

    Raises:
        ValueError: the text to replace is not in the file exactly once.
    """
    file = ROOT / "src" / "lockstep" / mutation.file
    text = file.read_text(encoding="utf-8") if file.exists() else ""
    if (found := text.count(mutation.old)) != 1:
        raise ValueError(f"{mutation.file} holds {mutation.old!r} {found} times instead of once: mend the case")
    return text.replace(mutation.old, mutation.new)


def misfits(cases: list[Mutation]) -> list[str]:
    """One line per case that no longer fits the source or the tests, with the reason."""
    wrong = []
    with tempfile.TemporaryDirectory(prefix="lockstep-mutation-") as folder:
        for number, case in enumerate(cases):
            try:
                (Path(folder) / f"{number}.py").write_text(mutated(case), encoding="utf-8")
            except ValueError as error:
                wrong.append(str(error))
            files = [test.partition("::")[0] for test in case.tests.split()]
            wrong += [f"{case.file}: there is no {file}" for file in files if not (ROOT / file).exists()]
        return wrong + undefined_names(Path(folder), cases)


def undefined_names(folder: Path, cases: list[Mutation]) -> list[str]:
    """One line per fault that uses a name that does not exist. Any test fails then, for the wrong reason.

    Args:
        folder: has the text of each fault in `NUMBER.py`, where NUMBER is its index in `cases`.
    """
    ruff = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "F821", "--output-format", "json"]
    found = json.loads(
        subprocess.run([*ruff, str(folder)], capture_output=True, text=True, encoding="utf-8", timeout=60).stdout
    )
    return [f"{cases[int(Path(f['filename']).stem)].file}: {f['message']}, which a mutation put in" for f in found]


def copy_of_source(folder: Path, mutation: Mutation | None = None) -> Path:
    """Make a copy of `src/`, with the fault if there is one.

    Raises:
        ValueError: as `mutated`.
    """
    source = folder / "src"
    shutil.copytree(ROOT / "src", source, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    if mutation is not None:
        (source / "lockstep" / mutation.file).write_text(mutated(mutation), encoding="utf-8")
    return source


def run_tests(source: Path, tests: list[str], log: Path) -> int:
    """Run tests on a copy of the source, in a fork of this process, which has already imported the libraries.

    Returns:
        The exit code of pytest; `STRANGE` if the tests did not import the copy, or if the time limit ended them.
    """
    child = os.fork()
    if not child:
        code = STRANGE
        try:
            output = os.open(log, os.O_WRONLY | os.O_CREAT)
            os.dup2(output, 1)
            os.dup2(output, 2)
            signal.alarm(LIMIT)
            sys.path.insert(0, str(source))
            os.environ["PYTHONPATH"] = str(source)
            os.chdir(ROOT)
            import pytest

            words = ["-q", "-x", "-p", "no:cacheprovider", "-m", "not long and not release and not vllm", *tests]
            ended = int(pytest.main(words))
            import lockstep

            code = ended if Path(lockstep.__file__).is_relative_to(source) else STRANGE
        finally:
            sys.stdout.flush()
            os._exit(code)
    status = os.waitpid(child, 0)[1]
    return os.WEXITSTATUS(status) if os.WIFEXITED(status) else STRANGE


def tried(mutation: Mutation) -> tuple[str, float]:
    """The verdict on a fault ("caught", "SURVIVED", or the reason why there is none), and the seconds of its tests."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="lockstep-mutation-") as folder:
        source = copy_of_source(Path(folder), mutation)
        log = Path(folder) / "log"
        code = run_tests(source, mutation.tests.split(), log)
        said = log.read_text(encoding="utf-8")[-2000:]
    verdict = {PASSED: "SURVIVED", FAILED: "caught"}.get(code, f"no verdict (exit code {code}):\n{said}")
    return verdict, time.monotonic() - start


def check_unbroken(cases: list[Mutation]) -> None:
    """Exit if a test of a case fails without a fault."""
    tests = sorted({test for case in cases for test in case.tests.split()})
    with tempfile.TemporaryDirectory(prefix="lockstep-mutation-") as folder:
        log = Path(folder) / "log"
        if (code := run_tests(copy_of_source(Path(folder)), tests, log)) != PASSED:
            sys.exit(f"without a fault the tests end with exit code {code}:\n{log.read_text(encoding='utf-8')[-3000:]}")


def import_libraries() -> None:
    """Import once the libraries that every test process needs."""
    os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "TQDM_DISABLE": "1"}
    import accelerate  # noqa: F401
    import datasets  # noqa: F401
    import hypothesis  # noqa: F401
    import peft  # noqa: F401
    import pytest  # noqa: F401
    from transformers import AutoModelForCausalLM, Trainer  # noqa: F401

    assert "lockstep" not in sys.modules


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--fit", action="store_true")
    arguments = parser.parse_args()
    cases = [case for case in MUTATIONS if arguments.only in f"{case.file} {case.about}"]
    if not cases:
        sys.exit(f"no case holds {arguments.only!r}")
    if wrong := misfits(cases):
        print(*wrong, sep="\n", file=sys.stderr)
        return 1
    if arguments.fit:
        print(f"{len(cases)} cases fit the source")
        return 0
    left_out = [case for case in cases if case.needs and not (ROOT / ".environments" / case.needs).exists()]
    for case in left_out:
        print(f"left out (make environments)  {case.file:38} {case.about}")
    cases = [case for case in cases if case not in left_out]
    if not cases:
        return 0
    if arguments.seed is not None:
        random.Random(arguments.seed).shuffle(cases)
    import_libraries()
    start = time.monotonic()
    missed = ran = 0
    # With a time limit, the tests of a few cases are checked and tried at a time.
    size = len(cases) if arguments.seconds == float("inf") else PORTION
    with ThreadPoolExecutor(arguments.jobs) as pool:
        for first in range(0, len(cases), size):
            if time.monotonic() - start > arguments.seconds:
                break
            some = cases[first : first + size]
            check_unbroken(some)
            for case, (verdict, seconds) in zip(some, pool.map(tried, some), strict=True):
                missed, ran = missed + (verdict != "caught"), ran + 1
                print(f"{seconds:6.1f} s  {verdict:8}  {case.file:38} {case.about}", flush=True)
    took = time.monotonic() - start
    print(f"{ran - missed} of {ran} faults were caught, of {len(cases)} cases, in {took:.0f} s")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
