"""What the tables of bad inputs share: a row, and its outcome on a command line of this process.

Every row must end with exit code 2 (or the row's own code), one line on standard error that contains the row's words,
no traceback, and within seconds.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NamedTuple

import pytest

from lockstep.cli.main import main

# A row that takes longer hangs.
LIMIT = 60


class Row(NamedTuple):
    """One bad input.

    Attributes:
        name: of the test.
        given: words of a command line, the content of a file, or an object; each table says which.
        says: a pattern that the one line must contain.
        code: the exit code.
    """

    name: str
    given: Any
    says: str
    code: int = 2


def rows(*table: Row | tuple, release: frozenset[str] = frozenset()) -> Any:
    """The rows as parameters of a test. Those whose names are in `release` run before a release only."""
    made = [row if isinstance(row, Row) else Row(*row) for row in table]
    names = [row.name for row in made]
    assert len(set(names)) == len(names), (
        f"two rows have the same name: {sorted({n for n in names if names.count(n) > 1})}"
    )
    assert release <= set(names), release - set(names)
    marked = [pytest.param(row, marks=pytest.mark.release) if row.name in release else row for row in made]
    return pytest.mark.parametrize("row", marked, ids=lambda row: row.name)


@contextmanager
def in_time(seconds: int = LIMIT) -> Iterator[None]:
    """Ends what hangs, with an error of its own."""

    def late(signum: int, frame: FrameType | None) -> None:
        raise AssertionError(f"it hangs: no end within {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def check(words: list[str], row: Row, capfd: pytest.CaptureFixture[str], aside: str | None = None) -> str:
    """Run a command line and check its end; returns everything that was printed.

    On a slow machine loading takes a line too.

    Args:
        aside: lines that begin so do not count.
    """
    capfd.readouterr()
    with in_time():
        code = main(words)
    out, err = capfd.readouterr()
    beside = ("loading PyTorch and transformers", *([aside] if aside else []))
    lines = [line for line in err.splitlines() if line.strip() and not line.startswith(beside)]
    assert "Traceback" not in out + err
    assert code == row.code, (code, err)
    if row.code == 2:
        assert len(lines) == 1, lines
        assert lines[0].startswith("lockstep: ")
    assert re.search(row.says, out + err), (row.says, err)
    return out + err


def refused(call: Callable[[], Any], says: str, *kinds: type[Exception]) -> None:
    """Check that a call from Python raises one clear error of ours."""
    from lockstep.errors import LockstepError

    with in_time(), pytest.raises(kinds or LockstepError) as found:
        call()
    text = str(found.value)
    assert re.search(says, text), (says, text)
