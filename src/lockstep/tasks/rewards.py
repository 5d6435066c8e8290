"""Built-in reward functions, and reward functions by name.

A name is one of the built-in ones, `path/to/file.py:function`, or `package.module.function`.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lockstep.errors import InputError

Reward = Callable[..., Any]


def texts(completions: list[Any]) -> list[str]:
    """Text of each completion, whether plain or a list of messages."""
    return [c if isinstance(c, str) else c[-1]["content"] for c in completions]


def exact_match(completions: list[Any], answer: list[Any], **_: Any) -> list[float]:
    """1 where the completion, stripped of white space, is the `answer` column's value, else 0."""
    return [float(text.strip() == str(right)) for text, right in zip(texts(completions), answer, strict=True)]


BUILT_IN: dict[str, Reward] = {"exact_match": exact_match}


def load_reward(name: str) -> Reward:
    """Reward function by name.

    Raises:
        InputError: there is no such function; the message says what was looked for.
    """
    if name in BUILT_IN:
        return BUILT_IN[name]
    where, _, function = name.rpartition(":") if ":" in name else name.rpartition(".")
    if not where:
        raise InputError(
            f"reward function {name!r}: not one of {', '.join(BUILT_IN)}, nor file.py:function, nor package.module.function"
        )
    module = _from_file(Path(where)) if where.endswith(".py") else _from_package(where)
    found = getattr(module, function, None)
    if not callable(found):
        raise InputError(f"reward function {name!r}: {where} has no function {function!r}")
    return found


def _from_file(path: Path) -> Any:
    if not path.is_file():
        raise InputError(f"reward file {path} does not exist")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise InputError(f"reward file {path} cannot be run: {type(error).__name__}: {error}") from error
    return module


def _from_package(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except (ImportError, SyntaxError) as error:
        raise InputError(f"reward module {name!r} cannot be imported: {error}") from error
