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

from lockstep.errors import LockstepError
from lockstep.parity.receipt import RECEIPT, lines_up_to, replace_text

# The last file that a checkpoint gets: what has it is whole.
TRAINER_STATE = "trainer_state.json"


def last_checkpoint(output_dir: str | Path) -> Path | None:
    """Newest complete checkpoint of a run; one that was being written when the run was killed does not count."""
    folder = Path(output_dir)
    found = [Path(path) for path in sort_checkpoints(str(folder))] if folder.is_dir() else []
    complete = [path for path in found if _is_complete(path)]
    return complete[-1] if complete else None


def checkpoint_step(checkpoint: Path) -> int:
    """Optimizer steps that a checkpoint stands after."""
    return int(json.loads((checkpoint / TRAINER_STATE).read_text())["global_step"])


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
    """Remove what a run wrote after `checkpoint` (all of it where None): later checkpoints and log lines."""
    folder = Path(output_dir)
    step = checkpoint_step(checkpoint) if checkpoint is not None else 0
    for path in folder.glob("checkpoint-*"):
        if checkpoint is None or not _is_complete(path) or checkpoint_step(path) > step:
            shutil.rmtree(path)
    for name in ("metrics.jsonl", RECEIPT):
        path = folder / name
        if checkpoint is None:
            path.unlink(missing_ok=True)
        elif path.exists():
            kept = lines_up_to(path.read_text().splitlines(), step)
            replace_text(path, "".join(f"{line}\n" for line in kept))


def _is_complete(checkpoint: Path) -> bool:
    try:
        json.loads((checkpoint / TRAINER_STATE).read_text())
    except (OSError, json.JSONDecodeError):
        return False
    return True
