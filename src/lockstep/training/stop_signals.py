"""SIGINT (Ctrl-C) and SIGTERM (what schedulers send) end a run where it can be resumed.

Comes from: `training/run.py`, which holds the signals for a whole run. Goes to: the trainer's loop, as a callback.
"""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from types import FrameType
from typing import Any, Self

from transformers import TrainerCallback
from transformers.trainer_utils import IntervalStrategy

from lockstep.errors import Interrupted
from lockstep.training.run_files.checkpoints import last_checkpoint
from lockstep.training.trainers.online import OnlineTrainer

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopSignals(TrainerCallback):
    """While training, the first signal ends the run after the optimizer step under way, with a checkpoint where saving is on.

    Where several steps learn from one generation, it ends after the last of them: rollouts are not saved. A second signal, or one
    that comes before or after training, ends the run at once, by `KeyboardInterrupt`. A signal to any rank stops all at the same
    step. Outside of the main thread nothing is caught: Python handles signals there alone.
    """

    def __init__(self) -> None:
        self.number = 0
        self._trainer: OnlineTrainer | None = None
        self._earlier: dict[int, Any] = {}
        self._training = False
        self._done = self._last = 0

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._earlier = {number: signal.signal(number, self._handle) for number in _SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._earlier.items():
            signal.signal(number, handler)
        self._earlier = {}

    def watch(self, trainer: OnlineTrainer) -> None:
        """Stop this trainer."""
        self._trainer = trainer
        trainer.add_callback(self)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._done, self._last, self._training = state.global_step, state.max_steps, True

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._training = False

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        assert self._trainer is not None
        self._done = state.global_step
        if state.global_step % self._every:
            return
        self.number = max(self._trainer.ranks.share("stop", lambda: self.number))
        if self.number:
            control.should_training_stop = True
            control.should_save = self._saves
            # The sums of the next log are not saved.
            control.should_log = args.logging_strategy != IntervalStrategy.NO

    @property
    def _saves(self) -> bool:
        assert self._trainer is not None
        return self._trainer.config.save_strategy != "no"

    @property
    def _every(self) -> int:
        """Steps between two places where the run can end."""
        assert self._trainer is not None
        return self._trainer.config.steps_a_generation if self._saves else 1

    def _handle(self, number: int, frame: FrameType | None) -> None:
        again, self.number = bool(self.number), number
        if again or not self._training:
            raise KeyboardInterrupt
        assert self._trainer is not None
        if not self._trainer.ranks.owner:
            return
        step = min((self._done // self._every + 1) * self._every, self._last)
        where = f"step {step}" + (", where its generation ends" if self._every > 1 else "")
        how = "with a checkpoint" if self._saves else "without a checkpoint (save_strategy is no)"
        print(f"\n{signal.Signals(number).name}: stopping after {where}, {how}; again to stop at once", flush=True)


def interrupted(number: int, folder: Path, step: int | None = None) -> Interrupted:
    """What is said of a run that a signal ended.

    Args:
        step: the last step that was taken; None where the run was stopped at once.
    """
    stopped = "stopped at once" if step is None else f"stopped after step {step}"
    checkpoint = last_checkpoint(folder)
    if checkpoint is None:
        return Interrupted(f"{stopped}; there is no checkpoint, so the same command starts anew", number)
    return Interrupted(f"{stopped}; the same command goes on from {checkpoint.name}", number)
