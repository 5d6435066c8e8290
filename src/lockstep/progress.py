"""Says what is going on: work that takes seconds, waits, and lines while nothing else is printed.

- `busy("loading the model")` announces a piece of work when it begins. A watcher shows it: `StatusLine` (a spinner with
  the seconds on a terminal, plain lines elsewhere), or a run's panel. Without one, only work that lasts gets a line.
- `Heartbeat` prints a line about the work under way when no line was printed for some seconds: for output to a file
  or a pipe.
- `waiting("the server to answer", 240.0)` says what a run waits for, from five seconds on. Every bounded wait for
  another process, another rank or a user's code is such a block, in whichever thread. The watcher shows the open ones;
  without one they go to the log. Several waits for one thing make one line.
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
from typing import Protocol, Self

from rich.live import Live
from rich.spinner import Spinner
from rich.text import Text

from lockstep.safe_text import masked
from lockstep.terminal import Terminal

# Seconds of silence before the first line, and until a wait is told. Each further line of the same silence or wait
# comes after twice the time, up to the longest.
FIRST = 5.0
_LONGEST = 60.0


class Heartbeat:
    """Calls a function from a thread while nothing is printed. The first `printed` starts it, `stop` ends it."""

    def __init__(self, beat: Callable[[], None]) -> None:
        self._beat = beat
        self._printed, self._stopped = threading.Event(), False
        self._thread: threading.Thread | None = None

    def printed(self) -> None:
        """A line was printed just now, so the silence starts again."""
        if self._thread is None:
            self._stopped = False
            self._thread = threading.Thread(target=self._run, name="lockstep-heartbeat", daemon=True)
            self._thread.start()
        self._printed.set()

    def stop(self) -> None:
        """Call nothing from now on; safe to call twice."""
        if self._thread is not None:
            self._stopped = True
            self._printed.set()
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        seconds = FIRST
        while not self._stopped:
            if self._printed.wait(seconds):
                self._printed.clear()
                seconds = FIRST
            else:
                self._beat()
                seconds = min(2 * seconds, _LONGEST)


_logger = logging.getLogger(__name__)

# A line that is printed anyway names waits from so many seconds on.
_WORTH_NAMING = 1.0
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
        self,
        what: str,
        limit: float | None = None,
        now: Callable[[], str] = str,
        *,
        verb: str = "waiting for ",
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
        """What each wait of at least so many seconds is for, and the line about it, the oldest first."""
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
    words = f"{first.what}{several}: {now - first.since:.0f} s"
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


# On a terminal, work that takes fewer seconds leaves no line behind.
_WORTH_A_LINE = 2.0


class StatusLine:
    """Shows the innermost piece of work that has not ended yet."""

    def __init__(self, console: Terminal | None = None) -> None:
        self._console = console or Terminal(stderr=True)
        self._work: list[tuple[str, Callable[[], str], float]] = []
        self._live: Live | None = None
        self._spinner = Spinner("dots")
        self._heartbeat = Heartbeat(self._beat)

    def begin(self, text: str, detail: Callable[[], str]) -> None:
        self._work.append((text, detail, time.monotonic()))
        if not self._console.is_terminal:
            self._print(f"{text} …")
            self._heartbeat.printed()
        elif self._live is None:
            # Libraries that are imported during the work keep references to the streams, so the streams must be the
            # real ones.
            self._live = Live(
                console=self._console, get_renderable=self._line, refresh_per_second=8, transient=True,
                redirect_stdout=False, redirect_stderr=False,
            )  # fmt: skip
            self._live.start(refresh=True)

    def end(self) -> None:
        text, _, began = self._work.pop()
        seconds = time.monotonic() - began
        if self._live is None:
            if not self._work:
                self._heartbeat.stop()
            return
        if not self._work:
            self._live.stop()
            self._live = None
        if seconds >= _WORTH_A_LINE:
            self._console.print(f"{text}: {seconds:.0f} s", style="dim", highlight=False, markup=False)

    def note(self, line: str) -> None:
        if not self._console.is_terminal:
            self._print(line)
            if self._work:
                self._heartbeat.printed()
        elif self._live is None:
            self._console.print(line, style="dim", highlight=False, markup=False)

    def _line(self) -> Spinner | Text:
        if not (words := self._words()):
            return Text("")
        self._spinner.update(text=Text(words, no_wrap=True, overflow="ellipsis"))
        return self._spinner

    def _beat(self) -> None:
        if words := self._words():
            self._print(words)

    def _words(self) -> str:
        """The innermost work, its progress and its seconds; empty if there is none. Any thread may call this."""
        work = self._work[-1:]
        if not work:
            return ""
        ((text, detail, began),) = work
        progress, seconds = detail(), f"{time.monotonic() - began:.0f} s"
        # The progress of a phase has seconds of its own.
        words = f"{text} · {progress} · {seconds} in all" if progress else f"{text} · {seconds}"
        # First, because a narrow terminal cuts the line.
        return " · ".join(filter(None, [open_waits(), words]))

    def _print(self, line: str) -> None:
        self._console.print(line, highlight=False, soft_wrap=True, markup=False)


class Watcher(Protocol):
    """Gets a call when a piece of work begins and when it ends. Pieces of work may be nested."""

    def begin(self, text: str, detail: Callable[[], str]) -> None: ...

    def end(self) -> None: ...

    def note(self, line: str) -> None:
        """A line about a wait that lasts. A watcher that draws shows the open waits itself."""


_watchers: list[Watcher] = []


@contextmanager
def busy(text: str, detail: Callable[[], str] = str) -> Iterator[None]:
    """Tell the watcher when a piece of work, such as "loading the model", begins and ends.

    `detail` returns the progress as text. Another thread calls it several times per second.
    """
    watcher, text = _watchers[-1] if _watchers else None, " ".join(text.split())
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


def clock(seconds: float) -> str:
    """Minutes and seconds, with hours if there are any."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
