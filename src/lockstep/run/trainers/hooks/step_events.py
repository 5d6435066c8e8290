"""Passes the events of `transformers.Trainer`'s loop to Lockstep's trainer.

`transformers.Trainer` calls the callback. The callback calls `run/trainers/hooks/steps.py`.
"""

from __future__ import annotations

from typing import Any, Protocol

from transformers import TrainerCallback

from lockstep.report.phases import PhaseClock


class StepTrainer(Protocol):
    """The methods of a trainer that the callback calls: when training begins, around the optimizer, and when a step ends."""

    clock: PhaseClock

    def begin_training(self) -> None: ...

    def before_update(self) -> None: ...

    def after_update(self) -> None: ...

    def end_step(self) -> bool: ...


class StepEvents(TrainerCallback):
    """The callback that passes the events to the trainer."""

    def __init__(self, trainer: StepTrainer) -> None:
        self._trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._trainer.begin_training()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._trainer.before_update()
        self._trainer.clock.start("optimizer")

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._trainer.clock.stop("optimizer")
        self._trainer.after_update()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not self._trainer.end_step():
            # Log and save a checkpoint, as after the last step of a run.
            control.should_training_stop = control.should_log = True
            control.should_save = args.save_strategy not in ("no", "best")
