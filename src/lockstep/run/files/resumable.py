"""Saves checkpoints only after steps from which a run can be resumed exactly: after the last step of a generation, after a log.

`transformers.Trainer` calls the callback. Checkpoints contain neither rollouts nor the sums of the next log. So a run that is
resumed from another step would give different results.
"""

from __future__ import annotations

import logging
import math
from typing import Any

from transformers import TrainerCallback
from transformers.trainer_utils import IntervalStrategy, SaveStrategy

from lockstep.training.config.online_config import OnlineConfig

_logger = logging.getLogger(__name__)


class ResumableSaves(TrainerCallback):
    """Rounds `save_steps` up to a multiple of the steps per generation, and writes a log before every checkpoint.

    The last checkpoint of a run may be inside a generation, because it holds the final weights. Then there is one more where the
    last whole generation ends, from which a run can go on.

    Args:
        config: the run's configuration.
        owner: whether this process prints the message about a changed `save_steps`.
    """

    def __init__(self, config: OnlineConfig, *, owner: bool) -> None:
        self._steps, self._owner = config.optimizer_steps_per_generation, owner

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # Computed again, because a state from a checkpoint has the intervals of the run that wrote it.
        state.compute_steps(args, state.max_steps)
        regular = args.save_strategy not in (SaveStrategy.NO, SaveStrategy.BEST)
        if regular and state.max_steps % self._steps and self._owner:
            _logger.info(
                f"the run ends at step {state.max_steps}, inside a generation of {self._steps} steps; its last "
                f"checkpoint has the final weights, and a run can go on from the one of step {self._last_whole(state)}"
            )
        if args.save_strategy != SaveStrategy.STEPS or state.save_steps <= 0:
            return
        wanted = int(state.save_steps)
        state.save_steps = math.ceil(wanted / self._steps) * self._steps
        if state.save_steps != wanted and self._owner:
            _logger.info(
                f"save_steps={args.save_steps:g} is a checkpoint every {wanted} steps, which can fall inside a "
                f"generation of {self._steps}, where no run can be resumed exactly; there is one every {state.save_steps} instead"
            )

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if (
            args.save_strategy not in (SaveStrategy.NO, SaveStrategy.BEST)
            and state.max_steps % self._steps
            and state.global_step == self._last_whole(state)
        ):
            control.should_save = True
        # Also at the end. Otherwise the steps after the last multiple of logging_steps would never be logged.
        if control.should_training_stop or self._may_save(args, control):
            control.should_log = args.logging_strategy != IntervalStrategy.NO or control.should_log

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # With `save_strategy: epoch` the checkpoint is asked for here.
        if self._may_save(args, control) and args.logging_strategy != IntervalStrategy.NO:
            control.should_log = True

    @staticmethod
    def _may_save(args: Any, control: Any) -> bool:
        # With `save_strategy: best` the evaluation decides, after the log.
        return control.should_save or (args.save_strategy == SaveStrategy.BEST and control.should_evaluate)

    def _last_whole(self, state: Any) -> int:
        """The step at which the last whole generation of the run ends."""
        return state.max_steps // self._steps * self._steps
