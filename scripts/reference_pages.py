"""Writes what is made from the code: parts of docs/reference, and the fields that the command line reads.

    .venv/bin/python scripts/reference_pages.py

| page | is made from |
|---|---|
| cli/fields/fields.json, docs/reference/fields.md | the fields of the configs, as their classes declare them |
| docs/reference/proofs.md | the docstrings of the files that make the proofs (a block "Proof …" each) |
| the last table of docs/reference/faults.md | the faults of `lockstep verify --self-test` |

`tests/docs/test_reference_pages.py` fails if a page is not what this script writes.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any, NamedTuple

from lockstep.cli.fields.describe import as_text, describe
from lockstep.cli.fields.description import FIELDS_FILE, grouped

ROOT = Path(__file__).resolve().parents[1]
REFERENCE = ROOT / "docs" / "reference"
SOURCE = ROOT / "src" / "lockstep"
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

`scripts/reference_pages.py` makes this page from the docstrings of the files that make the proofs, in the order of a run.
"""
# When a proof is made, in the order of a run, and the words by which its `When` says so.
MOMENTS = {
    "At start": r"start|before the first sample",
    "Every push": r"push|wake",
    "Every request": r"request",
    "Every rollout": r"rollout|completion|tool call",
    "Every generation": r"generation",
    "Every evaluation": r"evaluation",
    "Every micro-batch": r"micro-batch|pack|backward",
    "Every optimizer step": r"step|change of the policy",
    "Every checkpoint": r"checkpoint",
}
BLOCK = re.compile(r"Proof ([^\n]+)\.\nShows: (.+?)(?:\nDoes not show: (.+?))?\nWhen: (.+)", re.S)


class Block(NamedTuple):
    """What the docstring of `file` says of a proof. `title` has the names with which it fails."""

    title: str
    shows: str
    not_shown: str | None
    when: str
    file: str

    @property
    def names(self) -> set[str]:
        return set(re.findall(r"`(\w+)`", self.title))

    @property
    def moment(self) -> str:
        """The moment that `when` names first."""
        found = {moment: re.search(rf"\b(?:{words})", self.when) for moment, words in MOMENTS.items()}
        places = {moment: match.start() for moment, match in found.items() if match}
        if not places:
            raise SystemExit(f"{self.file}: proof {self.title} is made at no moment of a run: {self.when}")
        return min(places, key=lambda moment: places[moment])


def pages() -> dict[Path, str]:
    """The text of each page that this script writes."""
    described = describe()
    return {
        FIELDS_FILE: as_text(described),
        REFERENCE / "fields.md": fields_page(described),
        REFERENCE / "proofs.md": proofs_page(SOURCE),
        REFERENCE / "faults.md": faults_page((REFERENCE / "faults.md").read_text(encoding="utf-8")),
    }


def fields_page(described: dict[str, dict[str, Any]]) -> str:
    """One table per group of `--help`, without the fields that accept one value only."""
    commands = [command for command in described if command != "shared"]
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for command in commands:
        for name, entry in {**described["shared"], **described[command]}.items():
            found.setdefault(name, {})[command] = entry
    parts = [FIELDS_HEAD]
    for title, names in grouped({name: next(iter(entries.values())) for name, entries in found.items()}).items():
        rows = [row for name in names for row in _field_rows(name, found[name], commands)]
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


def proofs_page(source: Path) -> str:
    """A section per moment of a run, and in it what each proof shows, what it cannot show, and which file makes it.

    Raises:
        SystemExit: a proof can fail and no docstring says what it shows, or a docstring describes a proof that cannot fail.
    """
    blocks, raised = [], {}
    for path in sorted(source.rglob("*.py")):
        tree, file = ast.parse(path.read_text(encoding="utf-8")), path.relative_to(source).as_posix()
        blocks += blocks_of(ast.get_docstring(tree) or "", file)
        raised |= dict.fromkeys(raised_in(tree), file)
    described = {name: block.file for block in blocks for name in block.names}
    for name in sorted(raised.keys() - described.keys()):
        raise SystemExit(f"{raised[name]} raises `{name}`, and no docstring has the block: Proof `{name}`.")
    for name in sorted(described.keys() - raised.keys()):
        raise SystemExit(f"{described[name]} describes `{name}`, and nothing raises it")
    parts = [PROOFS_HEAD]
    for moment in MOMENTS:
        parts.append(f"## {moment}\n")
        for block in sorted((b for b in blocks if b.moment == moment), key=lambda b: b.title.strip("`")):
            lines = [f"### {block.title}\n", f"- **Shows:** {block.shows}"]
            lines += [f"- **Does not show:** {block.not_shown}"] if block.not_shown else []
            lines += [f"- **When:** {block.when}", f"- **File:** `{block.file}`\n"]
            parts.append("\n".join(_linked(line) for line in lines))
    return "\n".join(parts)


def blocks_of(docstring: str, file: str) -> list[Block]:
    """The blocks of a file's docstring."""
    found = []
    for paragraph in docstring.split("\n\n"):
        if match := BLOCK.fullmatch(paragraph):
            title, shows, not_shown, when = (text and " ".join(text.split()) for text in match.groups())
            found.append(Block(title, shows, not_shown, when, file))
        elif re.match(r"Proof .*`\.$", paragraph.partition("\n")[0]):
            raise SystemExit(f"{file}: a block has the lines Proof, Shows, Does not show (can be left out) and When")
    return found


def raised_in(tree: ast.Module) -> set[str]:
    """The names in `ProofError("name", …)`."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) == "ProofError"]
    names = [call.args[0] for call in calls if call.args]
    return {name.value for name in names if isinstance(name, ast.Constant)}


def _linked(text: str) -> str:
    """Pages that a docstring names, as links from docs/reference."""

    def link(match: re.Match[str]) -> str:
        page, anchor = match.groups()
        there = page.removeprefix("reference/") if page.startswith("reference/") else f"../{page}"
        return f"[{'more' if anchor else page.rpartition('/')[2]}]({there}{anchor or ''})"

    return re.sub(r"\bdocs/([\w/-]+\.md)(#[\w-]+)?", link, text)


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
