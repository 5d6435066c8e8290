"""Break the source in one place at a time, and check that the tests of that place fail. `make mutations`

The working tree is not changed: each fault goes into a copy of `src/`, and the tests import the copy. First, every
test of every case must pass without a fault. Exit code 1: no test caught a fault, or a case no longer fits the source
or its tests.

    --only WORD   run only the cases whose description, or whose file, contains WORD
    --jobs N      number of cases that run at the same time (2)
    --seed N      take the cases in an order that the seed draws
    --seconds S   begin no further cases after this time
    --fit         run nothing; only check that each case still fits the source (`make lint` does)
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from mutation_cases import MUTATIONS, Mutation

if TYPE_CHECKING:
    import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "lockstep"
# Time limit in seconds for the tests of one case. A fault may make a test hang.
LIMIT = 900
# Exit codes of pytest. Any other code (a test cannot be imported, for example) does not prove that a test caught the
# fault.
PASSED, FAILED = 0, 1
# Cases between two looks at the time limit of all.
PORTION = 10
STRANGE = 99
# Marks of tests that a case does not run, unless it names the test or the row in full.
LEFT_OUT = ("long", "release", "vllm")


@cache
def sources() -> dict[str, str]:
    """The text of every file of Python in the source, by its path below `src/lockstep`."""
    # The links to examples/ and recipes/ are not followed: nothing in them is a case.
    files = [path for path in sorted(SOURCE.rglob("*.py")) if path.resolve().is_relative_to(SOURCE)]
    return {str(path.relative_to(SOURCE)): path.read_text(encoding="utf-8") for path in files}


@cache
def scopes(file: str) -> list[tuple[int, int, str]]:
    """First line, last line and qualified name of each function and class of a file; outer ones come first."""
    found = []

    def look(node: ast.AST, outer: str) -> None:
        for child in ast.iter_child_nodes(node):
            name = outer
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                name = f"{outer}.{child.name}"
                first = min([child.lineno, *(decorator.lineno for decorator in child.decorator_list)])
                found.append((first, child.end_lineno or first, name))
            look(child, name)

    look(ast.parse(sources()[file]), "")
    return found


@cache
def place(mutation: Mutation) -> tuple[str, int]:
    """The file that has the text of a case, and the position at which the text begins.

    Raises:
        ValueError: the source does not have the text exactly once.
    """
    found = [
        (file, match.start())
        for file, text in sources().items()
        if mutation.old in text
        for match in re.finditer(re.escape(mutation.old), text)
    ]
    if mutation.within:
        found = [at for at in found if f".{scope_at(*at, mutation)}".endswith(f".{mutation.within}")]
    if len(found) != 1:
        where = f"{mutation.within} of src/lockstep" if mutation.within else "src/lockstep"
        files = ", ".join(sorted({file for file, _ in found})) or "nowhere"
        advice = "mend the case" if not found else "lengthen the text, or say `within` which function"
        raise ValueError(
            f"{mutation.old!r} is {len(found)} times in {where} instead of once ({files}): {advice}"
        )
    return found[0]


def scope_at(file: str, start: int, mutation: Mutation) -> str:
    """The qualified name of the innermost function or class around a text.

    The white space before the text does not count.
    """
    start += len(mutation.old) - len(mutation.old.lstrip())
    line = sources()[file].count("\n", 0, start) + 1
    return max((scope for scope in scopes(file) if scope[0] <= line <= scope[1]), default=(0, 0, ""))[
        2
    ].lstrip(".")


def file_of(mutation: Mutation) -> str:
    try:
        return place(mutation)[0]
    except ValueError:
        return ""


def mutated(mutation: Mutation) -> str:
    """The text of the file with the fault.

    Raises:
        ValueError: as `place`.
    """
    file, start = place(mutation)
    text = sources()[file]
    return text[:start] + mutation.new + text[start + len(mutation.old) :]


def misfits(cases: list[Mutation]) -> list[str]:
    """One line per case that no longer fits the source or the tests, with the reason."""
    wrong = []
    with tempfile.TemporaryDirectory(prefix="lockstep-mutation-") as folder:
        for number, case in enumerate(cases):
            try:
                (Path(folder) / f"{number}.py").write_text(mutated(case), encoding="utf-8")
            except ValueError as error:
                wrong.append(str(error))
            files = [test.partition("::")[0] for test in case.named]
            wrong += [f"{case.about!r}: there is no {file}" for file in files if not (ROOT / file).exists()]
        return wrong + undefined_names(Path(folder), cases)


def undefined_names(folder: Path, cases: list[Mutation]) -> list[str]:
    """One line per fault that uses a name that does not exist. Any test fails then, for the wrong reason.

    Args:
        folder: has the text of each fault in `NUMBER.py`, where NUMBER is its index in `cases`.
    """
    ruff = [
        sys.executable,
        "-m",
        "ruff",
        "check",
        "--isolated",
        "--select",
        "F821",
        "--output-format",
        "json",
    ]
    found = json.loads(
        subprocess.run(
            [*ruff, str(folder)], capture_output=True, text=True, encoding="utf-8", timeout=60
        ).stdout
    )
    return [
        f"{cases[int(Path(f['filename']).stem)].about!r}: {f['message']}, which a mutation put in"
        for f in found
    ]


def copy_of_source(folder: Path, mutation: Mutation | None = None) -> Path:
    """Make a copy of `src/`, with the fault if there is one.

    Raises:
        ValueError: as `mutated`.
    """
    source = folder / "src"
    shutil.copytree(ROOT / "src", source, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    if mutation is not None:
        (source / "lockstep" / file_of(mutation)).write_text(mutated(mutation), encoding="utf-8")
    return source


class Chosen:
    """A plugin of pytest that leaves out tests with a mark of `LEFT_OUT`, except those that are named in full."""

    def __init__(self, tests: list[str]) -> None:
        self._named = frozenset(tests)

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Choose among the collected tests. `tests/portions.py` has marked the rows of matrices before."""
        items[:] = [
            i for i in items if i.nodeid in self._named or not any(map(i.get_closest_marker, LEFT_OUT))
        ]


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

            ended = int(pytest.main(["-q", "-x", "-p", "no:cacheprovider", *tests], plugins=[Chosen(tests)]))
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
        code = run_tests(source, mutation.named, log)
        said = log.read_text(encoding="utf-8")[-2000:]
    verdict = {PASSED: "SURVIVED", FAILED: "caught"}.get(code, f"no verdict (exit code {code}):\n{said}")
    return verdict, time.monotonic() - start


def check_unbroken(cases: list[Mutation]) -> None:
    """Exit if a test of a case fails without a fault."""
    tests = sorted({test for case in cases for test in case.named})
    with tempfile.TemporaryDirectory(prefix="lockstep-mutation-") as folder:
        log = Path(folder) / "log"
        if (code := run_tests(copy_of_source(Path(folder)), tests, log)) != PASSED:
            sys.exit(
                f"without a fault the tests end with exit code {code}:\n{log.read_text(encoding='utf-8')[-3000:]}"
            )


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
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--fit", action="store_true")
    arguments = parser.parse_args()
    cases = [case for case in MUTATIONS if arguments.only in f"{file_of(case)} {case.about}"]
    if not cases:
        sys.exit(f"no case holds {arguments.only!r}")
    if wrong := misfits(cases):
        print(*wrong, sep="\n", file=sys.stderr)
        return 1
    if arguments.fit:
        print(f"{len(cases)} cases fit the source")
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
                print(f"{seconds:6.1f} s  {verdict:8}  {file_of(case):38} {case.about}", flush=True)
    took = time.monotonic() - start
    print(f"{ran - missed} of {ran} faults were caught, of {len(cases)} cases, in {took:.0f} s")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
