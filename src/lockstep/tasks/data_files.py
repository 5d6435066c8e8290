"""Data files by name. This module imports no large library, so that a missing file is found before anything is loaded."""

from __future__ import annotations

from pathlib import Path

from lockstep.errors import InputError

# The builder of `datasets` for each file name ending.
READERS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}


def data_file(name: str) -> Path | None:
    """The file that a data name stands for; None if the name is not the name of a file.

    Raises:
        InputError: there is no such file, or it is empty.
    """
    path = Path(name).expanduser()
    if path.suffix not in READERS:
        return None
    if not path.is_file():
        raise InputError(f"data file {path} does not exist")
    if path.stat().st_size == 0:
        raise InputError(f"data file {path} is empty")
    return path
