"""Data files by name. This module imports no large library, so that a missing file is found before anything is loaded."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from typing import IO, cast

from lockstep.errors import InputError
from lockstep.homes import expanded

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
        Files of one format; None if the name is neither a file nor a directory of files (it may be a directory that `datasets` has
        written, or a hub id).

    Raises:
        InputError: there is no such file, or it is empty, or its format cannot be read; the files of a directory have several
            formats, or none is of that split.
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
        raise InputError(f"{name} has no split {split!r}, only one set of rows; hold some out with eval_size instead")
    return [path]


def _shards(folder: Path, split: str) -> list[Path]:
    files = sorted(path for path in folder.iterdir() if path.is_file() and not path.name.startswith((".", "_")))
    files = [path for path in files if path.suffix.lower() != ".md"]
    if not files:
        raise InputError(
            f"data directory {folder} holds no data; it was not written by `datasets`, and has no file of rows"
        )
    if odd := [path.name for path in files if reader_of(path) is None]:
        raise InputError(f"data directory {folder}: {odd[0]} cannot be read; names of data files end with {_ENDINGS}")
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


def broken_line(path: Path) -> str | None:
    """The first line of a JSON lines file that is no JSON object, for an error; None if every line is one, or for other files."""
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
