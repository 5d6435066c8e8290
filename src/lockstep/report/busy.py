"""Announces a piece of work that takes seconds when it begins: `with busy("loading the model"):`.

A watcher shows the work: the command line with a spinner (`report/status.py`), a run with its panel (`report/live.py`). Without a
watcher, a script of the user prints a line only about work that lasts (`report/waits.py`). The watcher gets these lines too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from lockstep.report.waits import told_by, waiting
from lockstep.secret import masked


class Watcher(Protocol):
    """Gets a call when a piece of work begins and when it ends. Pieces of work may be nested."""

    def begin(self, text: str, detail: Callable[[], str]) -> None: ...

    def end(self) -> None: ...

    def note(self, line: str) -> None:
        """A line about a wait that lasts. A watcher that draws shows the open waits itself."""


_watchers: list[Watcher] = []


@contextmanager
def busy(text: str, detail: Callable[[], str] = str) -> Iterator[None]:
    """Tell the watcher when a piece of work begins and ends.

    Args:
        text: name of the work, such as "loading the model".
        detail: returns the progress as text; called several times per second, from another thread.
    """
    watcher = _watchers[-1] if _watchers else None
    if watcher is None:
        with waiting(text, now=detail, verb=""):
            yield
        return
    watcher.begin(masked(text), detail)
    try:
        yield
    finally:
        watcher.end()


@contextmanager
def watched_by(watcher: Watcher) -> Iterator[None]:
    """Within the block, this watcher gets the calls instead of an outer watcher."""
    _watchers.append(watcher)
    told_by(watcher.note)
    try:
        yield
    finally:
        _watchers.remove(watcher)
        told_by(_watchers[-1].note if _watchers else None)
