"""Bad reward functions: one line that names the function refuses each; none ends, hangs or changes a run silently."""

from __future__ import annotations

from pathlib import Path

import pytest
from bad_input import Row, check, rows
from training_words import words

from lockstep.cli.main import main

ONE = "return [1.0] * len(completions)"


def body(*lines: str, first: str = "") -> str:
    """A file with a function `score` of these lines."""
    return (
        first
        + "\n\ndef score(completions, **columns):\n"
        + "".join(f"    {line}\n" for line in lines or (ONE,))
    )


def returns(value: str) -> str:
    return body(f"return {value}")


def each(value: str) -> str:
    return body(f"return [{value} for _ in completions]")


VALUES = [
    Row("text", each("'0.5'"), "score returned the text '0.5'|score returned '0.5'"),
    Row("bytes", each("b'1'"), "score returned b'1'"),
    Row("10 to the 400", each("10**400"), "score.*beyond"),
    Row("minus 10 to the 400", each("-10**400"), "score.*beyond"),
    Row("1e308", each("1e308"), "score.*beyond"),
    Row("-1e308", each("-1e308"), "score.*beyond"),
    Row("1e20", each("1e20"), "score.*beyond"),
    Row("infinity", each("float('inf')"), "infinite"),
    Row("minus infinity", each("float('-inf')"), "infinite"),
    Row("NaN for all", each("float('nan')"), "NaN for all"),
    Row("nothing for all", each("None"), "no reward is learned from it", 0),
    Row("lists", each("[1.0]"), "not a number"),
    Row("dictionaries", each("{}"), "not a number"),
    Row("complex numbers", each("1j"), "not a number"),
    Row("functions", each("len"), "not a number"),
    Row("tuples", each("(1, 2)"), "not a number"),
    Row("a set", returns("{1.0}"), "returned set"),
    Row("a generator", returns("(1.0 for _ in completions)"), "returned generator"),
    Row("a dictionary", returns("{0: 1.0}"), "returned dict"),
    Row("one number", returns("1.0"), "returned float"),
    Row("nothing", returns("None"), "returned NoneType"),
    Row("one word", returns("'good'"), "score returned"),
    Row("too few", returns("[1.0]"), "returned 1 scores for 4"),
    Row("too many", returns("[1.0] * 99"), "returned 99 scores for 4"),
    Row("none", returns("[]"), "returned 0 scores for 4"),
    Row(
        "a coroutine that nobody awaits",
        body("async def f(): return 1", "return f()"),
        "score returned coroutine",
    ),
    Row(
        "a tensor of another shape",
        "import torch\n" + returns("torch.ones(len(completions), 2)"),
        "not a number",
    ),
    Row("one tensor", "import torch\n" + returns("torch.ones(())"), "returned 1 scores"),
]
ENDS = [
    Row("sys.exit(0) at import", "import sys; sys.exit(0)\n" + body(), "cannot be run: SystemExit"),
    Row("sys.exit(0) in a call", body("import sys; sys.exit(0)"), "score raised SystemExit"),
    Row("KeyError in a call", body("return columns['gold']"), "score raised KeyError"),
    Row("TypeError in a call", body("return 1 + 'a'"), "score raised TypeError"),
    Row(
        "an own BaseException",
        body("raise Stop", first="class Stop(BaseException): pass"),
        "score raised Stop",
    ),
    Row("GeneratorExit", body("raise GeneratorExit"), "score raised GeneratorExit"),
    Row("recursion without end", body("return score(completions)"), "score raised RecursionError"),
    Row("assertion", body("assert False, 'no'"), "score raised AssertionError"),
    Row("a missing argument", "def score(completions, gold): return []", "score raised TypeError"),
    Row("no keyword arguments", "def score(completions): return []", "score raised TypeError"),
    Row(
        "a warning made an error",
        body("import warnings; warnings.simplefilter('error')", "raise UserWarning('x')"),
        "UserWarning",
    ),
    Row(
        "a message of many lines", body("raise ValueError('a\\nb\\n\\nc')"), "score raised ValueError: a b c"
    ),
]
FILES = [
    Row("an error in its syntax", "def score(:\n", "cannot be run: SyntaxError"),
    Row("a NUL", "\0", "cannot be run"),
    Row("empty", "", "has no function 'score'"),
    Row("binary", "\x7fELF\x01", "cannot be run"),
    Row("not a function", "score = 3\n", "has no function 'score'"),
    Row(
        "an import that is missing", "import no_such_module\n" + body(), "cannot be run: ModuleNotFoundError"
    ),
    Row("an error at import", "1 / 0\n", "cannot be run: ZeroDivisionError"),
    Row("KeyboardInterrupt's sibling", "raise SystemExit('bye')\n", "cannot be run: SystemExit: bye"),
]
HANGS = [
    Row("a loop", body("while True: pass"), "score took longer than 0.5 s"),
    Row("a sleep", body("import time; time.sleep(1000)"), "score took longer than 0.5 s"),
    Row(
        "a loop that catches errors",
        body("while True:", "    try:", "        while True: pass", "    except Exception: pass"),
        "longer than 0.5 s",
    ),
    Row(
        "a wait for nobody",
        body("import threading; threading.Event().wait()"),
        "score took longer than 0.5 s",
    ),
    Row(
        "a socket",
        body("import socket; a, b = socket.socketpair(); a.recv(1)"),
        "score took longer than 0.5 s",
    ),
    Row(
        "a coroutine",
        "import asyncio\nasync def score(completions, **_):\n    await asyncio.sleep(1000)\n",
        "score took longer than 0.5 s",
    ),
]
NAMES = [
    Row("no such file", "nowhere.py:score", "does not exist"),
    Row("no such module", "no.such.module", "cannot be imported"),
    Row("no such function", "math.no_such_function", "has no function"),
    Row("a name alone", "quality", "not one of"),
    Row("a file alone", "rewards.py", "not one of"),
    Row("an empty name", "", "not one of"),
    Row("only a colon", ":", "not one of|reward"),
    Row("no numbers for overlong", "soft_overlong", "not one of"),
    Row("a cache beyond the limit", "soft_overlong(4, 9)", "must be between"),
    Row("a model that is not there", "./nowhere/model", "does not exist"),
    Row("a model directory without a model", "{home}", "no config.json"),
    Row("too many weights", "length\t--reward_weights\t1\t2", "2 entries for 1"),
]


