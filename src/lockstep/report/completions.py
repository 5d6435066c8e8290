"""Prints the last generation as a table: prompts, completions, scores, advantages, and values that reward functions logged.

The trainer makes plain rows from a generation. The table goes to the same output as the run's other lines.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from lockstep.report.terminal import Terminal
from lockstep.visible import visible


@dataclass(frozen=True, slots=True)
class Row:
    """One completion.

    Attributes:
        prompt: text, or messages with `role` and `content`.
        scores: score per reward function; None if the function gave none.
        extra: values that reward functions logged for the completion, by column.
        finish_reasons: the finish reason of each sampled turn.
    """

    prompt: Any
    completion: str
    scores: Mapping[str, float | None]
    advantage: float
    extra: Mapping[str, Any] = field(default_factory=dict)
    finish_reasons: Sequence[str] = ()


def chosen_rows(rows: Sequence[Row], count: int | None, *, unique_prompts: bool) -> list[Row]:
    """The rows to show.

    Args:
        count: largest number of rows, taken at even distances so that they cover many prompts; None for all.
        unique_prompts: whether to keep only the first row of every prompt.
    """
    kept = list(rows)
    if unique_prompts:
        first: dict[str, Row] = {}
        for row in rows:
            first.setdefault(repr(row.prompt), row)
        kept = list(first.values())
    if count is None or count >= len(kept):
        return kept
    return [kept[place * len(kept) // count] for place in range(count)]


def print_completions(rows: Sequence[Row], step: int, console: Terminal | None = None) -> None:
    """Print rows as one table, with a column for every score and every extra value that any row has, and one for the finish
    reasons of all turns if a row has several turns."""
    scores = list(dict.fromkeys(name for row in rows for name in row.scores))
    extras = list(dict.fromkeys(name for row in rows for name in row.extra))
    table = Table(expand=True, show_lines=True)
    table.add_column("Prompt", style="yellow")
    table.add_column("Completion", style="green")
    for name in (*scores, "Advantage"):
        table.add_column(Text(visible(name)), style="cyan", justify="right")
    ends = any(len(row.finish_reasons) > 1 for row in rows)
    for name in [*(["Finish reasons"] if ends else []), *extras]:
        table.add_column(Text(visible(name)))
    for row in rows:
        numbers = [_number(row.scores.get(name)) for name in scores] + [_number(row.advantage)]
        said = [Text(", ".join(row.finish_reasons))] if ends else []
        said += [_text(row.extra[name]) if name in row.extra else Text("") for name in extras]
        table.add_row(_text(row.prompt), _text(row.completion), *numbers, *said)
    (console or Terminal()).print(Panel(table, title=f"Step {step}", expand=False))


def _number(value: float | None) -> str:
    return "" if value is None or value != value else f"{value:.2f}"


def _text(value: Any) -> Text:
    # The cells are Text objects, because square brackets in a completion must not be read as markup.
    if isinstance(value, list) and value and all(isinstance(message, Mapping) for message in value):
        value = "\n\n".join(f"{str(m.get('role', '')).upper()}\n{m.get('content', '')}" for m in value)
    return Text(visible(str(value)))
