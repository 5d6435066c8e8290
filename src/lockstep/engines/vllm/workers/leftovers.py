"""Files that vLLM's processes leave behind when they are killed: in the temporary folder, and in shared memory.

Each engine has a private folder, and its owner holds a lock in it: `lockstep serve`, or the trainer. The folder also
has the list of the engine's files in shared memory. Whoever starts the next engine on the machine removes the folders
whose lock nobody holds any more, with these files. A lock ends with its process, however that ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

# The lock of a folder's owner, and the list of files in shared memory: inode and name per line.
_LOCK, _LIST = "owner.lock", "shared-memory"
_SHARED = Path("/dev/shm")
# Semaphores and shared memory of Python's multiprocessing, and what vLLM names itself.
_NAMES = re.compile(r"(sem\.mp-|psm_|vllm)[\w.-]+")


@contextmanager
def owned(folder: Path) -> Iterator[None]:
    """Inside the context, this process is the owner of a folder. At its end, the listed files are removed."""
    # The lock is held before the file has its name, so that nobody takes the folder for one of a dead owner.
    with (folder / f"{_LOCK}.new").open("w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        (folder / f"{_LOCK}.new").rename(folder / _LOCK)
        try:
            yield
        finally:
            remove_listed(folder)


def note(folder: Path, processes: Iterable[int], without: Iterable[str] = ()) -> None:
    """Add the files in shared memory that processes use to the list of a folder.

    Args:
        without: names that are not this engine's.
    """
    listed = _read_list(folder)
    names = {name for process in processes for name in shared_by(process)} - set(without)
    for name in names:
        with contextlib.suppress(OSError):
            found = (_SHARED / name).lstat()
            if found.st_uid == os.geteuid():
                listed[name] = found.st_ino
    with contextlib.suppress(OSError):
        (folder / f"{_LIST}.new").write_text(
            "".join(f"{inode} {name}\n" for name, inode in listed.items()), encoding="utf-8"
        )
        (folder / f"{_LIST}.new").rename(folder / _LIST)


def shared_by(process: int) -> set[str]:
    """Names of the files in shared memory that a process has mapped; none if the process is gone or another user's."""
    found = set()
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{process}/maps").read_text(encoding="utf-8", errors="replace").splitlines():
            path = line.partition("/")[1] + line.partition("/")[2]
            name = path.removeprefix(f"{_SHARED}/")
            # A file whose name was removed has another ending.
            if path != name and _NAMES.fullmatch(name):
                found.add(name)
    return found


def _all_processes() -> list[int]:
    """The ids of all processes on this machine."""
    return [int(path.name) for path in Path("/proc").glob("[0-9]*")]


def remove_dead(parent: Path) -> None:
    """Remove the folders in `parent` whose owners are gone, with their files in shared memory. Other users' are left alone."""
    for folder in parent.glob("lockstep-*"):
        with contextlib.suppress(OSError):
            found = folder.lstat()
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
                continue
            # A folder without a lock belongs to something else.
            lock = os.open(folder / _LOCK, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            with os.fdopen(lock, encoding="utf-8") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if not _is_used(folder):
                    remove_listed(folder)
                    shutil.rmtree(folder, ignore_errors=True)


def _is_used(folder: Path) -> bool:
    """Whether a process was started for this folder and outlives its owner."""
    return any(os.fsencode(folder) in _environment_of(process) for process in _all_processes())


def _environment_of(process: int) -> bytes:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{process}/environ").read_bytes()
    return b""


def _read_list(folder: Path) -> dict[str, int]:
    found = {}
    with contextlib.suppress(OSError):
        for line in (folder / _LIST).read_text(encoding="utf-8", errors="replace").splitlines():
            inode, _, name = line.partition(" ")
            if inode.isdecimal() and _NAMES.fullmatch(name):
                found[name] = int(inode)
    return found


def remove_listed(folder: Path) -> None:
    """Remove the listed files that nobody uses. A name may belong to another file by now, which has another inode."""
    listed = _read_list(folder)
    if not listed:
        return
    used = {name for process in _all_processes() for name in shared_by(process)}
    for name, inode in listed.items():
        with contextlib.suppress(OSError):
            found = (_SHARED / name).lstat()
            if name not in used and (found.st_ino, found.st_uid) == (inode, os.geteuid()):
                (_SHARED / name).unlink()
