"""What a run logs: the figures of its steps, and completions on the screen and in trackers.

Figures are means or sums over the steps since the last log, and seconds. `log_completions` shows completions of the
generation that was learned from last, and sends them as a table to the trackers that `transformers.Trainer` has opened.
"""

from __future__ import annotations

import importlib
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from transformers import TrainerCallback
from transformers.integrations import TensorBoardCallback, TrackioCallback, WandbCallback

from lockstep.config.run import OnlineConfig
from lockstep.learn.generation import Generation
from lockstep.learn.sequence import rollouts_of
from lockstep.report.live import Row, chosen_rows, print_completions
from lockstep.report.page.markup import Html
from lockstep.report.phases import PhaseClock
from lockstep.run.files.rollouts import kind_in_json

NAME = "completions"


def send_completions(rows: Sequence[Row], step: int, callbacks: Iterable[TrainerCallback]) -> None:
    """Send rows to each of the trackers among the trainer's callbacks."""
    columns, data = table_of(rows, step)
    for callback in callbacks:
        if isinstance(callback, WandbCallback):
            wandb = importlib.import_module("wandb")
            if wandb.run is not None:
                # The figures that follow commit the step.
                wandb.log(
                    {NAME: wandb.Table(columns=columns, data=data, allow_mixed_types=True)}, commit=False
                )
        elif isinstance(callback, TrackioCallback):
            trackio = importlib.import_module("trackio")
            trackio.log({NAME: trackio.Table(columns=columns, data=data)})
        elif isinstance(callback, TensorBoardCallback) and callback.tb_writer is not None:
            callback.tb_writer.add_text(NAME, markdown_of(columns, data), step)


def table_of(rows: Sequence[Row], step: int) -> tuple[list[str], list[list[Any]]]:
    """Column names and cells in TRL's order: `step`, `prompt`, `completion`, scores, extra values, `advantage`.

    Prompts that are messages, and extra values that are neither text nor number, become JSON. A missing score is None.
    """
    scores = list(dict.fromkeys(name for row in rows for name in row.scores))
    extras = list(dict.fromkeys(name for row in rows for name in row.extra))
    data = [
        [
            step,
            _cell(row.prompt),
            row.completion,
            *(row.scores.get(name) for name in scores),
            *(_cell(row.extra.get(name)) for name in extras),
            row.advantage,
        ]
        for row in rows
    ]
    return ["step", "prompt", "completion", *scores, *extras, "advantage"], data


def markdown_of(columns: Sequence[str], data: Sequence[Sequence[Any]]) -> str:
    """A table as TensorBoard shows it. Text of models is not read as markup."""
    lines = [" | ".join(map(_markdown, columns)), " | ".join("---" for _ in columns)]
    lines += [" | ".join(map(_markdown, row)) for row in data]
    return "\n".join(f"| {line} |" for line in lines)


def _cell(value: Any) -> Any:
    if value is None or isinstance(value, str | int | float):
        return value
    return json.dumps(value, ensure_ascii=False, default=kind_in_json)


def _markdown(value: Any) -> str:
    if value is None:
        return ""
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    marked = str(Html.escape(text)).replace("\\", "\\\\")
    for sign in "|*_`[]#~":
        marked = marked.replace(sign, f"\\{sign}")
    return "<br>".join(marked.splitlines())


def rows_of(generation: Generation) -> list[Row]:
    """One row per rollout. Its advantage is the mean over its tokens."""
    advantages: dict[str, list[float]] = {}
    for own in rollouts_of([s for batch in generation.micro_batches for s in batch]):
        advantages[own[0].rollout or own[0].name] = [a for s in own for a in s.advantages.tolist()]
    return [
        Row(
            group.prompt.source,
            r.text,
            r.scores,
            _mean(advantages.get(str(r.key), [])),
            r.extra,
            r.finish_reasons,
        )
        for group in generation.groups
        for r in group.rollouts
    ]


def _mean(values: list[float]) -> float:
    return sum(values) / max(len(values), 1)


def show_generation(
    generation: Generation | None, config: OnlineConfig, step: int, callbacks: Sequence[TrainerCallback]
) -> None:
    """Print the completions that `config` asks for, and send a table to the trackers among `callbacks`.

    As in TRL, `num_completions_to_print` is about what is printed; trackers get all rows.
    """
    if generation is None or not config.log_completions:
        return
    rows, unique = rows_of(generation), config.log_unique_prompts
    print_completions(chosen_rows(rows, config.num_completions_to_print, unique_prompts=unique), step)
    send_completions(chosen_rows(rows, None, unique_prompts=unique), step, callbacks)


# Figures that are summed over the steps of a log, like the seconds.
_COUNTS = ("parity/checked_tokens", "parity/aside_tokens", "sampling/tokens", "rewards/unscored_generations")
# Means over tokens, each with the figure that counts its tokens. Steps can have different numbers of tokens.
_BY_TOKEN = {"parity/mean_abs_gap": "parity/checked_tokens", "parity/k3": "parity/checked_tokens"}
# Every step notes this figure exactly once.
_OF_A_STEP = "parity/checked_tokens"


class StepLog:
    """Figures since the last log.

    Attributes:
        noted: the figures since the last log, by name, one entry per note.
        taken: the figures of the last log, without seconds.
    """

    def __init__(self) -> None:
        self.taken: dict[str, float] = {}
        self.noted: dict[str, list[float]] = defaultdict(list)
        self._latest: dict[str, float] = {}

    def note(self, figures: Mapping[str, float]) -> None:
        """Add the figures of a step or a generation."""
        for name, value in figures.items():
            self.noted[name].append(value)
        self._latest.update(figures)

    def latest(self) -> dict[str, float]:
        """The last figure of each name, also after `take` and `clear`."""
        return dict(self._latest)

    def values(self, name: str) -> list[float]:
        """All figures that were noted under a name since the last log, one entry per note."""
        return list(self.noted.get(name, ()))

    def take(self, clock: PhaseClock) -> dict[str, float]:
        """Means and sums of the notes, and seconds: `time/…` per phase, `step_time` per step. Clears the notes."""
        figures = self.taken = {
            name: self._figure(name, values) for name, values in self.noted.items() if values
        }
        seconds, steps = clock.take(), len(self.noted.get(_OF_A_STEP, ()))
        self.noted.clear()
        times = {f"time/{name}": value for name, value in seconds.items()}
        return figures | times | {"step_time": seconds["step"] / max(steps, 1)}

    def _figure(self, name: str, values: list[float]) -> float:
        if name in _COUNTS or name.endswith("/unscored"):
            return sum(values)
        weights = self.noted.get(_BY_TOKEN.get(name, ""), [1.0] * len(values))
        return sum(w * v for w, v in zip(weights, values, strict=True)) / max(sum(weights), 1.0)

    def clear(self) -> None:
        """Remove all notes since the last log."""
        self.noted.clear()
