"""Data files by name. This module imports no large library, so that a missing file is found before anything is loaded."""

from __future__ import annotations

import json
from pathlib import Path

from lockstep.errors import InputError
from lockstep.homes import expanded

# The builder of `datasets` for each file name ending.
READERS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}


def data_file(name: str) -> Path | None:
    """The file that a data name stands for; None if the name is not the name of a file.

    Raises:
        InputError: there is no such file, or it is empty.
    """
    path = expanded(name)
    if path.suffix not in READERS:
        return None
    if not path.is_file():
        raise InputError(f"data file {path} does not exist")
    if path.stat().st_size == 0:
        raise InputError(f"data file {path} is empty")
    return path


def broken_line(path: Path) -> str | None:
    """The first line of a JSON lines file that is no JSON object, for an error; None if every line is one, or for other files."""
    if path.suffix != ".jsonl" or not path.is_file():
        return None
    with path.open("rb") as file:
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
