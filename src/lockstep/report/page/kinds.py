"""The kinds of the values in a run's files, and the reader that leaves out what does not have them.

The files of a run may have been changed, or come from somebody else. A kind is a function of a value: it returns where
in the value something else stands (`parity.failed`; empty: the value itself), or None if the value fits. A page or a
table reads only values that fit.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lockstep.files import check_regular

Kind = Callable[[Any], str | None]
_WIDEST = 1 << 63


def _kind(fits: Callable[[Any], bool]) -> Kind:
    return lambda value: None if fits(value) else ""


def _is_number(value: Any) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < _WIDEST


def one_of(*types: type) -> Kind:
    """A value of one of these types, and no truth value unless it is one of them."""
    return _kind(lambda value: type(value) in types)


anything = _kind(lambda value: True)
a_text = one_of(str)
a_truth = one_of(bool)
a_number = _kind(_is_number)
a_count = _kind(lambda value: isinstance(value, int) and _is_number(value) and value >= 0)


def or_none(kind: Kind) -> Kind:
    """This kind, or null."""
    return lambda value: None if value is None else kind(value)


# JSON has no NaN: a file has null in its place.
a_figure = or_none(a_number)


def list_of(kind: Kind) -> Kind:
    """A list whose entries are of a kind."""

    def found(value: Any) -> str | None:
        if not isinstance(value, list):
            return ""
        wrong = ((place, kind(entry)) for place, entry in enumerate(value))
        return next((_joined(str(place), inside) for place, inside in wrong if inside is not None), None)

    return found


def mapping(
    needed: Mapping[str, Kind] | None = None,
    given: Mapping[str, Kind] | None = None,
    others: Callable[[str], Kind] = lambda name: anything,
) -> Kind:
    """A mapping from texts to values: those that it must have, those that it may have, and others by their names."""
    needed, given = needed or {}, given or {}

    def found(value: Any) -> str | None:
        if not isinstance(value, dict):
            return ""
        for name in needed:
            if name not in value:
                return name
        for name, entry in value.items():
            kind = needed.get(name) or given.get(name) or others(name)
            if (inside := kind(entry)) is not None:
                return _joined(name, inside)
        return None

    return found


def _joined(name: str, inside: str) -> str:
    return f"{name}.{inside}" if inside else name


_PARTS = list_of(mapping(given={"text": or_none(a_text), "type": a_text}))


def _content(value: Any) -> str | None:
    return _PARTS(value) if isinstance(value, list) else or_none(a_text)(value)


_CALL = mapping(given={"function": mapping()})
_MESSAGE = {"role": a_text, "content": _content, "tool_calls": or_none(list_of(_CALL))}
messages = list_of(mapping(given=_MESSAGE))


def a_prompt(value: Any) -> str | None:
    """A text, or a list of messages."""
    return messages(value) if isinstance(value, list) else a_text(value)


class Reader:
    """Reads JSON files, and keeps what it has left out."""

    def __init__(self) -> None:
        # A part of a sentence per file: what, and why.
        self.left_out: list[str] = []

    def read(self, path: Path, kind: Kind, clean: Callable[[Any], Any] = lambda value: value) -> Any:
        """What `clean` makes of a file's content; None if there is no file, or if it is left out."""
        try:
            content = _bytes_of(path)
        except FileNotFoundError:
            return None
        except OSError as error:
            self.left_out.append(f"{path} ({error.strerror})")
            return None
        found, why = _parsed(content, kind, clean)
        if why:
            self.left_out.append(f"{path} ({why})")
        return found

    def read_lines(
        self, path: Path, kind: Kind, clean: Callable[[Any], Any] = lambda value: value
    ) -> list[Any]:
        """The entries of a `.jsonl` file, if there is one. A last line that a kill cut short is left out silently."""
        try:
            lines = _bytes_of(path).split(b"\n")
        except FileNotFoundError:
            return []
        except OSError as error:
            self.left_out.append(f"{path} ({error.strerror})")
            return []
        entries, reasons = [], []
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            entry, why = _parsed(line, kind, clean)
            if not why:
                entries.append(entry)
            elif number < len(lines) or why != _NO_JSON:
                reasons.append(f"line {number}: {why}")
        if reasons:
            count = "1 line" if len(reasons) == 1 else f"{len(reasons)} lines"
            self.left_out.append(f"{count} of {path} ({reasons[0]})")
        return entries


def _bytes_of(path: Path) -> bytes:
    check_regular(path)
    return path.read_bytes()


_NO_JSON = "it is no JSON"
# Characters of a name in a reason.
_SAID = 80


def _parsed(content: bytes, kind: Kind, clean: Callable[[Any], Any]) -> tuple[Any, str]:
    """The value, or None and why not."""
    try:
        found = json.loads(content)
        wrong = kind(found)
        if wrong is None:
            return clean(found), ""
    except RecursionError:
        return None, "it is nested too deeply"
    except ValueError:
        return None, _NO_JSON
    return None, f"{wrong[:_SAID] or 'it'} is not of the kind that Lockstep writes"
