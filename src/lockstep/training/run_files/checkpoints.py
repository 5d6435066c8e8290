"""Makes sure that a checkpoint is either complete or absent, and resets a run directory to one of its checkpoints.

The trainer saves the checkpoints. A run that is started again in the same directory reads them.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lockstep.errors import InputError, LockstepError, writing
from lockstep.parity.receipt import RECEIPT, lines_up_to, replace_text
from lockstep.parity.resume.checkpoint import TRAINER_STATE
from lockstep.report.page.run_record import METRICS, SHOWN

_logger = logging.getLogger(__name__)


def last_checkpoint(output_dir: str | Path) -> Path | None:
    """Newest complete checkpoint of a run. A checkpoint is incomplete if the run was killed while it was written."""
    complete = [path for path in _checkpoints(Path(output_dir)) if _is_complete(path)]
    return complete[-1] if complete else None


def checkpoint_step(checkpoint: Path) -> int:
    """Number of optimizer steps that the run had taken when it wrote this complete checkpoint."""
    return int(json.loads((checkpoint / TRAINER_STATE).read_text())["global_step"])


def set_damaged_aside(output_dir: str | Path) -> None:
    """Rename checkpoints that cannot be read, so that no code loads or deletes them, and tell the user.

    If the newest checkpoint has no trainer state, the run was killed while writing it. This checkpoint is not damaged. It keeps
    its name, and `cut_back` removes it.

    Raises:
        InputError: no checkpoint can be read, so the run cannot continue. Nothing was changed.
    """
    found = _checkpoints(Path(output_dir))
    damaged = [path for path in found if not _is_complete(path)]
    if damaged and damaged[-1] == found[-1] and not (found[-1] / TRAINER_STATE).exists():
        damaged.pop()
    if not damaged:
        return
    if not any(map(_is_complete, found)):
        names = ", ".join(path.name for path in damaged)
        raise InputError(
            f"no checkpoint in {output_dir} can be read: {TRAINER_STATE} is damaged or missing in {names}. Nothing was changed. "
            "Put a good copy back to go on, or give another output_dir to start from the beginning"
        )
    for path in damaged:
        aside = free_name(path.with_name(f"damaged-{path.name}"))
        path.rename(aside)
        _logger.warning(f"{path.name} cannot be read ({TRAINER_STATE} is damaged); it is now {aside}")


def free_name(wanted: Path) -> Path:
    """The path itself if it does not exist, else the first of `NAME-2`, `NAME-3`, … that does not exist. The suffix is kept."""
    path, number = wanted, 2
    while path.exists():
        path = wanted.with_name(f"{wanted.stem}-{number}{wanted.suffix}")
        number += 1
    return path


@contextmanager
def whole_or_absent(checkpoint: Path) -> Iterator[None]:
    """Remove an incomplete checkpoint if saving it fails. The context contains the save by all ranks.

    Only the rank that writes the last file may use this. If another rank removed the folder, this rank could still be writing
    into it. The checkpoint is complete only after this rank has finished.
    """
    try:
        yield
    except LockstepError:
        if not _is_complete(checkpoint):
            shutil.rmtree(checkpoint, ignore_errors=True)
        raise


@contextmanager
def guarded_save(output_dir: str | Path, step: int) -> Iterator[None]:
    """Run one rank's part of a save. If it fails, the error names the last good checkpoint.

    Raises:
        LockstepError: the save failed, usually because the disk is full.
    """

    def what_now() -> str:
        good = last_checkpoint(output_dir)
        keeps = f"the last good one is {good}" if good else "there is no earlier one"
        return f"{keeps}. Make room and start the same command again"

    with writing(f"checkpoint-{step}", Path(output_dir), what_now):
        yield


def cut_back(output_dir: str | Path, checkpoint: Path | None) -> None:
    """Remove everything that a run wrote after `checkpoint`: later or incomplete checkpoints, and later log lines.

    If `checkpoint` is None, incomplete checkpoints and all log lines are removed. Later rollouts go when the run begins
    (`training/trainers/hooks/run_files.py`), because it may still be refused.
    """
    folder = Path(output_dir)
    step = checkpoint_step(checkpoint) if checkpoint is not None else 0
    for path in _checkpoints(folder):
        if not _is_complete(path) or (checkpoint is not None and checkpoint_step(path) > step):
            shutil.rmtree(path)
    for name in (METRICS, SHOWN, RECEIPT):
        path = folder / name
        if checkpoint is None:
            path.unlink(missing_ok=True)
        elif path.exists():
            kept = lines_up_to(path.read_text().splitlines(), step)
            replace_text(path, "".join(f"{line}\n" for line in kept))


def _checkpoints(folder: Path) -> list[Path]:
    """Directories of all checkpoints, complete or not, ordered by step."""
    if not folder.is_dir():
        return []
    found = [
        path
        for path in folder.glob("checkpoint-*")
        if path.is_dir() and path.name.removeprefix("checkpoint-").isdigit()
    ]
    return sorted(found, key=lambda path: int(path.name.removeprefix("checkpoint-")))


def _is_complete(checkpoint: Path) -> bool:
    try:
        return checkpoint_step(checkpoint) == int(checkpoint.name.rpartition("-")[2])
    except (OSError, ValueError, TypeError, KeyError, OverflowError, RecursionError):
        # The file is missing, is not text, is not JSON, or is JSON with other content.
        return False
