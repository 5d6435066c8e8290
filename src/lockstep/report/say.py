"""Prints lines for people. The linter forbids `print` elsewhere, so that no text of a model or a file steers a terminal."""

from __future__ import annotations

import sys

from lockstep.secret import masked
from lockstep.visible import visible


def say(text: str = "", *, end: str = "\n", flush: bool = False) -> None:
    """Print a text on standard output."""
    print(visible(text), end=end, flush=flush)


def complain(text: str) -> None:
    """Print an error or a warning on standard error, without secrets. If nobody can read that, on standard output."""
    shown = visible(masked(text))
    print(shown, file=sys.stderr, flush=True)
    if _is_lost(sys.stderr) and not _is_lost(sys.stdout):
        print(shown, flush=True)


def _is_lost(stream: object) -> bool:
    # The streams of a command know it (`cli/process/streams.py`).
    return getattr(getattr(stream, "buffer", None), "is_lost", False)
