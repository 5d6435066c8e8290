"""Sends the table of `log_completions` to trackers: Weights & Biases, trackio and TensorBoard.

The rows are given just before the trainer sends the figures of the same log. The trackers are those that
`transformers.Trainer` has opened for `report_to`.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterable, Sequence
from typing import Any

from transformers import TrainerCallback
from transformers.integrations import TensorBoardCallback, TrackioCallback, WandbCallback

from lockstep.report.completions import Row
from lockstep.report.page.markup import Html
from lockstep.run.files.rollout_files import kind_in_json

NAME = "completions"


def send_completions(rows: Sequence[Row], step: int, callbacks: Iterable[TrainerCallback]) -> None:
    """Send rows to each of the trackers among the trainer's callbacks."""
    columns, data = table_of(rows, step)
    for callback in callbacks:
        if isinstance(callback, WandbCallback):
            wandb = importlib.import_module("wandb")
            if wandb.run is not None:
                # The figures that follow commit the step.
                wandb.log({NAME: wandb.Table(columns=columns, data=data, allow_mixed_types=True)}, commit=False)
        elif isinstance(callback, TrackioCallback):
            trackio = importlib.import_module("trackio")
            trackio.log({NAME: trackio.Table(columns=columns, data=data)})
        elif isinstance(callback, TensorBoardCallback) and callback.tb_writer is not None:
            callback.tb_writer.add_text(NAME, markdown_of(columns, data), step)


def table_of(rows: Sequence[Row], step: int) -> tuple[list[str], list[list[Any]]]:
    """Column names and cells, in TRL's order: `step`, `prompt`, `completion`, the scores, the extra values, `advantage`.

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
