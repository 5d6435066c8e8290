"""What to do about a user's function whose parameters do not fit its call, to follow Python's own text."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any


def not_callable_as(function: Callable[..., Any], called: str, *given: Any, **named: Any) -> str:
    """Advice about a function called by position, as in `called`; it begins with a semicolon. Empty: it fits."""
    return "" if _fits(function, given, named) else f"; it is called as {called}: give it these parameters"


def not_callable_by_name(
    function: Callable[..., Any], given: Mapping[str, Any], who: str, example: str
) -> str:
    """The same of a function that `who` get called by name, with every column of the data; `example` would fit."""
    if _fits(function, (), given):
        return ""
    parameters = inspect.signature(function).parameters.values()
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    missing = [
        p.name for p in parameters if p.kind in by_name and p.default is p.empty and p.name not in given
    ]
    if missing:
        return (
            f"; it asks for {', '.join(missing)}, and {who} get {', '.join(sorted(given)) or 'nothing'}: "
            "rename the parameter, add the column, or give the parameter a default"
        )
    return (
        f"; {who} get all their arguments and every column of the data by name: add **kwargs to its "
        f"parameters, as in {example}"
    )


def _fits(function: Callable[..., Any], given: tuple[Any, ...], named: Mapping[str, Any]) -> bool:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        # A function in C may have none.
        return True
    try:
        signature.bind(*given, **named)
    except TypeError:
        return False
    return True
