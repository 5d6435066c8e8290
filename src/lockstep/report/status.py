"""Shows the current piece of work in one line: a spinner with the seconds on a terminal, plain lines elsewhere.

A plain line says that a piece of work begins; further ones follow while it lasts (`report/heartbeat.py`).
Comes from: `report/busy.py`. Goes to: a console, by default on standard error, so that standard output can be piped.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from rich.live import Live
from rich.spinner import Spinner
from rich.text import Text

from lockstep.report.heartbeat import Heartbeat
from lockstep.report.terminal import Terminal
from lockstep.report.waits import open_waits

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
            # Libraries that are imported during the work keep references to the streams, so the streams must be the real ones.
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
