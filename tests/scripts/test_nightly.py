"""A rehearsal of `make nightly`: each part on a small case of its own, and what the night does with its time."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "scripts"))

import nightly
from nightly import Part, Result, night

TESTS = """
import pytest


@pytest.mark.release
def test_passes(): pass


@pytest.mark.release
def test_skips(): pytest.skip("not here")


def test_of_ci(): raise AssertionError("a test without the mark ran")
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A folder with tests of its own."""
    (tmp_path / "tests").mkdir()
    (tmp_path / "pyproject.toml").write_text("[tool.pytest.ini_options]\nmarkers = ['release']\n")
    for name in "ab":
        (tmp_path / "tests" / f"test_{name}.py").write_text(TESTS)
    return tmp_path


def soon(seconds: float = 100.0) -> float:
    return time.monotonic() + seconds


@pytest.mark.release
def test_the_release_tests_are_run_and_counted(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    failing = TESTS.replace("def test_passes(): pass", "def test_passes(): assert 1 == 2")
    (tree / "tests" / "test_a.py").write_text(failing)
    (result,) = nightly.release_tests(1, soon(), tree)
    assert (result.ran, result.of, result.failed, result.passed) == (4, 4, 1, False)
    assert "assert 1 == 2" in capsys.readouterr().out


def test_a_program_whose_time_is_over_is_killed(tmp_path: Path) -> None:
    # Without the kill, this would end at the time limit of the test.
    code = nightly.run_program(
        [sys.executable, "-c", "import time; time.sleep(3600)"], soon(0.5), tmp_path / "log"
    )
    assert code is None


def test_the_seed_draws_the_order() -> None:
    names = [f"tests/test_{i}.py" for i in range(20)]
    orders = [tuple(nightly.sampled(names, seed)) for seed in (20261126, 20261126, 20261127)]
    assert orders[0] == orders[1] != orders[2]
    assert set(orders[2]) == set(names)


@pytest.mark.release
def test_a_sample_of_the_mutations_is_run() -> None:
    (result,) = nightly.mutations(3, soon(), ["--only", "algorithms/segments"])
    assert 0 < result.ran <= result.of
    assert result.passed


STAND_IN = """
import json, pathlib, sys
words = sys.argv[1:]
assert words[:5] == ["verify", "--model", "smollm2-135m-instruct", "--self-test", "--dtype"], words
found = json.loads(pathlib.Path(sys.argv[0]).with_name(words[5] + ".json").read_text())
pathlib.Path(words[7]).write_text(json.dumps(found))
sys.exit(0 if found["passed"] else 1)
"""


def test_the_counts_of_both_self_tests_are_taken(tmp_path: Path) -> None:
    program = tmp_path / "lockstep.py"
    program.write_text(STAND_IN)
    for dtype, caught in (("float32", 2), ("bfloat16", 1)):
        found = {"passed": caught == 2, "injected": 2, "caught": caught, "errors": 0, "ended": True}
        faults = [{"id": name} for name in ("-", "W1", "W2", "W10")]
        (tmp_path / f"{dtype}.json").write_text(json.dumps({**found, "faults": faults}))
    single, half = nightly.self_tests(1, soon(), (sys.executable, program))
    assert (single.part, single.ran, single.of, single.passed) == ("self-test, float32", 2, 3, True)
    assert (half.part, half.failed, half.passed) == ("self-test, bfloat16", 1, False)


def test_a_self_test_that_does_not_end_fails(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text("import time; time.sleep(600)")
    results = nightly.self_tests(1, soon(1.0), (sys.executable, tmp_path / "slow.py"))
    assert [result.said for result in results] == ["NOT ENDED in its time"] * 2
    assert not any(result.passed for result in results)


def test_what_a_self_test_had_found_when_it_was_killed_is_counted(tmp_path: Path) -> None:
    program = tmp_path / "lockstep.py"
    program.write_text(
        f"{STAND_IN.partition('sys.exit')[0]}\nos.kill(os.getpid(), 9)".replace("import ", "import os, ")
    )
    found = {"passed": False, "injected": 2, "caught": 2, "errors": 0, "ended": False}
    for dtype in ("float32", "bfloat16"):
        (tmp_path / f"{dtype}.json").write_text(json.dumps({**found, "faults": [{"id": "W1"}, {"id": "W2"}]}))
    results = nightly.self_tests(1, soon(), (sys.executable, program))
    assert [(result.ran, result.passed, result.said) for result in results] == [
        (2, False, "NOT ENDED, exit code -9")
    ] * 2


@pytest.mark.parametrize("has_model", [True, False])
def test_the_part_of_vllms_gpu_runner_judges_its_tests_and_its_self_test(
    has_model: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its programs are played: they take minutes."""

    def played(command: Sequence[object], until: float, log: Path, *_: object, **__: object) -> int:
        log.write_text("", encoding="utf-8")
        words = [str(word) for word in command]
        if "--junitxml" in words:
            Path(words[words.index("--junitxml") + 1]).write_text(
                '<testsuites><testsuite tests="3" failures="1" errors="0"/></testsuites>', encoding="utf-8"
            )
            return 1
        if "--json" in words:
            verdicts = {
                "injected": 2,
                "caught": 2,
                "errors": 0,
                "ended": True,
                "faults": [{"id": "-"}, {"id": "A"}, {"id": "B"}],
            }
            Path(str(words[words.index("--json") + 1])).write_text(json.dumps(verdicts), encoding="utf-8")
            return 0
        return 0 if has_model else 1

    monkeypatch.setattr(nightly, "run_program", played)
    rows = nightly.gpu_runner(1, time.monotonic() + 60)
    found = [(row.ran, row.failed, row.passed) for row in rows]
    assert found == ([(3, 1, False), (2, 0, True)] if has_model else [(0, 0, False)])


def test_one_table_at_the_end_with_the_seed(capsys: pytest.CaptureFixture[str]) -> None:
    ends: list[float] = []

    def part(seed: int, until: float) -> list[Result]:
        ends.append(until)
        return [Result("good", 3, 9, 1.0), Result("bad", 3, 9, 1.0, failed=2)]

    start = time.monotonic()
    assert night([Part("one", 0.5, part), Part("two", 1.0, part)], 20261126, 3.0) == 1
    assert [round(end - start) for end in ends] == [5400, 10800]
    out = capsys.readouterr().out
    assert 'seed 20261126: make nightly ARGS="--seed 20261126"' in out
    assert [line.split() for line in out.splitlines() if line.startswith(("good", "bad"))] == 2 * [
        ["good", "3", "of", "9", "1", "s", "passed"],
        ["bad", "3", "of", "9", "1", "s", "2", "FAILED"],
    ]
    assert night([Part("one", 1.0, lambda seed, until: [Result("good", 3, 9, 1.0)])], 1, 3.0) == 0
    assert night([Part("one", 1.0, lambda seed, until: [Result("nothing", 0, 9, 1.0)])], 1, 3.0) == 1


def test_the_table_is_printed_if_a_part_breaks(capsys: pytest.CaptureFixture[str]) -> None:
    def breaks(seed: int, until: float) -> list[Result]:
        raise OSError("no space left")

    with pytest.raises(OSError, match="no space left"):
        night(
            [Part("one", 0.5, lambda seed, until: [Result("good", 3, 9, 1.0)]), Part("two", 1.0, breaks)],
            1,
            3.0,
        )
    assert "3 of     9" in capsys.readouterr().out
