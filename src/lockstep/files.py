"""Writes files. Each has its whole old content or its whole new content, also after a kill, a full disk or a crash.

Every file of a run is written by these functions. `tests/run/test_every_write.py` finds code that writes in another
way.
"""

from __future__ import annotations

import atexit
import errno
import fcntl
import json
import logging
import math
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from lockstep.errors import InputError, names_path, reason

_logger = logging.getLogger(__name__)

# What a file system says that cannot sync a directory.
_NO_SYNC = {errno.EINVAL, errno.ENOTSUP, errno.EBADF}


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Within the block, the new content of a file is written. At its end it replaces the old one in one step.

    What is not a regular file, such as a pipe or a terminal, is written to directly. After an OSError, for example
    because the disk is full, the file is unchanged.
    """
    if path.exists() and not path.is_file() and not path.is_dir():
        with names_path(path), path.open("wb") as file:
            yield file
        return
    # A link stays a link.
    target = Path(os.path.realpath(path))
    beside = target.with_name(f".{target.name}.new")
    try:
        with names_path(path):
            with beside.open("wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            beside.replace(target)
    except BaseException:
        with suppress(OSError):
            beside.unlink(missing_ok=True)
        raise


def what_is_at(path: Path) -> str:
    """What there is in place of a file or folder that was asked for, as the end of a sentence."""
    try:
        if path.is_dir():
            return "is a directory"
        if path.is_file():
            return "is a file"
        if path.exists():
            return "is neither a file nor a directory"
        return "is a link to nothing" if path.is_symlink() else "does not exist"
    except (OSError, ValueError) as error:
        return f"cannot be looked at ({reason(error)})"


# Files that hold settings have a few KiB.
_LARGEST_SETTINGS = 1 << 20


def check_regular(path: Path) -> None:
    """Refuse what is there and is no regular file: a pipe or a device such as /dev/zero may have no end.

    Raises:
        OSError: it is something else.
    """
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "is not a file", str(path))


def from_json(text: str | bytes) -> Any:
    """The value of a text that may be damaged.

    Raises:
        ValueError: it is no JSON, or nested so deeply that nobody has written it.
    """
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def read_json(path: Path) -> Any:
    """The value in a file, which may be damaged.

    Raises:
        OSError: it is no regular file, or cannot be read.
        ValueError: it is not UTF-8, no JSON, or nested too deeply.
    """
    check_regular(path)
    return from_json(path.read_text(encoding="utf-8"))


def read_settings(path: Path) -> str:
    """The text of a file in which a user has written settings.

    Raises:
        OSError: it is no regular file, has more than 1 MiB, or cannot be read.
        ValueError: it is not UTF-8.
    """
    check_regular(path)
    with path.open("rb") as opened:
        found = opened.read(_LARGEST_SETTINGS + 1)
    if len(found) > _LARGEST_SETTINGS:
        raise OSError(errno.EFBIG, "has more than 1 MiB", str(path))
    return found.decode()


def check_writable(path: Path) -> None:
    """Refuse a file that `replacing` cannot write. Nothing is changed."""
    if path.is_dir():
        raise InputError(f"{path} is a directory; give the name of a file to write")
    target = path.resolve() if "\0" not in str(path) else path
    beside = target.with_name(f".{target.name}.new")
    try:
        if path.exists() and not path.is_file():
            # A pipe or a terminal.
            return
        beside.open("ab").close()
        beside.unlink()
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be written ({reason(error)})") from error


def replace_text(path: Path, text: str) -> None:
    """Replace a file's text in one step. After an OSError it is unchanged."""
    with replacing(path) as file:
        file.write(text.encode())


def as_json(value: Any, **options: Any) -> str:
    """JSON of a value. A number that JSON does not have (NaN, infinite) is null there."""
    return json.dumps(without_nan(value), allow_nan=False, **options)


