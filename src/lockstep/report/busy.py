"""Work that takes seconds says so as it begins: `with busy("loading the model"):`.

Whoever watches shows it: the command line with a spinner (`report/status.py`), a run with its panel (`report/live.py`). Without a
watcher nothing is shown, so that a script of the user's stays silent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol


class Watcher(Protocol):
    """Is told what begins and that it has ended. Pieces of work may be nested."""

    def begin(self, text: str, detail: Callable[[], str]) -> None: ...

    def end(self) -> None: ...


_watchers: list[Watcher] = []


@contextmanager
def busy(text: str, detail: Callable[[], str] = str) -> Iterator[None]:
    """Tell the watcher of a piece of work.

    Args:
        text: what is done, such as "loading the model".
        detail: gives how far it has come; asked several times a second, from another thread.
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
    """Let a watcher be told of the work within the block, in place of an outer one."""
    _watchers.append(watcher)
    try:
        yield
    finally:
        _watchers.remove(watcher)
