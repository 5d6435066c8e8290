"""Checks each field of a config by itself: numbers within their bounds, mappings that can be read, trackers that exist.

The checks come before `transformers.TrainingArguments` uses the fields. A value that would make the run wrong is
refused. A value that is only unusual is taken, and a line says so. Nothing here imports torch.
"""

from __future__ import annotations

import functools
import json
import logging
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
from os import PathLike, fspath
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, Literal, Union, get_args, get_origin, get_type_hints

from lockstep.config.option import Bounds
from lockstep.config.table import options_of
from lockstep.errors import InputError

if TYPE_CHECKING:
    pass

_logger = logging.getLogger(__name__)


def check_bounds(given: Any, bounds: Mapping[str, Bounds]) -> None:
    """Check that numbers lie within their bounds.

    Args:
        given: has an attribute for each name. One that is None is not checked.

    Raises:
        InputError: a number is out of bounds.
    """
    for name, allowed in bounds.items():
        value = getattr(given, name)
        if value is not None:
            _check_within(name, value, allowed)


def _check_within(name: str, value: float, allowed: Bounds) -> None:
    if not allowed.holds(value):
        raise InputError(f"{name}={value}; it must be {allowed}")


def check_fields(config: Any, *, again: bool = False) -> None:
    """Check the fields of a config, before anything uses them.

    Args:
        again: whether they have been checked before, so that what is unusual has been said.

    Raises:
        InputError: a number is NaN, infinite or out of bounds; a mapping cannot be read; a tracker does not exist.
    """
    kinds: Any = type(config)
    check_types(config)
    for field in fields(config):
        _check_text(field.name, getattr(config, field.name, None))
        for value in _numbers(getattr(config, field.name, None)):
            check_number(kinds, field.name, value, quiet=again)
    for name in config._VALID_DICT_FIELDS:
        _check_mapping(name, getattr(config, name, None))
    check_trackers(config.report_to)
    _check_list("reward_weights", config.reward_weights, int | float, "numbers")
    _check_list("stop_strings", config.stop_strings, str, "texts")
    if any(not text for text in config.stop_strings or ()):
        raise InputError("stop_strings: an empty string would end every completion at once")


def check_types(config: Any) -> None:
    """Check that each field has a value of its declared type. numpy's numbers and paths become Python's.

    Raises:
        InputError: a field has another kind of value.
    """
    kind: Any = type(config)
    for name, kinds in _kinds(kind).items():
        value = given = getattr(config, name, None)
        if type(given).__module__ == "numpy" and getattr(given, "ndim", 1) == 0:
            value = given.item()  # type: ignore[union-attr]
        elif isinstance(given, PathLike) and "str" in kinds:
            value = fspath(given)
        if value is not given:
            setattr(config, name, value)
        if not _is_of(value, kinds):
            said = " or ".join(dict.fromkeys(_SAID[kind] for kind in sorted(kinds) if kind in _SAID))
            raise InputError(f"{name}={value!r:.80}; it must be {said}")


_SAID = {
    "bool": "true or false",
    "int": "a whole number",
    "float": "a number",
    "str": "text",
    "list": "a list",
    "dict": "a mapping",
}


@functools.cache
def _kinds(config_class: type) -> dict[str, frozenset[str]]:
    """The names of the types of each field. A field that takes any object is left out.

    The parser of transformers changes `Field.type`, so that it is not used here.
    """
    hints, said, found = get_type_hints(config_class), options_of(config_class), {}
    for field in fields(config_class):
        kinds = {*_members(hints[field.name]), *said[field.name].get("also", ())}
        # The parser of transformers gives None for what the command line leaves out.
        if field.default is None or len(kinds) > 1:
            kinds.add("NoneType")
        if "Any" not in kinds and kinds & _SAID.keys():
            found[field.name] = frozenset(kinds)
    return found


