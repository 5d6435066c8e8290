"""Data files by name, and CSV files, whose columns have no types.

Data files by name. This module imports no large library, so that a missing file is found before anything is loaded.

Reads CSV files. CSV has no types: every column is text, unless the user names a type (`dataset_types`).
"""

from __future__ import annotations

import codecs
import csv
import gzip
import io
import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, cast

from lockstep.errors import InputError
from lockstep.private_caches import expanded

# The builder of `datasets` for each file name ending. `.gz` may follow.
READERS = {".jsonl": "json", ".ndjson": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}
_ENDINGS = f"{', '.join(READERS)}, each also with .gz behind it"
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
    if path.is_dir():
        return None if any((path / known).exists() for known in _SAVED) else _shards(path, split)
    if reader_of(path) is None:
        if path.is_file():
            raise InputError(f"data file {path} cannot be read; the name of a data file ends with {_ENDINGS}")
        return None
    if not path.is_file():
        raise InputError(f"data file {path} does not exist")
    if path.stat().st_size == 0:
        raise InputError(f"data file {path} is empty")
    if split != "train":
        raise InputError(
            f"{name} has no split {split!r}, only one set of rows; hold some out with eval_size instead"
        )
    return [path]


def _shards(folder: Path, split: str) -> list[Path]:
    files = sorted(
        path for path in folder.iterdir() if path.is_file() and not path.name.startswith((".", "_"))
    )
    files = [path for path in files if path.suffix.lower() != ".md"]
    if not files:
        raise InputError(
            f"data directory {folder} holds no data; it was not written by `datasets`, and has no file of rows"
        )
    if odd := [path.name for path in files if reader_of(path) is None]:
        raise InputError(
            f"data directory {folder}: {odd[0]} cannot be read; names of data files end with {_ENDINGS}"
        )
    if len({reader_of(path) for path in files}) > 1:
        raise InputError(
            f"data directory {folder} has files of several formats; put each format into its own directory"
        )
    splits = {path: _split_of(path) for path in files}
    named = sorted({found for found in splits.values() if found})
    if named and None in splits.values():
        bare = next(path.name for path, found in splits.items() if found is None)
        raise InputError(
            f"data directory {folder}: some files name a split ({', '.join(named)}), and {bare} names none"
        )
    chosen = [path for path, found in splits.items() if found == split] if named else files
    if not chosen or (not named and split != "train"):
        known = ", ".join(named) or "only one set of rows; hold some out with eval_size instead"
        raise InputError(f"data directory {folder} has no split {split!r}: {known}")
    if empty := [path.name for path in chosen if path.stat().st_size == 0]:
        raise InputError(f"data directory {folder}: {empty[0]} is empty")
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
    """The first line of a JSON lines file that is no JSON object, for an error; None if every line is one, or for
    other files.
    """
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
    """The columns of CSV files with equal headers.

    An empty cell is the empty text, and None in a column of another type.

    Raises:
        InputError: a file has no header, or another one; a row has more or fewer cells than the header; a cell has
            not the type of its column; `types` names a column that is not there.
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
                        f"data file {file}, line {rows.line_num}: {len(row)} cells for {len(header)} columns; "
                        f"put quotes around a "
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
            f"{file}: every column of CSV is text, and {', '.join(alike)} looks like numbers; if a reward "
            f"function needs numbers, "
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
