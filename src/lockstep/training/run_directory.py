"""The directory of a run: fresh, to be continued, or finished.

A run that was interrupted is continued where its last complete checkpoint stands; a finished one is left alone and the new run
goes beside it. `run.json` keeps the settings, since a run continued with others would be neither.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.errors import InputError
from lockstep.training.checkpoints import cut_back, last_checkpoint

SETTINGS, SUMMARY = "run.json", "summary.json"


@dataclass(frozen=True, slots=True)
class RunPlace:
    """Where a run writes, and the checkpoint it continues from (None: from the start)."""

    folder: Path
    checkpoint: Path | None


def open_run(output_dir: str | Path, settings: dict[str, Any]) -> RunPlace:
    """Choose the directory, cut it back to its last checkpoint, and write the settings.

    Raises:
        InputError: the directory holds an interrupted run with other settings.
    """
    folder = _unfinished(Path(output_dir))
    known = folder / SETTINGS
    plain = json.loads(json.dumps(settings, default=str))
    checkpoint = None
    if known.exists():
        earlier = json.loads(known.read_text())
        changed = sorted(k for k in earlier.keys() | plain.keys() if earlier.get(k) != plain.get(k))
        if changed:
            what = ", ".join(f"{k} was {earlier.get(k)!r}, is {plain.get(k)!r}" for k in changed[:5])
            raise InputError(
                f"{folder} holds an interrupted run with other settings ({what}); give another output_dir, or delete it"
            )
        checkpoint = last_checkpoint(folder)
        cut_back(folder, checkpoint)
    elif last_checkpoint(folder) is not None:
        raise InputError(f"{folder} holds checkpoints of something else (no {SETTINGS}); give another output_dir")
    folder.mkdir(parents=True, exist_ok=True)
    known.write_text(json.dumps(plain, indent=1) + "\n")
    return RunPlace(folder, checkpoint)


def _unfinished(wanted: Path) -> Path:
    folder, number = wanted, 2
    while (folder / SUMMARY).exists():
        folder = wanted.with_name(f"{wanted.name}-{number}")
        number += 1
    return folder


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Entries of a `.jsonl` file; none where there is no file."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
