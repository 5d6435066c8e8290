"""Reward functions by name: those that come with Lockstep, and functions and classes in files and packages.

A name is a built-in one, `soft_overlong(MAX, CACHE)`, `path/to/file.py:function`, or `package.module.function`. A name
that is a directory, or has a slash and no colon, names a reward model, which is loaded elsewhere. Each built-in
function takes the arguments that it needs by keyword and ignores the others; docs/internals/rollouts.md lists them.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import itertools
import json
import re
import sys
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

from lockstep.errors import InputError, check_extra, quoted
from lockstep.files import what_is_at
from lockstep.private_caches import expanded
from lockstep.tasks.files import NUMBER
from lockstep.tasks.math_comparison import compare

Reward = Callable[..., Any]


def texts(completions: list[Any]) -> list[str]:
    """Text of each completion, which is plain text or a list of messages."""
    return [c if isinstance(c, str) else c[-1]["content"] for c in completions]


def exact_match(completions: list[Any], answer: list[Any], **_: Any) -> list[float | None]:
    """1 if the completion, without surrounding white space, equals the `answer` column's value, else 0.

    Values are compared as texts (`str`). Where the answer is a number and no text, a completion with the same value
    is right too: `7`, `7.0` and `7e0` for 7. None where the row has no answer.
    """
    pairs = zip(texts(completions), answer, strict=True)
    return [None if right is None else float(_equals(text.strip(), right)) for text, right in pairs]


# The columns with the right answers, of which a built-in function reads the first that the data has.
exact_match.answer_columns = ("answer",)  # type: ignore[attr-defined]


def _equals(text: str, right: Any) -> bool:
    if text == str(right):
        return True
    is_number = isinstance(right, int | float | Decimal) and not isinstance(right, bool)
    if not is_number or NUMBER.fullmatch(text) is None:
        return False
    return float(text) == right if isinstance(right, float) else Decimal(text) == right


def accuracy(
    completions: list[Any],
    solution: list[Any] | None = None,
    answer: list[Any] | None = None,
    log_extra: Callable[[str, list[str]], None] | None = None,
    **_: Any,
) -> list[float | None]:
    r"""1 if the completion's final answer is mathematically equal to the reference (math-verify), else 0.

    The final answer must be LaTeX, as for TRL's `accuracy_reward`. It is the content of the last `\boxed{…}`. Without
    a box it is a formula that is said to be the answer, as in "the answer is $4$". Boxes with little text between
    them are one answer with several values. A comparison that takes too long scores 0
    (`lockstep.tasks.math_comparison`).

    Args:
        solution: the reference, LaTeX or a plain number. It may also contain a derivation that ends in the result.
        answer: the same, used if the data has no `solution`.

    Returns:
        1 or 0 per completion; None if there is no reference, or none that math-verify can read.

    Raises:
        InputError: the data has neither column, or math-verify is not installed.
    """
    check_package("accuracy")
    references = solution if solution is not None else answer
    if references is None:
        columns = "a column 'solution' or 'answer' with the right result"
        raise InputError(f"accuracy needs {columns}; the data has neither")
    pairs = zip(references, texts(completions), strict=True)
    found = [compare(None if right is None else str(right), text) for right, text in pairs]
    if log_extra is not None:
        log_extra("gold_parsed", [pair.gold for pair in found])
        log_extra("answer_parsed", [pair.answer for pair in found])
    return [pair.score for pair in found]


accuracy.answer_columns = ("solution", "answer")  # type: ignore[attr-defined]


def format(completions: list[Any], **_: Any) -> list[float]:
    """1 if the completion starts with `<think>`, closes it with `</think>`, and opens it only once, else 0.

    Any text may follow the closing tag. The same as TRL's `think_format_reward`.
    """
    return [float(_thinks_once(text)) for text in texts(completions)]


def length(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Minus the number of completion tokens: shorter is better.

    Alone it teaches the policy to say nothing. So it needs another reward function, and a small weight
    (`reward_weights`), such as 0.001.
    """
    return [-float(len(ids)) for ids in completion_ids]


