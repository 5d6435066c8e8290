"""`before.json` and `after.json`: the evaluations before and after training, with a few of their rollouts.

`training/trainers/hooks/run_files.py` writes them, and a run that goes on reads `before.json` again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lockstep.errors import InputError
from lockstep.images.reading import text_of_content
from lockstep.images.thumbnails import thumbnails_of_row
from lockstep.parity.receipt import replace_text
from lockstep.rollouts.group import RolloutGroup

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
        turns: rollouts turn by turn (`run_files/shown_rollouts.py`).
        images: whether small copies of the prompts' images are written.
    """
    found = {
        "metrics": dict(metrics),
        "rollouts": [_shown(group, images=images) for group in groups[:_SHOWN_GROUPS]],
        "turns": list(turns),
    }
    replace_text(path, json.dumps(found, indent=1) + "\n")


def read_evaluation(path: Path) -> dict[str, Any]:
    """A saved evaluation; empty if there is none.

    Raises:
        InputError: the file cannot be read.
    """
    if not path.exists():
        return {}
    try:
        found: dict[str, Any] = json.loads(path.read_text())
        if not found["metrics"] or not isinstance(found["rollouts"], list):
            raise ValueError("it holds no evaluation")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path} cannot be read ({error}); delete it to go on without it") from error
    return found


def _shown(group: RolloutGroup, *, images: bool) -> dict[str, Any]:
    source = group.prompt.source
    return {
        "prompt": source if isinstance(source, str) else text_of_content(source[-1]["content"]),
        "images": thumbnails_of_row(source, group.prompt.columns) if images else [],
        "completions": [rollout.text for rollout in group.rollouts],
        # JSON has no NaN.
        "rewards": [rollout.reward if rollout.scored else None for rollout in group.rollouts],
    }
