"""Reads CSV files. CSV has no types: every column is text, unless the user names a type (`dataset_types`)."""

from __future__ import annotations

import csv
import io
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lockstep.errors import InputError
from lockstep.tasks.data_files import opened

_logger = logging.getLogger(__name__)

# A number as people write it, and not a word that Python's `float` reads too, such as nan.
NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?", re.ASCII)
# One field of a row may be as long as a picture's `data:` URL.
_LONGEST_FIELD = 1 << 30


def column_types(given: Sequence[str]) -> dict[str, str]:
    """The types of columns, from `NAME=TYPE` words.

    Raises:
        InputError: a word has another form, or names a type that there is not.
    """
    found = {}
    for word in given:
        name, _, kind = word.rpartition("=")
        if not name or kind not in _READ:
            raise InputError(
                f"dataset_types {word!r}: give NAME=TYPE, with a column's name and one of {', '.join(_READ)}"
            )
        found[name] = kind
    return found


def read_csv(files: Sequence[Path], types: Mapping[str, str]) -> dict[str, list[Any]]:
    """The columns of CSV files with equal headers. An empty cell is the empty text, and None in a column of another type.

    Raises:
        InputError: a file has no header, or another one; a row has more or fewer cells than the header; a cell has not the type of
            its column; `types` names a column that is not there.
        OSError, UnicodeDecodeError, csv.Error: a file cannot be read.
    """
    csv.field_size_limit(_LONGEST_FIELD)
    header: list[str] = []
    columns: list[list[Any]] = []
    for file in files:
        with opened(file) as raw, io.TextIOWrapper(raw, encoding="utf-8-sig", newline="") as text:
            rows = csv.reader(text, strict=True)
            found = next(rows, [])
            if not found or len(set(found)) < len(found):
                raise InputError(
                    f"data file {file}: the first line must name the columns, each once, and is {found!r:.120}"
                )
            if header and found != header:
                raise InputError(
                    f"data file {file} has the columns {found!r:.120}, and {files[0].name} has {header!r:.120}"
                )
            if not header:
                header, columns = found, [[] for _ in found]
            read = [_READ[types.get(name, "text")] for name in header]
            for row in filter(None, rows):
                if len(row) != len(header):
                    raise InputError(
                        f"data file {file}, line {rows.line_num}: {len(row)} cells for {len(header)} columns; put quotes around a "
                        "text that has a comma"
                    )
                for column, convert, name, cell in zip(columns, read, header, row, strict=True):
                    try:
                        column.append(convert(cell))
                    except ValueError as error:
                        raise InputError(
                            f"data file {file}, line {rows.line_num}: {name} is {cell!r:.80}, and dataset_types says "
                            f"{types[name]}"
                        ) from error
    if unknown := sorted(types.keys() - set(header)):
        raise InputError(f"dataset_types: there is no column {unknown[0]!r}, only {', '.join(header)}")
    _tell_numbers(files[0].name, dict(zip(header, columns, strict=True)), types)
    return dict(zip(header, columns, strict=True))


def _tell_numbers(file: str, columns: Mapping[str, list[Any]], types: Mapping[str, str]) -> None:
    alike = [
        name
        for name, cells in columns.items()
        if name not in types and any(cells) and all(NUMBER.fullmatch(cell) for cell in cells if cell)
    ]
    if alike:
        _logger.warning(
            f"{file}: every column of CSV is text, and {', '.join(alike)} looks like numbers; if a reward function needs numbers, "
            f"set dataset_types: {' '.join(f'{name}=float' for name in alike)}"
        )


def _whole(cell: str) -> int | None:
    return int(cell) if cell else None


def _real(cell: str) -> float | None:
    return float(cell) if cell else None


def _truth(cell: str) -> bool | None:
    known = {"true": True, "false": False, "": None}
    if cell.lower() not in known:
        raise ValueError(cell)
    return known[cell.lower()]


_READ: dict[str, Callable[[str], Any]] = {"text": str, "int": _whole, "float": _real, "bool": _truth}
