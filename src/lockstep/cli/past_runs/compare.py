"""`lockstep compare RUN RUN …`: the settings in which runs differ, what they reached, and their curves, side by side.

Reads `run.json`, `summary.json` and `metrics.jsonl` of each run. A run that goes on, or was interrupted, has no summary yet.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.cli.words import WordParser
from lockstep.errors import InputError
from lockstep.report.page.run_record import SETTINGS
from lockstep.report.sparkline import sparkline
from lockstep.secret import without_secrets

# The curves, by metric, with their names.
CURVES = {
    "reward": "reward",
    "loss": "loss",
    "entropy": "entropy",
    "completions/mean_length": "length",
    "parity/mean_abs_gap": "mean gap",
    "grad_norm": "grad norm",
    "kl": "KL",
}
_WIDTH = 24


@dataclass(frozen=True, slots=True)
class PastRun:
    """The files of a run.

    Attributes:
        name: its directory, as the user named it.
        settings: the settings that decide what the run learns.
        summary: empty if the run has not ended.
        steps: the lines of its steps in `metrics.jsonl`.
    """

    name: str
    settings: Mapping[str, Any]
    summary: Mapping[str, Any]
    steps: Sequence[Mapping[str, Any]]


def compare_runs(words: list[str]) -> int:
    """Print the comparison.

    Raises:
        InputError: a directory holds no run, or its files cannot be read.
    """
    parser = WordParser(prog="lockstep compare", description=__doc__)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="output directory of a run")
    named = parser.parse_args(words).runs
    from lockstep.report.page.run_record import files_of_a_run

    with files_of_a_run(*map(Path, named)):
        runs = [read_past_run(Path(name)) for name in named]
        tables = sections(runs)
    from rich.table import Table

    from lockstep.report.terminal import Terminal

    console = Terminal()
    for title, rows in tables.items():
        table = Table(title=title, title_justify="left", title_style="bold")
        table.add_column("")
        for one in runs:
            table.add_column(one.name, overflow="fold")
        for label, cells in rows:
            table.add_row(label, *cells)
        if rows:
            console.print(table, markup=False)
        else:
            console.print(f"{title}: none", markup=False)
    return 0


def read_past_run(folder: Path) -> PastRun:
    """The files of a run; its settings are those of `run.json`, or of `about.json` after a run in Python.

    Raises:
        InputError: the directory holds no run, or its settings cannot be read.
    """
    from lockstep.report.page.run_record import read_run

    record, path = read_run(folder), folder / SETTINGS
    if not path.is_file() and not record.about:
        raise InputError(f"{folder} has no {SETTINGS}: is it the output directory of a run?")
    try:
        settings = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else record.about.get("settings", {})
        if not isinstance(settings, dict):
            raise ValueError("it holds no fields")
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read ({error})") from error
    return PastRun(str(folder), without_secrets(settings), record.summary, record.steps)


def sections(runs: Sequence[PastRun]) -> dict[str, list[tuple[str, list[str]]]]:
    """The tables, by title: rows of a label and one cell per run."""
    return {
        "settings that differ": differing(runs),
        "results": [(label, [value(one) for one in runs]) for label, value in _RESULTS.items()],
        "curves (one scale per row; first → last)": curves(runs),
    }


def differing(runs: Sequence[PastRun]) -> list[tuple[str, list[str]]]:
    """The settings that are not the same in all runs; `–` stands where a run has no such setting."""
    names = list(dict.fromkeys(name for one in runs for name in one.settings))
    rows = [(name, [_said(one.settings, name) for one in runs]) for name in names]
    return [(name, cells) for name, cells in rows if len(set(cells)) > 1]


def curves(runs: Sequence[PastRun]) -> list[tuple[str, list[str]]]:
    """The curves that at least one run has."""
    rows = []
    for metric, label in CURVES.items():
        found = [[step[metric] for step in one.steps if _is_number(step.get(metric))] for one in runs]
        every = [value for values in found for value in values]
        if every:
            low, high = min(every), max(every)
            rows.append((label, [_curve(values, low, high) for values in found]))
    return rows


def _curve(values: Sequence[float], low: float, high: float) -> str:
    if not values:
        return "–"
    count = min(len(values), _WIDTH)
    # The mean of each part, so that a long curve fits.
    parts = [values[i * len(values) // count : (i + 1) * len(values) // count] for i in range(count)]
    means = [sum(part) / len(part) for part in parts]
    return f"{sparkline(means, _WIDTH, low, high)} {values[0]:.3g} → {values[-1]:.3g}"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and value == value


def _said(settings: Mapping[str, Any], name: str) -> str:
    if name not in settings:
        return "–"
    value = settings[name]
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _interval(when: str) -> Callable[[PastRun], str]:
    def cell(one: PastRun) -> str:
        key = f"eval_reward_{when}"
        return f"{one.summary[key]:.3f} ± {one.summary[f'{key}_ci95']:.3f}" if key in one.summary else "–"

    return cell


def _summed(form: Callable[[Mapping[str, Any]], str]) -> Callable[[PastRun], str]:
    return lambda one: form(one.summary) if one.summary else "–"


_RESULTS: dict[str, Callable[[PastRun], str]] = {
    "state": lambda one: "finished" if one.summary else "not finished",
    "steps": lambda one: str(one.steps[-1]["step"]) if one.steps else "0",
    "held-out reward before": _interval("before"),
    "held-out reward after": _interval("after"),
    "mean reward, last tenth": lambda one: _last_rewards(one.steps),
    "tokens checked, failed": _summed(lambda s: f"{s['parity']['checked_tokens']}, {s['parity']['failed']}"),
    "gap, mean": _summed(lambda s: f"{s['parity']['mean_abs_gap']:.1e}"),
    "gap, largest": _summed(lambda s: f"{s['parity']['max_abs_gap']:.1e}"),
    "gap, closest to its limit": _summed(lambda s: s["parity"].get("closest_to_limit", {}).get("text", "–")),
    "seconds in all": _summed(lambda s: f"{s['wall_s']:.0f}"),
    "tokens per second": _summed(lambda s: f"{s['tokens_per_s']:.0f}"),
}


def _last_rewards(steps: Sequence[Mapping[str, Any]]) -> str:
    rewards = [step["reward"] for step in steps if _is_number(step.get("reward"))]
    last = rewards[-max(len(rewards) // 10, 1) :]
    return f"{sum(last) / len(last):.3f}" if last else "–"
