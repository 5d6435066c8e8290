"""The callbacks of every trainer: the files of a run, the proofs around a step, the places of checkpoints, and the lines of a log.

`training/trainers/online.py` adds them when `transformers.Trainer` is set up.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from transformers import PrinterCallback, TrainerCallback
from transformers.trainer import DEFAULT_PROGRESS_CALLBACK

from lockstep.report.log_lines import LogLines
from lockstep.report.notebook import in_notebook
from lockstep.training.run_files.resumable import ResumableSaves
from lockstep.training.trainers.hooks.optimizer import WatchedCallbacks
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
    trainer.callback_handler = WatchedCallbacks(trainer.callback_handler, lambda: trainer.optimizer_settings)
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
    """Let the user's callbacks change hooks, forwards and attention functions; at the start also those of trackers."""
    handler = trainer.callback_handler
    call = handler.call_event

    def changes(callback: Any, event: str) -> bool:
        kind = type(callback)
        own = ("lockstep.",) if event == "on_train_begin" else ("lockstep.", "transformers.")
        inherits = getattr(kind, event, None) is getattr(TrainerCallback, event, None) and event not in vars(callback)
        return not kind.__module__.startswith(own) and not inherits

    def call_event(event: str, *given: Any, **named: Any) -> Any:
        # The constructor of the base class calls an event before there is a loop.
        if not hasattr(trainer, "loop") or not any(changes(callback, event) for callback in handler.callbacks):
            return call(event, *given, **named)
        with trainer.loop.hooks.taking():
            return call(event, *given, **named)

    handler.call_event = call_event
