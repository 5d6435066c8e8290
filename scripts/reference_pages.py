"""Writes what is made from the code: parts of docs/reference, and the fields that the command line reads.

    .venv/bin/python scripts/reference_pages.py

| page | is made from |
|---|---|
| cli/fields.json, docs/reference/fields.md | the fields of the configs, as their classes declare them |
| docs/reference/proofs.md | the docstrings of the files that make the proofs (a block "Proof …" each) |
| the last list of docs/reference/faults.md | the faults of `lockstep verify --self-test` |

`tests/docs/test_reference_pages.py` fails if a page is not what this script writes.
"""

from __future__ import annotations

import ast
import re
import textwrap
from pathlib import Path
from typing import Any, NamedTuple

from lockstep.cli.describe import as_text, describe
from lockstep.cli.help import FIELDS_FILE, grouped
from lockstep.config.effect import without_effect
from lockstep.config.option import OTHERS

ROOT = Path(__file__).resolve().parents[1]
REFERENCE = ROOT / "docs" / "reference"
SOURCE = ROOT / "src" / "lockstep"
BEGIN, END = "<!-- injected faults: scripts/reference_pages.py -->", "<!-- end of injected faults -->"

FIELDS_HEAD = """\
# Fields

A field stands in a config file (`name: value`), on the command line (`--name value`, which has priority), or in
Python in the method's config (`GRPOConfig(learning_rate=1e-6)`). Models, data, functions and adapters are arguments
of a trainer there. `--dry_run` prints all fields with their values.

In brackets are the type and the defaults, of all commands where they differ. Commands at the end of a line: the
field is theirs only; `gateway` and `verify` take what `grpo` takes. `scripts/reference_pages.py` makes this page
from the code.
"""
OTHERS_HEAD = """\
These mean what they mean in `transformers.TrainingArguments`, where they are described; `lockstep grpo --help-all` has
the texts. [What differs](migrating-from-trl.md#config-fields)."""
PROOFS_HEAD = """\
# Proofs

Every proof is on by default. A failed proof stops the run before the optimizer step, and the error starts with its
name. Each section says what a proof shows, what it does not show, and when and where it is made, in the order of a
run. [When a proof fails](../troubleshooting/proofs.md) says what to do; [the proof](../internals/proof.md) has
limits, costs and measurements; [known faults](faults.md) has the faults that proofs must catch.
`scripts/reference_pages.py` makes this page from docstrings.
"""
# Choices of a field that stand on the page; fields with more are transformers' own.
MANY = 12
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
    """One list per group of `--help`, without fields that accept one value only; transformers' own fields by name."""
    commands = [command for command in described if command != "shared"]
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for command in commands:
        for name, entry in {**described["shared"], **described[command]}.items():
            found.setdefault(name, {})[command] = entry
    parts = [FIELDS_HEAD]
    groups = grouped({name: next(iter(entries.values())) for name, entries in found.items()})
    others = ", ".join(f"`{name}`" for name in groups.pop(OTHERS))
    for title, names in groups.items():
        rows = [row for name in names for row in _field_rows(name, found[name], commands)]
        parts.append(f"## {title}\n\n" + "\n".join(rows) + "\n")
    return "\n".join([*parts, f"## {OTHERS}\n\n{OTHERS_HEAD}\n\n{_wrapped(others)}\n"])


def _field_rows(name: str, by_command: dict[str, dict[str, Any]], commands: list[str]) -> list[str]:
    """A row for each meaning that a field has in some commands."""
    by_meaning: dict[tuple[Any, ...], dict[str, dict[str, Any]]] = {}
    for command, entry in by_command.items():
        meaning = entry["type"], tuple(entry.get("choices", ())), entry["help"]
        by_meaning.setdefault(meaning, {})[command] = entry
    return [_field_row(name, own, commands) for own in by_meaning.values()]


