"""Checkpoints of a run: when they are written, what is in them, and what surrounds the one that a run continues from.

A checkpoint is either complete or absent. It has no rollouts and no sums of the next log, so checkpoints come only
after the last step of a generation, after a log. A resumed run gives bitwise the results of a run without a break:
if a file that the method needs is missing, loading raises an error. Receipt and metrics around a checkpoint are
checked before anything is changed or loaded.
"""

from __future__ import annotations

import json
import logging
import math
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import TrainerCallback
from transformers.trainer_utils import IntervalStrategy, SaveStrategy

from lockstep.config.run import OnlineConfig
from lockstep.errors import InputError, reason, writing
from lockstep.files import (
    as_json,
    free_name,
    from_json,
    publish_folder,
    read_json,
    replace_text,
    replacing,
    set_aside,
    sync_folder,
)
from lockstep.learn.methods.objective import Objective
from lockstep.learn.policy_and_reference import FILE as REFERENCE
from lockstep.learn.policy_and_reference import Reference
from lockstep.report.page.run_record import (
    ABOUT,
    AFTER,
    BEFORE,
    END,
    METRICS,
    REPORT,
    SETTINGS,
    SHOWN,
    read_lines,
)
from lockstep.run.data.prompts import PromptOrder
from lockstep.run.files.identity import Changes
from lockstep.watch.receipt import DIGESTS, RECEIPT, check_chain, lines_up_to, read_log
from lockstep.watch.resume import TRAINER_STATE, check_sealed

_logger = logging.getLogger(__name__)

# The folder of a run in which a checkpoint is written. transformers does not upload names that begin so.
UNFINISHED = "_unfinished"
_REPLACED = "replaced-"


def last_checkpoint(output_dir: str | Path) -> Path | None:
    """Newest complete checkpoint of a run."""
    complete = complete_checkpoints(output_dir)
    return complete[-1] if complete else None


def complete_checkpoints(output_dir: str | Path) -> list[Path]:
    """The complete checkpoints of a run, ordered by step."""
    return [path for path in _checkpoints(Path(output_dir)) if _is_complete(path)]


def checkpoint_step(checkpoint: Path) -> int:
    """Number of optimizer steps that the run had taken when it wrote this complete checkpoint."""
    return int(read_json(checkpoint / TRAINER_STATE)["global_step"])


def set_damaged_aside(output_dir: str | Path) -> None:
    """Rename checkpoints that cannot be read, and tell the user; if none can be read, nothing is changed.

    A checkpoint gets its name after it is complete and on the disk. So a kill leaves none that cannot be read.
    """
    found = _checkpoints(Path(output_dir))
    damaged = [path for path in found if not _is_complete(path)]
    if damaged and damaged == found:
        names = ", ".join(path.name for path in damaged)
        raise InputError(
            f"no checkpoint in {output_dir} can be read: {TRAINER_STATE} is damaged or missing in {names}. "
            "Nothing was changed. Put a good copy back to go on. To start from the beginning, move them "
            "away, or give another output_dir"
        )
    for path in damaged:
        set_aside(path, f"cannot be read ({TRAINER_STATE} is damaged or missing)")


# ---- write -------------------------------------------------------------------------------------------------------


@contextmanager
def staged_checkpoint(checkpoint: Path) -> Iterator[Path]:
    """A folder for a checkpoint, before `publish` gives it its name. It is removed if saving fails.

    Only the rank that publishes the checkpoint may use it. The context contains the save by all ranks.
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
    """Bring a staged checkpoint to the disk, give it its name, and replace an earlier one of the same step."""
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
    """Finish the renames of `publish` after a kill. If the new checkpoint is not whole, the earlier one comes back."""
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
    """Run one rank's part of a save. If it fails, the error names the last good checkpoint."""

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


# ---- go back
# ------------------------------------------------------------------------------------------------------------


