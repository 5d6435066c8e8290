"""What a command prints: its streams, and the lines of other libraries that it keeps apart.

Each standard stream is open, takes every character, and a write that fails ends nothing: the reader of a pipe may end
(`lockstep … | head`), a disk may be full, and a shell may close a stream (`>&-`). A run then trains to its end, and a
verdict has its exit code. If the lines were the whole result, the command says so and ends with exit code 1.

vLLM, gloo and other native code write warnings, most of them harmless, to file descriptor 2. They go to a file in the
run's directory. What Python code writes to `sys.stderr` stays on the terminal. Notes and progress bars of other
libraries are switched off.
"""

from __future__ import annotations

import errno
import io
import logging
import os
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from lockstep.errors import LockstepError
from lockstep.safe_text import complain, masked

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
    """Replace the streams of this process by such ones, and print tracebacks with `complain`.

    Call it once, before any thread.

    A descriptor that is closed is opened on nothing. Otherwise the next file that the process opens would get its
    number, and whatever native code prints would be written into that file.

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
        is_result: whether the lines on standard output are the command's result. If a disk was full, the result is
            lost. A reader that is gone, as in `lockstep … | head`, has what it wanted.
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


LIBRARY_LOG = "libraries.log"
# Loggers whose messages go to the file too. `py.warnings` logs the warnings of Python.
_LOGGERS = ("vllm", "py.warnings")
_STDERR = 2


class _WithoutSecrets(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return masked(super().format(record))


class LibraryLog:
    """The file of the libraries' output; it can move to a folder.

    Args:
        temporary: descriptor of the temporary file that is used until there is a folder.
    """

    def __init__(self, temporary: int) -> None:
        self._temporary = temporary
        self.path: Path | None = None

    def move_to(self, folder: Path) -> Path:
        """Continue in `libraries.log` of a folder, and copy the earlier output to it; returns the path of the file."""
        self.path = folder / LIBRARY_LOG
        with self.path.open("ab") as file:
            file.write(self.written())
            file.flush()
            os.dup2(file.fileno(), _STDERR)
        return self.path

    def written(self) -> bytes:
        """The content of the temporary file."""
        return os.pread(self._temporary, os.fstat(self._temporary).st_size, 0)


@contextmanager
def libraries_aside() -> Iterator[LibraryLog]:
    """Within the block, libraries write to a file. It is a temporary file until `move_to` names a folder.

    If another program's error has ended the block, the file gets its traceback.
    If the block raises an unexpected error before that, the content of the temporary file is written to the terminal.
    """
    with tempfile.TemporaryFile() as temporary:
        sys.stderr.flush()
        terminal, found = os.dup(_STDERR), sys.stderr
        if _is_real(found):
            sys.stderr = lasting(found, os.dup(terminal), why_lost(found))
        log = LibraryLog(temporary.fileno())
        os.dup2(temporary.fileno(), _STDERR)
        # This handler writes to the descriptor, so its messages go to the current file.
        handler = logging.StreamHandler(
            os.fdopen(_STDERR, "w", buffering=1, closefd=False, encoding="utf-8", errors="backslashreplace")
        )
        handler.setFormatter(_WithoutSecrets())
        for name in _LOGGERS:
            logging.getLogger(name).addHandler(handler)
        logging.captureWarnings(True)
        try:
            yield log
        except Exception as error:
            if log.path is None and not isinstance(error, LockstepError):
                os.write(terminal, log.written())
            if isinstance(error, LockstepError) and error.__cause__ is not None:
                # The terminal gets one line of it.
                os.write(
                    _STDERR,
                    masked("".join(traceback.format_exception(error))).encode(errors="backslashreplace"),
                )
            raise
        finally:
            logging.captureWarnings(False)
            for name in _LOGGERS:
                logging.getLogger(name).removeHandler(handler)
            os.dup2(terminal, _STDERR)
            sys.stderr = found
            os.close(terminal)


def _is_real(stream: object) -> bool:
    try:
        return stream.fileno() == _STDERR  # type: ignore[attr-defined]
    except (AttributeError, OSError, ValueError):
        return False


def quiet_libraries() -> None:
    """Turn them off. A command calls this before it imports anything heavy."""
    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
