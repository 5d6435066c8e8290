"""A script: the command `lockstep`, which also writes into the file `PHASE_FILE` what rank 0 does at the moment.

`long_schedule.py` reads the file, so that its signals meet every phase of a step. Nothing else is changed.
"""

from __future__ import annotations

import os
from typing import Any

from lockstep.cli.main import main
from lockstep.report.phases import PhaseClock
from lockstep.run.trainers.online import OnlineTrainer

PHASE_FILE = "LOCKSTEP_TESTS_PHASE_FILE"
_WIDTH = 24


def note(phase: str) -> None:
    """Write the phase over the earlier one; the file keeps its size."""
    file = os.open(os.environ[PHASE_FILE], os.O_WRONLY | os.O_CREAT)
    os.pwrite(file, phase.ljust(_WIDTH).encode(), 0)
    os.close(file)


def observe() -> None:
    """Let rank 0 of a run note its phases."""
    start, stop, save = PhaseClock.start, PhaseClock.stop, OnlineTrainer._save_checkpoint

    def noted_start(clock: PhaseClock, name: str) -> None:
        note(name)
        start(clock, name)

    def noted_stop(clock: PhaseClock, name: str) -> None:
        stop(clock, name)
        note("between phases")

    def noted_save(trainer: OnlineTrainer, model: Any, trial: Any) -> None:
        note("checkpoint")
        save(trainer, model, trial)
        note("between phases")

    PhaseClock.start, PhaseClock.stop = noted_start, noted_stop  # type: ignore[method-assign]
    OnlineTrainer._save_checkpoint = noted_save  # type: ignore[method-assign]


if __name__ == "__main__":
    if os.environ.get("RANK", "0") == "0":
        observe()
    raise SystemExit(main())