def _field_row(name: str, by_command: dict[str, dict[str, Any]], commands: list[str]) -> str:
    entries = list(by_command.values())
    choices = entries[0].get("choices", ())
    kind = ", ".join(f"`{choice}`" for choice in choices) or entries[0]["type"]
    if len(choices) > MANY:
        kind = f"one of {len(choices)} names of transformers"
    defaults = dict.fromkeys(entry.get("default", "") for entry in entries)
    shown = "; " + ", ".join(f"`{value}`" for value in defaults if value) if any(defaults) else ""
    beside = {"gateway", "verify"} if {"grpo", "gateway", "verify"} <= by_command.keys() else set()
    own = ", ".join(f"`{command}`" for command in by_command if command not in beside)
    used = "" if len(by_command) == len(commands) else f" [{own}]"
    does = entries[0]["help"].replace("<", "&lt;").replace("\n", " ")
    if conditions := entries[0].get("only_with"):
        does += f" {without_effect(conditions)}"
    return _wrapped(f"- `{name}` ({kind}{shown}): {does}{used}")


def proofs_page(source: Path) -> str:
    """A section per moment of a run, and in it what each proof shows, what it cannot show, and which file makes it.

    Raises:
        SystemExit: a proof can fail and no docstring says what it shows, or a docstring describes a proof that cannot
            fail.
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
            lines = [f"### {block.title}\n", f"{block.shows[0].upper()}{block.shows[1:]}\n"]
            lines += [f"- Not shown: {block.not_shown}"] if block.not_shown else []
            lines += [f"- When: {block.when} (`{block.file}`)\n"]
            parts.append("\n".join(_wrapped(_linked(line)) for line in lines))
    return "\n".join(parts)


def blocks_of(docstring: str, file: str) -> list[Block]:
    """The blocks of a file's docstring."""
    found = []
    for paragraph in docstring.split("\n\n"):
        if match := BLOCK.fullmatch(paragraph):
            title, shows, not_shown, when = (text and " ".join(text.split()) for text in match.groups())
            found.append(Block(title, shows, not_shown, when, file))
        elif re.match(r"Proof .*`\.$", paragraph.partition("\n")[0]):
            raise SystemExit(
                f"{file}: a block has the lines Proof, Shows, Does not show (can be left out) and When"
            )
    return found


def raised_in(tree: ast.Module) -> set[str]:
    """The names in `ProofError("name", …)`."""
    calls = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "ProofError"
    ]
    names = [call.args[0] for call in calls if call.args]
    return {name.value for name in names if isinstance(name, ast.Constant)}


def _linked(text: str) -> str:
    """Pages that a docstring names, as links from docs/reference."""

    def link(match: re.Match[str]) -> str:
        page, anchor = match.groups()
        there = page.removeprefix("reference/") if page.startswith("reference/") else f"../{page}"
        return f"[{'more' if anchor else page.rpartition('/')[2]}]({there}{anchor or ''})"

    return re.sub(r"\bdocs/([\w/-]+\.md)(#[\w-]+)?", link, text)


def _wrapped(text: str) -> str:
    """A paragraph, or an entry of a list, in lines of prose. A line break at its end stays."""
    indent = "  " if text.startswith("- ") else ""
    lines = textwrap.fill(text, 118, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
    return lines + "\n" * text.endswith("\n")


def faults_page(page: str) -> str:
    """The page with the list of the injected faults that have no row of their own above it."""
    before, _, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise SystemExit("docs/reference/faults.md has no marks for the list")
    above = set(re.findall(r"^\| ([A-Z]\d+) \|", before, re.M))
    lines = "\n".join(f"- {name}: {what}" for name, what in injected() if name not in above)
    return f"{before}{BEGIN}\n\n{lines}\n\n{END}{after}"


def injected() -> list[tuple[str, str]]:
    """Id and description of every fault of the self-test."""
    from lockstep.extras.fp8.quantised_faults import QUANTISED_FAULTS
    from lockstep.extras.lora_alone.adapter_faults import ADAPTER_FAULTS
    from lockstep.extras.selftest.picture_faults import PICTURE_FAULTS
    from lockstep.extras.selftest.self_test import FAULTS

    return [
        (fault.id, fault.what) for fault in (*FAULTS, *ADAPTER_FAULTS, *QUANTISED_FAULTS, *PICTURE_FAULTS)
    ]


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
