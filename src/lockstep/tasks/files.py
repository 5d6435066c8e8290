"""Data files by name, and CSV files, whose columns are text unless the user names a type (`dataset_types`).

This module imports no large library, so that a missing file is found before anything is loaded.
"""

from __future__ import annotations

import codecs
import csv
import difflib
import gzip
import io
import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, cast

from lockstep.errors import InputError
from lockstep.files import what_is_at
from lockstep.private_caches import expanded

# The builder of `datasets` for each file name ending. `.gz` may follow.
READERS = {".jsonl": "json", ".ndjson": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}
_ENDINGS = f"{', '.join(READERS)}, each also with .gz behind it"
# Endings of other files, which no hub id has.
_OTHERS = (
    ".txt",
    ".tsv",
    ".xlsx",
    ".xls",
    ".arrow",
    ".zip",
    ".tar",
    ".yaml",
    ".yml",
    ".py",
    ".pkl",
    ".md",
    ".db",
)
# A directory with one of these was written by `datasets`.
_SAVED = ("dataset_info.json", "dataset_dict.json", "state.json")
# The words by which a file of a directory says which split it belongs to, as on the hub.
_SPLITS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("test", "testing", "eval", "evaluation"), "test"),
    **dict.fromkeys(("validation", "valid", "dev", "val"), "validation"),
}


def reader_of(path: Path) -> str | None:
    """The builder of `datasets` for a file, by the ending of its name in any case; None: there is none."""
    return READERS.get(Path(path.name.lower().removesuffix(".gz")).suffix)


def data_files(name: str, split: str = "train") -> list[Path] | None:
    """The files that a data name stands for: a file, or all files of a directory (shards), sorted by name.

    Files of a directory that name splits (`test-00000.parquet`) are those of `split`.

    Returns:
        Files of one format; None if the name is neither a file nor a directory of files (it may be a directory that
        `datasets` has written, or a hub id).

    Raises:
        InputError: there is no such file, or it is empty, or its format cannot be read; the files of a directory have
            several formats, or none is of that split.
    """
    path = expanded(name)
    there = what_is_at(path)
    if there == "is a directory":
        return None if any((path / known).exists() for known in _SAVED) else _shards(path, split)
    if reader_of(path) is None:
        if there == "does not exist" and not _looks_like_a_path(name):
            return None
        there = "cannot be read" if there == "is a file" else there
        near = difflib.get_close_matches(path.suffix.lower(), READERS, 1)
        hint = f"; did you mean {path.with_suffix(near[0]).name[:80]!r}?" if near else ""
        raise InputError(
            f"data file {str(path)[:150]} {there}{hint}; the name of a data file ends with {_ENDINGS}"
        )
    if there != "is a file":
        raise InputError(f"data file {str(path)[:200]} {there}")
    if path.stat().st_size == 0:
        raise InputError(f"data file {path} is empty")
    check_split(name, split)
    return [path]


_ONE_SET = "only one set of rows; hold some out with eval_size instead"


def check_split(name: str, split: str) -> None:
    """Refuse a split name for data without splits: it would silently give the same rows again."""
    if split != "train":
        raise InputError(f"{name} has no split {split!r}, {_ONE_SET}")


def _looks_like_a_path(name: str) -> bool:
    """Whether a name cannot be that of a data set on the hub, which is `user/name`, or `name` in rare cases."""
    ending = Path(name).suffix.lower()
    if name.startswith((".", "/", "~")) or name.count("/") > 1 or name.endswith("/") or ending in _OTHERS:
        return True
    return bool(difflib.get_close_matches(ending, READERS, 1)) or ("/" not in name and ending[1:].isalpha())


def _shards(folder: Path, split: str) -> list[Path]:
    what = f"data directory {folder}"
    shown = (path for path in folder.iterdir() if path.is_file() and not path.name.startswith((".", "_")))
    files = sorted(path for path in shown if path.suffix.lower() != ".md")
    if not files:
        raise InputError(f"{what} holds no data; it was not written by `datasets`, and has no file of rows")
    if odd := [path.name for path in files if reader_of(path) is None]:
        raise InputError(f"{what}: {odd[0]} cannot be read; names of data files end with {_ENDINGS}")
    if len({reader_of(path) for path in files}) > 1:
        raise InputError(f"{what} has files of several formats; put each format into its own directory")
    splits = {path: _split_of(path) for path in files}
    named = sorted({found for found in splits.values() if found})
    if named and None in splits.values():
        bare = next(path.name for path, found in splits.items() if found is None)
        raise InputError(f"{what}: some files name a split ({', '.join(named)}), and {bare} names none")
    chosen = [path for path, found in splits.items() if found == split] if named else files
    if not chosen or (not named and split != "train"):
        raise InputError(f"{what} has no split {split!r}: {', '.join(named) or _ONE_SET}")
    if empty := [path.name for path in chosen if path.stat().st_size == 0]:
        raise InputError(f"{what}: {empty[0]} is empty")
    return chosen


