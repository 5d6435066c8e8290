"""What libraries write past Python, or warn of, goes to a file in the run's directory and not between the run's own lines.

vLLM, gloo and other native code write warnings straight to the process's standard error, file descriptor 2; most are harmless. What
Python code writes to `sys.stderr` (errors, a reward function's own words) stays on the terminal.
"""

from __future__ import annotations

import logging
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lockstep.errors import LockstepError

LIBRARY_LOG = "libraries.log"
# Loggers whose messages go to the file too; `py.warnings` is what Python's warnings are logged by.
_LOGGERS = ("vllm", "py.warnings")
_STDERR = 2


class LibraryLog:
    """The file, and how to move it.

    Args:
        temporary: descriptor of the file that stands in until there is a folder.
    """

    def __init__(self, temporary: int) -> None:
        self._temporary = temporary
        self.path: Path | None = None

    def move_to(self, folder: Path) -> Path:
        """Go on in a folder's `libraries.log`, with what was written so far; returns the file's path."""
        self.path = folder / LIBRARY_LOG
        with self.path.open("ab") as file:
            file.write(self.written())
            file.flush()
            os.dup2(file.fileno(), _STDERR)
        return self.path

    def written(self) -> bytes:
        """What stands in the temporary file."""
        return os.pread(self._temporary, os.fstat(self._temporary).st_size, 0)


@contextmanager
def libraries_aside() -> Iterator[LibraryLog]:
    """Within the block, libraries write to a file: a temporary one, until `move_to` names a folder.

    Where the block fails before that, by an error that nobody expected, what they wrote is shown after all.
    """
    with tempfile.TemporaryFile() as temporary:
        sys.stderr.flush()
        terminal, found = os.dup(_STDERR), sys.stderr
        if _is_real(found):
            sys.stderr = os.fdopen(os.dup(terminal), "w", buffering=1)
        log = LibraryLog(temporary.fileno())
        os.dup2(temporary.fileno(), _STDERR)
        # Writes to the descriptor, and so to wherever it leads.
        handler = logging.StreamHandler(os.fdopen(_STDERR, "w", buffering=1, closefd=False))
        for name in _LOGGERS:
            logging.getLogger(name).addHandler(handler)
        logging.captureWarnings(True)
        try:
            yield log
        except Exception as error:
            if log.path is None and not isinstance(error, LockstepError):
                os.write(terminal, log.written())
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
