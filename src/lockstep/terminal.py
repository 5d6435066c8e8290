"""rich's console for panels, tables and lines of a run. Texts cannot steer it; a terminal that is gone ends nothing.

A write that fails, because the reader of a pipe is gone or a disk is full, is dropped: a run that trains must not end
because of its lines.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import IO, Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from lockstep.safe_text import visible


class Terminal(Console):
    """A console that writes texts only: what they hold is shown, and not obeyed."""

    @property
    def file(self) -> IO[str]:
        """The stream of this moment; one whose reader is gone raises nothing."""
        return _Open(super().file)  # type: ignore[return-value]

    @file.setter
    def file(self, new_file: IO[str]) -> None:
        Console.file.fset(self, new_file)  # type: ignore[attr-defined]

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """The segments of something, without controls in its texts."""
        if isinstance(renderable, str):
            renderable = visible(renderable)
        elif isinstance(renderable, Text) and (plain := visible(renderable.plain)) != renderable.plain:
            renderable = renderable.blank_copy(plain)
        for segment in super().render(renderable, options):
            # Segments with controls are rich's own, such as those that move the cursor of a live panel.
            text = segment.text if segment.control else visible(segment.text)
            yield segment if text == segment.text else Segment(text, segment.style)


class _Open:
    """A stream that is written as far as it can be: it may be gone or closed, or have few characters."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        # A stream that is closed raises a ValueError.
        with suppress(OSError, ValueError):
            try:
                self._stream.write(text)
            except UnicodeEncodeError:
                self._stream.write(text.encode("ascii", "backslashreplace").decode())
        return len(text)

    def flush(self) -> None:
        with suppress(OSError, ValueError):
            self._stream.flush()


_BLOCKS = "▁▂▃▄▅▆▇█"


def sparkline(
    values: Sequence[float], width: int = 32, low: float | None = None, high: float | None = None
) -> str:
    """The last `width` values as block characters of eight heights. NaN is left out.

    Args:
        low, high: the values of the lowest and the highest block; by default those of the values themselves.
    """
    shown = [value for value in values[-width:] if value == value]
    if not shown:
        return ""
    low, high = min(shown) if low is None else low, max(shown) if high is None else high
    span = (high - low) or 1.0
    return "".join(_BLOCKS[round((min(max(v, low), high) - low) / span * (len(_BLOCKS) - 1))] for v in shown)