def cut_back(output_dir: str | Path, checkpoint: Path | None) -> None:
    """Remove checkpoints and log lines of a run after `checkpoint`; None: the run starts from the beginning.

    Later rollouts go when the run begins, because it may still be refused.
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

    If a line cannot be read, a copy of the whole log is kept, except for a last line that a kill cut short.
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
        return not isinstance(from_json(line)["step"], int)
    except (ValueError, KeyError, TypeError):
        return bool(line.strip())


def keep_logs_of_lost(folder: Path, step: int) -> None:
    """Copy the logs if the receipt names a checkpoint after `step` that is neither there nor was being written."""
    receipt = folder / RECEIPT
    if not receipt.is_file():
        return
    named = set()
    for line in read_log(receipt):
        with suppress(ValueError, KeyError, TypeError, OverflowError):
            entry = from_json(line)
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
    goes_on = (
        f"goes on from checkpoint-{step} and repeats the steps after it"
        if step
        else "starts from the beginning"
    )
    names = ", ".join(f"checkpoint-{number}" for number in lost)
    _logger.warning(
        f"{RECEIPT} names {names}, which cannot be used or is gone; the run {goes_on}. Its logs so far are "
        f"kept: {', '.join(kept)}"
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
    except (OSError, ValueError, TypeError, KeyError, OverflowError):
        # The file is missing, is not text, is not JSON, or is JSON with other content.
        return False


class ResumableSaves(TrainerCallback):
    """Rounds `save_steps` up to a multiple of the steps per generation, and writes a log before every checkpoint.

    The last checkpoint of a run may be inside a generation, because it holds the final weights. Then there is one
    more where the last whole generation ends, from which a run can go on. The owner prints what is changed.
    """

    def __init__(self, config: OnlineConfig, *, owner: bool) -> None:
        self._steps, self._owner = config.optimizer_steps_per_generation, owner

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # Computed again, because a state from a checkpoint has the intervals of the run that wrote it.
        state.compute_steps(args, state.max_steps)
        regular = args.save_strategy not in (SaveStrategy.NO, SaveStrategy.BEST)
        if regular and state.max_steps % self._steps and self._owner:
            _logger.info(
                f"the run ends at step {state.max_steps}, inside a generation of {self._steps} steps; its last "
                f"checkpoint has the final weights, and a run can go on from the one of step {self._last_whole(state)}"
            )
        if args.save_strategy != SaveStrategy.STEPS or state.save_steps <= 0:
            return
        wanted = int(state.save_steps)
        state.save_steps = math.ceil(wanted / self._steps) * self._steps
        if state.save_steps != wanted and self._owner:
            _logger.info(
                f"save_steps={args.save_steps:g} is a checkpoint every {wanted} steps, which can fall "
                f"inside a generation of {self._steps}, where no run can be resumed exactly; there is one "
                f"every {state.save_steps} instead"
            )

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if (
            args.save_strategy not in (SaveStrategy.NO, SaveStrategy.BEST)
            and state.max_steps % self._steps
            and state.global_step == self._last_whole(state)
        ):
            control.should_save = True
        # Also at the end. Otherwise the steps after the last multiple of logging_steps would never be logged.
        if control.should_training_stop or self._may_save(args, control):
            control.should_log = args.logging_strategy != IntervalStrategy.NO or control.should_log

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # With `save_strategy: epoch` the checkpoint is asked for here.
        if self._may_save(args, control) and args.logging_strategy != IntervalStrategy.NO:
            control.should_log = True

    @staticmethod
    def _may_save(args: Any, control: Any) -> bool:
        # With `save_strategy: best` the evaluation decides, after the log.
        return control.should_save or (args.save_strategy == SaveStrategy.BEST and control.should_evaluate)

    def _last_whole(self, state: Any) -> int:
        """The step at which the last whole generation of the run ends."""
        return state.max_steps // self._steps * self._steps


CRITIC, OBJECTIVE, PROMPTS = "value_head.safetensors", "objective.json", "prompts.json"
CHANGES = "changes.json"


@dataclass(frozen=True, slots=True)
class MethodState:
    """The parts of the state that the base class does not save.

    Attributes:
        moving_reference: the reference model, if it follows the policy. A fixed one is made again by a resumed run.
        critic: the value head; None if there is none.
        changes: what the user has changed at the trainer.
    """

    objective: Objective
    moving_reference: Reference | None
    critic: torch.nn.Module | None
    order: PromptOrder
    changes: Changes

    def save(self, folder: Path) -> None:
        """Write the state into a checkpoint, before the base class saves: its last file marks it as complete."""
        folder.mkdir(parents=True, exist_ok=True)
        if state := self.objective.state():
            replace_text(folder / OBJECTIVE, json.dumps(state))
        if solved := self.order.state():
            replace_text(folder / PROMPTS, json.dumps(solved))
        if changed := self.changes.state():
            replace_text(folder / CHANGES, json.dumps(changed))
        if self.critic is not None:
            save_file(self.critic.state_dict(), folder / CRITIC)
        if self.moving_reference is not None:
            self.moving_reference.save(folder)

    def load(self, folder: Path) -> None:
        """Load the state from a checkpoint."""
        if self.objective.state():
            self.objective.load_state(
                json.loads(_there(folder / OBJECTIVE, "the method's state").read_text(encoding="utf-8"))
            )
        if self.order.state():
            self.order.load_state(
                json.loads(
                    _there(folder / PROMPTS, "the prompts that are solved").read_text(encoding="utf-8")
                )
            )
        if (changed := folder / CHANGES).is_file():
            self.changes.load_state(json.loads(changed.read_text(encoding="utf-8")))
        if self.critic is not None:
            self.critic.load_state_dict(load_file(_there(folder / CRITIC, "the value head")))
        if self.moving_reference is not None:
            _there(folder / REFERENCE, "the reference model, which follows the policy")
            self.moving_reference.load(folder)


def _there(path: Path, what: str) -> Path:
    if not path.is_file():
        raise InputError(
            f"checkpoint {path.parent} has no {path.name} ({what}): it is of a run with another method or "
            "other settings, or was copied in part; resume from one that has the file, or start from the "
            "beginning"
        )
    return path


def check_checkpoint(checkpoint: Path, step: int, receipt: Path) -> dict[str, Any]:
    """Refuse to go on from a checkpoint that is not as the run wrote it, or whose receipt does not name it.

    The message has the remedy that loses the least. Returns the last `start` line before the checkpoint's own, which
    has the inputs of the steps up to the checkpoint. `receipt` is the run's, or its copy in the checkpoint.
    """
    what = f"the run in {checkpoint.parent} cannot go on: "
    if not any((checkpoint / name).exists() for name in (DIGESTS, "optimizer.pt")):
        raise InputError(
            f"{what}{checkpoint.name} holds only the model (save_only_model), and no optimizer state. "
            "Nothing was changed. Give the checkpoint as the model of a new run, with another output_dir"
        )
    try:
        return _checked(checkpoint, step, receipt)
    except (InputError, OSError) as error:
        why = error if isinstance(error, InputError) else f"{error.filename} cannot be read ({reason(error)})"
        raise InputError(f"{what}{why}. Nothing was changed. {_remedy(checkpoint, step, receipt)}") from error


def _checked(checkpoint: Path, step: int, receipt: Path) -> dict[str, Any]:
    kept = lines_up_to(_lines(receipt), step)
    check_chain(kept)
    entries = [json.loads(line) for line in kept]
    before = _before_checkpoint(entries, step)
    if before is None:
        raise InputError(f"{RECEIPT} does not reach {checkpoint.name}: lines were removed or replaced")
    check_sealed(checkpoint, entries[len(before)]["digests"])
    # A start after it is of an attempt that was refused or killed before it had a checkpoint of its own.
    return next(entry for entry in reversed(before) if entry["kind"] == "start")


def _remedy(checkpoint: Path, step: int, receipt: Path) -> str:
    """What the user can do about a checkpoint that is refused, so that the least is lost."""
    copy = checkpoint / RECEIPT
    if copy != receipt and _is_whole(checkpoint, step, copy):
        return f"The checkpoint has a copy of the receipt: cp {quote(str(copy))} {quote(str(receipt))}"
    for earlier in reversed(complete_checkpoints(checkpoint.parent)):
        number = checkpoint_step(earlier)
        if number < step and _is_whole(earlier, number, receipt):
            aside = free_name(checkpoint.with_name(f"damaged-{checkpoint.name}"))
            return (
                f"Put a good copy back, or move it away to go on from {earlier.name}: mv "
                f"{quote(str(checkpoint))} {quote(str(aside))}"
            )
    return (
        "No earlier checkpoint is whole. Put a good copy back, or give another output_dir to start from the "
        "beginning"
    )


def _is_whole(checkpoint: Path, step: int, receipt: Path) -> bool:
    try:
        _checked(checkpoint, step, receipt)
    except (InputError, OSError, ValueError, KeyError, TypeError):
        return False
    return True


def optimizer_lines(receipt: Path, step: int) -> list[dict[str, Any]]:
    """The lines of a receipt about the optimizer up to the checkpoint of a step. Later changes are not in it."""
    entries = [json.loads(line) for line in lines_up_to(read_log(receipt), step)]
    return [
        entry for entry in _before_checkpoint(entries, step) or () if entry["kind"] in ("start", "optimizer")
    ]


def _before_checkpoint(entries: list[dict[str, Any]], step: int) -> list[dict[str, Any]] | None:
    """The entries of a receipt before the line of a step's checkpoint; None if it has no such line."""
    ends = [i for i, entry in enumerate(entries) if entry["kind"] == "checkpoint" and entry["step"] == step]
    return entries[: ends[-1]] if ends else None


