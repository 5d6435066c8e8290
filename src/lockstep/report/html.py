"""`report.html`: one self-contained page about a finished run.

It is made from the run's metrics, its summary, and the rollouts that were sampled before and after. It opens without a network.
"""

from __future__ import annotations

import functools
import html
from collections.abc import Sequence
from typing import Any

import plotly.io

from lockstep.report.pictures import STYLE as PICTURES_STYLE
from lockstep.report.pictures import name_of, render_pictures
from lockstep.report.turns import STYLE as TURNS_STYLE
from lockstep.report.turns import render_turns

Line = dict[str, Any]
# A figure as the JSON of plotly.js. plotly's classes for figures take a hundred times as long.
Figure = dict[str, Any]

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1000px; margin: 2em auto; padding: 0 1em; color: #1a1a1a; }
table { border-collapse: collapse; width: 100%; margin: 1em 0; }
td, th { border-bottom: 1px solid #ddd; padding: .35em .6em; text-align: left; vertical-align: top; }
.good { background: #e3f6e5; } .bad { background: #fbe9e7; } code { font-size: 13px; }
"""


def render_report(
    title: str, summary: Line, metrics: list[Line], before: list[Line], after: list[Line], turns: Sequence[Line] = ()
) -> str:
    """The page as HTML text.

    Args:
        metrics: lines of `metrics.jsonl`.
        before, after: rollouts that were sampled before and after training: `prompt`, `completions`, `rewards`.
        turns: rollouts to show turn by turn (`report/turns.py`).
    """
    steps = [line for line in metrics if "loss" in line]
    figures = [_rewards(steps), _lengths(steps), _gaps(steps), _times(steps)] if steps else []
    plots = "".join(
        plotly.io.to_html(figure, full_html=False, include_plotlyjs=index == 0, validate=False)
        for index, figure in enumerate(figures)
    )
    return (
        f"<!doctype html><html lang='en'><head><meta charset='utf-8'><title>{html.escape(title)}</title>"
        f"<style>{_STYLE}{TURNS_STYLE}{PICTURES_STYLE}</style></head><body><h1>{html.escape(title)}</h1>"
        f"{_numbers(summary)}{plots}{_rollouts(before, after)}{render_turns(list(turns))}</body></html>"
    )


@functools.cache
def _template() -> Line:
    template: Line = plotly.io.templates["simple_white"].to_plotly_json()
    return template


def _figure(traces: list[Line], title: str, axis: str, **layout: Any) -> Figure:
    """A figure over the steps. `axis` is the title of its y axis."""
    layout = {"xaxis": {"title": {"text": "step"}}, "yaxis": {"title": {"text": axis}}, **layout}
    return {"data": traces, "layout": {"title": {"text": title}, "template": _template(), "height": 320, **layout}}


def _line(steps: list[Line], title: str, axis: str, names: dict[str, str], log: bool = False) -> Figure:
    at = [s["step"] for s in steps]
    traces = [
        {"type": "scatter", "mode": "lines+markers", "name": label, "x": at, "y": [s.get(key) for s in steps]}
        for key, label in names.items()
    ]
    figure = _figure(traces, title, axis)
    if log:
        figure["layout"]["yaxis"] |= {"type": "log", "exponentformat": "power"}
    return figure


def _rewards(steps: list[Line]) -> Figure:
    parts = {k: k.split("/")[1] for k in steps[0] if k.startswith("rewards/") and k.endswith("/mean")}
    return _line(
        steps, "Reward of the training rollouts", "reward", {"reward": "reward", **(parts if len(parts) > 1 else {})}
    )


def _lengths(steps: list[Line]) -> Figure:
    names = {
        "completions/mean_length": "mean",
        "completions/max_length": "longest",
        "completions/min_length": "shortest",
    }
    return _line(steps, "Length of completions", "tokens", names)


def _gaps(steps: list[Line]) -> Figure:
    names = {"parity/mean_abs_gap": "mean |g|", "parity/max_abs_gap": "max |g|"}
    return _line(steps, "Parity gap between engine and trainer, every sampled token", "nats", names, log=True)


def _times(steps: list[Line]) -> Figure:
    at = [s["step"] for s in steps]
    traces = [
        {"type": "bar", "name": key.removeprefix("time/"), "x": at, "y": [s[key] for s in steps]}
        for key in steps[0]
        if key.startswith("time/") and key != "time/step"
    ]
    return _figure(traces, "Where the time goes", "seconds", barmode="stack")


def _numbers(summary: Line) -> str:
    rows = []
    for key, value in summary.items():
        for name, number in value.items() if isinstance(value, dict) else ((None, value),):
            label = f"{key}.{name}" if name else key
            shown = f"{number:.4g}" if isinstance(number, float) else str(number)
            rows.append(f"<tr><td><code>{html.escape(label)}</code></td><td>{html.escape(shown)}</td></tr>")
    return f"<h2>Summary</h2><table>{''.join(rows)}</table>"


def _rollouts(before: list[Line], after: list[Line]) -> str:
    if not before or not after:
        return ""
    later = {name_of(entry): entry for entry in after}
    rows = "".join(
        f"<tr><td>{render_pictures(entry)}{html.escape(entry['prompt'])}</td><td>{_completions(entry)}</td>"
        f"<td>{_completions(later[name_of(entry)])}</td></tr>"
        for entry in before
        if name_of(entry) in later
    )
    return (
        "<h2>Held-out rollouts, before and after</h2><table><tr><th>prompt</th><th>before</th><th>after</th></tr>"
        f"{rows}</table>"
    )


def _completions(entry: Line) -> str:
    best = max((reward for reward in entry["rewards"] if reward is not None), default=None)
    return "<br>".join(
        f"<span class='{'good' if reward is not None and reward == best and reward > 0 else 'bad'}'>{html.escape(text)}</span> "
        f"({'no score' if reward is None else f'{reward:g}'})"
        for text, reward in zip(entry["completions"], entry["rewards"], strict=True)
    )