def run(home: Path, model: str, text: str, **changes: str) -> list[str]:
    (home / "r.py").write_bytes(text.encode())
    return words(home, model, reward_funcs=f"{home / 'r.py'}:score", **changes)


@rows(*VALUES, *ENDS, *FILES)
def test_a_bad_reward_function_is_one_line(
    row: Row, tmp_path: Path, untied_dir: str, capfd: pytest.CaptureFixture[str]
) -> None:
    check(run(tmp_path, untied_dir, row.given), row, capfd)


@rows(*HANGS)
def test_a_reward_function_that_hangs_is_ended(
    row: Row, tmp_path: Path, untied_dir: str, capfd: pytest.CaptureFixture[str]
) -> None:
    check(run(tmp_path, untied_dir, row.given, reward_timeout="0.5"), row, capfd)


@rows(*NAMES)
def test_a_bad_name_is_one_line(
    row: Row, tmp_path: Path, untied_dir: str, capfd: pytest.CaptureFixture[str]
) -> None:
    check(words(tmp_path, untied_dir, reward_funcs=row.given.replace("{home}", str(tmp_path))), row, capfd)


LATER = "import itertools\n_calls = itertools.count()\n"
# What a function does in its second call, with the policy in memory, as it goes on with the first call's answer.
IN_TRAINING = [
    Row(
        "switches gradients off",
        "import torch\n"
        + body("torch.set_grad_enabled(False)", "return [float(i) for i in range(len(completions))]"),
        "gradients",
        0,
    ),
    Row(
        "changes the default dtype",
        "import torch\n"
        + body(
            "torch.set_default_dtype(torch.float64)", "return [float(i) for i in range(len(completions))]"
        ),
        "default dtype",
        0,
    ),
    Row(
        "empties its lists",
        body("completions.clear(); columns['completion_ids'].clear()", "return [float(i) for i in range(4)]"),
        "",
        0,
    ),
    Row(
        "raises in its second call",
        LATER + body("assert next(_calls) == 0, 'second'", ONE),
        "score raised AssertionError",
    ),
    Row(
        "ends the program in its second call",
        LATER + body("if next(_calls): raise SystemExit(0)", ONE),
        "score raised SystemExit",
    ),
    Row(
        "returns too few in its second call",
        LATER + body("return [1.0] * (3 if next(_calls) else 4)"),
        "3 scores for 4",
    ),
]


@rows(*IN_TRAINING)
def test_what_a_function_does_to_the_process_in_training_ends_in_one_line_or_changes_nothing(
    row: Row, tmp_path: Path, untied_dir: str, capfd: pytest.CaptureFixture[str]
) -> None:
    import torch

    check(run(tmp_path, untied_dir, row.given), row, capfd)
    assert torch.is_grad_enabled()
    assert torch.get_default_dtype() == torch.float32


def test_a_function_that_empties_its_lists_is_blamed_and_not_the_next_one(
    tmp_path: Path, untied_dir: str, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "r.py").write_text(
        body("completions.clear()", "return completions").replace("score", "greedy") + body()
    )
    both = f"{tmp_path / 'r.py'}:greedy\t{tmp_path / 'r.py'}:score"
    row = Row("emptied", None, "greedy returned 0 scores for 4")
    check(words(tmp_path, untied_dir, reward_funcs=both), row, capfd)


def test_infinite_weights_and_strange_but_good_values_are_told_apart(tmp_path: Path, untied_dir: str) -> None:
    """Booleans, whole numbers, numpy's and torch's numbers, and None for some, are scores."""
    text = "import numpy, torch\n" + body("return [True, 3, numpy.float32(0.5), None]")
    assert main(run(tmp_path, untied_dir, text)) == 0
