"""Writes the parts of docs/reference that are made from the code.

    .venv/bin/python scripts/reference_pages.py

| page | is made from |
|---|---|
| docs/reference/fields.md | `cli/fields/fields.json` and `cli/fields/groups.py` |
| docs/reference/proofs.md | the table of proofs in docs/internals/proof.md |
| the last table of docs/reference/faults.md | the faults of `lockstep verify --self-test` |

`tests/docs/test_reference_pages.py` fails if a page is not what this script writes.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from lockstep.cli.fields.description import FIELDS_FILE
from lockstep.cli.fields.groups import GROUPS, OTHERS
from lockstep.training.config.fields.trl import ONE_VALUE, UNSUPPORTED, WITHOUT_EFFECT

ROOT = Path(__file__).resolve().parents[1]
REFERENCE = ROOT / "docs" / "reference"
PROOF_PAGE = ROOT / "docs" / "internals" / "proof.md"
BEGIN, END = "<!-- injected faults: scripts/reference_pages.py -->", "<!-- end of injected faults -->"

FIELDS_HEAD = """\
# Fields

Each field can stand in a config file (`name: value`) and on the command line (`--name value`). The command line has priority. In
Python the fields are arguments of the method's config, for example `GRPOConfig(learning_rate=1e-6)`. Models, data, functions and
adapters are arguments of a trainer there, so their fields are for the command line only. `lockstep grpo --help` shows the common
fields, and `--dry_run` prints all fields with their values.

`scripts/reference_pages.py` makes this page from the code. Where commands have different defaults, the cell has all of them.
"""
PROOFS_HEAD = """\
# Proofs

Every proof is on by default. A failed proof stops the run before the optimizer step, and the error starts with the proof's name.
[When a proof fails](../troubleshooting/proofs.md) says what to do, [the proof](../internals/proof.md) has limits, costs and
measurements, and [known faults](faults.md) has the faults that the proofs must catch.

`scripts/reference_pages.py` makes this page from the table in the internals section.
"""


def pages() -> dict[Path, str]:
    """The text of each page that this script writes."""
    return {
        REFERENCE / "fields.md": fields_page(json.loads(FIELDS_FILE.read_text(encoding="utf-8"))),
        REFERENCE / "proofs.md": proofs_page(PROOF_PAGE.read_text(encoding="utf-8")),
        REFERENCE / "faults.md": faults_page((REFERENCE / "faults.md").read_text(encoding="utf-8")),
    }


def fields_page(described: dict[str, dict[str, Any]]) -> str:
    """One table per group of `--help`, without the fields that accept one value only."""
    commands = [command for command in described if command != "shared"]
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for command in commands:
        for name, entry in {**described["shared"], **described[command]}.items():
            found.setdefault(name, {})[command] = entry
    refused = {*ONE_VALUE, *UNSUPPORTED, *WITHOUT_EFFECT}
    grouped = {name for names in GROUPS.values() for name in names}
    groups = {**GROUPS, OTHERS: tuple(name for name in found if name not in grouped)}
    parts = [FIELDS_HEAD]
    for title, names in groups.items():
        rows = [
            row
            for name in names
            if name in found and name not in refused
            for row in _field_rows(name, found[name], commands)
        ]
        parts.append(f"## {title}\n\n| field | type | default | what it does | commands |\n|---|---|---|---|---|\n")
        parts[-1] += "\n".join(rows) + "\n"
    return "\n".join(parts)


def _field_rows(name: str, by_command: dict[str, dict[str, Any]], commands: list[str]) -> list[str]:
    """A row for each meaning that a field has in some commands."""
    by_meaning: dict[tuple[Any, ...], dict[str, dict[str, Any]]] = {}
    for command, entry in by_command.items():
        meaning = entry["type"], tuple(entry.get("choices", ())), entry["help"]
        by_meaning.setdefault(meaning, {})[command] = entry
    return [_field_row(name, own, commands) for own in by_meaning.values()]


def _field_row(name: str, by_command: dict[str, dict[str, Any]], commands: list[str]) -> str:
    entries = list(by_command.values())
    kind = " or ".join(f"`{choice}`" for choice in entries[0].get("choices", ())) or entries[0]["type"]
    defaults = dict.fromkeys(entry.get("default", "") for entry in entries)
    shown = ", ".join(f"`{value}`" for value in defaults if value) or "–"
    used = "all" if len(by_command) == len(commands) else ", ".join(f"`{command}`" for command in by_command)
    return f"| `{name}` | {_cell(kind)} | {_cell(shown)} | {_cell(entries[0]['help'])} | {used} |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")


def proofs_page(page: str) -> str:
    """A section per row of the table of proofs: what it shows, what it cannot show, and when it is made."""
    table = page.partition("## What is proven, and when")[2].partition("\n\n|")[2].partition("\n\n")[0]
    parts = [PROOFS_HEAD]
    for row in table.splitlines()[2:]:
        name, shows, not_shown, when, _ = (cell.strip() for cell in re.split(r"(?<!\\)\|", row.strip("|")))
        name = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", name)
        lines = [f"## {name}\n", f"- **Shows:** {shows}."]
        lines += [f"- **Does not show:** {not_shown}."] if not_shown else []
        lines += [f"- **When:** {when}.\n"]
        parts.append("\n".join(_moved(line) for line in lines))
    return "\n".join(parts)


def _moved(text: str) -> str:
    """Links of a page in docs/internals, as they are from docs/reference."""

    def there(match: re.Match[str]) -> str:
        target = match[1]
        if target.startswith("../reference/"):
            return f"]({target.removeprefix('../reference/')})"
        return f"](../internals/{'proof.md' if target.startswith('#') else ''}{target})"

    return re.sub(r"\]\(([^)\s]+)\)", there, text)


def faults_page(page: str) -> str:
    """The page with the table of the faults that the self-test injects."""
    before, _, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise SystemExit("docs/reference/faults.md has no marks for the table")
    rows = "\n".join(f"| {name} | {_cell(what)} |" for name, what in injected())
    return f"{before}{BEGIN}\n\n| fault | what is injected |\n|---|---|\n{rows}\n\n{END}{after}"


def injected() -> list[tuple[str, str]]:
    """Id and description of every fault of the self-test."""
    from lockstep.verify.self_test import ADAPTER_FAULTS, FAULTS, PICTURE_FAULTS, QUANTISED_FAULTS

    return [(fault.id, fault.what) for fault in (*FAULTS, *ADAPTER_FAULTS, *QUANTISED_FAULTS, *PICTURE_FAULTS)]


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
