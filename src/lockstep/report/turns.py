"""Rollouts in the report, turn by turn: what was sampled with the gap of each token, what was inserted, calls and results.

`training/run_files/shown_rollouts.py` makes the values.
"""

from __future__ import annotations

import html
import math
from typing import Any

from lockstep.report.pictures import render_pictures

Line = dict[str, Any]

STYLE = """
.turns { border: 1px solid #ddd; border-radius: 6px; padding: .6em .9em; margin: 1em 0; overflow-wrap: anywhere; }
.turns pre { white-space: pre-wrap; margin: .2em 0 .6em; font-size: 13px; line-height: 1.6; }
.turns small { color: #555; } .inserted { background: #ececf4; color: #444; } .failed { color: #b00020; }
.scale span, .sampled span { border-radius: 2px; }
"""
# Colours from a gap of 1e-7 nats or less to one of 1 nat or more, one per factor of ten.
_COLOURS = ("#e3f6e5", "#d5f0cf", "#e4f0b8", "#f5eda6", "#fbdc93", "#fbc284", "#f7a07a", "#ef7b6f")
_SMALLEST = -7


def render_turns(rollouts: list[Line]) -> str:
    """The section of the report as HTML; empty without rollouts."""
    if not rollouts:
        return ""
    steps = "".join(
        f"<span style='background:{colour}'>&nbsp;1e{_SMALLEST + place:+d}&nbsp;</span>"
        for place, colour in enumerate(_COLOURS)
    )
    return (
        "<h2>Turns of held-out rollouts, after training</h2><p>Coloured text was sampled, and training learns from such text. The "
        "colour is the gap |g| between engine and trainer in nats; point at a token to see the value. Grey text is a prompt or was "
        "inserted: the policy does not learn from it.</p>"
        f"<p class='scale'>{steps} <span class='inserted'>&nbsp;inserted&nbsp;</span></p>"
        + "".join(_rollout(rollout) for rollout in rollouts)
    )


def _rollout(rollout: Line) -> str:
    reward = "no reward" if rollout["reward"] is None else f"reward {rollout['reward']:g}"
    failed = f" <b class='failed'>failed: {html.escape(rollout['failed'])}</b>" if rollout["failed"] else ""
    calls = "".join(f"<li>{html.escape(line)}</li>" for line in rollout["calls"])
    count = len(rollout["branches"])
    branches = "".join(
        _branch(branch, f"branch {n + 1} of {count}" if count > 1 else "prompt")
        for n, branch in enumerate(rollout["branches"])
    )
    reasons = ", ".join(rollout["finish_reasons"])
    return (
        f"<div class='turns'><b>{html.escape(rollout['name'])}</b> · {reward} · finish reason of each answer: {reasons}{failed}"
        f"{render_pictures(rollout)}{branches}"
        f"{f'<small>tool calls and results</small><ul>{calls}</ul>' if calls else ''}</div>"
    )


def _branch(branch: Line, title: str) -> str:
    parts = [f"<div><small>{title}</small><pre class='inserted'>{html.escape(branch['prompt'])}</pre>"]
    turn = 0
    for span in branch["spans"]:
        if "text" in span:
            parts.append(f"<small>inserted</small><pre class='inserted'>{html.escape(span['text'])}</pre>")
            continue
        turn += 1
        worst = max(map(abs, span["gaps"]), default=0.0)
        parts.append(
            f"<small>turn {turn}, sampled: {len(span['tokens'])} tokens, largest gap {worst:.1e}, finish reason "
            f"{span['finish_reason'] or 'unknown'}</small>"
            f"<pre class='sampled'>{''.join(map(_token, span['tokens'], span['gaps']))}</pre>"
        )
    return "".join(parts) + f"<small>ends with: {branch['finish_reason']}</small></div>"


def _token(text: str, gap: float) -> str:
    size = math.floor(math.log10(abs(gap))) if gap else _SMALLEST
    colour = _COLOURS[min(max(size - _SMALLEST, 0), len(_COLOURS) - 1)]
    return f"<span style='background:{colour}' title='gap {gap:.2e}'>{html.escape(text)}</span>"
