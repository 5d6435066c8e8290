"""Makes the view that shows a trainer at work: the panel of the command line, and its form for notebooks.

The command line has its own view; a trainer that is made in a notebook adds the notebook's view itself.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from lockstep.report.live import About, LiveView
from lockstep.report.notebook import NotebookView, in_notebook
from lockstep.run.files.shown_rollouts import live_sample

View = TypeVar("View", bound=LiveView)

if TYPE_CHECKING:
    from lockstep.run.trainers.online import OnlineTrainer


def view_of(trainer: OnlineTrainer, kind: type[View]) -> View:
    """A view of the trainer's steps, phases and latest figures; only for the rank that holds the engine."""
    proofs = trainer.proofs
    about = About(
        f"{trainer.method} · {trainer.engine.settings().engine} in lockstep",
        model=Path(trainer.model_path).name,
        folder=str(trainer.config.output_dir),
    )
    return kind(
        about,
        trainer.clock.progress,
        trainer.step_log.latest,
        lambda: live_sample(trainer.source.shown_group),
        lambda: proofs.judged,
        alarms=lambda: trainer.alarms.texts,
    )


def show_in_notebook(trainer: OnlineTrainer) -> NotebookView | None:
    """In a notebook, add the panel to the trainer, unless the user asks for transformers' progress bar. Elsewhere: None."""
    if not in_notebook() or not trainer.ranks.owner or trainer.config.asks_for_progress_bar:
        return None
    view = view_of(trainer, NotebookView)
    trainer.add_callback(view)
    return view
