"""Says what a run waits for, from five seconds on: `with waiting("the server to answer", 240.0):`.

Every bounded wait for another process, another rank or a user's code is such a block, in whichever thread. A thread of
this module looks at the open ones. The watcher of long work shows them; without a watcher they go to the log, which a
terminal shows (`terminal_log.py`). Several waits for one thing make one line.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

from lockstep.secret import masked

_logger = logging.getLogger(__name__)

# Seconds until a wait is told. It is told again after twice the time, up to the longest.
FIRST = 5.0
# A line that is printed anyway names waits from so many seconds on.
_WORTH_NAMING = 1.0
_LONGEST = 60.0
# After so many seconds without a line about it, a wait is told as if for the first time.
_FORGOTTEN = 180.0
# Seconds between two looks at the open waits.
LOOK_EVERY = 0.5


class waiting:
    """A block that waits.

    Args:
        what: what it waits for, to follow the words "waiting for". Waits with equal words are told together.
        limit: seconds that it may take; None: nothing ends it.
        now: returns how far it is, in words.
        verb: the words before `what`; empty for work that is not a wait. It is told only where nothing else is.
    """

    __slots__ = ("is_work", "limit", "now", "since", "what")

    def __init__(
        self, what: str, limit: float | None = None, now: Callable[[], str] = str, *, verb: str = "waiting for "
    ) -> None:
        self.what, self.limit, self.now, self.since = verb + what, limit, now, 0.0
        self.is_work = not verb

    def __enter__(self) -> Self:
        self.since = time.monotonic()
        WAITS.begin(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        WAITS.end(self)


class Waits:
    """The open waits of this process, and the thread that looks at them."""

    def __init__(self) -> None:
        self.open: set[waiting] = set()
        self._some, self._starting = threading.Event(), threading.Lock()
        self._thread: threading.Thread | None = None
        # Of each wait that was told: when, and after how many seconds it is told again.
        self._told: dict[str, tuple[float, float]] = {}
        # Gets each line; None: nobody shows them.
        self.say: Callable[[str], None] | None = None

    def begin(self, wait: waiting) -> None:
        self.open.add(wait)
        if self._thread is None:
            with self._starting:
                if self._thread is None:
                    self._thread = threading.Thread(target=self._run, name="lockstep-waits", daemon=True)
                    self._thread.start()
        self._some.set()

    def end(self, wait: waiting) -> None:
        self.open.discard(wait)

    def forked(self) -> None:
        """Forget the waits and the thread of the process that this one was forked from."""
        self.__init__()  # type: ignore[misc]

    def lines(self, now: float, least: float) -> dict[str, str]:
        """Of the waits that last for at least so many seconds: what each is for, and the line about it, the oldest first."""
        together: dict[str, list[waiting]] = {}
        # One call of the interpreter, because other threads change the set.
        for wait in sorted(self.open.copy(), key=lambda wait: wait.since):
            together.setdefault(wait.what, []).append(wait)
        found = {what: waits for what, waits in together.items() if now - waits[0].since >= least}
        only_work = all(waits[0].is_work for waits in found.values())
        return {what: _line(waits, now) for what, waits in found.items() if only_work or not waits[0].is_work}

    def tell(self, now: float) -> list[str]:
        """The lines that are due."""
        due = []
        for what, line in self.lines(now, FIRST).items():
            when, pause = self._told.get(what, (-_FORGOTTEN, FIRST))
            if now - when >= _FORGOTTEN:
                pause = FIRST
            elif now - when < pause:
                continue
            self._told[what] = (now, min(2 * pause, _LONGEST))
            due.append(line)
        for what in [what for what, (when, _) in list(self._told.items()) if now - when >= _FORGOTTEN]:
            del self._told[what]
        return due

    def told(self, now: float) -> str:
        """What there is to say at the moment. It need not be said again at once."""
        lines = self.lines(now, _WORTH_NAMING)
        for what in lines:
            _, pause = self._told.get(what, (now, 2 * FIRST))
            self._told[what] = (now, pause)
        return " · ".join(lines.values())

    def _run(self) -> None:
        while True:
            self._some.wait()
            self._some.clear()
            while self.open:
                for line in self.tell(time.monotonic()):
                    (self.say or _logger.info)(line)
                time.sleep(LOOK_EVERY)


def _line(waits: list[waiting], now: float) -> str:
    first = waits[0]
    several = f" ({len(waits)} times)" if len(waits) > 1 else ""
    seconds = f"{now - first.since:.0f} s"
    words = f"{first.what}{several}: {seconds}"
    if first.limit is not None:
        words += f" of at most {first.limit:.0f} s"
    return masked(" · ".join(filter(None, [words, first.now()])))


WAITS = Waits()
os.register_at_fork(after_in_child=WAITS.forked)
# A thread that writes while the interpreter ends would end it with a fatal error.
atexit.register(lambda: told_by(lambda line: None))


def open_waits() -> str:
    """What this process waits for, in words, for a line that is printed now; empty if there is nothing."""
    return WAITS.told(time.monotonic())


def told_by(say: Callable[[str], None] | None) -> None:
    """From now on give the lines to this function; None: to the log."""
    WAITS.say = say


@contextmanager
def told_to(say: Callable[[str], None]) -> Iterator[None]:
    """Within the block give the lines to this function."""
    told_by(say)
    try:
        yield
    finally:
        told_by(None)
