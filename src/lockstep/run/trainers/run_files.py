"""Writes what a run leaves in its output directory, from the first step to its end, whatever the end is.

`RunFiles` is a callback that every trainer has; `trainer.remove_callback(RunFiles)` takes it away. It reads the
trainer's parts. docs/reference/report.md lists the files. The proofs write `receipt.jsonl` themselves.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback

from lockstep.errors import ProofError
from lockstep.files import append_line, as_json, replace_text
from lockstep.report.page.report import render_report
from lockstep.report.page.run_record import (
    ABOUT,
    AFTER,
    BEFORE,
    END,
    METRICS,
    REPORT,
    SHOWN,
    SUMMARY,
    read_run,
)
from lockstep.report.summary import summarise
from lockstep.run.files.checkpoints import clear_places, clear_unfinished, cut_log, is_metric, restore_metrics
from lockstep.run.files.directory import Occupied, about_run, locked
from lockstep.run.files.rollouts import (
    evaluation_line,
    keep_rollouts,
    proven_evaluation,
    remove_after,
    save_evaluation,
    shown_generation,
    shown_rollout,
)
from lockstep.safe_text import masked

if TYPE_CHECKING:
    from lockstep.run.trainers.online import OnlineTrainer

_logger = logging.getLogger(__name__)

# Generations of a run whose rollouts the report shows, and held-out rollouts that it shows turn by turn.
_SHOWN_GENERATIONS, _SHOWN_TURNS = 10, 4
# The report is written again during training if that has taken at most this share of the time since.
_SHARE_OF_TIME = 0.01


# What stands in the place of a signal's name if nothing is known of what ended a training.
UNASKED = "nobody has asked for it"


@contextmanager
def _pages_aside(*more: type[Exception]) -> Iterator[None]:
    """A fault of the page is a warning: no run fails because of it."""
    kinds: tuple[type[Exception], ...] = (ValueError, KeyError, TypeError, AttributeError, IndexError, *more)
    try:
        yield
    except kinds as error:
        _logger.warning("report.html could not be written (%s: %s)", type(error).__name__, error)


class RunFiles(TrainerCallback):
    """The files of a run, on the rank that holds the engine.

    Attributes:
        awaits_evaluation: whether an evaluation follows the training. The run is not finished before.
        interrupted_by: the name of the signal that ends the run; empty if there is none.
    """

    def __init__(self, trainer: OnlineTrainer, began: float) -> None:
        """`began` is the `time.monotonic()` at which the making of the trainer began."""
        self._trainer, self._began = trainer, began
        self.awaits_evaluation = False
        self.interrupted_by = ""
        self._is_training = self._is_begun = self._has_trained = self._has_before = False
        # The weight version whose generation was kept last.
        self._kept = -1
        self._written, self._took = -math.inf, 0.0
        self._failure: BaseException | None = None

    @property
    def ends_unasked(self) -> bool:
        """Whether the training has ended before its last step, and no signal and no callback has asked for that."""
        trainer = self._trainer
        early = trainer.state.global_step < trainer.state.max_steps
        return early and not self.interrupted_by and not trainer.callback_handler.end_was_asked_for

    @property
    def folder(self) -> Path:
        """The output directory."""
        return Path(self._trainer.args.output_dir or ".")

    # ---- while the run trains ---------------------------------------------------------------------------------------

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not self._trainer.ranks.owner:
            return
        folder, self._kept, self._is_training = self.folder, -1, True
        self._has_trained, self._failure = False, None
        folder.mkdir(parents=True, exist_ok=True)
        self._is_begun = False

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._begin(state)

    def _begin(self, state: Any) -> None:
        """Cut what is later than the run's checkpoint. A run that is refused when it begins has lost nothing."""
        if self._is_begun or not self._trainer.ranks.owner:
            return
        folder, self._is_begun = self.folder, True
        clear_places(folder)
        clear_unfinished(folder)
        if (checkpoint := self._trainer.resumed_from) is not None:
            restore_metrics(folder, checkpoint, state.global_step)
        remove_after(folder, state.global_step)
        for name in (METRICS, SHOWN):
            cut_log(folder / name, state.global_step)
        # An evaluation of an earlier run in this directory does not belong to this one.
        stale = (BEFORE,) if state.global_step == 0 and not self._has_before else ()
        for name in (END, SUMMARY, AFTER, *stale):
            (folder / name).unlink(missing_ok=True)
        if self._has_before and (line := evaluation_line(folder / BEFORE, state.global_step)):
            self._trainer.proofs.note_evaluation(line)
        replace_text(
            folder / ABOUT,
            json.dumps({**self._about(), "max_steps": state.max_steps}, indent=1, default=str) + "\n",
        )

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._trainer.ranks.owner:
            self._keep_generation()

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any
    ) -> None:
        if not self._is_training or not logs or not is_metric(logs):
            return
        # The evaluation of `eval_on_start` comes before the first step.
        self._begin(state)
        append_line(self.folder / METRICS, as_json({"step": state.global_step, **logs}))
        self._write_now_and_then()

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._is_training:
            self._write_now_and_then()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not self._is_training:
            return
        self._begin(state)
        self._is_training, self._has_trained = False, True
        if state.global_step < state.max_steps and (self.interrupted_by or self.ends_unasked):
            self._end({"ended": "interrupted", "signal": self.interrupted_by or UNASKED})
        elif not self.awaits_evaluation:
            self.finish()

    # ---- evaluations and ends ---------------------------------------------------------------------------------------

    def evaluated(self, metrics: dict[str, float]) -> None:
        """Keep an evaluation before or after training. `metrics.jsonl` has the metrics of others."""
        trainer = self._trainer
        if (
            not trainer.ranks.owner
            or self._is_training
            or not all(name.startswith("eval_") for name in metrics)
        ):
            return
        state = trainer.state
        # A run that goes on from the checkpoint of its last step only lacks this evaluation.
        after = self._has_trained or 0 < state.max_steps <= state.global_step
        if not after and state.global_step:
            return
        try:
            with locked(self.folder):
                self._save_evaluation(metrics, after=after)
        except Occupied as error:
            _logger.warning(f"the evaluation is not written to a file: {error}")

    def _save_evaluation(self, metrics: dict[str, float], *, after: bool) -> None:
        trainer = self._trainer
        groups, turns, images = trainer.last_eval_groups, [], trainer.config.log_multimodal
        if after:
            # The policy has not moved since the evaluation.
            first = [group.rollouts[0] for group in groups[:_SHOWN_TURNS]]
            turns = [
                shown_rollout(r, trainer.processing_class, trainer.proofs.token_gaps, images=images)
                for r in first
            ]
        self._has_before |= not after
        save_evaluation(self.folder / (AFTER if after else BEFORE), metrics, groups, turns, images=images)
        if after and not self.awaits_evaluation:
            self.finish()

    def finish(self) -> dict[str, Any]:
        """Write the summary and the report of a finished run. Returns the summary."""
        self._end({"ended": "finished"}, report=False)
        run = read_run(self.folder)
        run = replace(run, before=proven_evaluation(self.folder / BEFORE, run.receipt) or None)
        summary = summarise(
            run.metrics, run.receipt, run.before and run.before["metrics"], run.after and run.after["metrics"],
            time.monotonic() - self._began,
        )  # fmt: skip
        with _pages_aside():
            replace_text(self.folder / REPORT, render_report(replace(run, summary=summary)))
        # The last file of a run. A run that was killed before it has not finished, and the same command goes on with
        # it.
        replace_text(self.folder / SUMMARY, as_json(summary, indent=1) + "\n")
        return summary

    @contextmanager
    def noting_failure(self) -> Iterator[None]:
        """If the block raises, write how the run has ended, and the report. The error goes on unchanged."""
        try:
            yield
        except BaseException as error:
            if self._failure is not error and self._trainer.ranks.owner:
                self._failure = error
                # Whatever goes wrong with these files must not hide the error itself.
                with suppress(Exception), locked(self.folder):
                    self._fail(error)
            self._is_training = False
            raise

    def _fail(self, error: BaseException) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        if isinstance(error, KeyboardInterrupt):
            self._end({"ended": "interrupted", "signal": self.interrupted_by or "SIGINT"})
            return
        found = {"ended": "failed", "error": type(error).__name__, "message": masked(str(error))}
        if isinstance(error, ProofError):
            parts = {"check": error.check, "found": error.found, "cause": error.cause, "fix": error.fix}
            found |= {name: masked(text) for name, text in parts.items()}
        self._end(found, report=False)
        with suppress(OSError):
            self._keep_generation(failed=isinstance(error, ProofError))
        self.write_report()

    def _end(self, how: dict[str, Any], *, report: bool = True) -> None:
        state = self._trainer.state
        how |= {
            "step": state.global_step,
            "max_steps": state.max_steps,
            "seconds": round(time.monotonic() - self._began, 1),
        }
        replace_text(self.folder / END, json.dumps(how, indent=1) + "\n")
        if report:
            self.write_report()

    # ---- the report -------------------------------------------------------------------------------------------------

    def write_report(self) -> None:
        """Write `report.html` from the files of the run."""
        began = time.monotonic()
        replace_text(self.folder / REPORT, render_report(read_run(self.folder)))
        self._written = time.monotonic()
        self._took = self._written - began

    def _write_now_and_then(self) -> None:
        if self._took > _SHARE_OF_TIME * (time.monotonic() - self._written):
            return
        # The training continues without the page, also where the disk is full.
        with _pages_aside(OSError):
            self.write_report()

    # ---- rollouts ---------------------------------------------------------------------------------------------------

    def _keep_generation(self, *, failed: bool = False) -> None:
        trainer, config = self._trainer, self._trainer.config
        generation, limit = trainer.loop.generation, config.rollouts_size_limit
        if generation is None or (generation.version == self._kept and not failed):
            return
        is_new, self._kept = generation.version != self._kept, generation.version
        logps = trainer.loop.policy_logps()
        if limit and is_new:
            facts = {
                "method": trainer.method,
                "model": trainer.model_path,
                "seed": config.seed,
                "sampling": asdict(trainer.source.sampling),
            }
            keep_rollouts(self.folder, generation, logps, facts, limit)
        number = generation.version // config.optimizer_steps_per_generation
        every = max(trainer.state.max_steps // config.optimizer_steps_per_generation // _SHOWN_GENERATIONS, 1)
        if failed or number % every == 0:
            shown = shown_generation(
                generation, trainer.processing_class, logps, failed=failed, images=config.log_multimodal
            )
            append_line(self.folder / SHOWN, as_json(shown))

    def _about(self) -> dict[str, Any]:
        trainer = self._trainer
        return about_run(
            trainer.method,
            trainer.model_path,
            asdict(trainer.engine.settings()),
            trainer.config,
            trainer.rows,
            trainer.inputs.get("data", {}),
        )
