"""One process at a time writes into the directory of a run. A process that ends in any way, for example by a kill, leaves no lock.

Commands hold the lock from their start to their end. A trainer of a script holds it while it trains, and while it
writes an evaluation (`run/trainers/`).
"""

from __future__ import annotations

import fcntl
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from lockstep.errors import InputError

_logger = logging.getLogger(__name__)

LOCK = ".lock"


class Occupied(InputError):
    """Another process, or another trainer of this process, writes into the directory."""


@dataclass
class _Held:
    """A lock that this process holds.

    Attributes:
        times: how many blocks hold it.
        alone: what this process does there, and may do only once at a time.
    """

    file: IO[str]
    times: int = 0
    alone: set[str] = field(default_factory=set)


# By device and inode of the lock's file: two paths may name one directory.
_held: dict[tuple[int, int], _Held] = {}


def _leave_to_parent() -> None:
    # A forked process that outlives this one must not hold its locks.
    for held in _held.values():
        held.file.close()
    _held.clear()


os.register_at_fork(after_in_child=_leave_to_parent)


@contextmanager
def locked(folder: Path, alone: str = "") -> Iterator[None]:
    """Hold the lock of a directory. This process may hold it several times, because a trainer holds it within a command.

    Args:
        alone: what this process does in the block, if it may do so only once at a time: "command" or "trainer".

    Raises:
        Occupied: another process holds the lock, or this process does the same thing there already.
        InputError: the directory cannot be used.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / LOCK).open("a", encoding="utf-8")
    except OSError as error:
        raise InputError(f"output_dir {folder} cannot be used: {error}") from error
    found = os.fstat(file.fileno())
    key = (found.st_dev, found.st_ino)
    if key in _held:
        file.close()
    else:
        _take(file, folder)
        _held[key] = _Held(file)
    held = _held[key]
    if alone in held.alone:
        raise Occupied(
            f"another {alone} of this process is running in {folder}; wait for it, or give another output_dir"
        )
    held.times += 1
    held.alone |= {alone} - {""}
    try:
        yield
    finally:
        held.times -= 1
        held.alone.discard(alone)
        # A forked process has left the lock to its parent.
        if not held.times and _held.get(key) is held:
            del _held[key]
            held.file.close()


def _take(file: IO[str], folder: Path) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.close()
        raise Occupied(f"another process is running in {folder}; wait for it, or give another output_dir") from error
    except OSError as error:
        _logger.warning(
            f"the file system of {folder} has no locks ({error.strerror}): make sure yourself that no other process "
            "writes into this directory"
        )
