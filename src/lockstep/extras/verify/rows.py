"""Results of `lockstep verify`: one row per proof, as a table for people and as JSON for programs."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from lockstep.files import replace_text
from lockstep.terminal import Terminal
from lockstep.watch.gap import GapStats, bounds, over_limits
from lockstep.watch.tolerances import Tolerance


@dataclass(frozen=True, slots=True)
class Row:
    """The result of one proof.

    Attributes:
        proof: name of the proof.
        figure: the measured value.
        limit: the allowed value.
        fix: what to change if the proof failed.
        details: figures for the JSON file only (for example every layer).
    """

    proof: str
    figure: str
    limit: str
    passed: bool
    fix: str = ""
    details: dict[str, Any] = field(default_factory=dict)


def gap_row(proof: str, gap: GapStats, limit: Tolerance, fix: str, note: str = "") -> Row:
    """A row for a parity gap."""
    passed = not over_limits(gap, limit)
    figure = f"mean {gap.mean_abs:.1e}, max {gap.max_abs:.1e}, k3 {gap.k3:.0e}, {gap.tokens} tokens{note}"
    allowed = ", ".join(f"{bound:.2g}" for bound in bounds(gap, limit))
    details = {
        "tokens": gap.tokens,
        "mean": gap.mean_abs,
        "max": gap.max_abs,
        "k3": gap.k3,
        "worst": gap.worst,
    }
    return Row(proof, figure, allowed, passed, "" if passed else fix, details)


def print_rows(rows: list[Row], console: Terminal) -> None:
    """Print the table, and below it what to change."""
    table = Table(box=None, pad_edge=False)
    for name in ("proof", "found", "limit", ""):
        table.add_column(name, overflow="fold")
    for row in rows:
        verdict = "[green]PASS" if row.passed else "[bold red]FAIL"
        table.add_row(row.proof, escape(row.figure), row.limit, verdict)
    console.print(table)
    failed = [row for row in rows if not row.passed]
    console.print(f"\n{len(rows)} proofs, {len(failed)} failed", highlight=False)
    for row in failed:
        found = f"\n[bold]{row.proof}[/]: {escape(row.figure)}"
        console.print(f"{found}\n  what to change: {escape(row.fix)}", highlight=False)


def write_json(path: Path, rows: list[Row], settings: dict[str, Any]) -> None:
    """Write the rows with their details, and the settings. Numbers that JSON cannot represent become text."""
    passed = all(row.passed for row in rows)
    content = {"passed": passed, "settings": settings, "rows": [asdict(row) for row in rows]}
    replace_text(path, json.dumps(_plain(content), indent=1, default=str) + "\n")


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
