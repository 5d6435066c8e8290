"""SIGINT (Ctrl-C) and SIGTERM (sent by schedulers) end a run at a step from which it can be resumed.

The signals are handled during a whole run. The trainer's loop calls the class here as a callback.
"""

from __future__ import annotations

import logging
import signal
import threading
from pathlib import Path
from types import FrameType
from typing import Any, Self

from transformers import TrainerCallback
from transformers.trainer_utils import IntervalStrategy

from lockstep.errors import Interrupted, LockstepError
from lockstep.run.files.checkpoints import last_checkpoint
from lockstep.run.trainers.online import OnlineTrainer

_logger = logging.getLogger(__name__)

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopSignals(TrainerCallback):
    """During training, the first signal ends the run after the current optimizer step, with a checkpoint if saving is on.

    If several steps learn from one generation and saving is on, the run ends after the last of these steps, because checkpoints
    do not contain rollouts. A second signal ends the run at once, by `KeyboardInterrupt`. So does a signal before or after
    training. A signal to any rank stops all ranks at the same step. In a thread other than the main thread this class
    catches no signal, because Python can handle signals only in the main thread.
    """

    def __init__(self) -> None:
        self.number = 0
        self._trainer: OnlineTrainer | None = None
        self._earlier: dict[int, Any] = {}
        self._training = False
        self._done = self._last = 0
        # Whose handlers were in the place of this one.
        self._told: set[str] = set()

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._earlier = {number: signal.signal(number, self._handle) for number in _SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._earlier.items():
            signal.signal(number, handler)
        self._earlier = {}

    def watch(self, trainer: OnlineTrainer) -> None:
        """Let a signal stop this trainer."""
        self._trainer = trainer
        trainer.add_callback(self)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._hold()
        self._done, self._last, self._training = state.global_step, state.max_steps, True

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._training = False

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._hold()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._hold()
        assert self._trainer is not None
        self._done = state.global_step
        if state.global_step % self._every:
            return
        self.number = max(self._trainer.ranks.share("stop", lambda: self.number))
        if self.number:
            self._trainer.files.interrupted_by = signal.Signals(self.number).name
            control.should_training_stop = True
            control.should_save = self._saves
            # Checkpoints do not contain the sums of the next log. So the trainer logs them now.
            control.should_log = args.logging_strategy != IntervalStrategy.NO

    def _hold(self) -> None:
        """Handle the signals again, if a library or a function of the user's has put another handler in the place of this one."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number in self._earlier:
            if (other := signal.getsignal(number)) == self._handle:
                continue
            signal.signal(number, self._handle)
            who = f"{getattr(other, '__module__', '')}.{getattr(other, '__qualname__', other)}"
            if who in self._told:
                continue
            self._told.add(who)
            _logger.warning(
                f"{who} had replaced the handler of {signal.Signals(number).name}; the run handles it again, so that it ends at a "
                "step from which it can go on"
            )

    @property
    def _saves(self) -> bool:
        assert self._trainer is not None
        return self._trainer.config.save_strategy != "no"

    @property
    def _every(self) -> int:
        """The run can end after every multiple of this number of steps."""
        assert self._trainer is not None
        return self._trainer.config.optimizer_steps_per_generation if self._saves else 1

    def _handle(self, number: int, frame: FrameType | None) -> None:
        again, self.number = bool(self.number), number
        if self._trainer is not None:
            self._trainer.files.interrupted_by = signal.Signals(number).name
        if again or not self._training:
            raise KeyboardInterrupt
        assert self._trainer is not None
        if not self._trainer.ranks.owner:
            return
        step = min((self._done // self._every + 1) * self._every, self._last)
        where = f"step {step}" + (", where its generation ends" if self._every > 1 else "")
        how = "with a checkpoint" if self._saves else "without a checkpoint (save_strategy is no)"
        _logger.info(f"{signal.Signals(number).name}: stopping after {where}, {how}; again to stop at once")


def ended_unasked(folder: Path, step: int, last: int) -> LockstepError:
    """The exception for a training that ended early although neither a signal nor a callback has asked for that."""
    checkpoint = last_checkpoint(folder)
    from_where = f"goes on from {checkpoint.name}" if checkpoint is not None else "starts from the beginning"
    return LockstepError(
        f"the training ended after step {step} of {last}, and no signal and no callback of yours has asked for that; the same "
        f"command {from_where}"
    )


def interrupted(number: int, folder: Path, step: int | None = None) -> Interrupted:
    """The exception for a run that a signal ended.

    Args:
        step: the last completed step; None if the run was stopped at once.
    """
    stopped = "stopped at once" if step is None else f"stopped after step {step}"
    checkpoint = last_checkpoint(folder)
    if checkpoint is None:
        return Interrupted(f"{stopped}; there is no checkpoint, so the same command starts from the beginning", number)
    return Interrupted(f"{stopped}; the same command goes on from {checkpoint.name}", number)
