"""`before.json` and `after.json`: the evaluations before and after training, with a few of their rollouts.

A run that goes on reads `before.json` again.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lockstep.files import as_json, replace_text, set_aside
from lockstep.images.reading import text_of_content
from lockstep.images.thumbnails import thumbnails_of_row
from lockstep.report.page.run_record import with_nan
from lockstep.rollouts.group import RolloutGroup
from lockstep.watch.receipt import RECEIPT, text_digest

_logger = logging.getLogger(__name__)

# The kind of the receipt's line.
EVALUATION = "evaluation"
_SHOWN_GROUPS = 12


def save_evaluation(
    path: Path,
    metrics: Mapping[str, float],
    groups: Sequence[RolloutGroup],
    turns: Sequence[Mapping[str, Any]] = (),
    *,
    images: bool = True,
) -> None:
    """Write an evaluation.

    Args:
        metrics: those of the trainer's `evaluate`.
        groups: all rollouts. The first ones are written.
        turns: rollouts turn by turn (`run/files/shown_rollouts.py`).
        images: whether small copies of the prompts' images are written.
    """
    found = {
        "metrics": dict(metrics),
        "rollouts": [_shown(group, images=images) for group in groups[:_SHOWN_GROUPS]],
        "turns": list(turns),
    }
    replace_text(path, as_json(found, indent=1) + "\n")


def proven_evaluation(path: Path, receipt: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A saved evaluation, as the run wrote it; empty if there is none.

    A file that cannot be read or was changed is renamed, and the user is told. Then the metrics are those of the receipt's
    line (`evaluation_line`). A run of an earlier version has no such line: its file is taken if it can be read.
    """
    line = next((e for e in reversed(receipt) if e.get("kind") == EVALUATION and e.get("file") == path.name), None)
    text = _text(path)
    found = _evaluation(text)
    restored = line and as_json({"metrics": line["metrics"], "rollouts": [], "turns": []}, indent=1) + "\n"
    if found and (line is None or text == restored or text_digest(text or "") == line["digest"]):
        return found
    if os.path.lexists(path):
        set_aside(path, "is not as the run wrote it" if found else "cannot be read")
    if restored is None:
        return {}
    replace_text(path, restored)
    _logger.info(f"the metrics of {path.name} were restored from {RECEIPT}; it has no rollouts")
    return _evaluation(restored)


def evaluation_line(path: Path, step: int) -> dict[str, Any] | None:
    """The receipt's line of a saved evaluation: its metrics, and the digest of its file. None: there is no such file."""
    text = _text(path)
    found = _evaluation(text)
    if not found:
        return None
    digest = text_digest(text or "")
    return {"kind": EVALUATION, "step": step, "file": path.name, "digest": digest, "metrics": found["metrics"]}


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None


def _evaluation(text: str | None) -> dict[str, Any]:
    """The content of a file; empty if it holds no evaluation."""
    try:
        found: dict[str, Any] = json.loads(text or "")
        if not found["metrics"] or not isinstance(found["rollouts"], list):
            return {}
        return {**found, "metrics": with_nan(found["metrics"])}
    except (ValueError, KeyError, TypeError, RecursionError):
        return {}


def _shown(group: RolloutGroup, *, images: bool) -> dict[str, Any]:
    source = group.prompt.source
    return {
        "prompt": source if isinstance(source, str) else text_of_content(source[-1]["content"]),
        "images": thumbnails_of_row(source, group.prompt.columns) if images else [],
        "completions": [rollout.text for rollout in group.rollouts],
        # JSON has no NaN.
        "rewards": [rollout.reward if rollout.scored else None for rollout in group.rollouts],
    }
