"""Announces a piece of work that takes seconds when it begins: `with busy("loading the model"):`.

A watcher shows the work: the command line with a spinner (`report/status.py`), a run with its panel (`report/live.py`). Without a
watcher nothing is shown, so that a script of the user prints nothing extra.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol


class Watcher(Protocol):
    """Gets a call when a piece of work begins and when it ends. Pieces of work may be nested."""

    def begin(self, text: str, detail: Callable[[], str]) -> None: ...

    def end(self) -> None: ...


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
        yield
        return
    watcher.begin(text, detail)
    try:
        yield
    finally:
        watcher.end()


@contextmanager
def watched_by(watcher: Watcher) -> Iterator[None]:
    """Within the block, this watcher gets the calls instead of an outer watcher."""
    busy_seen_by(watcher)
    try:
        yield
    finally:
        unseen(watcher)


def busy_seen_by(watcher: Watcher) -> None:
    """From now on, until `unseen`, this watcher gets the calls instead of an earlier watcher."""
    _watchers.append(watcher)


def unseen(watcher: Watcher) -> None:
    """End what `busy_seen_by` began."""
    _watchers.remove(watcher)
