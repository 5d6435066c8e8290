"""The directory of a run: fresh, to be continued, or finished.

A run that was interrupted is continued where its last complete checkpoint stands; a finished one is left alone and the new run
goes beside it. `run.json` keeps the settings, since a run continued with others would be neither.
"""

from __future__ import annotations

import fcntl
import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.errors import InputError
from lockstep.rollouts.ranks import Ranks
from lockstep.training.run_files.checkpoints import cut_back, last_checkpoint

SETTINGS, SUMMARY = "run.json", "summary.json"


@dataclass(frozen=True, slots=True)
class RunPlace:
    """Where a run writes, and the checkpoint it continues from (None: from the start)."""

    folder: Path
    checkpoint: Path | None


@contextmanager
def open_run(output_dir: str | Path, settings: dict[str, Any]) -> Iterator[RunPlace]:
    """Choose the directory, cut it back to its last checkpoint, write the settings, and keep other processes out meanwhile.

    The lock goes with the process that holds it, however it ends.

    Raises:
        InputError: another process runs there, or the directory holds an interrupted run with other settings.
    """
    folder = _unfinished(Path(output_dir))
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise InputError(
                f"another process is running in {folder}; wait for it, or give another output_dir"
            ) from error
        yield _prepare(folder, settings)


@contextmanager
def open_run_together(ranks: Ranks, output_dir: str | Path, settings: dict[str, Any]) -> Iterator[RunPlace]:
    """`open_run` by the rank that owns the engine, for all; every rank must call, and sees the directory under the same path.

    Raises:
        InputError: as `open_run`, on every rank.
    """
    with ExitStack() as held:
        yield ranks.from_owner(
            "run directory",
            lambda: held.enter_context(open_run(output_dir, settings)),
            lambda place: [str(place.folder), place.checkpoint and str(place.checkpoint)],
            lambda found: RunPlace(Path(found[0]), found[1] and Path(found[1])),
        )


def _prepare(folder: Path, settings: dict[str, Any]) -> RunPlace:
    known = folder / SETTINGS
    plain = json.loads(json.dumps(settings, default=str))
    checkpoint = last_checkpoint(folder)
    if checkpoint is not None and not known.exists():
        raise InputError(f"{folder} holds checkpoints of something else (no {SETTINGS}); give another output_dir")
    if checkpoint is not None:
        earlier = json.loads(known.read_text())
        changed = sorted(k for k in earlier.keys() | plain.keys() if earlier.get(k) != plain.get(k))
        # Another method has other fields: their list would hide what they come from.
        changed.sort(key=lambda name: name != "method")
        if changed:
            what = ", ".join(f"{k} was {earlier.get(k)!r}, is {plain.get(k)!r}" for k in changed[:5])
            raise InputError(
                f"{folder} holds an interrupted run with other settings ({what}); give another output_dir, or delete it"
            )
    if known.exists():
        cut_back(folder, checkpoint)
    known.write_text(json.dumps(plain, indent=1) + "\n")
    return RunPlace(folder, checkpoint)


def _unfinished(wanted: Path) -> Path:
    folder, number = wanted, 2
    while (folder / SUMMARY).exists():
        folder = wanted.with_name(f"{wanted.name}-{number}")
        number += 1
    return folder


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Entries of a `.jsonl` file; none where there is no file."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
