"""A series of numbers as one line of block characters. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Sequence

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
