"""A whole run: evaluate, train, evaluate again, and write the report.

`cli/` or a user's script calls it. It writes into the output directory: checkpoints, `metrics.jsonl`, `receipt.jsonl`,
`before.json`, `after.json`, `summary.json` and `report.html`.
"""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PrinterCallback, TrainerCallback, TrainerState

from lockstep.errors import InputError, LockstepError, names_path
from lockstep.images.reading import text_of_content
from lockstep.images.thumbnails import thumbnails_of_row
from lockstep.parity.receipt import RECEIPT, replace_text
from lockstep.report.busy import busy, watched_by
from lockstep.report.html import render_report
from lockstep.report.live import About, LiveView
from lockstep.report.summary import summarise
from lockstep.rollouts.group import RolloutGroup
from lockstep.training.config.online_config import OnlineConfig
from lockstep.training.run_files.checkpoints import TRAINER_STATE, checkpoint_step
from lockstep.training.run_files.run_directory import SUMMARY, RunPlace, read_lines
from lockstep.training.run_files.shown_rollouts import live_sample, shown_rollout
from lockstep.training.stop_signals import StopSignals, interrupted
from lockstep.training.trainers.online import OnlineTrainer

_SHOWN_ROLLOUTS, _SHOWN_TURNS = 12, 4


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
        InputError: there are several evaluation sets, or the config names a checkpoint.
        Interrupted: SIGINT or SIGTERM arrived (see `stop_signals.py`).
        LockstepError: the trainer raised it.
    """
    if isinstance(arguments.get("eval_dataset"), Mapping):
        raise InputError("a run and its report have one evaluation set; use the trainer's class for several")
    if config.resume_from_checkpoint is not None:
        raise InputError(
            f"resume_from_checkpoint={config.resume_from_checkpoint!r} is not supported here: a run goes on from the last "
            "checkpoint of its output_dir by itself; leave it out"
        )
    start = time.monotonic()
    config.output_dir = str(place.folder)
    config.disable_tqdm = True
    with StopSignals() as stop:
        try:
            trainer = _trainer(kind, model, config, arguments)
            try:
                return _run(trainer, place, start, stop)
            finally:
                trainer.close()
        except KeyboardInterrupt as error:
            raise interrupted(stop.number or signal.SIGINT, place.folder) from error


def _trainer(kind: type[OnlineTrainer], model: str, config: OnlineConfig, arguments: dict[str, Any]) -> OnlineTrainer:
    try:
        with busy(f"loading {model}"):
            return kind(model, args=config, **arguments)
    except LockstepError:
        raise
    except (ValueError, RuntimeError, ImportError) as error:
        # The base class refuses fields that contradict each other, or a tracker that is not installed.
        raise InputError(str(error)) from error


def _run(trainer: OnlineTrainer, place: RunPlace, start: float, stop: StopSignals) -> FinishedRun:
    folder, ranks = place.folder, trainer.ranks
    if place.checkpoint is not None and place.start is not None:
        trainer.checked = place.checkpoint, place.start
    trainer.remove_callback(PrinterCallback)
    before = _evaluation(
        trainer, folder / "before.json", again=place.checkpoint is None, late=place.checkpoint is not None
    )
    stop.watch(trainer)
    if ranks.owner:
        _train_in_view(trainer, place, before)
    else:
        _train(trainer, place.checkpoint)
    if stop.number and trainer.state.global_step < trainer.state.max_steps:
        raise interrupted(stop.number, folder, trainer.state.global_step)
    after = _evaluation(trainer, folder / "after.json", again=True)
    seconds = time.monotonic() - start
    summary = ranks.from_owner("report", lambda: _report(trainer, folder, before, after, seconds), _same, _same)
    return FinishedRun(summary, folder / "report.html")


def _train_in_view(trainer: OnlineTrainer, place: RunPlace, before: dict[str, Any] | None) -> None:
    """Train. Write every log into `metrics.jsonl`, and show it in the live view."""
    # The evaluations before and after training are not in this file. They have separate files.
    metrics_file = MetricsFile(place.folder / "metrics.jsonl")
    limit = trainer.source.limit
    view = LiveView(
        About(
            f"{trainer.method} · {trainer.engine.settings().engine} in lockstep",
            model=Path(trainer.model_path).name,
            folder=str(place.folder),
            gap_limits=(
                limit.mean,
                limit.largest(trainer.config.completions_per_step * trainer.config.completion_limit),
            ),
        ),
        trainer.clock.progress,
        trainer.step_log.latest,
        lambda: live_sample(trainer.source.shown_group),
    )
    if before:
        view.on_evaluate(trainer.args, trainer.state, trainer.control, before["metrics"])
    for callback in (metrics_file, view):
        trainer.add_callback(callback)
    try:
        with watched_by(view):
            _train(trainer, place.checkpoint)
    finally:
        view.stop()
        trainer.remove_callback(metrics_file)


def _report(
    trainer: OnlineTrainer, folder: Path, before: dict[str, Any] | None, after: dict[str, Any] | None, seconds: float
) -> dict[str, Any]:
    """Write the report and the summary of a finished run. Returns the summary."""
    metrics = read_lines(folder / "metrics.jsonl")
    summary = summarise(
        metrics,
        read_lines(folder / RECEIPT),
        before["metrics"] if before else None,
        after["metrics"] if after else None,
        seconds,
    )
    page = render_report(
        f"{trainer.method} on {trainer.model_path}",
        summary,
        metrics,
        before["rollouts"] if before else [],
        after["rollouts"] if after else [],
        # A run directory of an earlier version has no turns.
        after.get("turns", []) if after else [],
    )
    replace_text(folder / "report.html", page)
    replace_text(folder / SUMMARY, json.dumps(summary, indent=1) + "\n")
    return summary


def _train(trainer: OnlineTrainer, checkpoint: Path | None) -> None:
    """Train to the end, from the start or from a checkpoint. The checkpoint may be of the last step already."""
    if checkpoint is None:
        trainer.train()
    elif 0 < trainer.args.max_steps <= checkpoint_step(checkpoint):
        # Here the base class would take one more step.
        trainer._load_from_checkpoint(str(checkpoint))
        trainer.state = TrainerState.load_from_json(str(checkpoint / TRAINER_STATE))
    else:
        trainer.train(resume_from_checkpoint=str(checkpoint))


def _evaluation(trainer: OnlineTrainer, path: Path, *, again: bool, late: bool = False) -> dict[str, Any] | None:
    """Evaluate and save the result, or read the result that an earlier part of the run saved.

    Args:
        again: whether to evaluate even if there is a saved result.
        late: whether the policy has moved since. Then nothing is evaluated, and a saved result that is gone stays gone.
    """
    if trainer.eval_dataset is None:
        return None
    ranks = trainer.ranks
    earlier = ranks.from_owner("evaluation", lambda: _read(path) if not again else {}, _same, _same)
    if earlier:
        return earlier
    if late:
        if ranks.owner:
            print(f"lockstep: {path} is gone; the report has no evaluation from before training", flush=True)
        return None
    metrics = trainer.evaluate()
    shown, images = trainer.last_eval_groups[:_SHOWN_ROLLOUTS], trainer.config.log_multimodal
    found = {"metrics": metrics, "rollouts": [_shown(group, images=images) for group in shown]}
    if ranks.owner:
        proofs = trainer.source.proofs
        # The policy has not moved since the evaluation.
        found["turns"] = [
            shown_rollout(group.rollouts[0], trainer.processing_class, proofs.token_gaps, images=images)
            for group in trainer.last_eval_groups[:_SHOWN_TURNS]
        ]
        print(f"held-out reward {metrics['eval_reward']:.3f} ± {metrics['eval_reward_ci95']:.3f}", flush=True)
        replace_text(path, json.dumps(found, indent=1) + "\n")
    return found


def _same(found: dict[str, Any]) -> dict[str, Any]:
    return found


def _read(path: Path) -> dict[str, Any]:
    """A saved evaluation; empty if there is none.

    Raises:
        InputError: the file cannot be read.
    """
    if not path.exists():
        return {}
    try:
        found = json.loads(path.read_text())
        if not found["metrics"] or not isinstance(found["rollouts"], list):
            raise ValueError("it holds no evaluation")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path} cannot be read ({error}); delete it to go on without it") from error
    return found


def _shown(group: RolloutGroup, *, images: bool) -> dict[str, Any]:
    source = group.prompt.source
    return {
        "prompt": source if isinstance(source, str) else text_of_content(source[-1]["content"]),
        "images": thumbnails_of_row(source, group.prompt.columns) if images else [],
        "completions": [rollout.text for rollout in group.rollouts],
        # JSON has no NaN.
        "rewards": [rollout.reward if rollout.scored else None for rollout in group.rollouts],
    }


class MetricsFile(TrainerCallback):
    """Writes every log of a step or an evaluation as a line of `metrics.jsonl`.

    Only keys under `time/`, and `step_time`, depend on the clock.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
        if logs and ("loss" in logs or "eval_reward" in logs):
            with names_path(self._path), self._path.open("a") as file:
                file.write(json.dumps({"step": state.global_step, **logs}) + "\n")
