"""Makes sure that a checkpoint is either complete or absent, and resets a run directory to one of its checkpoints.

The trainer saves the checkpoints. A run that is started again in the same directory reads them.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from lockstep.errors import InputError, writing
from lockstep.files import free_name, publish_folder, replace_text, replacing, set_aside, sync_folder
from lockstep.report.page.run_record import ABOUT, AFTER, BEFORE, END, METRICS, REPORT, SETTINGS, SHOWN
from lockstep.watch.receipt import RECEIPT, lines_up_to, read_log
from lockstep.watch.resume import TRAINER_STATE

_logger = logging.getLogger(__name__)

# The folder of a run in which a checkpoint is written. transformers does not upload names that begin so.
UNFINISHED = "_unfinished"
_REPLACED = "replaced-"


def last_checkpoint(output_dir: str | Path) -> Path | None:
    """Newest complete checkpoint of a run. A checkpoint is incomplete if the run was killed while it was written."""
    complete = complete_checkpoints(output_dir)
    return complete[-1] if complete else None


def complete_checkpoints(output_dir: str | Path) -> list[Path]:
    """The complete checkpoints of a run, ordered by step."""
    return [path for path in _checkpoints(Path(output_dir)) if _is_complete(path)]


def checkpoint_step(checkpoint: Path) -> int:
    """Number of optimizer steps that the run had taken when it wrote this complete checkpoint."""
    return int(json.loads((checkpoint / TRAINER_STATE).read_text(encoding="utf-8"))["global_step"])


def set_damaged_aside(output_dir: str | Path) -> None:
    """Rename checkpoints that cannot be read, so that no code loads or deletes them, and tell the user.

    A checkpoint gets its name after it is complete and on the disk. So a kill leaves none that cannot be read.

    Raises:
        InputError: no checkpoint can be read, so the run cannot continue. Nothing was changed.
    """
    found = _checkpoints(Path(output_dir))
    damaged = [path for path in found if not _is_complete(path)]
    if damaged and damaged == found:
        names = ", ".join(path.name for path in damaged)
        raise InputError(
            f"no checkpoint in {output_dir} can be read: {TRAINER_STATE} is damaged or missing in {names}. Nothing was changed. "
            "Put a good copy back to go on. To start from the beginning, move them away, or give another output_dir"
        )
    for path in damaged:
        set_aside(path, f"cannot be read ({TRAINER_STATE} is damaged or missing)")


# ---- write --------------------------------------------------------------------------------------------------------------


@contextmanager
def staged_checkpoint(checkpoint: Path) -> Iterator[Path]:
    """A folder into which a checkpoint is written, before `publish` gives it its name. It is removed if saving fails.

    The context contains the save by all ranks. Only the rank that publishes the checkpoint may use this.
    """
    folder = staging_place(checkpoint)
    shutil.rmtree(folder, ignore_errors=True)
    try:
        yield folder
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        with suppress(OSError):
            finish_replacement(checkpoint.parent)
            # The receipt may name the checkpoint already. The empty folder says that it was never complete.
            folder.mkdir(parents=True)
        raise


def staging_place(checkpoint: Path) -> Path:
    """Where a checkpoint is while it is written."""
    return checkpoint.parent / UNFINISHED / checkpoint.name


def publish(checkpoint: Path) -> None:
    """Bring a staged checkpoint to the disk, and give it its name. An earlier checkpoint of the same step is replaced.

    Raises:
        OSError: the disk is full, or fails.
    """
    made = staging_place(checkpoint)
    # A command can go on with this copy if the run's own file is damaged.
    if (settings := checkpoint.parent / SETTINGS).is_file():
        with replacing(made / SETTINGS) as copy:
            copy.write(settings.read_bytes())
    if checkpoint.is_dir() and _is_complete(checkpoint):
        sync_folder(made)
        # After a kill between these two renames, `finish_replacement` makes the second one.
        replaced = made.with_name(f"{_REPLACED}{checkpoint.name}")
        shutil.rmtree(replaced, ignore_errors=True)
        checkpoint.rename(replaced)
        publish_folder(made, checkpoint)
        shutil.rmtree(replaced)
    else:
        if os.path.lexists(checkpoint):
            set_aside(checkpoint, "is in the place of a new checkpoint and is not complete")
        publish_folder(made, checkpoint)
    with suppress(OSError):
        made.parent.rmdir()


def finish_replacement(output_dir: str | Path) -> None:
    """Give a checkpoint its name that a kill or an error has kept from replacing an earlier one.

    If it is not complete, the earlier one gets its name back.
    """
    place = Path(output_dir)
    for replaced in (place / UNFINISHED).glob(f"{_REPLACED}*"):
        checkpoint = place / replaced.name.removeprefix(_REPLACED)
        if not checkpoint.exists():
            made = staging_place(checkpoint)
            (made if _is_complete(made) else replaced).rename(checkpoint)


def clear_unfinished(output_dir: str | Path) -> None:
    """Remove what a kill left of checkpoints that were being written."""
    shutil.rmtree(Path(output_dir) / UNFINISHED, ignore_errors=True)


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


def clear_places(output_dir: Path) -> None:
    """Rename directories that lie where a run writes files, and tell the user."""
    for name in (ABOUT, END, METRICS, SHOWN, BEFORE, AFTER, REPORT):
        if (output_dir / name).is_dir():
            set_aside(output_dir / name, "is a directory, and the run writes a file of this name")


# ---- go back ------------------------------------------------------------------------------------------------------------


def cut_back(output_dir: str | Path, checkpoint: Path | None) -> None:
    """Reset a run to `checkpoint`: remove later checkpoints and later log lines. None: the run starts from the beginning.

    If the receipt names a later checkpoint that is gone, more is lost than a kill can lose. Then the logs are kept
    beside the new ones, and the user is told. Later rollouts go when the run begins, because it may still be refused.
    """
    folder = Path(output_dir)
    step = checkpoint_step(checkpoint) if checkpoint is not None else 0
    keep_logs_of_lost(folder, step)
    for path in _checkpoints(folder):
        if checkpoint is not None and checkpoint_step(path) > step:
            shutil.rmtree(path)
    for name in (METRICS, SHOWN, RECEIPT):
        cut_log(folder / name, step)
    clear_unfinished(folder)


def cut_log(path: Path, step: int) -> None:
    """Remove the lines of later steps from a log. At step 0 the whole log goes to `NAME.previous` beside it.

    If a line cannot be read, a copy of the whole log is kept, and the user is told. This does not hold for a last line
    that a kill cut short.
    """
    if not os.path.lexists(path):
        return
    if not path.is_file():
        set_aside(path, "is not a file")
        return
    if step == 0:
        path.replace(path.with_name(f"{path.stem}.previous{path.suffix}"))
        return
    kept, whole = lines_up_to(read_log(path), step), path.read_bytes().split(b"\n")[:-1]
    # The lines of the receipt have a proof of their own.
    if path.name != RECEIPT and any(map(_is_broken, whole)):
        set_aside(path, "has lines that cannot be read")
        kept = [line for line in kept if not _is_broken(line.encode(errors="replace"))]
    replace_text(path, "".join(f"{line}\n" for line in kept))


def _is_broken(line: bytes) -> bool:
    # A line that was not text has U+FFFD. JSON of ours is ASCII.
    if not line.isascii():
        return True
    try:
        return not isinstance(json.loads(line)["step"], int)
    except (ValueError, KeyError, TypeError, RecursionError):
        return bool(line.strip())


def keep_logs_of_lost(folder: Path, step: int) -> None:
    """Copy the logs if the receipt names a checkpoint after `step` that is neither there nor was being written."""
    receipt = folder / RECEIPT
    if not receipt.is_file():
        return
    named = set()
    for line in read_log(receipt):
        with suppress(ValueError, KeyError, TypeError):
            entry = json.loads(line)
            if entry["kind"] == "checkpoint" and int(entry["step"]) > step:
                named.add(int(entry["step"]))
    there = {path.name for place in (folder, folder / UNFINISHED) for path in _checkpoints(place)}
    lost = [number for number in sorted(named) if f"checkpoint-{number}" not in there]
    if not lost:
        return
    kept = []
    for name in (METRICS, SHOWN, RECEIPT):
        path = folder / name
        if path.is_file():
            copy = free_name(path.with_name(f"{path.stem}-until-step-{lost[-1]}{path.suffix}"))
            with replacing(copy) as file:
                file.write(path.read_bytes())
            kept.append(copy.name)
    goes_on = f"goes on from checkpoint-{step} and repeats the steps after it" if step else "starts from the beginning"
    names = ", ".join(f"checkpoint-{number}" for number in lost)
    _logger.warning(
        f"{RECEIPT} names {names}, which cannot be used or is gone; the run {goes_on}. Its logs so far are kept: {', '.join(kept)}"
    )


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
