"""Checks each field of a config by itself: numbers within their bounds, mappings that can be read, trackers that exist.

The checks come before `transformers.TrainingArguments` uses the fields. A value that would make the run wrong is
refused. A value that is only unusual is taken, and a line says so. Nothing here imports torch.
"""

from __future__ import annotations

import functools
import json
import logging
import math
import shlex
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
from enum import Enum
from os import PathLike, fspath
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, Literal, Union, get_args, get_origin, get_type_hints

from lockstep.config.option import Bounds
from lockstep.config.table import options_of
from lockstep.errors import InputError, no_choice

if TYPE_CHECKING:
    pass

_logger = logging.getLogger(__name__)

# Bytes of a name in a folder, on every usual file system.
_LONGEST_NAME = 255
_ANY = Bounds().usual
# Fractions of a field that says nothing else.
_COMMON = (-1e6, 1e6)
# The largest whole number that torch and the files of a run can hold.
LARGEST = 2**63 - 1


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
        for value in numbers_of(getattr(config, field.name, None)):
            check_number(kinds, field.name, value, quiet=again)
    if any(len(part.encode()) > _LONGEST_NAME for part in str(config.output_dir or "").split("/")):
        raise InputError(
            f"output_dir={config.output_dir!r:.80}: a name in it has more than {_LONGEST_NAME} bytes"
        )
    for name in config._VALID_DICT_FIELDS:
        _check_mapping(name, getattr(config, name, None))
    check_trackers(config.report_to)
    if any(not text for text in config.stop_strings or ()):
        raise InputError("stop_strings: an empty string would end every completion at once")


def check_types(config: Any) -> None:
    """Check that each field has a value of its declared type. numpy's numbers and paths become Python's.

    Raises:
        InputError: a field, or an entry of its list, has another kind of value.
    """
    kind: Any = type(config)
    entries = entry_kinds_of(kind)
    described = options_of(kind)
    for name, kinds in kinds_of(kind).items():
        given = getattr(config, name, None)
        value = _of_python(given, kinds)
        if isinstance(value, list) and name in entries:
            value = [_of_python(entry, entries[name]) for entry in value]
        if value is not given:
            setattr(config, name, value)
        if not _is_of(value, kinds):
            if only := described.get(name, {}).get("only"):
                raise InputError(f"{name}={value!r:.80} is not supported, only {only[0]!r} is: {only[1]}")
            raise InputError(f"{name}={value!r:.80}; it must be {_said(kinds)}")
        if isinstance(value, str) and (choices := choices_of(kind).get(name, ())) and value not in choices:
            raise InputError(f"{name}={value!r:.80} is no choice; {no_choice(value, choices, 'choices')}")
        for entry in value if isinstance(value, list | tuple) and name in entries else ():
            if not _is_of(entry, entries[name]):
                raise InputError(f"{name}={value!r:.80}; each entry must be {_said(entries[name])}")


def _of_python(value: Any, kinds: frozenset[str]) -> Any:
    """A value as Python's own number or text, as far as it is one."""
    if type(value).__module__ == "numpy" and getattr(value, "ndim", 1) == 0:
        value = value.item()
    elif isinstance(value, PathLike) and "str" in kinds:
        value = fspath(value)
    # Some libraries look at the type: torch's AdamW takes no pair of 0 and 0.999.
    is_whole = type(value) is int and abs(value) <= LARGEST
    return float(value) if is_whole and "float" in kinds and "int" not in kinds else value


def _said(kinds: frozenset[str]) -> str:
    said = [_SAID[kind] for kind in sorted(kinds) if kind in _SAID]
    return " or ".join(dict.fromkeys(said or sorted(kinds - {"NoneType"})))


_SAID = {
    "bool": "true or false",
    "int": "a whole number",
    "float": "a number",
    "str": "text",
    "list": "a list",
    "dict": "a mapping",
}


@functools.cache
def kinds_of(config_class: type) -> dict[str, frozenset[str]]:
    """The names of the types of each field. A field that takes any object is left out.

    The parser of transformers changes `Field.type`, so that it is not used here.
    """
    hints, said, found = get_type_hints(config_class), options_of(config_class), {}
    for field in fields(config_class):
        kinds = {*_members(hints[field.name]), *said[field.name].get("also", ())}
        # The parser of transformers gives None for what the command line leaves out.
        if field.default is None or len(kinds) > 1:
            kinds.add("NoneType")
        if "Any" not in kinds:
            found[field.name] = frozenset(kinds)
    return found


@functools.cache
def choices_of(config_class: type) -> dict[str, list[str]]:
    """The texts that each field with an enumeration, or with a `Literal`, takes."""
    found = {}
    for name, hint in get_type_hints(config_class).items():
        for part in (hint, *get_args(hint)):
            if isinstance(part, type) and issubclass(part, Enum):
                found[name] = [str(member.value) for member in part]
            elif get_origin(part) is Literal:
                found[name] = [text for text in get_args(part) if isinstance(text, str)]
    return found


@functools.cache
def entry_kinds_of(config_class: type) -> dict[str, frozenset[str]]:
    """The names of the types of the entries of each field that may be a list."""
    found = {}
    for name, hint in get_type_hints(config_class).items():
        for part in (hint, *get_args(hint)):
            kinds = frozenset(_members(get_args(part)[0])) if get_origin(part) is list else frozenset()
            if kinds & _SAID.keys():
                found[name] = kinds
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
    return any(base.__name__ in kinds for base in type(value).__mro__)


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


def numbers_of(value: Any) -> Iterator[float]:
    """The numbers of a field that holds a value or a list of values."""
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
    check_possible(name, value, bounds)
    low, high = _ANY if bounds is None else bounds.usual
    if (low, high) == _ANY and isinstance(value, float) and math.isfinite(value):
        low, high = _COMMON
    if not quiet and not low <= value <= high:
        _logger.warning(f"{name}={value:g} is unusual (usually {low:g} to {high:g})")


def check_possible(name: str, value: float, bounds: Bounds | None) -> None:
    """Check one number by the bounds of its field, if it has any.

    Raises:
        InputError: it is NaN, infinite or out of the bounds.
    """
    if isinstance(value, int) and abs(value) > LARGEST:
        # Python refuses to print some of them.
        raise InputError(f"{name} has a number of {value.bit_length()} bits; it must have at most 63")
    may_be_infinite = bounds is not None and bounds.infinite
    if isinstance(value, float) and (math.isnan(value) or (math.isinf(value) and not may_be_infinite)):
        raise InputError(f"{name}={value}; it must be a finite number")
    if bounds is not None and value not in bounds.special:
        _check_within(name, value, bounds)


def _check_mapping(name: str, value: Any) -> None:
    if not isinstance(value, str) or not value.startswith("{"):
        return
    try:
        json.loads(value)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{name}={value:.80} is not a mapping in JSON: {error}") from error


def words_of_command(command: str) -> list[str]:
    """The words of an agent's command line.

    Raises:
        InputError: it has no words, or this machine has no such program.
    """
    said = f"the agent's command line {command!r:.80}"
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise InputError(f"{said} cannot be split into words: {error}") from error
    if not words:
        raise InputError(f"{said} is empty")
    if shutil.which(words[0]) is None:
        raise InputError(f"{said} names no program that may be run here")
    return words


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
