"""Shows the current piece of work in one line: a spinner with the seconds on a terminal, one plain line per piece elsewhere.

Comes from: `report/busy.py`. Goes to: a console, by default on standard error, so that standard output can be piped.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner
from rich.text import Text

# On a terminal, work that takes fewer seconds leaves no line behind.
_WORTH_A_LINE = 2.0


class StatusLine:
    """Shows the innermost piece of work that has not ended yet."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._work: list[tuple[str, Callable[[], str], float]] = []
        self._live: Live | None = None
        self._spinner = Spinner("dots")

    def begin(self, text: str, detail: Callable[[], str]) -> None:
        self._work.append((text, detail, time.monotonic()))
        if not self._console.is_terminal:
            self._console.print(f"{text} …", highlight=False, soft_wrap=True, markup=False)
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
            return
        if not self._work:
            self._live.stop()
            self._live = None
        if seconds >= _WORTH_A_LINE:
            self._console.print(f"{text}: {seconds:.0f} s", style="dim", highlight=False, markup=False)

    def _line(self) -> Spinner | Text:
        if not self._work:
            return Text("")
        text, detail, began = self._work[-1]
        words = [text, *filter(None, [detail()]), f"{time.monotonic() - began:.0f} s"]
        self._spinner.update(text=Text(" · ".join(words), no_wrap=True, overflow="ellipsis"))
        return self._spinner
