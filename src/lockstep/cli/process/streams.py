"""The standard streams of a command: each is open, takes every character, and a write that fails ends nothing.

The reader of a pipe may end (`lockstep … | head`), a disk may be full, and a shell may close a stream (`>&-`). A
command then goes on: a run trains to its end, and a verdict has its exit code. Lines that nobody can read are dropped.
If the lines were the whole result, the command says so and ends with exit code 1.
"""

from __future__ import annotations

import errno
import io
import os
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Any, TextIO

from lockstep.report.say import complain

_CLOSED = OSError(errno.EBADF, os.strerror(errno.EBADF))


class _Raw(io.FileIO):
    """The descriptor under a stream. After a write that fails, nothing more is written.

    Attributes:
        error: why; None while writes succeed.
    """

    error: OSError | None = None
    lost: Callable[[OSError], None] | None = None

    def write(self, data: Any, /) -> int:
        if self.error is None:
            try:
                # None, if a reader that does not wait is full: the buffer tries again.
                return super().write(data)
            except OSError as error:
                self.error = error
                if self.lost is not None:
                    self.lost(error)
        return len(data)


class _Buffer(io.BufferedWriter):
    """Says whether nobody can read what is written."""

    raw: _Raw

    @property
    def is_lost(self) -> bool:
        return self.raw.error is not None


def lasting(stream: TextIO, number: int, error: OSError | None = None) -> TextIO:
    """A stream on a descriptor whose writes raise no OSError, and which replaces characters that it cannot encode.

    Args:
        stream: the encoding and the buffering are taken from it.
        error: why nobody reads it; None: somebody does.
    """
    # The three streams of the process stay open, and a descriptor of another stream is closed with it.
    raw = _Raw(number, "w", closefd=number > 2)
    raw.error = error
    return io.TextIOWrapper(
        _Buffer(raw),
        stream.encoding,
        "backslashreplace",
        line_buffering=bool(stream.line_buffering),
        write_through=bool(getattr(stream, "write_through", False)),
    )


def why_lost(stream: object) -> OSError | None:
    """Why nobody can read what is written to a stream; None: somebody can, or the stream is not one of ours."""
    buffer = getattr(stream, "buffer", None)
    return buffer.raw.error if isinstance(buffer, _Buffer) else None


def open_streams(goes_on: str = "") -> None:
    """Replace the streams of this process by such ones, and print tracebacks with `complain`. Call it once, before any thread.

    A descriptor that is closed is opened on nothing. Otherwise the next file that the process opens would get its number, and
    whatever native code prints would be written into that file.

    Args:
        goes_on: what is said at once, behind the reason, if standard output is lost; empty: nothing.
    """
    closed = [number for number in (0, 1, 2) if _is_closed(number)]
    for number in closed:
        nothing = os.open(os.devnull, os.O_RDWR)
        if nothing != number:
            os.dup2(nothing, number)
            os.close(nothing)
        os.set_inheritable(number, True)
    if sys.stdin is None:
        sys.stdin = open(0, closefd=False, encoding="locale")  # noqa: SIM115  it lasts as long as the process
    for number, name in ((1, "stdout"), (2, "stderr")):
        found = getattr(sys, name) or open(number, "w", closefd=False, encoding="locale")  # noqa: SIM115
        if isinstance(found, io.TextIOWrapper):
            with suppress(OSError):
                found.flush()
            setattr(sys, name, lasting(found, number, _CLOSED if number in closed else None))
    if goes_on and isinstance(buffer := getattr(sys.stdout, "buffer", None), _Buffer):
        buffer.raw.lost = lambda error: complain(f"lockstep: standard output {_reason(error)}; {goes_on}")
    sys.excepthook = _print_traceback


def code_of(code: int, *, is_result: bool) -> int:
    """The exit code of a command that ends with `code`, after all its output was written.

    Args:
        is_result: whether the lines on standard output are the command's result. If a disk was full, the result is lost. A reader
            that is gone, as in `lockstep … | head`, has what it wanted.
    """
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    error = why_lost(sys.stdout)
    if not is_result or error is None or error.errno in (errno.EPIPE, errno.EBADF):
        return code
    complain(f"lockstep: standard output {_reason(error)}, so that the result is not whole")
    return code or 1


def _reason(error: OSError) -> str:
    return "has no reader any more" if error.errno == errno.EPIPE else f"cannot be written ({error.strerror})"


def _is_closed(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return True
    return False


def _print_traceback(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    complain("".join(traceback.format_exception(kind, error, trace)).rstrip())