def soft_overlong(max_completion_length: int, cache: int) -> Reward:
    """A penalty for completions that are too long or nearly so (DAPO, arXiv 2503.14476, eq. 13).

    Args:
        max_completion_length: number of tokens from which the penalty is −1.
        cache: number of tokens before that, over which the penalty changes linearly from 0 to −1.

    Raises:
        InputError: not `0 <= cache <= max_completion_length`.
    """
    if not 0 <= cache <= max_completion_length:
        raise InputError(
            f"soft_overlong({max_completion_length}, {cache}): the second number, the tokens over which the "
            "punishment grows, must be between 0 and the first, the longest completion"
        )
    punished = functools.partial(_punished, start=max_completion_length - cache, cache=cache)

    def soft_overlong(completion_ids: list[list[int]], **_: Any) -> list[float]:
        return [punished(len(ids)) for ids in completion_ids]

    return soft_overlong


def reasoning_gym(completions: list[Any], entry: list[Any], **_: Any) -> list[float]:
    """The score that each row's reasoning-gym data set gives the completion, usually between 0 and 1.

    Args:
        entry: the problem as reasoning-gym made it, as JSON or as a dictionary. Its `metadata.source_dataset` names
            the data set.

    Raises:
        InputError: an entry names no data set, or one that reasoning-gym does not have; or reasoning-gym is not
            installed.
    """
    problems = [json.loads(problem) if isinstance(problem, str) else problem for problem in entry]
    pairs = zip(texts(completions), problems, strict=True)
    return [float(_gym_scorer(_gym_name(problem))(text.strip(), problem)) for text, problem in pairs]


BUILT_IN: dict[str, Reward] = {f.__name__: f for f in (exact_match, accuracy, format, length, reasoning_gym)}

# The extra and the module that a function needs.
_EXTRAS = {"accuracy": ("math", "math_verify"), "reasoning_gym": ("demo", "reasoning_gym")}


def check_package(name: str) -> None:
    """Check that the package of a built-in function is installed (`InputError`), without importing it."""
    if name in _EXTRAS:
        check_extra(f"the built-in {name}", *_EXTRAS[name])


def gym_package() -> Any:
    """The package reasoning_gym, whose import takes two thirds of a second; an `InputError` if it is not installed."""
    check_package("reasoning_gym")
    import reasoning_gym

    return reasoning_gym


def _thinks_once(text: str) -> bool:
    opening, closing = "<think>", "</think>"
    rest = text[len(opening) :]
    return text.startswith(opening) and opening not in rest and closing in rest


def _punished(tokens: int, *, start: int, cache: int) -> float:
    if tokens <= start:
        return 0.0
    return max((start - tokens) / cache, -1.0) if cache else -1.0


def _gym_name(problem: Any) -> str:
    metadata = problem.get("metadata") if isinstance(problem, dict) else None
    name = metadata.get("source_dataset") if isinstance(metadata, dict) else None
    if not isinstance(name, str):
        raise InputError(
            f"an entry names no reasoning-gym data set (metadata.source_dataset): {problem!r:.120}; "
            "keep the whole problem that reasoning-gym made in the column 'entry'"
        )
    return name


@functools.cache
def _gym_scorer(name: str) -> Callable[[str, dict[str, Any]], float]:
    try:
        return gym_package().get_score_answer_fn(name)
    except ValueError as error:
        raise InputError(f"reasoning-gym has no data set {name!r}: {error}") from error


_numbers = itertools.count()
# Modules by their files.
Modules = dict[Path, Any]


def load_function(name: str, kind: str, modules: Modules | None = None) -> Any:
    """The function or class of a name, for errors of a `kind` such as `tool`.

    `modules` are the files that this run has loaded. With them, everything from one file is from one module.
    """
    where, function = place_of(name, kind)
    module = _from_file(Path(where), kind, modules) if where.endswith(".py") else _from_package(where, kind)
    found = getattr(module, function, None)
    if not callable(found):
        raise InputError(f"{kind} {name!r}: {where} has no function {function!r}")
    return found


