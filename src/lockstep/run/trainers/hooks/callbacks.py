"""The callbacks of every trainer: the files of a run, the proofs around a step, the places of checkpoints, and the lines of a log.

They are added when `transformers.Trainer` is set up.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from transformers import PrinterCallback
from transformers.trainer import DEFAULT_PROGRESS_CALLBACK

from lockstep.report.log_lines import LogLines
from lockstep.run.files.resumable import ResumableSaves
from lockstep.run.trainers.hooks.optimizer import WatchedCallbacks
from lockstep.run.trainers.hooks.run_files import RunFiles
from lockstep.run.trainers.hooks.step_events import StepEvents

if TYPE_CHECKING:
    from lockstep.run.trainers.online import OnlineTrainer


def add_callbacks(trainer: OnlineTrainer, began: float) -> RunFiles:
    """Add the callbacks, and replace the progress bar of transformers unless the user has asked for it.

    Args:
        began: `time.monotonic()` of the start of the run.

    Returns:
        The callback that writes the files of the run.
    """
    files, config = RunFiles(trainer, began), trainer.config

    def taking() -> AbstractContextManager[None]:
        # The constructor of the base class calls an event before there is a watch.
        return trainer.watch.hooks.taking() if hasattr(trainer, "watch") else nullcontext()

    watched = WatchedCallbacks(trainer.callback_handler, lambda: trainer.optimizer_settings, taking)
    trainer.callback_handler = watched
    for callback in (files, StepEvents(trainer), ResumableSaves(config, owner=trainer.ranks.owner)):
        trainer.add_callback(callback)
    if not config.asks_for_progress_bar:
        for printer in (PrinterCallback, DEFAULT_PROGRESS_CALLBACK):
            trainer.remove_callback(printer)
        trainer.add_callback(LogLines())
    return files
