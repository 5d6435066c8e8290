"""Reward functions by name.

A name is a built-in one, `soft_overlong(MAX, CACHE)`, `path/to/file.py:function`, or `package.module.function`. A name that is a
directory, or has a slash and no colon, names a reward model, which is loaded elsewhere.
"""

from __future__ import annotations

import re

from lockstep.errors import InputError
from lockstep.homes import expanded
from lockstep.tasks.builtin_rewards import BUILT_IN, Reward, check_package, soft_overlong
from lockstep.tasks.functions import Modules, load_function, place_of

_KIND = "reward function"
_SOFT_OVERLONG = re.compile(r"soft_overlong\(\s*(\d+)\s*,\s*(\d+)\s*\)")


def names_model(name: str) -> bool:
    """Whether a name is the name of a reward model (a directory, or a hub id such as `user/model`) and not of a function."""
    if not name or name in BUILT_IN or ":" in name or name.endswith(".py"):
        return False
    return "/" in name or expanded(name).is_dir()


def load_reward(name: str, modules: Modules | None = None) -> Reward:
    """Reward function by name.

    Args:
        modules: as in `load_function`.

    Raises:
        InputError: there is no such function, and the message says where it was searched; or a built-in function needs a
            package that is not installed.
    """
    if name in BUILT_IN:
        check_package(name)
        return BUILT_IN[name]
    if numbers := _SOFT_OVERLONG.fullmatch(name):
        return soft_overlong(int(numbers[1]), int(numbers[2]))
    reward_place(name)
    return load_function(name, _KIND, modules)


def reward_place(name: str) -> tuple[str, str]:
    """File or module of a reward function, and the function's name; both empty for a built-in function. Runs no code.

    Raises:
        InputError: the name is not a name of a reward function, or the file does not exist.
    """
    if name in BUILT_IN or _SOFT_OVERLONG.fullmatch(name):
        return "", ""
    if ("." not in name and ":" not in name) or name.endswith(".py"):
        raise InputError(
            f"reward function {name!r}: not one of {', '.join(BUILT_IN)}, soft_overlong(MAX,CACHE), nor file.py:function, "
            "package.module.function, or the directory or hub id of a reward model"
        )
    return place_of(name, _KIND)
