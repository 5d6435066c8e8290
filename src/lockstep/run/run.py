"""A whole run: evaluate, train, evaluate again, in view of the user.

A command or a user's script begins here. The trainer's callback `RunFiles` (`run/trainers/hooks/run_files.py`) writes
the files.
"""

from __future__ import annotations

import logging
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import TrainerState

from lockstep.collector import collector_off
from lockstep.errors import InputError, foreign_errors
from lockstep.models.liger import check_gpu
from lockstep.report.busy import busy, watched_by
from lockstep.report.log_lines import LogLines
from lockstep.report.page.run_record import BEFORE, RECEIPT, REPORT, read_lines
from lockstep.report.terminal import Terminal
from lockstep.run.files.checkpoints import TRAINER_STATE, checkpoint_step
from lockstep.run.files.run_directory import RunPlace
from lockstep.run.files.saved_evaluation import proven_evaluation
from lockstep.run.stop_signals import StopSignals, ended_unasked, interrupted
from lockstep.run.trainers.hooks.live_views import view_of
from lockstep.run.trainers.online import OnlineTrainer
from lockstep.training.config.online_config import OnlineConfig

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class FinishedRun:
    """The result of a finished run: its summary and the path of its report."""

    summary: dict[str, Any]
    report: Path


def run_method(
    kind: type[OnlineTrainer],
    config: OnlineConfig,
    place: RunPlace,
    model: str,
    **arguments: Any,
) -> FinishedRun:
    """Run a method up to the report, from the start or from the checkpoint of `place`.

    Args:
        kind: the method's trainer.
        arguments: the other arguments of the trainer's constructor: reward functions, data, an adapter.

    Raises:
        InputError: there are several evaluation sets, the config names a checkpoint, or its kernels need a GPU.
        Interrupted: SIGINT or SIGTERM arrived (see `stop_signals.py`).
        LockstepError: the trainer raised it, or the training ended early and nobody has asked for that.
    """
    if isinstance(arguments.get("eval_dataset"), Mapping):
        raise InputError("a run and its report have one evaluation set; use the trainer's class for several")
    if config.resume_from_checkpoint is not None:
        raise InputError(
            f"resume_from_checkpoint={config.resume_from_checkpoint!r} is not supported here: a run goes on from the last "
            "checkpoint of its output_dir by itself; leave it out"
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


def _trainer(kind: type[OnlineTrainer], model: str, config: OnlineConfig, arguments: dict[str, Any]) -> OnlineTrainer:
    # The base class refuses fields that contradict each other, or a tracker that is not installed.
    with foreign_errors(f"no trainer can be made for {model}", InputError), busy(f"loading {model}"), collector_off():
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
    """Evaluate before training, or read the result that an earlier part of the run has saved.

    Args:
        late: whether the policy has moved since. Then nothing is evaluated, and a saved result that is gone stays gone.
    """
    if trainer.eval_dataset is None:
        return None
    ranks = trainer.ranks
    earlier = ranks.from_owner(
        "evaluation", lambda: proven_evaluation(path, read_lines(path.parent / RECEIPT)) if late else {}, _same, _same
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