def _split_of(path: Path) -> str | None:
    words = re.split(r"[^a-z]+", path.name.lower())
    return next((_SPLITS[word] for word in words if word in _SPLITS), None)


def opened(path: Path) -> IO[bytes]:
    """A data file for reading, unpacked."""
    is_packed = path.name.lower().endswith(".gz")
    return cast("IO[bytes]", gzip.open(path, "rb")) if is_packed else path.open("rb")


def check_text(files: Sequence[Path]) -> None:
    """Read files as UTF-8. Libraries find a wrong byte only when a row is read.

    Raises:
        UnicodeDecodeError: a file is not UTF-8.
    """
    for path in files:
        decoder = codecs.getincrementaldecoder("utf-8")()
        with opened(path) as file:
            while part := file.read(1 << 20):
                decoder.decode(part)
        decoder.decode(b"", final=True)


def broken_line(path: Path) -> str | None:
    """The first line of a JSON lines file that is no JSON object, for an error; None: there is none, or other files."""
    if not path.is_file() or reader_of(path) != "json" or ".json" in map(str.lower, path.suffixes):
        return None
    with opened(path) as file:
        for number, line in enumerate(file, start=1):
            try:
                if line.strip() and not isinstance(json.loads(line), dict):
                    return f"line {number} is no JSON object: {line[:80]!r}"
            except UnicodeDecodeError:
                return f"line {number} is not UTF-8 text: {line[:80]!r}"
            except ValueError as error:
                return f"line {number} is not JSON ({error}): {line[:80]!r}"
            except RecursionError:
                return f"line {number} is nested too deeply"
    return None


_logger = logging.getLogger(__name__)

# A number as people write it, and not a word that Python's `float` reads too, such as nan.
NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?", re.ASCII)
# One field of a row may be as long as a picture's `data:` URL.
_LONGEST_FIELD = 1 << 30


def column_types(given: Sequence[str]) -> dict[str, str]:
    """The types of columns, from `NAME=TYPE` words."""
    found, form = {}, f"NAME=TYPE, with a column's name and one of {', '.join(_READ)}"
    for word in given:
        name, _, kind = word.rpartition("=")
        if not name or kind not in _READ:
            raise InputError(f"dataset_types {word!r}: give {form}")
        found[name] = kind
    return found


def read_csv(files: Sequence[Path], types: Mapping[str, str]) -> dict[str, list[Any]]:
    """The columns of CSV files with equal headers. An empty cell is "", and None in a column that is not text.

    Raises:
        InputError: header, rows, cells and types do not fit each other.
        OSError, UnicodeDecodeError, csv.Error: a file cannot be read.
    """
    csv.field_size_limit(_LONGEST_FIELD)
    header: list[str] = []
    columns: list[list[Any]] = []
    for file in files:
        with opened(file) as raw, io.TextIOWrapper(raw, encoding="utf-8-sig", newline="") as text:
            rows, what = csv.reader(text, strict=True), f"data file {file}"
            found = next(rows, [])
            if not found or len(set(found)) < len(found):
                raise InputError(
                    f"{what}: the first line must name the columns, each once, and is {found!r:.120}"
                )
            if header and found != header:
                raise InputError(
                    f"{what} has the columns {found!r:.120}, and {files[0].name} has {header!r:.120}"
                )
            if not header:
                header, columns = found, [[] for _ in found]
            read = [_READ[types.get(name, "text")] for name in header]
            for row in filter(None, rows):
                place = f"{what}, line {rows.line_num}"
                if len(row) != len(header):
                    counts = f"{len(row)} cells for {len(header)} columns"
                    raise InputError(f"{place}: {counts}; put quotes around a text that has a comma")
                for column, convert, name, cell in zip(columns, read, header, row, strict=True):
                    try:
                        column.append(convert(cell))
                    except ValueError as error:
                        said = f"{name} is {cell!r:.80}, and dataset_types says {types[name]}"
                        raise InputError(f"{place}: {said}") from error
    if unknown := sorted(types.keys() - set(header)):
        raise InputError(f"dataset_types: there is no column {unknown[0]!r}, only {', '.join(header)}")
    _tell_numbers(files[0].name, dict(zip(header, columns, strict=True)), types)
    return dict(zip(header, columns, strict=True))


def _tell_numbers(file: str, columns: Mapping[str, list[Any]], types: Mapping[str, str]) -> None:
    plain = ((name, cells) for name, cells in columns.items() if name not in types and any(cells))
    alike = [name for name, cells in plain if all(NUMBER.fullmatch(cell) for cell in cells if cell)]
    if alike:
        _logger.warning(
            f"{file}: every column of CSV is text, and {', '.join(alike)} looks like numbers; if a reward function "
            f"needs numbers, set dataset_types: {' '.join(f'{name}=float' for name in alike)}"
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
