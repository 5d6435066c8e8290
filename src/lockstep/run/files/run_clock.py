"""The time that a run's chat templates read: that of its first start, also after a resume.

The receipt's `start` lines have it. It is asked for before a prompt is rendered.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from lockstep.run.files.checkpoints import last_checkpoint
from lockstep.tokens.clock import TemplateClock
from lockstep.training.config.online_config import OnlineConfig
from lockstep.watch.receipt import RECEIPT, read_log

# Its name among the inputs of a `start` line.
CLOCK = "clock of chat templates"


def clock_of_run(config: OnlineConfig) -> TemplateClock:
    """The clock of the run whose checkpoint the config names or its directory holds; without a checkpoint, of now.

    A receipt that cannot be read, or that an older Lockstep wrote, gives no time. Whether the run may go on is checked later.
    """
    asked = config.resume_from_checkpoint
    named = isinstance(asked, str | Path) and (Path(asked) / RECEIPT).is_file()
    checkpoint = Path(str(asked)) if named else last_checkpoint(config.output_dir or ".")
    for receipt in () if checkpoint is None else (checkpoint / RECEIPT, checkpoint.parent / RECEIPT):
        if (moment := _recorded(receipt)) is not None:
            return TemplateClock(moment, is_earlier=True)
    return TemplateClock(datetime.now())


def other_time(earlier: Mapping[str, Any], clock: TemplateClock, checkpoint: Path) -> str:
    """What to say of prompts that differ because templates read another time; empty: they do not.

    Args:
        earlier: inputs of the start with which the run goes on.
    """
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
        entries = [json.loads(line) for line in read_log(receipt) if CLOCK in line]
        moments = [entry["inputs"][CLOCK] for entry in entries]
        return datetime.fromisoformat(moments[-1]) if moments else None
    except (OSError, ValueError, KeyError, TypeError):
        return None
