"""Ends a command's process at once when its work is done.

An interpreter that ends frees every object one by one. With PyTorch and vLLM loaded this takes 4 CPU seconds, in which
the command seems to hang after its last line. `EndAtOnce` lets everything run that programs have registered for their
end (threads, `atexit`), writes what the streams hold, and leaves the rest to the operating system.
"""

from __future__ import annotations

import atexit
import os
import sys


class EndAtOnce:
    """Make it first: Python calls the functions of `atexit` in the reverse order, so this one is called after all others.

    Attributes:
        code: the exit code of a command that has returned. None: it has raised an error, and the interpreter ends as usual.
    """

    def __init__(self) -> None:
        self.code: int | None = None
        atexit.register(self._end)

    def _end(self) -> None:
        if self.code is None:
            return
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except (OSError, ValueError):
                # Nobody reads it any more.
                continue
        os._exit(self.code)
