"""The directory of a run: new, interrupted, or finished; its lock, its clock, and the file that says what the run is.

An interrupted run continues from its last complete checkpoint, with the settings of `run.json` (`identity.py`); with
others, its results would belong to neither of the two configurations. A finished run continues if only steps or epochs
are more. Otherwise it stays unchanged, and the new run gets a new directory beside it.

One process at a time writes into a directory: a command from its start to its end, a trainer of a script while it
trains or writes an evaluation. A process that ends in any way leaves no lock. Chat templates read the time of the
run's first start, also after a resume.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import platform
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import MISSING, Field, dataclass, field, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

from lockstep.config.run import OnlineConfig
from lockstep.errors import InputError
from lockstep.files import free_name, from_json, read_json, replace_text, what_is_at
from lockstep.report.page.run_record import AFTER, END, REPORT, SETTINGS, SUMMARY
from lockstep.rollouts.ranks import Ranks
from lockstep.run.files import identity
from lockstep.run.files.checkpoints import (
    check_checkpoint,
    checkpoint_step,
    clear_places,
    cut_back,
    finish_replacement,
    last_checkpoint,
    restore_metrics,
    set_damaged_aside,
)
from lockstep.safe_text import without_secrets
from lockstep.tokens.chat import TemplateClock
from lockstep.watch.inputs import device, versions
from lockstep.watch.receipt import RECEIPT, read_log

LOCK = ".lock"


class Occupied(InputError):
    """Another process, or another trainer of this process, writes into the directory."""


@dataclass
class _Held:
    """A lock that this process holds: in how many blocks, and what it may do there only once at a time."""

    file: IO[str]
    times: int = 0
    alone: set[str] = field(default_factory=set)


# By device and inode of the lock's file: two paths may name one directory.
_held: dict[tuple[int, int], _Held] = {}


def _leave_to_parent() -> None:
    # A forked process that outlives this one must not hold its locks.
    for held in _held.values():
        held.file.close()
    _held.clear()


os.register_at_fork(after_in_child=_leave_to_parent)


@contextmanager
def locked(folder: Path, alone: str = "") -> Iterator[None]:
    """Hold the lock of a directory. A process may hold it several times: a trainer does within a command.

    Args:
        alone: what this process does in the block, if only once at a time: "command" or "trainer".
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / LOCK).open("a", encoding="utf-8")
    except OSError as error:
        why = str(error)
        if isinstance(error, FileExistsError):
            leads = folder.readlink() if folder.is_symlink() else None
            why = "it is a file" if leads is None else f"it is a link to {leads}, where no folder is"
        raise InputError(f"output_dir {folder} cannot be used: {why}") from error
    found = os.fstat(file.fileno())
    key = (found.st_dev, found.st_ino)
    if key in _held:
        file.close()
    else:
        _take(file, folder)
        _held[key] = _Held(file)
    held = _held[key]
    if alone in held.alone:
        raise Occupied(
            f"another {alone} of this process is running in {folder}; wait for it, or give another output_dir"
        )
    held.times += 1
    held.alone |= {alone} - {""}
    try:
        yield
    finally:
        held.times -= 1
        held.alone.discard(alone)
        # A forked process has left the lock to its parent.
        if not held.times and _held.get(key) is held:
            del _held[key]
            held.file.close()


def _take(file: IO[str], folder: Path) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.close()
        raise Occupied(
            f"another process is running in {folder}; wait for it, or give another output_dir"
        ) from error
    except OSError as error:
        _logger.warning(
            f"the file system of {folder} has no locks ({error.strerror}): make sure yourself that no other "
            "process writes into this directory"
        )


_logger = logging.getLogger(__name__)

# Files that a run writes at its end.
_END = (SUMMARY, REPORT, AFTER, END)


@dataclass(frozen=True, slots=True)
class RunPlace:
    """The directory that a run writes to, and the checkpoint from which it continues (None: from the start).

    Attributes:
        start: the `start` line of the checkpoint's receipt; None on ranks that have not compared the checkpoint.
    """

    folder: Path
    checkpoint: Path | None
    start: dict[str, Any] | None = None


@contextmanager
def open_run(output_dir: str | Path, settings: dict[str, Any]) -> Iterator[RunPlace]:
    """Choose the directory, reset it to its last checkpoint, write the settings, and lock it for other processes."""
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
    """`open_run` by the rank that owns the engine, for all ranks. The path must be the same on every rank."""
    with ExitStack() as held:
        yield ranks.from_owner(
            "run directory",
            lambda: held.enter_context(open_run(output_dir, settings)),
            lambda place: [str(place.folder), place.checkpoint and str(place.checkpoint)],
            lambda found: RunPlace(Path(found[0]), found[1] and Path(found[1])),
        )


def _prepare(folder: Path, settings: dict[str, Any]) -> RunPlace:
    known = folder / SETTINGS
    if (there := what_is_at(known)) not in ("is a file", "does not exist"):
        raise InputError(f"{known} {there}; give another output_dir")
    finish_replacement(folder)
    set_damaged_aside(folder)
    checkpoint, start = last_checkpoint(folder), None
    if checkpoint is not None and not known.exists() and not (checkpoint / SETTINGS).exists():
        raise InputError(
            f"{folder} holds checkpoints of something else (no {SETTINGS}); give another output_dir"
        )
    clear_places(folder)
    if checkpoint is not None:
        earlier = _settings_in(folder, checkpoint)
        if changed := identity.changed_fields(earlier, settings):
            what = ", ".join(f"{k} was {earlier.get(k)!r}, is {settings.get(k)!r}" for k in changed[:5])
            advice = identity.memory_advice(changed) + identity.device_advice(changed, earlier)
            raise InputError(
                f"{folder} holds an interrupted run with other settings ({what}). {advice}Give another "
                "output_dir, or delete it"
            )
        start = check_checkpoint(checkpoint, checkpoint_step(checkpoint), folder / RECEIPT)
        restore_metrics(folder, checkpoint, checkpoint_step(checkpoint))
        _lengthen(folder, earlier, settings, checkpoint_step(checkpoint))
    if checkpoint is not None or known.exists():
        cut_back(folder, checkpoint)
    replace_text(known, json.dumps(settings, indent=1) + "\n")
    return RunPlace(folder, checkpoint, start)


