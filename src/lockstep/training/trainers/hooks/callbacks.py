"""The callbacks of every trainer: the files of a run, the proofs around a step, the places of checkpoints, and the lines of a log.

`training/trainers/online.py` adds them when `transformers.Trainer` is set up.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from transformers import PrinterCallback
from transformers.trainer import DEFAULT_PROGRESS_CALLBACK

from lockstep.report.log_lines import LogLines
from lockstep.report.notebook import in_notebook
from lockstep.training.run_files.resumable import ResumableSaves
from lockstep.training.trainers.hooks.run_files import RunFiles
from lockstep.training.trainers.hooks.step_events import StepEvents

if TYPE_CHECKING:
    from lockstep.training.trainers.online import OnlineTrainer


def add_callbacks(trainer: OnlineTrainer, began: float) -> RunFiles:
    """Add the callbacks, and replace the progress bar of transformers unless the user has asked for it.

    Args:
        began: `time.monotonic()` of the start of the run.

    Returns:
        The callback that writes the files of the run.
    """
    files, config = RunFiles(trainer, began), trainer.config
    for callback in (files, StepEvents(trainer), ResumableSaves(config, owner=trainer.ranks.owner)):
        trainer.add_callback(callback)
    if not config.asks_for_progress_bar:
        for printer in (PrinterCallback, DEFAULT_PROGRESS_CALLBACK):
            trainer.remove_callback(printer)
        if not in_notebook():
            trainer.add_callback(LogLines())
    take_hooks_of_callbacks(trainer)
    return files


def take_hooks_of_callbacks(trainer: OnlineTrainer) -> None:
    """Let callbacks that are neither Lockstep's nor the base class's own change hooks, forwards and attention functions."""
    handler, own = (
        trainer.callback_handler,
        ("lockstep.", "transformers.trainer_callback", "transformers.utils.notebook"),
    )
    call = handler.call_event

    def call_event(event: str, *given: Any, **named: Any) -> Any:
        if all(type(callback).__module__.startswith(own) for callback in handler.callbacks):
            return call(event, *given, **named)
        # The constructor of the base class calls an event before there is a loop.
        with trainer.loop.hooks.taking() if hasattr(trainer, "loop") else nullcontext():
            return call(event, *given, **named)

    handler.call_event = call_event
