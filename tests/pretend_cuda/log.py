"""What happened on the pretend GPU: mixed devices and waits of the host, each with its place in the code under test."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

# The kinds of events that make the host wait until the device has done all work so far. `h2d` is one of them: PyTorch
# waits for the end of a copy from the host, from pinned memory too, unless it is `non_blocking`. Such a copy of
# pageable memory (`h2d_staged`) waits for the stream before it begins.
WAITS = ("sync", "h2d", "h2d_staged", "d2h")


@dataclass
class Log:
    """Counts of what happened.

    Attributes:
        root: a part of the file names of the code under test.
        mixes: calls with tensors of two devices, by (operation, devices, place). Each has raised an error, which the
            code under test may have swallowed.
        events: copies and waits, by (kind, operation, place, what `context` gave).
        sizes: their bytes, by the same.
        context: gives a label for each event, such as the phase of a step.
        kernels: gives the number of operations that have run on the device.
    """

    root: str = "/src/lockstep/"
    mixes: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    events: Counter[tuple[str, str, str, Any]] = field(default_factory=Counter)
    sizes: Counter[tuple[str, str, str, Any]] = field(default_factory=Counter)
    context: Callable[[], Any] = lambda: ""
    kernels: Callable[[], int] = lambda: 0
    _lock: threading.RLock = field(default_factory=threading.RLock)

    def event(self, kind: str, operation: str, detail: str, size: int) -> None:
        """Count an event. The extension calls this, from any thread."""
        place = self._place()
        with self._lock:
            if kind == "mix":
                self.mixes[operation, detail.strip(), place] += 1
            else:
                label = self.context()
                self.events[kind, operation, place, label] += 1
                self.sizes[kind, operation, place, label] += size

    def copied(self, kind: str) -> int:
        """Bytes of all events of a kind."""
        with self._lock:
            return sum(size for (found, *_), size in self.sizes.items() if found == kind)

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self.mixes.clear()
            self.events.clear()
            self.sizes.clear()

    def _place(self) -> str:
        """File and line of the innermost frame of the code under test; of the main thread for autograd's own thread."""
        if (own := self._own(sys._getframe())) is not None:
            return own
        main = self._own(sys._current_frames().get(threading.main_thread().ident or 0))
        return f"autograd, called at {main}" if main is not None else "outside"

    def _own(self, frame: FrameType | None) -> str | None:
        while frame is not None:
            name = frame.f_code.co_filename
            if self.root in name:
                return f"{name.partition(self.root)[2]}:{frame.f_lineno}"
            frame = frame.f_back
        return None


LOG = Log()
