"""Checks what surrounds the checkpoint from which a run continues: its receipt and its metrics.

`run_files/run_directory.py` calls it before anything is changed or loaded.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from lockstep.errors import InputError
from lockstep.parity.receipt import DIGESTS, RECEIPT, check_chain, lines_up_to, replace_text
from lockstep.parity.resume.checkpoint import check_sealed
from lockstep.report.page.run_record import METRICS

_logger = logging.getLogger(__name__)


def check_checkpoint(checkpoint: Path, step: int, receipt: Path) -> dict[str, Any]:
    """Refuse to go on from a checkpoint that is not as the run wrote it, or whose receipt does not name it.

    Args:
        step: the checkpoint's optimizer step.
        receipt: the run's receipt, or the copy of it in the checkpoint.

    Returns:
        The receipt's last `start` line, which has the run's inputs.

    Raises:
        InputError: the receipt is missing, empty, cut or changed; a file of the checkpoint is missing, changed, or foreign; or the
            checkpoint holds only the model.
    """
    what = f"the run in {checkpoint.parent} cannot go on: "
    now = "Nothing was changed. Put a good copy back, or give another output_dir to start from the beginning"
    if not any((checkpoint / name).exists() for name in (DIGESTS, "optimizer.pt")):
        raise InputError(
            f"{what}{checkpoint.name} holds only the model (save_only_model), and no optimizer state. Nothing was changed. Give "
            "the checkpoint as the model of a new run, with another output_dir"
        )
    kept = lines_up_to(_text(receipt, what, now).splitlines(), step)
    try:
        check_chain(kept)
        entries = [json.loads(line) for line in kept]
        lines = [entry for entry in entries if entry["kind"] == "checkpoint" and entry["step"] == step]
        if not lines:
            raise InputError(f"{RECEIPT} does not reach {checkpoint.name}: lines were removed or replaced")
        check_sealed(checkpoint, lines[-1]["digests"])
    except InputError as error:
        raise InputError(f"{what}{error}. {now}") from error
    return next(entry for entry in reversed(entries) if entry["kind"] == "start")


def optimizer_lines(receipt: Path, step: int) -> list[dict[str, Any]]:
    """The lines of a receipt that say what was changed in the optimizer, up to the checkpoint of a step.

    Changes that were written after the checkpoint are not in it.
    """
    entries = [json.loads(line) for line in lines_up_to(receipt.read_text().splitlines(), step)]
    ends = [i for i, entry in enumerate(entries) if entry["kind"] == "checkpoint" and entry["step"] == step]
    return [entry for entry in entries[: ends[-1]] if entry["kind"] in ("start", "optimizer")]


def restore_metrics(folder: Path, checkpoint: Path, step: int) -> None:
    """Write the lines of `metrics.jsonl` again if some are gone or unreadable. The checkpoint's trainer state has them too."""
    history = json.loads((checkpoint / "trainer_state.json").read_text()).get("log_history", [])
    wanted = [entry for entry in history if "loss" in entry or "eval_reward" in entry]
    found = _entries(folder / METRICS)
    if [entry["step"] for entry in wanted] == [entry["step"] for entry in found if entry["step"] <= step]:
        return
    path = folder / METRICS
    if path.is_dir():
        raise InputError(f"{path} is a directory; rename it")
    if path.exists():
        path.replace(path.with_name("metrics.damaged.jsonl"))
    replace_text(path, "".join(json.dumps({"step": entry["step"], **entry}) + "\n" for entry in wanted))
    _logger.info(f"{METRICS} lacked lines; they were restored from {checkpoint.name}")


def _entries(path: Path) -> list[dict[str, Any]]:
    """The entries of a log that can be read; a last line that a kill cut short does not count, nor does any other such line."""
    if not path.is_file():
        return []
    found = []
    for line in path.read_bytes().splitlines():
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if isinstance(entry, dict) and isinstance(entry.get("step"), int):
            found.append(entry)
    return found


def _text(path: Path, what: str, now: str) -> str:
    try:
        text = path.read_text()
    except OSError as error:
        raise InputError(f"{what}{path.name} of {path.parent.name} cannot be read ({error.strerror}). {now}") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{what}{path.name} of {path.parent.name} is not a text file. {now}") from error
    if not text.strip():
        raise InputError(f"{what}{path.name} of {path.parent.name} is empty. {now}")
    return text