def place_of(name: str, kind: str) -> tuple[str, str]:
    """File or module of a function, and the function's name. Runs no code."""
    where, _, function = name.rpartition(":") if ":" in name else name.rpartition(".")
    if not where or name.endswith(".py"):
        raise InputError(f"{kind} {name!r}: give file.py:name or package.module.name")
    if where.endswith(".py"):
        where = str(expanded(where))
        if (there := what_is_at(Path(where))) != "is a file":
            raise InputError(f"{kind} {name[:200]!r}: {where[:200]} {there}")
    elif "/" in where or (":" in name and expanded(where).is_file()):
        there = "the name of a file with code ends with .py"
        raise InputError(f"{kind} {name[:200]!r}: {where[:200]} {what_is_at(expanded(where))}; {there}")
    return where, function


def _from_file(path: Path, kind: str, modules: Modules | None) -> Any:
    """The module of a file, with a unique name."""
    known = modules if modules is not None else {}
    if path.resolve() in known:
        return known[path.resolve()]
    name = f"lockstep_file_{next(_numbers)}_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses and pickle search the module of a class in sys.modules.
    sys.modules[name] = module
    # Modules beside the file are found as a script finds them, but last: no local file hides an installed package.
    if (beside := str(path.resolve().parent)) not in sys.path:
        sys.path.append(beside)
    from lockstep.threads import folder_as_before

    try:
        # The loader is not used, because it may run cached bytecode of an older text of this file.
        with folder_as_before(f"{kind} file {path}"):
            exec(compile(path.read_bytes(), str(path), "exec", dont_inherit=True), module.__dict__)
    except BaseException as error:
        del sys.modules[name]
        if isinstance(error, KeyboardInterrupt):
            raise
        why = f"{type(error).__name__}: {quoted(error)}"
        raise InputError(f"{kind} file {path} cannot be run: {why}") from error
    known[path.resolve()] = module
    return module


def _from_package(name: str, kind: str) -> Any:
    # The working directory comes last, unlike in TRL, so that no local folder hides an installed package.
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.append(here)
    try:
        return importlib.import_module(name)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        why = f"{type(error).__name__}: {quoted(error)}"
        raise InputError(f"{kind} module {name!r} cannot be imported: {why}") from error


_KIND = "reward function"
_SOFT_OVERLONG = re.compile(r"soft_overlong\(\s*(\d+)\s*,\s*(\d+)\s*\)")


def names_model(name: str) -> bool:
    """Whether a name is that of a reward model (a directory, or a hub id such as `user/model`) and of no function."""
    if not name or name in BUILT_IN or ":" in name or name.endswith(".py"):
        return False
    return "/" in name or expanded(name).is_dir()


def load_reward(name: str, modules: Modules | None = None) -> Reward:
    """Reward function by name; `modules` as in `load_function`."""
    if name in BUILT_IN:
        check_package(name)
        return BUILT_IN[name]
    if numbers := _SOFT_OVERLONG.fullmatch(name):
        return soft_overlong(int(numbers[1]), int(numbers[2]))
    reward_place(name)
    return load_function(name, _KIND, modules)


def reward_place(name: str) -> tuple[str, str]:
    """File or module of a reward function, and its name; both empty for a built-in function. Runs no code."""
    if name in BUILT_IN or _SOFT_OVERLONG.fullmatch(name):
        return "", ""
    if ("." not in name and ":" not in name) or name.endswith(".py"):
        raise InputError(
            f"reward function {name!r}: not one of {', '.join(BUILT_IN)}, soft_overlong(MAX,CACHE), nor "
            "file.py:function, package.module.function, or the directory or hub id of a reward model"
        )
    return place_of(name, _KIND)