def _members(hint: Any) -> Iterator[str]:
    if get_origin(hint) in (Union, UnionType):
        for part in get_args(hint):
            yield from _members(part)
    elif get_origin(hint) is Literal:
        yield from (type(value).__name__ for value in get_args(hint))
    else:
        yield getattr(get_origin(hint) or hint, "__name__", str(hint))


def _is_of(value: Any, kinds: frozenset[str]) -> bool:
    if isinstance(value, bool | NoneType):
        return type(value).__name__ in kinds
    if isinstance(value, int):
        return bool({"int", "float"} & kinds)
    for kind, name in ((float, "float"), (str, "str"), (list | tuple, "list"), (Mapping, "dict")):
        if isinstance(value, kind):
            return name in kinds or type(value).__name__ in kinds
    # An object of a library: what takes a mapping or more than plain values may take it.
    return not kinds <= {"bool", "int", "float", "str", "NoneType"}


def _check_text(name: str, value: Any) -> None:
    """Refuse half a character, at any depth: no file of the run could hold it. A plain text has no zero byte either."""
    if isinstance(value, str) and "\0" in value:
        raise InputError(f"{name} {value!r:.80} holds a character that is not text")
    parts = value.items() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    for part in parts:
        _check_text(name, part)
    try:
        str(value).encode()
    except UnicodeEncodeError as error:
        raise InputError(f"{name} {value!r:.80} holds a character that is not text") from error


def _check_list(name: str, value: Any, kind: Any, what: str) -> None:
    if value is not None and not (
        isinstance(value, list | tuple) and all(isinstance(entry, kind) for entry in value)
    ):
        raise InputError(f"{name}={value!r:.80}; it must be a list of {what}")


def _numbers(value: Any) -> Iterator[float]:
    for entry in value if isinstance(value, list | tuple) else [value]:
        if isinstance(entry, int | float) and not isinstance(entry, bool):
            yield entry


def check_number(kind: type, name: str, value: float, *, quiet: bool = False) -> None:
    """Check one number of a field.

    Args:
        kind: the class of the config.
        quiet: whether nothing is said of an unusual number.

    Raises:
        InputError: it is NaN, infinite or out of the field's bounds.
    """
    bounds: Bounds | None = options_of(kind).get(name, {}).get("bounds")
    may_be_infinite = bounds is not None and bounds.infinite
    if isinstance(value, float) and (math.isnan(value) or (math.isinf(value) and not may_be_infinite)):
        raise InputError(f"{name}={value}; it must be a finite number")
    if bounds is None or value in bounds.special:
        return
    _check_within(name, value, bounds)
    low, high = bounds.usual
    if not quiet and not low <= value <= high:
        _logger.warning(f"{name}={value:g} is unusual (usually {low:g} to {high:g})")


def _check_mapping(name: str, value: Any) -> None:
    if not isinstance(value, str) or not value.startswith("{"):
        return
    try:
        json.loads(value)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{name}={value:.80} is not a mapping in JSON: {error}") from error


def check_trackers(report_to: Any) -> None:
    """Refuse trackers that transformers does not know, before a model is loaded.

    Raises:
        InputError: there is no such tracker.
    """
    from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

    known = {*INTEGRATION_TO_CALLBACK, "all", "none"}
    named = [report_to] if isinstance(report_to, str) else report_to or ()
    for name in named:
        if name not in known:
            raise InputError(f"report_to: there is no tracker {name!r}; there are {', '.join(sorted(known))}")


def check_installed(report_to: Iterable[str]) -> None:
    """Refuse trackers that this machine does not have. transformers would raise after the model is loaded.

    Raises:
        InputError: a tracker is not installed.
    """
    from transformers.integrations.integration_utils import get_available_reporting_integrations

    # transformers does not say of these two whether they are there.
    here = {*get_available_reporting_integrations(), "azure_ml", "flyte", "all", "none"}
    if missing := [name for name in report_to if name not in here]:
        raise InputError(
            f"report_to: the tracker {missing[0]} is not installed, or a variable of the environment switches "
            f"it off; install it, "
            "or leave it out"
        )
