"""Tells the user's own code from Lockstep, Python's library and installed packages.

`importlib.metadata` knows which files belong to installed distributions, wherever these lie: in this environment, in
the system's packages, or in a folder that a `.pth` file or a link names. A distribution that was installed as
editable is the user's own code.
"""

from __future__ import annotations

import functools
import inspect
import json
import re
import sys
import sysconfig
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import Any

# First parts of paths that lead out of the folder of the packages, or that all packages share.
_BESIDE = {"..", "", "/", "__pycache__"}
_STANDARD = Path(sysconfig.get_paths()["stdlib"]).resolve()


def top_module(value: Any) -> str:
    """Name of the outermost package or module in which a class or a function stands."""
    return str(getattr(value, "__module__", "")).partition(".")[0]


def is_lockstep(value: Any) -> bool:
    """Whether a class or a function is one of Lockstep's own."""
    return top_module(value) == "lockstep"


def is_users(value: Any) -> bool:
    """Whether a class or a function is the user's own: in no installed package, and perhaps typed into a prompt."""
    if is_lockstep(value):
        return False
    try:
        path = inspect.getsourcefile(value)
    except TypeError:
        # It is built into Python.
        return False
    except OSError:
        # It was typed into a prompt or a notebook.
        return True
    return path is None or not is_installed(path)


def is_installed(path: str) -> bool:
    """Whether a file belongs to Python's own library, or to an installed distribution that is not editable."""
    found = Path(path).resolve()
    if found.is_relative_to(_STANDARD):
        (top, *_) = found.relative_to(_STANDARD).parts
        if top.partition(".")[0] in sys.stdlib_module_names:
            return True
    installed = _installed(tuple(sys.path))
    return found in installed or not installed.isdisjoint(found.parents)


@functools.lru_cache(maxsize=2)
def _installed(where: tuple[str, ...]) -> frozenset[Path]:
    """The files and folders that the distributions of Python's search path have put beside their metadata."""
    found: set[Path] = set()
    for distribution in distributions(path=list(where)):
        if not _is_editable(distribution):
            folder = Path(str(distribution.locate_file(""))).resolve()
            found |= {(folder / top).resolve() for top in _tops(distribution)}
    return frozenset(found)


def _is_editable(distribution: Distribution) -> bool:
    try:
        origin = json.loads(distribution.read_text("direct_url.json") or "{}")
    except ValueError:
        return False
    return bool(origin.get("dir_info", {}).get("editable"))


def _tops(distribution: Distribution) -> set[str]:
    """First parts of the paths of a distribution's files."""
    if (record := distribution.read_text("RECORD")) is not None:
        # One file per line. `distribution.files` would make an object of each of its lines, which takes ten times as
        # long.
        return {re.split("[/,]", line, maxsplit=1)[0].strip('"') for line in record.splitlines()} - _BESIDE
    if distribution.read_text("installed-files.txt") is not None:
        return {file.parts[0] for file in distribution.files or ()} - _BESIDE
    if distribution.read_text("SOURCES.txt") is not None:
        # The folder of a project that is being worked on.
        return set()
    # Packages of a Linux distribution have no list of their files.
    names = (distribution.read_text("top_level.txt") or "").split()
    return {name for top in names for name in (top, f"{top}.py")}
