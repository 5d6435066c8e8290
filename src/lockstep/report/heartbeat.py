"""Prints a line about the work under way when no line was printed for some seconds: for output that goes to a file or a pipe.

On a terminal they draw several times per second instead.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

# Seconds of silence before the first line. Each further line of the same silence comes after twice the time, up to the longest.
FIRST = 5.0
_LONGEST = 60.0


class Heartbeat:
    """Calls a function while nothing is printed. The first call of `printed` starts it, `stop` ends it.

    Args:
        beat: prints a line; called from a thread.
    """

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
