"""Reward functions by name.

A name is a built-in one, `soft_overlong(MAX, CACHE)`, `path/to/file.py:function`, or `package.module.function`. A name that is a
directory, or has a slash and no colon, names a reward model, which is loaded elsewhere.
"""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import re
import sys
from pathlib import Path
from typing import Any

from lockstep.errors import InputError
from lockstep.tasks.builtin_rewards import BUILT_IN, Reward, soft_overlong

_numbers = itertools.count()
_SOFT_OVERLONG = re.compile(r"soft_overlong\(\s*(\d+)\s*,\s*(\d+)\s*\)")


def names_model(name: str) -> bool:
    """Whether a name is the name of a reward model (a directory, or a hub id such as `user/model`) and not of a function."""
    if name in BUILT_IN or ":" in name or name.endswith(".py"):
        return False
    return "/" in name or Path(name).expanduser().is_dir()


def load_reward(name: str) -> Reward:
    """Reward function by name.

    Raises:
        InputError: there is no such function. The message says where it was searched.
    """
    if name in BUILT_IN:
        return BUILT_IN[name]
    if numbers := _SOFT_OVERLONG.fullmatch(name):
        return soft_overlong(int(numbers[1]), int(numbers[2]))
    where, function = reward_place(name)
    module = _from_file(Path(where)) if where.endswith(".py") else _from_package(where)
    found = getattr(module, function, None)
    if not callable(found):
        raise InputError(f"reward function {name!r}: {where} has no function {function!r}")
    return found


def reward_place(name: str) -> tuple[str, str]:
    """File or module of a reward function, and the function's name; both empty for a built-in function. Runs no code.

    Raises:
        InputError: the name is not a name of a reward function, or the file does not exist.
    """
    if name in BUILT_IN or _SOFT_OVERLONG.fullmatch(name):
        return "", ""
    where, _, function = name.rpartition(":") if ":" in name else name.rpartition(".")
    if not where or name.endswith(".py"):
        raise InputError(
            f"reward function {name!r}: not one of {', '.join(BUILT_IN)}, soft_overlong(MAX,CACHE), nor file.py:function, "
            "package.module.function, or the directory or hub id of a reward model"
        )
    if where.endswith(".py") and not Path(where).is_file():
        raise InputError(f"reward file {where} does not exist")
    return where, function


def _from_file(path: Path) -> Any:
    """A new module from a file, with a unique name."""
    name = f"lockstep_reward_file_{next(_numbers)}_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses and pickle search the module of a class in sys.modules.
    sys.modules[name] = module
    try:
        # The loader is not used, because it may run cached bytecode of an older text of this file.
        exec(compile(path.read_bytes(), str(path), "exec", dont_inherit=True), module.__dict__)
    except BaseException as error:
        del sys.modules[name]
        if isinstance(error, KeyboardInterrupt):
            raise
        raise InputError(f"reward file {path} cannot be run: {type(error).__name__}: {error}") from error
    return module


def _from_package(name: str) -> Any:
    # TRL's commands search the working directory first. Here it comes last, so that no local folder hides an installed package.
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.append(here)
    try:
        return importlib.import_module(name)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise InputError(f"reward module {name!r} cannot be imported: {type(error).__name__}: {error}") from error
