"""Checkpoints that are whole or absent, and a run directory cut back to one of them.

Comes from: the trainer's saves. Goes to: a run that is started again in the same directory.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError
from transformers.trainer_utils import sort_checkpoints

from lockstep.errors import InputError, LockstepError
from lockstep.parity.receipt import RECEIPT, lines_up_to, replace_text

# The last file that a checkpoint gets: what has it is whole.
TRAINER_STATE = "trainer_state.json"


def last_checkpoint(output_dir: str | Path) -> Path | None:
    """Newest complete checkpoint of a run; one that was being written when the run was killed does not count."""
    complete = [path for path in _checkpoints(Path(output_dir)) if _is_complete(path)]
    return complete[-1] if complete else None


def checkpoint_step(checkpoint: Path) -> int:
    """Optimizer steps that a complete checkpoint stands after."""
    return int(json.loads((checkpoint / TRAINER_STATE).read_text())["global_step"])


def set_damaged_aside(output_dir: str | Path) -> None:
    """Rename checkpoints that cannot be read, so that nothing takes or deletes them, and say so.

    The newest one without a trainer's state was being written when the run was killed; it is not damaged, and stays for `cut_back`.

    Raises:
        InputError: there is no other to go on from. Nothing was changed then.
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
            "Put a good copy back to go on, or give another output_dir to start anew"
        )
    for path in damaged:
        aside = free_name(path.with_name(f"damaged-{path.name}"))
        path.rename(aside)
        print(f"lockstep: {path.name} cannot be read ({TRAINER_STATE} is damaged); it is now {aside}", flush=True)


def free_name(wanted: Path) -> Path:
    """The path itself, or the first of `NAME-2`, `NAME-3`, … that nothing has yet; the suffix stays."""
    path, number = wanted, 2
    while path.exists():
        path = wanted.with_name(f"{wanted.stem}-{number}{wanted.suffix}")
        number += 1
    return path


@contextmanager
def whole_or_absent(checkpoint: Path) -> Iterator[None]:
    """Run the save of a checkpoint by all ranks, on the one that makes it whole; if it fails, remove what it left.

    No other rank may: this one may still be writing into the same folder, whose end alone makes it count.
    """
    try:
        yield
    except LockstepError:
        if not _is_complete(checkpoint):
            shutil.rmtree(checkpoint, ignore_errors=True)
        raise


@contextmanager
def guarded_save(output_dir: str | Path, step: int) -> Iterator[None]:
    """Run one rank's share of a save; if it fails, say which checkpoint is good.

    Raises:
        LockstepError: the save failed (a full disk, most often).
    """
    try:
        yield
    except (OSError, SafetensorError, RuntimeError) as error:
        # A full disk shows as any of the three: Python's files, safetensors' and torch's writers differ.
        good = last_checkpoint(output_dir)
        keeps = f"the last good one is {good}" if good else "there is no earlier one"
        free = shutil.disk_usage(output_dir).free / 2**30
        raise LockstepError(
            f"checkpoint-{step} could not be written ({free:.1f} GiB free in {output_dir}): {error}; {keeps}. Make room and "
            "start the same command again"
        ) from error


def cut_back(output_dir: str | Path, checkpoint: Path | None) -> None:
    """Remove what a run wrote after `checkpoint`: later or unfinished checkpoints, and log lines (where None, all of them)."""
    folder = Path(output_dir)
    step = checkpoint_step(checkpoint) if checkpoint is not None else 0
    for path in _checkpoints(folder):
        if not _is_complete(path) or (checkpoint is not None and checkpoint_step(path) > step):
            shutil.rmtree(path)
    for name in ("metrics.jsonl", RECEIPT):
        path = folder / name
        if checkpoint is None:
            path.unlink(missing_ok=True)
        elif path.exists():
            kept = lines_up_to(path.read_text().splitlines(), step)
            replace_text(path, "".join(f"{line}\n" for line in kept))


def _checkpoints(folder: Path) -> list[Path]:
    """Directories of checkpoints, whole or not, by step."""
    return [Path(path) for path in sort_checkpoints(str(folder))] if folder.is_dir() else []


def _is_complete(checkpoint: Path) -> bool:
    try:
        checkpoint_step(checkpoint)
    except (OSError, ValueError, TypeError, KeyError):
        # Missing, no text, no JSON, or JSON of something else.
        return False
    return True
