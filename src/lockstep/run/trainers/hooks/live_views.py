"""Makes the panel that shows a trainer at work on the command line."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.report.live import About, LiveView
from lockstep.run.files.shown_rollouts import live_sample

if TYPE_CHECKING:
    from lockstep.run.trainers.online import OnlineTrainer


def view_of(trainer: OnlineTrainer) -> LiveView:
    """A view of the trainer's steps, phases and latest figures; only for the rank that holds the engine."""
    proofs = trainer.proofs
    about = About(
        f"{trainer.method} · {trainer.engine.settings().engine} in lockstep",
        model=Path(trainer.model_path).name,
        folder=str(trainer.config.output_dir),
    )
    return LiveView(
        about,
        trainer.clock.progress,
        trainer.step_log.latest,
        lambda: live_sample(trainer.source.shown_group),
        lambda: proofs.judged,
        alarms=lambda: trainer.alarms.texts,
    )
