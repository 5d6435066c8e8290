"""Writes what a run leaves in its output directory while it trains.

`RunFiles` is a callback that every trainer has; `trainer.remove_callback(RunFiles)` takes it away. It reads the trainer's parts.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback

from lockstep.training.run_files.rollout_files import keep_rollouts, remove_after

if TYPE_CHECKING:
    from lockstep.training.trainers.online import OnlineTrainer


class RunFiles(TrainerCallback):
    """The files of a run, on the rank that holds the engine."""

    def __init__(self, trainer: OnlineTrainer) -> None:
        self._trainer = trainer
        # The weight version whose generation was kept last.
        self._kept = -1

    @property
    def folder(self) -> Path:
        """The output directory."""
        return Path(self._trainer.args.output_dir or ".")

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._trainer.ranks.owner:
            self._kept = -1
            remove_after(self.folder, state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._trainer.ranks.owner:
            self._keep_rollouts()

    def _keep_rollouts(self) -> None:
        trainer = self._trainer
        generation, limit = trainer.loop.generation, trainer.config.rollouts_size_limit
        if generation is None or generation.version == self._kept or not limit:
            return
        facts = {
            "method": trainer.method,
            "model": trainer.model_path,
            "seed": trainer.config.seed,
            "sampling": asdict(trainer.source.sampling),
        }
        keep_rollouts(self.folder, generation, trainer.loop.policy_logps(), facts, limit)
        self._kept = generation.version
