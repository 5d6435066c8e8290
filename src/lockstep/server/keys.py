"""The key that trainer and server share, in a file that only its owner can read.

`lockstep serve` makes the key when it starts, or the user gives one.
"""

from __future__ import annotations

import os
import secrets
import socket
import stat
from pathlib import Path
from urllib.parse import urlsplit

from lockstep import processes as child_environment
from lockstep.bounded_http import is_local
from lockstep.errors import InputError, names_path
from lockstep.models.packaged import cache_dir
from lockstep.private_caches import expanded

KEY_VARIABLE = child_environment.KEY_VARIABLE
_SHORTEST, _LONGEST = 16, 4096


def make_key() -> str:
    """A new key: 256 random bits, URL-safe."""
    return secrets.token_urlsafe(32)


def take_key() -> None:
    """Take the key out of the environment of this server's process, so that no process that it starts has it."""
    _taken.extend([given] if (given := os.environ.pop(KEY_VARIABLE, None)) is not None else [])


def guards_key() -> str:
    """The key for the guard inside a server: the one that was taken, or the one in the environment."""
    return checked_key(_taken[-1] if _taken else os.environ.get(KEY_VARIABLE, ""), KEY_VARIABLE)


_taken: list[str] = []


def default_key_file(port: int) -> Path:
    """The file in which a server on this port saves the key that it made. Machines may share a home directory."""
    return cache_dir() / "keys" / f"{socket.gethostname()}-port-{port}.key"


def write_key(path: Path, key: str) -> None:
    """Write a key file that no other user can read, not even while it is written. If it fails, an earlier key stays."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    staging = path.with_suffix(f".{os.getpid()}")
    staging.unlink(missing_ok=True)
    handle = os.open(staging, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with names_path(path), os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(key + "\n")
        staging.replace(path)
    except BaseException:
        staging.unlink(missing_ok=True)
        raise


def read_key(path: Path) -> str:
    """The key in a file that this user owns and no other user can read."""
    try:
        # Without O_NONBLOCK, opening a named pipe that has no writer would never return.
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
            found = os.fstat(file.fileno())
            key = file.read(_LONGEST + 1) if stat.S_ISREG(found.st_mode) else b""
    except OSError as error:
        raise InputError(f"key file {path} cannot be read: {error.strerror}") from error
    if not stat.S_ISREG(found.st_mode) or len(key) > _LONGEST:
        raise InputError(f"key file {path} is not a file with one key")
    if found.st_uid != os.geteuid():
        raise InputError(
            f"key file {path} belongs to another user, who may know or change the key; make a file of your own"
        )
    if found.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise InputError(f"other users can read key file {path}; run 'chmod 600 {path}' and make a new key")
    return checked_key(key.decode("latin-1").strip(), str(path))


def checked_key(key: str, where: str) -> str:
    """The key, if it is long enough and fits an HTTP header."""
    if len(key) < _SHORTEST or not key.isascii() or not key.isprintable() or " " in key:
        raise InputError(
            f"the key in {where} must be at least {_SHORTEST} printable characters without spaces"
        )
    return key


def key_for(url: str, key_file: str | None) -> str | None:
    """The key for a server: from a file, from the environment, or saved by a server on this machine.

    None: no key is known; a server without a guard needs none.
    """
    if key_file is not None:
        return read_key(expanded(key_file))
    if given := os.environ.get(KEY_VARIABLE):
        return checked_key(given, KEY_VARIABLE)
    address = urlsplit(url)
    saved = default_key_file(address.port or 80)
    return read_key(saved) if is_local(address.hostname or "") and saved.is_file() else None