def without_nan(value: Any) -> Any:
    """A value with None in place of each number in it that is NaN or infinite."""
    if isinstance(value, Mapping):
        return {name: without_nan(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def append_line(path: Path, line: str, *, durable: bool = False) -> None:
    """Append a line to a log. After an OSError, the log is as it was before.

    A durable line is on the disk when the function returns, so that a crash of the machine does not lose it.
    """
    data = f"{line}\n".encode()
    with names_path(path), path.open("ab", buffering=0) as file:
        start, done = file.tell(), 0
        try:
            while done < len(data):
                done += file.write(data[done:])
            if durable:
                os.fsync(file.fileno())
        except OSError:
            # Half a line would join the next one.
            with suppress(OSError):
                file.truncate(start)
            raise


def sync_folder(folder: Path) -> None:
    """Bring every file of a folder to the disk."""
    for place, _, names in os.walk(folder):
        for name in names:
            _sync(Path(place) / name)
        _sync(Path(place))


def publish_folder(made: Path, place: Path) -> None:
    """Give a finished folder on the same file system its name, which nothing has yet.

    A folder with that name is whole at every moment, also after a crash of the machine.
    """
    sync_folder(made)
    made.rename(place)
    _sync(place.parent)


@contextmanager
def making_folder(place: Path) -> Iterator[Path]:
    """Within the block, a folder is filled under another name. At its end it gets its name; an error removes it."""
    made = place.with_name(f".{place.name}.new")
    # A kill may have left it.
    shutil.rmtree(made, ignore_errors=True)
    try:
        made.mkdir(parents=True)
        yield made
        publish_folder(made, place)
    except BaseException:
        shutil.rmtree(made, ignore_errors=True)
        raise


@contextmanager
def temporary_folder(prefix: str, parent: Path | None = None) -> Iterator[Path]:
    """Within the block, a new folder that only this user can open. At its end the folder is removed.

    At its beginning the folders of this prefix are removed whose owners were killed: nobody holds their lock. Without
    a parent they are in the temporary folder of this machine.
    """
    place = Path(tempfile.gettempdir()) if parent is None else parent
    for left in place.glob(f"{prefix}*"):
        with suppress(OSError):
            _remove_dead(left)
    made = Path(tempfile.mkdtemp(prefix=prefix, dir=place))
    handle = os.open(made, os.O_RDONLY)
    try:
        # Some file systems have no locks. There the folders of the dead stay.
        with suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)
        os.close(handle)


def folder_until_exit(prefix: str) -> Path:
    """A folder as `temporary_folder` makes it, which is removed when this process ends."""
    until_exit, owner = ExitStack(), os.getpid()
    made = until_exit.enter_context(temporary_folder(prefix))
    atexit.register(lambda: until_exit.close() if os.getpid() == owner else None)
    return made


def _remove_dead(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # The owner of an empty folder may be about to lock it.
        if os.fstat(handle).st_uid == os.geteuid() and any(folder.iterdir()):
            shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(handle)


def free_name(wanted: Path) -> Path:
    """The path itself, or the first of `NAME-2`, `NAME-3`, … with its suffix that does not exist."""
    path, number = wanted, 2
    while os.path.lexists(path):
        path = wanted.with_name(f"{wanted.stem}-{number}{wanted.suffix}")
        number += 1
    return path


def set_aside(path: Path, why: str) -> Path:
    """Rename what cannot be used to `damaged-NAME`, and tell the user. Returns the new path."""
    aside = free_name(path.with_name(f"damaged-{path.name}"))
    path.rename(aside)
    _logger.warning(f"{path.name} {why}; it is now {aside}")
    return aside


def _sync(path: Path) -> None:
    if path.is_symlink() or not (path.is_file() or path.is_dir()):
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        with names_path(path):
            os.fsync(handle)
    except OSError as error:
        if not path.is_dir() or error.errno not in _NO_SYNC:
            raise
    finally:
        os.close(handle)
