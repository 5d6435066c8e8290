"""The home directory: `~` in the names that a user gives, and a place for the caches of a user who has no home.

Containers often run as a user id without a name, without HOME, or with a HOME such as `/` that cannot be written. Python and many
libraries raise there, each in its own way. `private_caches.use_private_caches` sets the variables before a library reads them.
"""

from __future__ import annotations

import logging
import os
import pwd
from collections.abc import Mapping
from pathlib import Path

from lockstep.errors import InputError
from lockstep.files import folder_until_exit

_logger = logging.getLogger(__name__)

# Where `getpass.getuser` looks before it asks for the name of the user id.
_NAMES = ("LOGNAME", "USER", "LNAME", "USERNAME")


def expanded(name: str) -> Path:
    """The path that a user means, with `~` written out.

    Raises:
        InputError: the home directory that `~` stands for is not known.
    """
    try:
        return Path(name).expanduser()
    except RuntimeError as error:
        raise InputError(f"{name}: the home directory that ~ stands for is not known; write the whole path") from error


def missing_home(given: Mapping[str, str]) -> dict[str, str]:
    """Variables that a user without a home or a name needs; empty for others. A folder that they name is removed at the end.

    Args:
        given: the environment.
    """
    made = {}
    try:
        usual = pwd.getpwuid(os.getuid()).pw_dir
    except KeyError:
        usual = ""
        if not any(given.get(name) for name in _NAMES):
            made["LOGNAME"] = f"uid{os.getuid()}"
    home = given.get("HOME") or usual
    if not home:
        home = made["HOME"] = str(folder_until_exit("lockstep-home-"))
        _logger.warning(
            "HOME is not set, and this user has no name: converted models and caches go to %s and are not kept. Set HOME "
            "to keep them",
            home,
        )
    elif not given.get("XDG_CACHE_HOME") and not _is_or_can_be(Path(home, ".cache")):
        made["XDG_CACHE_HOME"] = str(folder_until_exit("lockstep-cache-"))
        _logger.warning(
            "%s/.cache cannot be made: converted models and caches go to %s and are not kept. Set XDG_CACHE_HOME or HOME "
            "to a folder that can be written",
            home.rstrip("/"),
            made["XDG_CACHE_HOME"],
        )
    return made


def _is_or_can_be(folder: Path) -> bool:
    """Whether a folder is there, perhaps with models that an image brings along, or can be made now."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError:
        return False
    return True
