"""Reads the files of a run for its report. Missing and damaged files are left out: a run that was killed has a report too."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from lockstep.errors import InputError, LockstepError
from lockstep.report.alarms import LINE
from lockstep.report.kept_rollouts import rollout_files
from lockstep.secret import without_secrets

Line = dict[str, Any]
ABOUT, END, METRICS, RECEIPT, SETTINGS, SHOWN, SUMMARY = (
    "about.json", "end.json", "metrics.jsonl", "receipt.jsonl", "run.json", "shown_rollouts.jsonl", "summary.json",
)  # fmt: skip
BEFORE, AFTER, REPORT = "before.json", "after.json", "report.html"


@dataclass(frozen=True, slots=True)
class RunRecord:
    """The content of a run's files.

    Attributes:
        folder: the run's output directory.
        about: method, model, settings, versions (`about.json`).
        end: how the run has ended (`end.json`); empty while it trains, and after a kill.
        metrics, receipt, shown: lines of `metrics.jsonl`, `receipt.jsonl` and `shown_rollouts.jsonl`.
        summary: `summary.json`; empty before the end.
        before, after: the evaluations before and after training; None if there was none.
        rewards: rewards of the training rollouts that are kept, by step.
    """

    folder: Path
    about: Line = field(default_factory=dict)
    end: Line = field(default_factory=dict)
    metrics: list[Line] = field(default_factory=list)
    receipt: list[Line] = field(default_factory=list)
    shown: list[Line] = field(default_factory=list)
    summary: Line = field(default_factory=dict)
    before: Line | None = None
    after: Line | None = None
    rewards: dict[int, list[float]] = field(default_factory=dict)

    @property
    def steps(self) -> list[Line]:
        """The logs of training steps."""
        return [line for line in self.metrics if "loss" in line]

    @property
    def evaluations(self) -> list[Line]:
        """The logs of evaluations during training."""
        return [line for line in self.metrics if "loss" not in line]

    @property
    def start(self) -> Line:
        """The last `start` line of the receipt; empty if there is none."""
        return next((line for line in reversed(self.receipt) if line.get("kind") == "start"), {})

    @property
    def proven(self) -> list[Line]:
        """The receipt's lines of steps whose proofs have passed."""
        return [line for line in self.receipt if line.get("kind") == "step"]

    @property
    def unproven(self) -> list[Line]:
        """The receipt's lines of checks that were due and could not be made."""
        return [line for line in self.receipt if line.get("kind") == "unproven"]

    @property
    def taken(self) -> list[str]:
        """The user's hooks and functions in the model's forward and backward."""
        return [name for line in self.receipt if line.get("kind") == "hooks" for name in line["taken"]]

    @property
    def alarms(self) -> list[Line]:
        """The receipt's lines of alarms."""
        return [line for line in self.receipt if line.get("kind") == LINE]

    @property
    def last_step(self) -> int:
        """The last optimizer step that the files name."""
        return max((int(line.get("step", 0)) for line in (*self.metrics, *self.proven, self.end)), default=0)


@contextmanager
def files_of_a_run(*folders: Path) -> Iterator[None]:
    """Within the block, an error that values of another kind cause, in files that others wrote or changed, is one sentence.

    Raises:
        InputError: the files hold such values.
    """
    try:
        yield
    except LockstepError:
        raise
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
        named = " or ".join(map(str, folders))
        raise InputError(
            f"a file in {named} holds a value of another kind than Lockstep writes ({type(error).__name__}: {error}); it was "
            "changed by something else, or written by another version"
        ) from error


def read_run(folder: Path) -> RunRecord:
    """The record of a run."""
    return RunRecord(
        folder,
        # An earlier version wrote them as they were.
        without_secrets(_read(folder / ABOUT)),
        without_secrets(_read(folder / END), by_name=False),
        [with_nan(line) for line in read_lines(folder / METRICS)],
        read_lines(folder / RECEIPT),
        read_lines(folder / SHOWN),
        with_nan(_read(folder / SUMMARY)),
        _evaluation(folder / BEFORE),
        _evaluation(folder / AFTER),
        _rewards(folder),
    )


def read_lines(path: Path) -> list[Line]:
    """Entries of a `.jsonl` file; an empty list if there is no file. A line that a kill cut short is left out."""
    found = []
    for line in path.read_bytes().splitlines() if path.is_file() else ():
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if isinstance(entry, dict):
            found.append(entry)
    return found


def with_nan(figures: Line) -> Line:
    """Figures of a file with NaN where the file has null: JSON has no NaN."""
    return {name: math.nan if value is None else value for name, value in figures.items()}


def _read(path: Path) -> Line:
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _evaluation(path: Path) -> Line | None:
    found = _read(path)
    whole = isinstance(found.get("metrics"), dict) and isinstance(found.get("rollouts"), list)
    return {**found, "metrics": with_nan(found["metrics"])} if whole else None


def _rewards(folder: Path) -> dict[int, list[float]]:
    """Rewards of the first, a middle and the last step that is kept."""
    files = rollout_files(folder)
    found = {}
    for step, path in dict(files[i] for i in {0, len(files) // 2, len(files) - 1} if files).items():
        try:
            table = pq.read_table(path, columns=["branch", "reward"]).to_pydict()
        except (OSError, pa.ArrowException):
            continue
        rewards = zip(table["branch"], table["reward"], strict=True)
        found[step] = [reward for branch, reward in rewards if branch == 0 and reward is not None]
    return dict(sorted(found.items()))
