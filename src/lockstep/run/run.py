"""A whole run: evaluate, train, evaluate again, and end when a signal asks.

The files are written by the trainer's callback `RunFiles` (`run/trainers/run_files.py`). SIGINT (Ctrl-C) and SIGTERM
(of schedulers) end a run at a step from which it can be resumed.
"""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Self

from transformers import TrainerCallback, TrainerState
from transformers.trainer_utils import IntervalStrategy

from lockstep.config.run import OnlineConfig
from lockstep.errors import InputError, Interrupted, LockstepError, foreign_errors
from lockstep.models.arithmetic import check_gpu
from lockstep.progress import busy, watched_by
from lockstep.report.live import LogLines
from lockstep.report.page.run_record import BEFORE, RECEIPT, REPORT, read_lines
from lockstep.run.files.checkpoints import TRAINER_STATE, checkpoint_step, last_checkpoint
from lockstep.run.files.directory import RunPlace
from lockstep.run.files.rollouts import proven_evaluation
from lockstep.run.trainers.hooks import view_of
from lockstep.run.trainers.online import OnlineTrainer
from lockstep.start_up import collector_off
from lockstep.terminal import Terminal

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopSignals(TrainerCallback):
    """The first signal in training ends it after the step or, if it saves, after the generation's last step.

    Checkpoints do not contain rollouts. A second signal ends the run at once, by `KeyboardInterrupt`. So does one
    before or after training. A signal to any rank stops all ranks at the same step. Only in the main thread can Python
    catch signals.
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
        """Handle the signals again, if a library or the user's code has put another handler in this one's place."""
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
                f"{who} had replaced the handler of {signal.Signals(number).name}; the run handles it "
                "again, so that it ends at a step from which it can go on"
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
        f"the training ended after step {step} of {last}, and no signal and no callback of yours has asked "
        f"for that; the same command {from_where}"
    )


def interrupted(number: int, folder: Path, step: int | None = None) -> Interrupted:
    """The exception for a run that a signal ended. `step` is the last one; None: it was stopped at once."""
    stopped = "stopped at once" if step is None else f"stopped after step {step}"
    checkpoint = last_checkpoint(folder)
    if checkpoint is None:
        return Interrupted(
            f"{stopped}; there is no checkpoint, so the same command starts from the beginning", number
        )
    return Interrupted(f"{stopped}; the same command goes on from {checkpoint.name}", number)


_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class FinishedRun:
    """The result of a finished run: its summary and the path of its report."""

    summary: dict[str, Any]
    report: Path


def run_method(
    kind: type[OnlineTrainer], config: OnlineConfig, place: RunPlace, model: str, **arguments: Any
) -> FinishedRun:
    """Run a method up to the report, from the start or from the checkpoint of `place`.

    Args:
        kind: the method's trainer.
        arguments: the other arguments of the trainer's constructor: reward functions, data, an adapter.

    Raises:
        InputError: there are several evaluation sets, the config names a checkpoint, or its kernels need a GPU.
        Interrupted: SIGINT or SIGTERM arrived.
        LockstepError: the trainer raised it, or the training ended early and nobody has asked for that.
    """
    if isinstance(arguments.get("eval_dataset"), Mapping):
        raise InputError("a run and its report have one evaluation set; use the trainer's class for several")
    if config.resume_from_checkpoint is not None:
        raise InputError(
            f"resume_from_checkpoint={config.resume_from_checkpoint!r} is not supported here: a run goes on "
            "from the last checkpoint of its output_dir by itself; leave it out"
        )
    # The trainer asks again. Here the answer comes before a model is loaded and an engine started.
    check_gpu(config.use_liger_kernel, use_cpu=config.use_cpu)
    config.output_dir = str(place.folder)
    config.disable_tqdm = True
    with StopSignals() as stop:
        try:
            trainer = _trainer(kind, model, config, arguments)
            try:
                return _run(trainer, place, stop)
            finally:
                trainer.close()
        except KeyboardInterrupt as error:
            raise interrupted(stop.number or signal.SIGINT, place.folder) from error


def _trainer(
    kind: type[OnlineTrainer], model: str, config: OnlineConfig, arguments: dict[str, Any]
) -> OnlineTrainer:
    # The base class refuses fields that contradict each other, or a tracker that is not installed.
    with (
        foreign_errors(f"no trainer can be made for {model}", InputError),
        busy(f"loading {model}"),
        collector_off(),
    ):
        return kind(model, args=config, **arguments)


def _run(trainer: OnlineTrainer, place: RunPlace, stop: StopSignals) -> FinishedRun:
    folder, ranks = place.folder, trainer.ranks
    if place.checkpoint is not None and place.start is not None:
        trainer.checked = place.checkpoint, place.start
    # The live view prints these lines.
    trainer.remove_callback(LogLines)
    trainer.files.awaits_evaluation = True
    before = _evaluate_first(trainer, folder / BEFORE, late=place.checkpoint is not None)
    stop.watch(trainer)
    if ranks.owner:
        _train_in_view(trainer, place, before)
    else:
        _train(trainer, place.checkpoint)
    if stop.number and trainer.state.global_step < trainer.state.max_steps:
        raise interrupted(stop.number, folder, trainer.state.global_step)
    if trainer.files.ends_unasked:
        raise ended_unasked(folder, trainer.state.global_step, trainer.state.max_steps)
    if trainer.eval_dataset is not None:
        _say(trainer, trainer.evaluate())
    with busy("writing the report"):
        summary = ranks.from_owner("report", trainer.files.finish, _same, _same)
    return FinishedRun(summary, folder / REPORT)


def _train_in_view(trainer: OnlineTrainer, place: RunPlace, before: dict[str, Any] | None) -> None:
    """Train, and show every log in the live view."""
    view = view_of(trainer)
    if before:
        view.on_evaluate(trainer.args, trainer.state, trainer.control, before["metrics"])
    trainer.add_callback(view)
    try:
        with watched_by(view):
            _train(trainer, place.checkpoint)
    finally:
        view.stop()


def _train(trainer: OnlineTrainer, checkpoint: Path | None) -> None:
    """Train to the end, from the start or from a checkpoint. The checkpoint may be of the last step already."""
    if checkpoint is None:
        trainer.train()
    elif 0 < trainer.args.max_steps <= checkpoint_step(checkpoint):
        # Here the base class would take one more step.
        trainer.check_resume(str(checkpoint))
        trainer._load_from_checkpoint(str(checkpoint))
        trainer.state = TrainerState.load_from_json(str(checkpoint / TRAINER_STATE))
    else:
        trainer.train(resume_from_checkpoint=str(checkpoint))


def _evaluate_first(trainer: OnlineTrainer, path: Path, *, late: bool) -> dict[str, Any] | None:
    """Evaluate before training or, `late` in a run, read what an earlier part of it has saved.

    The policy has moved since, so that a result that is gone stays gone.
    """
    if trainer.eval_dataset is None:
        return None
    ranks = trainer.ranks
    earlier = ranks.from_owner(
        "evaluation",
        lambda: proven_evaluation(path, read_lines(path.parent / RECEIPT)) if late else {},
        _same,
        _same,
    )
    if late and not earlier and ranks.owner:
        _logger.warning(f"{path} is gone; the report has no evaluation from before training")
    if late:
        return earlier or None
    metrics = trainer.evaluate()
    _say(trainer, metrics)
    return {"metrics": metrics}


def _say(trainer: OnlineTrainer, metrics: dict[str, float]) -> None:
    if trainer.ranks.owner:
        line = f"held-out reward {metrics['eval_reward']:.3f} ± {metrics['eval_reward_ci95']:.3f}"
        Terminal().print(line, highlight=False, soft_wrap=True)


def _same(found: dict[str, Any]) -> dict[str, Any]:
    return found
