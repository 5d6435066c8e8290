"""Write the table of faults in runs into docs/internals/proof.md, from the file that a self-test has written.

    lockstep verify --model NAME_DIR_OR_ID --self-test --json self_test.json
    python scripts/fault_table.py self_test.json

The table stands between two marks in the page. It has one row per fault, and one column per way in which a run uses its
generations.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[1] / "docs" / "internals" / "proof.md"
BEGIN, END = "<!-- faults in runs: scripts/fault_table.py -->", "<!-- end of faults in runs -->"


def table(verdicts: list[dict[str, Any]]) -> str:
    """The table in Markdown. A fault that no way of the file could inject has no row."""
    ways = list(dict.fromkeys(v["way"] for v in verdicts if v["way"]))
    cells = {(v["id"], v["way"]): cell(v) for v in verdicts if v["way"]}
    names = {v["id"]: v["what"] for v in verdicts if v["way"] and v["id"] != "-"}
    shown = [name for name in names if any(not cells[name, way].startswith("left out") for way in ways)]
    lines = [f"| fault | injected | {' | '.join(ways)} |", f"|---|---|{'---|' * len(ways)}"]
    lines += [f"| {name} | {names[name]} | {' | '.join(cells[name, way] for way in ways)} |" for name in shown]
    return "\n".join(lines)


def cell(verdict: dict[str, Any]) -> str:
    """Which proof caught the fault, and after how many optimizer steps that were taken with it."""
    if verdict["skipped"]:
        return f"left out: {verdict['skipped']}"
    if not verdict["caught_by"]:
        return "**not caught**"
    return f"`{verdict['caught_by']}`, {verdict['steps']}"


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__)
    words.add_argument("file", type=Path)
    verdicts = json.loads(words.parse_args().file.read_text(encoding="utf-8"))["faults"]
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise SystemExit(f"{PAGE} has no marks for the table")
    PAGE.write_text(f"{before}{BEGIN}\n\n{table(verdicts)}\n\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
