"""Write the list of faults in runs into docs/internals/proof.md, from the file that a self-test has written.

    lockstep verify --model NAME_DIR_OR_ID --self-test --json self_test.json
    python scripts/fault_table.py self_test.json

The list stands between two marks in the page. It has one line per proof, with the ids of the faults that the proof has
caught, in the first way in which a run uses its generations. What differs in another way stands behind it. Where more
than one optimizer step was taken with the fault, their number stands in brackets.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[1] / "docs" / "internals" / "proof.md"
BEGIN, END = "<!-- faults in runs: scripts/fault_table.py -->", "<!-- end of faults in runs -->"


def listed(verdicts: list[dict[str, Any]]) -> str:
    """The list in Markdown. A fault that no way of the file could inject is in no line."""
    run = [v for v in verdicts if v["way"] and v["id"] != "-"]
    ways = list(dict.fromkeys(v["way"] for v in run))
    injected = {v["id"] for v in run if not v["skipped"]}
    found: dict[str, dict[str, list[str]]] = {}
    for verdict in run:
        if verdict["id"] in injected:
            found.setdefault(outcome(verdict), {way: [] for way in ways})[verdict["way"]].append(
                named(verdict)
            )
    lines = [
        f"In runs with {ways[0]}, and in those with {', '.join(ways[1:])} where nothing else is said:",
        "",
    ]
    for name, ids in found.items():
        first, *others = (", ".join(faults) or "none" for faults in ids.values())
        differ = [
            f"; {way}: {faults}" for way, faults in zip(ways[1:], others, strict=True) if faults != first
        ]
        lines.append(f"- {name}: {first}{''.join(differ)}")
    return "\n".join(lines)


def outcome(verdict: dict[str, Any]) -> str:
    """Which proof caught the fault, or why it was not injected in this way."""
    if verdict["skipped"]:
        return f"left out: {verdict['skipped']}"
    return f"`{verdict['caught_by']}`" if verdict["caught_by"] else "**not caught**"


def named(verdict: dict[str, Any]) -> str:
    """The id of a fault, and how many optimizer steps were taken with it, if there was more than one."""
    return f"{verdict['id']} ({verdict['steps']})" if verdict["steps"] > 1 else verdict["id"]


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__)
    words.add_argument("file", type=Path)
    verdicts = json.loads(words.parse_args().file.read_text(encoding="utf-8"))["faults"]
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise SystemExit(f"{PAGE} has no marks for the list")
    PAGE.write_text(f"{before}{BEGIN}\n\n{listed(verdicts)}\n\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
