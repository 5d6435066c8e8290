"""The directory of a run: new, interrupted, or finished.

An interrupted run continues from its last complete checkpoint. A finished run continues if the settings are the same except for
more steps or epochs. Otherwise the finished run stays unchanged, and the new run gets a new directory beside it. `run.json`
contains the settings that decide what the run learns (`run_identity.py`). An interrupted run cannot continue with other settings,
because its results would belong to neither of the two configurations.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.errors import InputError
from lockstep.files import free_name, replace_text
from lockstep.report.page.run_record import AFTER, END, REPORT, SETTINGS, SUMMARY
from lockstep.rollouts.across_ranks.ranks import Ranks
from lockstep.run.files.checkpoints import (
    checkpoint_step,
    clear_places,
    cut_back,
    finish_replacement,
    last_checkpoint,
    set_damaged_aside,
)
from lockstep.run.files.lock import locked
from lockstep.run.files.run_identity import (
    changed_fields,
    device_advice,
    follows_length,
    longer,
    memory_advice,
)
from lockstep.run.files.whole_run import check_checkpoint, restore_metrics
from lockstep.secret import without_secrets
from lockstep.watch.receipt import RECEIPT

_logger = logging.getLogger(__name__)

# Files that a run writes at its end.
_END = (SUMMARY, REPORT, AFTER, END)


@dataclass(frozen=True, slots=True)
class RunPlace:
    """The directory that a run writes to, and the checkpoint from which it continues (None: from the start).

    Attributes:
        start: the `start` line of the checkpoint's receipt. The checkpoint was compared with its digests when it was read. None on
            ranks that have not read it.
    """

    folder: Path
    checkpoint: Path | None
    start: dict[str, Any] | None = None


@contextmanager
def open_run(output_dir: str | Path, settings: dict[str, Any]) -> Iterator[RunPlace]:
    """Choose the directory, reset it to its last checkpoint, write the settings, and lock it for other processes.

    The lock is released at the end of the context, and also when the process ends in any way, for example by a kill.

    Raises:
        InputError: another process runs in the directory, the directory holds an interrupted run with other settings, or its
            files cannot be read.
    """
    settings = without_secrets(json.loads(json.dumps(settings, default=str)))
    while True:
        folder = _place(Path(output_dir), settings)
        with locked(folder, "command"):
            # The run of another process may have ended meanwhile.
            if _place(Path(output_dir), settings) == folder:
                yield _prepare(folder, settings)
                return


@contextmanager
def open_run_together(ranks: Ranks, output_dir: str | Path, settings: dict[str, Any]) -> Iterator[RunPlace]:
    """`open_run` for several ranks. The rank that owns the engine calls `open_run` and sends the result to all ranks.

    Every rank must call this. The directory must have the same path on every rank.

    Raises:
        InputError: rank 0 cannot use the directory. Every rank raises it.
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
    if known.exists() and known.is_dir():
        raise InputError(f"{known} is a directory; give another output_dir")
    finish_replacement(folder)
    set_damaged_aside(folder)
    checkpoint, start = last_checkpoint(folder), None
    if checkpoint is not None and not known.exists() and not (checkpoint / SETTINGS).exists():
        raise InputError(f"{folder} holds checkpoints of something else (no {SETTINGS}); give another output_dir")
    clear_places(folder)
    if checkpoint is not None:
        earlier = _settings_in(folder, checkpoint)
        if changed := changed_fields(earlier, settings):
            what = ", ".join(f"{k} was {earlier.get(k)!r}, is {settings.get(k)!r}" for k in changed[:5])
            advice = memory_advice(changed) + device_advice(changed, earlier)
            raise InputError(
                f"{folder} holds an interrupted run with other settings ({what}). {advice}Give another output_dir, or delete it"
            )
        start = check_checkpoint(checkpoint, checkpoint_step(checkpoint), folder / RECEIPT)
        restore_metrics(folder, checkpoint, checkpoint_step(checkpoint))
        _lengthen(folder, earlier, settings, checkpoint_step(checkpoint))
    if checkpoint is not None or known.exists():
        cut_back(folder, checkpoint)
    replace_text(known, json.dumps(settings, indent=1) + "\n")
    return RunPlace(folder, checkpoint, start)


def _place(wanted: Path, settings: dict[str, Any]) -> Path:
    """The first of `NAME`, `NAME-2`, … that holds no finished run, or a finished run that `settings` makes longer."""
    folder, number = wanted, 2
    while _is_finished(folder) and not _is_extended(folder, settings):
        folder = wanted.with_name(f"{wanted.name}-{number}")
        number += 1
    return folder


def _is_finished(folder: Path) -> bool:
    """Whether a run has ended there. A summary that cannot be read does not count if the run has a checkpoint: it is written again.

    Raises:
        InputError: the summary cannot be read, and there is nothing from which the run could continue.
    """
    path = folder / SUMMARY
    if not path.exists():
        return False
    try:
        if isinstance(json.loads(path.read_text(encoding="utf-8")), dict):
            return True
    except (OSError, ValueError):
        pass
    if path.is_dir() or last_checkpoint(folder) is None:
        raise InputError(
            f"{path} cannot be read, so that nobody can tell whether the run there has ended; give another output_dir"
        )
    _logger.warning(f"{path} cannot be read; the run goes on from its last checkpoint and writes it again")
    return False


def _is_extended(folder: Path, settings: dict[str, Any]) -> bool:
    checkpoint = last_checkpoint(folder)
    if checkpoint is None:
        return False
    try:
        earlier = _settings_in(folder, checkpoint)
    except (OSError, InputError):
        return False
    return not changed_fields(earlier, settings) and bool(longer(earlier, settings))


def _lengthen(folder: Path, earlier: dict[str, Any], settings: dict[str, Any], step: int) -> None:
    """Rename the files that the run wrote at its earlier end, and print what changes with the new length."""
    for name in longer(earlier, settings):
        _logger.info(f"the run in {folder} goes on: {name} was {earlier[name]}, is {settings[name]}")
        if follows_length(settings):
            _logger.info(
                f"its learning rate ({settings.get('lr_scheduler_type')}) follows the new length from step {step + 1} "
                "on; the steps before were taken with the old one"
            )
        for path in (folder / left for left in _END):
            if path.exists():
                path.rename(free_name(path.with_name(f"{path.stem}-at-step-{step}{path.suffix}")))


def _settings_in(folder: Path, checkpoint: Path) -> dict[str, Any]:
    """The settings of the run: its own file, or the copy in its last checkpoint."""
    troubles = []
    for path in (folder / SETTINGS, checkpoint / SETTINGS):
        try:
            found = without_secrets(json.loads(path.read_text(encoding="utf-8")))
            if not isinstance(found, dict):
                raise ValueError("it holds no fields")
        except (OSError, ValueError) as error:
            troubles.append(error)
            continue
        if troubles:
            _logger.warning(
                f"{folder / SETTINGS} cannot be read ({troubles[0]}); the copy in {checkpoint.name} is used"
            )
        return found
    raise InputError(
        f"{folder / SETTINGS} cannot be read ({troubles[0]}), nor can its copy in {checkpoint.name}, so that nobody can tell "
        "whether the run there is this one; give another output_dir"
    ) from troubles[0]