def _place(wanted: Path, settings: dict[str, Any]) -> Path:
    """The first of `NAME`, `NAME-2`, … that has no finished run, or one that `settings` make longer."""
    folder, number = wanted, 2
    while _is_finished(folder) and not _is_extended(folder, settings):
        folder = wanted.with_name(f"{wanted.name}-{number}")
        number += 1
    return folder


def _is_finished(folder: Path) -> bool:
    """Whether a run has ended there. A summary that cannot be read does not count if the run can write it again."""
    path = folder / SUMMARY
    if not path.exists():
        return False
    try:
        if isinstance(read_json(path), dict):
            return True
    except (OSError, ValueError):
        pass
    if not path.is_file() or last_checkpoint(folder) is None:
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
    return not identity.changed_fields(earlier, settings) and bool(identity.longer(earlier, settings))


def _lengthen(folder: Path, earlier: dict[str, Any], settings: dict[str, Any], step: int) -> None:
    """Rename the files that the run wrote at its earlier end, and print what changes with the new length."""
    for name in identity.longer(earlier, settings):
        _logger.info(f"the run in {folder} goes on: {name} was {earlier[name]}, is {settings[name]}")
        if identity.follows_length(settings):
            _logger.info(
                f"its learning rate ({settings.get('lr_scheduler_type')}) follows the new length from step "
                f"{step + 1} on; the steps before were taken with the old one"
            )
        for path in (folder / left for left in _END):
            if path.exists():
                path.rename(free_name(path.with_name(f"{path.stem}-at-step-{step}{path.suffix}")))


def _settings_in(folder: Path, checkpoint: Path) -> dict[str, Any]:
    """The settings of the run: its own file, or the copy in its last checkpoint."""
    troubles = []
    for path in (folder / SETTINGS, checkpoint / SETTINGS):
        try:
            found = without_secrets(read_json(path))
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
        f"{folder / SETTINGS} cannot be read ({troubles[0]}), nor can its copy in {checkpoint.name}, so "
        "that nobody can tell whether the run there is this one; give another output_dir"
    ) from troubles[0]


def about_run(
    method: str,
    model: str,
    engine: Mapping[str, Any],
    config: OnlineConfig,
    rows: Mapping[str, int],
    data: Mapping[str, str],
) -> dict[str, Any]:
    """What `about.json` has, in JSON types, without secrets.

    Args:
        engine: settings that the engine reports.
        rows, data: number of prompts, and digest, of each part of the data.
    """
    settings = identity.curve_settings(config)
    return {
        "name": without_secrets(config.run_name or ""),
        "method": method,
        "model": without_secrets(model),
        "engine": {name: str(value) for name, value in without_secrets(engine).items()},
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "rows": dict(rows),
        "data": dict(data),
        "settings": settings,
        "chosen": [
            f.name
            for f in fields(config)
            if not identity.is_bookkeeping(f.name) and _is_chosen(f, getattr(config, f.name))
        ],
        "versions": versions(),
        "machine": {
            "processes": config.world_size,
            "device": device(use_cpu=config.use_cpu),
            "system": platform.system(),
        },
    }


def _is_chosen(field: Field[Any], value: Any) -> bool:
    default = field.default if field.default_factory is MISSING else field.default_factory()
    return bool(value != default)


# Its name among the inputs of a `start` line.
CLOCK = "clock of chat templates"


def clock_of_run(config: OnlineConfig) -> TemplateClock:
    """The clock of the run whose checkpoint the config names or its directory holds; without a checkpoint, of now.

    A receipt that cannot be read, or that an older Lockstep wrote, gives no time.
    """
    asked = config.resume_from_checkpoint
    named = isinstance(asked, str | Path) and what_is_at(Path(asked) / RECEIPT) == "is a file"
    checkpoint = Path(str(asked)) if named else last_checkpoint(config.output_dir or ".")
    for receipt in () if checkpoint is None else (checkpoint / RECEIPT, checkpoint.parent / RECEIPT):
        if (moment := _recorded(receipt)) is not None:
            return TemplateClock(moment, is_earlier=True)
    return TemplateClock(datetime.now())


def other_time(earlier: Mapping[str, Any], clock: TemplateClock, checkpoint: Path) -> str:
    """What to say of prompts that differ because templates read another time than `earlier` inputs; or nothing."""
    then = earlier.get(CLOCK)
    if not clock.was_read or then == clock.moment.isoformat():
        return ""
    known = "names no time" if then is None else f"has the time {then}"
    return (
        f"The chat template contains the time: the run's receipt {known}, and these prompts have "
        f"{clock.moment.isoformat()}. "
        + (
            "An older Lockstep began the run. "
            if then is None
            else f"Set resume_from_checkpoint={str(checkpoint)!r} in the config, and the prompts get the run's time. "
        )
    )


def _recorded(receipt: Path) -> datetime | None:
    try:
        entries = [from_json(line) for line in read_log(receipt) if CLOCK in line]
        moments = [entry["inputs"][CLOCK] for entry in entries]
        return datetime.fromisoformat(moments[-1]) if moments else None
    except (OSError, ValueError, KeyError, TypeError):
        return None
