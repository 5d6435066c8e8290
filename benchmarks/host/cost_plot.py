"""Draws the figures of `cost.py`: one bar per size. The parts of a bar are the rows of the table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

_COLOURS = (
    "#1f6feb",
    "#39c5cf",
    "#a371f7",
    "#f778ba",
    "#8b949e",
    "#d29922",
    "#3fb950",
    "#f85149",
    "#db6d28",
    "#56d364",
    "#c9d1d9",
    "#0a3069",
    "#9a6700",
)
_WIDTH, _HEIGHT, _BAR, _MARGIN = 760, 320, 70, 30


def drawing(figures: Mapping[str, Mapping[str, float]], rows: Sequence[str]) -> str:
    """An SVG of microseconds per sampled token.

    Args:
        figures: for each size, the microseconds by row.
        rows: the rows that are drawn, from bottom to top.
    """
    highest = max(sum(found[row] for row in rows) for found in figures.values())
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{_HEIGHT}" '
        f'font-family="sans-serif" font-size="11">',
        f'<text x="{_MARGIN}" y="16">microseconds per sampled token, by completions x tokens of each</text>',
    ]
    for place, (size, found) in enumerate(figures.items()):
        x, y = _MARGIN + place * (_BAR + 30), float(_HEIGHT - 30)
        for row, colour in zip(rows, _COLOURS, strict=True):
            height = (_HEIGHT - 80) * found[row] / highest
            y -= height
            box = f'x="{x}" y="{y:.1f}" width="{_BAR}" height="{height:.1f}" fill="{colour}"'
            lines.append(f"<rect {box}><title>{row}: {found[row]:.3f}</title></rect>")
        lines.append(f'<text x="{x}" y="{y - 5:.1f}">{sum(found[row] for row in rows):.2f}</text>')
        lines.append(f'<text x="{x}" y="{_HEIGHT - 14}">{size}</text>')
    left = _MARGIN + len(figures) * (_BAR + 30) + 10
    for place, (row, colour) in enumerate(zip(rows, _COLOURS, strict=True)):
        y = _HEIGHT - 40 - 20 * place
        lines.append(f'<rect x="{left}" y="{y}" width="10" height="10" fill="{colour}"/>')
        lines.append(f'<text x="{left + 16}" y="{y + 9}">{row}</text>')
    return "\n".join([*lines, "</svg>", ""])
