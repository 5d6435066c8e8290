"""Checks what surrounds the checkpoint from which a run continues: its receipt and its metrics.

It is done before anything is changed or loaded.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from shlex import quote
from typing import Any

from lockstep.errors import InputError
from lockstep.files import as_json, free_name, replace_text, set_aside
from lockstep.report.page.run_record import METRICS, read_lines
from lockstep.run.files.checkpoints import checkpoint_step, complete_checkpoints
from lockstep.watch.receipt import DIGESTS, RECEIPT, check_chain, lines_up_to, read_log
from lockstep.watch.resume import TRAINER_STATE, check_sealed

_logger = logging.getLogger(__name__)


def check_checkpoint(checkpoint: Path, step: int, receipt: Path) -> dict[str, Any]:
    """Refuse to go on from a checkpoint that is not as the run wrote it, or whose receipt does not name it.

    Args:
        step: the checkpoint's optimizer step.
        receipt: the run's receipt, or the copy of it in the checkpoint.

    Returns:
        The last `start` line before the checkpoint's own. It has the inputs of the steps up to the checkpoint.

    Raises:
        InputError: the receipt is missing, empty, cut or changed; a file of the checkpoint is missing, changed, or foreign; or the
            checkpoint holds only the model. The message has the remedy that loses the least.
    """
    what = f"the run in {checkpoint.parent} cannot go on: "
    if not any((checkpoint / name).exists() for name in (DIGESTS, "optimizer.pt")):
        raise InputError(
            f"{what}{checkpoint.name} holds only the model (save_only_model), and no optimizer state. Nothing was changed. Give "
            "the checkpoint as the model of a new run, with another output_dir"
        )
    try:
        return _checked(checkpoint, step, receipt)
    except InputError as error:
        raise InputError(f"{what}{error}. Nothing was changed. {_remedy(checkpoint, step, receipt)}") from error


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
                f"Put a good copy back, or move it away to go on from {earlier.name}: "
                f"mv {quote(str(checkpoint))} {quote(str(aside))}"
            )
    return (
        "No earlier checkpoint is whole. Put a good copy back, or give another output_dir to start from the beginning"
    )


def _is_whole(checkpoint: Path, step: int, receipt: Path) -> bool:
    try:
        _checked(checkpoint, step, receipt)
    except (InputError, OSError, ValueError, KeyError, TypeError):
        return False
    return True


def optimizer_lines(receipt: Path, step: int) -> list[dict[str, Any]]:
    """The lines of a receipt that say what was changed in the optimizer, up to the checkpoint of a step.

    Changes that were written after the checkpoint are not in it.
    """
    entries = [json.loads(line) for line in lines_up_to(read_log(receipt), step)]
    return [entry for entry in _before_checkpoint(entries, step) or () if entry["kind"] in ("start", "optimizer")]


def _before_checkpoint(entries: list[dict[str, Any]], step: int) -> list[dict[str, Any]] | None:
    """The entries of a receipt before the line of a step's checkpoint; None if it has no such line."""
    ends = [i for i, entry in enumerate(entries) if entry["kind"] == "checkpoint" and entry["step"] == step]
    return entries[: ends[-1]] if ends else None


def restore_metrics(folder: Path, checkpoint: Path, step: int) -> None:
    """Write `metrics.jsonl` again if its lines up to the checkpoint are not those that the run has logged.

    The checkpoint's trainer state has the same lines, and its digest is in the receipt. A file that differs is kept beside
    the new one, and the user is told. Lines may have more entries, which a callback of the user's has added.
    """
    history = json.loads((checkpoint / TRAINER_STATE).read_text(encoding="utf-8")).get("log_history", [])
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
