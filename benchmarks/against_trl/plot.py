"""Draws how a step grows: milliseconds per sampled token, by phase, over number and length of completions."""

from __future__ import annotations

import statistics
from typing import Any

_COLOURS = {
    "generate": "#1f6feb",
    "forward_backward": "#d29922",
    "verify": "#3fb950",
    "sync": "#a371f7",
    "optimizer": "#f85149",
    "reference": "#8b949e",
    "rewards": "#39c5cf",
    "other": "#c9d1d9",
}
_WIDTH, _HEIGHT, _BAR, _MARGIN = 760, 300, 44, 50


def drawing(growth: dict[str, list[dict[str, Any]]]) -> str:
    """One bar per size, with one part per phase; both panels have the same scale."""
    bars = {name: _parts(steps) for name, steps in growth.items()}
    highest = max(sum(parts.values()) for parts in bars.values())
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{_HEIGHT}" '
        f'font-family="sans-serif" font-size="11">',
        f'<text x="{_MARGIN}" y="16">milliseconds a sampled token</text>',
    ]
    x, before = _MARGIN, ""
    for name, parts in bars.items():
        kind, number = name.rsplit("-", 1)
        if kind != before:
            x += 24 if before else 0
            titles = {"completions": "completions of 32 tokens", "length": "tokens of each of 8 completions"}
            lines.append(f'<text x="{x}" y="{_HEIGHT - 22}">{titles[kind]}</text>')
            before = kind
        y = float(_HEIGHT - 56)
        for phase, value in parts.items():
            height = (_HEIGHT - 100) * value / highest
            y -= height
            box = f'x="{x}" y="{y:.1f}" width="{_BAR}" height="{height:.1f}" fill="{_COLOURS[phase]}"'
            lines.append(f"<rect {box}><title>{phase}</title></rect>")
        lines.append(f'<text x="{x}" y="{y - 5:.1f}">{sum(parts.values()):.1f}</text>')
        lines.append(f'<text x="{x}" y="{_HEIGHT - 40}">{number}</text>')
        x += _BAR + 10
    for place, (phase, colour) in enumerate(_COLOURS.items()):
        left, shown = _MARGIN + 88 * place, phase.replace("forward_backward", "learn")
        lines.append(f'<rect x="{left}" y="{_HEIGHT - 14}" width="9" height="9" fill="{colour}"/>')
        lines.append(f'<text x="{left + 12}" y="{_HEIGHT - 5}">{shown}</text>')
    return "\n".join([*lines, "</svg>", ""])


def _parts(steps: list[dict[str, Any]]) -> dict[str, float]:
    """Milliseconds per sampled token, by phase."""
    parts: dict[str, float] = {}
    tokens = statistics.median(step["sampled_tokens"] for step in steps)
    for phase in _COLOURS:
        if phase == "other":
            spent = [step["step"] - sum(step["phases"].values()) for step in steps]
        else:
            spent = [step["phases"][phase] for step in steps]
        parts[phase] = 1000 * max(statistics.median(spent), 0.0) / tokens
    return parts