def restore_metrics(folder: Path, checkpoint: Path, step: int) -> None:
    """Write `metrics.jsonl` again if its lines up to the checkpoint are not those that the run has logged.

    The checkpoint's trainer state has the same lines. A file that differs is kept beside the new one. Lines may have
    more entries, which a callback of the user's has added.
    """
    history = read_json(checkpoint / TRAINER_STATE).get("log_history", [])
    wanted = [{"step": entry["step"], **entry} for entry in history if is_metric(entry)]
    path = folder / METRICS
    found = [entry for entry in read_lines(path) if _step(entry) <= step]
    if len(found) == len(wanted) and all(map(_has, found, wanted)):
        return
    if os.path.lexists(path):
        set_aside(path, f"is not what the run has logged up to {checkpoint.name}")
    replace_text(path, "".join(as_json(entry) + "\n" for entry in wanted))
    _logger.info(f"{METRICS} was restored from {checkpoint.name}")


def is_metric(entry: Mapping[str, Any]) -> bool:
    """Whether a log of the trainer is a line of `metrics.jsonl`: of a step, or of an evaluation between steps."""
    return "loss" in entry or any(name.startswith("eval_") for name in entry)


def _has(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
    # An earlier version wrote NaN where null is now.
    return as_json({name: found.get(name) for name in wanted}) == as_json(wanted)


def _step(entry: Mapping[str, Any]) -> int:
    step = entry.get("step")
    # A line without a step is none of ours. It counts as a difference.
    return step if isinstance(step, int) else -1


def _lines(path: Path) -> list[str]:
    try:
        lines = read_log(path)
    except OSError as error:
        raise InputError(f"{path.name} of {path.parent.name} cannot be read ({error.strerror})") from error
    if not lines:
        raise InputError(f"{path.name} of {path.parent.name} is empty")
    return lines
