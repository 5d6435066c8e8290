"""Writes the warnings of libraries to a file in the run's directory, so that they do not mix with the run's own lines.

vLLM, gloo and other native code write warnings directly to the process's standard error, file descriptor 2; most are harmless.
The text that Python code writes to `sys.stderr` (errors, prints of a reward function) stays on the terminal.
"""

from __future__ import annotations

import logging
import os
import sys
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lockstep.cli.process.streams import lasting, why_lost
from lockstep.errors import LockstepError
from lockstep.secret import masked

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
                os.write(_STDERR, masked("".join(traceback.format_exception(error))).encode(errors="backslashreplace"))
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
