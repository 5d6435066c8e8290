"""Loads the data that a config names: problems that are made, files, a saved `datasets` directory, or a hub id."""

from __future__ import annotations

import csv
import glob
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datasets import Dataset, DatasetDict, load_dataset, load_from_disk
from datasets.exceptions import DatasetsError

from lockstep.errors import InputError
from lockstep.private_caches import expanded
from lockstep.tasks import MADE
from lockstep.tasks.builtin import arithmetic, calculator, dots, reasoning_gym_problems
from lockstep.tasks.files import (
    broken_line,
    check_split,
    column_types,
    data_files,
    opened,
    read_csv,
    reader_of,
)
from lockstep.tasks.rewards import Reward, exact_match


@dataclass(frozen=True, slots=True)
class TaskData:
    """The training and evaluation data of a run.

    Attributes:
        evaluation: held-out rows, never trained on; None if none were requested.
        rewards: reward functions that belong to the data; empty if the user must name some.
    """

    train: Dataset
    evaluation: Dataset | None
    rewards: tuple[Reward, ...] = ()


def load_data(
    name: str,
    *,
    subset: str | None,
    train_split: str,
    test_split: str | None,
    train_size: int,
    eval_size: int,
    seed: int,
    types: Sequence[str] = (),
) -> TaskData:
    """Load the data of a run.

    Args:
        name: `arithmetic`, `calculator`, `dots`, `reasoning_gym`, a `.jsonl`, `.ndjson`, `.json`, `.csv` or
            `.parquet` file (perhaps with `.gz`), a directory of such files, a directory written by `datasets`, or a
            hub id.
        subset: kind of arithmetic problems, name of a reasoning-gym data set, or hub configuration.
        train_split: split to train on, if the data has splits.
        test_split: split to evaluate on. By default `eval_size` rows are held out of the training split.
        train_size: number of training rows if problems are generated; otherwise a limit, 0 for all.
        eval_size: number of held-out rows; 0 for none.
        seed: seed of generated problems and of the choice of held-out rows.
        types: `NAME=TYPE` for each column of a CSV file that is not text: `int`, `float` or `bool`.

    Raises:
        InputError: there is no data of that name, its format cannot be read, or it has too few rows.
    """
    if name in MADE and test_split is not None:
        raise InputError(f"{name} has no splits; drop dataset_test_split and set eval_size")
    if types and not _is_csv(name, train_split):
        raise InputError("dataset_types is for CSV files: other data has types of its own; leave it out")
    if name in MADE:
        train, held_out, score = _made(name, subset, max(train_size, 1), eval_size, seed)
        if train_size == 0:
            raise InputError(f"{name} makes its problems: set train_size, the number to train on")
        return TaskData(train, held_out if eval_size else None, (score,))
    train = _load_split(name, subset, train_split, types)
    if test_split is not None:
        tested = _load_split(name, subset, test_split, types)
        return TaskData(_limited(train, train_size), _limited(tested, eval_size))
    if eval_size == 0:
        return TaskData(_limited(train, train_size), None)
    if (count := len(train)) <= eval_size:
        raise InputError(
            f"{name} has {count} rows; {eval_size} cannot be held out for evaluation (eval_size)"
        )
    parts = train.train_test_split(test_size=eval_size, seed=seed)
    return TaskData(_limited(parts["train"], train_size), parts["test"])


def _made(
    name: str, subset: str | None, train_size: int, eval_size: int, seed: int
) -> tuple[Dataset, Dataset, Reward]:
    if name == "arithmetic":
        return *arithmetic(subset or "larger", train_size, eval_size, seed), exact_match
    if name != "reasoning_gym":
        make = calculator if name == "calculator" else dots
        return *make(train_size, eval_size, seed), exact_match
    if subset is None:
        raise InputError("dataset_name reasoning_gym needs dataset_config, such as letter_counting")
    return reasoning_gym_problems(subset, train_size, eval_size, seed)


def _is_csv(name: str, split: str) -> bool:
    return any(reader_of(file) == "csv" for file in data_files(name, split) or ())


def _load_split(name: str, subset: str | None, split: str, types: Sequence[str]) -> Dataset:
    path = expanded(name)
    if "::" in name and path.exists():
        # `datasets` reads the part before it alone: another file, or none.
        raise InputError(
            f"{path}: data cannot be read from a path with '::' in it; rename that file or folder"
        )
    files = data_files(name, split)
    try:
        if files is not None:
            return _read_files(files, types)
        if path.is_dir():
            saved = load_from_disk(str(path))
            if isinstance(saved, DatasetDict):
                return saved[split]
            check_split(name, split)
            return saved
        return load_dataset(name, subset, split=split)
    except InputError:
        raise
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, DatasetsError, csv.Error) as error:
        broken = next(filter(None, map(broken_line, files or ())), None)
        raise InputError(f"cannot read data {name!r}: {broken or _reason(error)}") from error


def _read_files(files: Sequence[Path], types: Sequence[str]) -> Dataset:
    reader = reader_of(files[0])
    assert reader is not None
    if reader == "csv":
        return Dataset.from_dict(read_csv(files, column_types(types)))
    try:
        # `datasets` reads a name of a file as a pattern, and puts the working directory before it as it is.
        escaped = [glob.escape(str(file.absolute())) for file in files]
        found = load_dataset(reader, data_files=escaped, split="train")
    except DatasetsError as error:
        if reader != "json" or "timestamp" not in _reason(error):
            raise
    else:
        # In Parquet, dates are written as such.
        types = [str(field.type) for field in found.features.arrow_schema]
        if reader != "json" or not any("timestamp" in kind for kind in types):
            return found
    # JSON has no dates. `datasets` has made some from texts that look like one.
    return Dataset.from_list([row for file in files for row in _json_rows(file)])


def _json_rows(path: Path) -> list[Any]:
    with opened(path) as file:
        text = file.read().decode("utf-8-sig")
    try:
        whole = json.loads(text)
    except ValueError:
        return [json.loads(line) for line in text.splitlines() if line.strip()]
    return whole if isinstance(whole, list) else [whole]


def _reason(error: BaseException) -> str:
    """The first line of the error that caused the others: `datasets` says only that an error occurred."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _limited(data: Dataset, rows: int) -> Dataset:
    return data.select(range(min(rows, len(data)))) if rows else data
