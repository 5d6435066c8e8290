"""Loads the data that a config names: problems that are made, files, a saved `datasets` directory, or a hub id."""

from __future__ import annotations

import csv
import glob
import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
from datasets import Dataset, DatasetDict, load_dataset, load_from_disk
from datasets.exceptions import DatasetsError

from lockstep.errors import InputError
from lockstep.private_caches import expanded
from lockstep.tasks import MADE
from lockstep.tasks.builtin import arithmetic, calculator, dots, reasoning_gym_problems
from lockstep.tasks.files import (
    broken_line,
    check_split,
    check_text,
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
    if path.exists() and ("::" in name or os.path.expandvars(name) != name):
        # `datasets` reads the part before `::` alone, and puts the variable's value there: another file, or none.
        raise InputError(
            f"{path}: the data cannot be read from a path with '::' or the name of a variable ($HOME) in it; rename "
            "that file or folder"
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
        if broken is None and "corresponds to no data" in _reason(error):
            broken = "it has no rows"
        if not broken and files is None and not path.is_dir():
            broken = f"there is no such file or directory here, and as a hub id: {_reason(error)[:200]}"
        raise InputError(f"cannot read data {name!r}: {broken or _reason(error)}") from error


def _read_files(files: Sequence[Path], types: Sequence[str]) -> Dataset:
    reader = reader_of(files[0])
    assert reader is not None
    if reader == "csv":
        return Dataset.from_dict(read_csv(files, column_types(types)))
    if reader == "json":
        check_text(files)
    try:
        # `datasets` reads a name of a file as a pattern, and puts the working directory before it as it is.
        escaped = [glob.escape(str(file.absolute())) for file in files]
        found = load_dataset(reader, data_files=escaped, split="train")
    except DatasetsError as error:
        if reader != "json" or not re.search("timestamp|agent traces", _reason(error)):
            raise
    else:
        # In Parquet, dates and JSON values are written as such.
        if reader != "json" or not re.search(r"timestamp|Json\(", str(found.features)):
            return found
    # JSON has no dates. `datasets` has made some from texts that look like one. Where a column has several kinds of
    # values, it has made numbers of texts that look like one.
    return _as_written([row for file in files for row in _json_rows(file)])


def _as_written(rows: list[dict[str, Any]]) -> Dataset:
    # Older releases of `datasets` have no type for columns of several kinds.
    mixed = {"on_mixed_types": "use_json"} if hasattr(datasets, "Json") else {}
    found = Dataset.from_list(rows, **mixed)
    if "Json(" not in str(found.features):
        return found
    # A text that is JSON itself counts as encoded already.
    encoded = [{name: _encoded(row.get(name), kind) for name, kind in found.features.items()} for row in rows]
    return Dataset.from_list(encoded, features=found.features)


def _encoded(value: Any, kind: Any) -> Any:
    """A value with JSON in place of every part of the feature `Json`."""
    if value is None:
        return None
    if type(kind).__name__ == "Json":
        return json.dumps(value)
    if isinstance(value, dict):
        return {name: _encoded(value.get(name), part) for name, part in kind.items()}
    if isinstance(value, list):
        part = kind[0] if isinstance(kind, list) else kind.feature
        return [_encoded(entry, part) for entry in value]
    return value


def _json_rows(path: Path) -> list[Any]:
    with opened(path) as file:
        text = file.read().decode("utf-8-sig")
    try:
        whole = json.loads(text)
    except ValueError:
        # Not by `splitlines`: a text may have line ends that JSON lines have not, such as U+2028.
        return [json.loads(line) for line in re.split("[\r\n]", text) if line.strip()]
    return whole if isinstance(whole, list) else [whole]


def _reason(error: BaseException) -> str:
    """The first line of the error that caused the others: `datasets` says only that an error occurred."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _limited(data: Dataset, rows: int) -> Dataset:
    return data.select(range(min(rows, len(data)))) if rows else data
