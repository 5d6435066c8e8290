"""Passes the events of `transformers.Trainer`'s loop on to our trainer.

Comes from: `transformers.Trainer`, which calls back. Goes to: `training/trainers/online.py`.
"""

from __future__ import annotations

from typing import Any, Protocol

from transformers import TrainerCallback

from lockstep.report.phases import PhaseClock


class StepTrainer(Protocol):
    """A trainer that is told when training begins and steps end."""

    clock: PhaseClock

    def begin_training(self) -> None: ...

    def end_step(self) -> bool: ...


class StepEvents(TrainerCallback):
    """The callback that does it."""

    def __init__(self, trainer: StepTrainer) -> None:
        self._trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._trainer.begin_training()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._trainer.clock.start("optimizer")

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._trainer.clock.stop("optimizer")

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not self._trainer.end_step():
            # As after the last step of a run: log, and save a checkpoint.
            control.should_training_stop = control.should_log = True
            control.should_save = args.save_strategy != "no"
