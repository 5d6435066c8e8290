"""The pages of the site: short for users, and with code that can be copied."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
sys.path.insert(0, str(ROOT / "scripts"))
from site_hosts import loads  # noqa: E402

EVERY = sorted(DOCS.rglob("*.md"))
# Reference pages are as long as what they list; internals are for people who change Lockstep.
USERS = [page for page in EVERY if page.relative_to(DOCS).parts[0] not in ("reference", "internals")]
README = ROOT / "README.md"
FIELDS = json.loads((ROOT / "src/lockstep/cli/fields.json").read_text())
KNOWN = {command: {*FIELDS["shared"], *own} for command, own in FIELDS.items() if command != "shared"}
# Words that every command takes. `serve` passes on arguments of vLLM's server.
GENERAL = {"config", "dry_run", "help", "help_all", "version"}
BLOCK = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```", re.M | re.S)


def of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def words(page: Path) -> int:
    """The number of words of a page; the lines of tables are none."""
    return sum(any(sign.isalnum() for sign in word) for word in page.read_text(encoding="utf-8").split())


def blocks(page: Path, language: str) -> list[str]:
    return [text for name, text in BLOCK.findall(page.read_text(encoding="utf-8")) if name == language]


@pytest.mark.parametrize("page", USERS, ids=of)
def test_a_page_for_users_is_short(page: Path) -> None:
    assert words(page) < 800


def test_the_readme_is_short() -> None:
    assert words(README) < 700


@pytest.mark.parametrize("page", [*USERS, README], ids=of)
def test_python_of_a_page_compiles(page: Path) -> None:
    for text in blocks(page, "python"):
        compile(text, str(page), "exec")


@pytest.mark.parametrize("page", EVERY, ids=of)
def test_yaml_of_a_page_has_only_fields_that_exist(page: Path) -> None:
    fields = set().union(*KNOWN.values())
    for text in blocks(page, "yaml"):
        assert set(yaml.safe_load(text)) <= fields


@pytest.mark.parametrize("page", [*EVERY, README], ids=of)
def test_commands_of_a_page_have_only_fields_that_exist(page: Path) -> None:
    for text in blocks(page, "bash"):
        subprocess.run(["bash", "-n"], input=text, text=True, check=True, capture_output=True)
        for line in text.replace("\\\n", " ").splitlines():
            assert unknown_fields(line) == []


def unknown_fields(line: str) -> list[str]:
    """The `--field` words of a line that the command of `lockstep` in it does not take."""
    words = shlex.split(line, comments=True)
    at = next(
        (
            i
            for i, word in enumerate(words)
            if word in ("lockstep", ".venv/bin/lockstep", "lockstep.cli.main")
        ),
        None,
    )
    if at is None or (command := next(iter(words[at + 1 :]), "")) not in KNOWN:
        return []
    named = [word[2:].partition("=")[0].replace("-", "_") for word in words[at:] if word.startswith("--")]
    return [name for name in named if name not in KNOWN[command] | GENERAL]


def test_a_field_that_does_not_exist_is_noticed() -> None:
    assert unknown_fields("lockstep grpo --config x.yaml --learning_rat 1  # --nothing") == ["learning_rat"]
    assert unknown_fields("torchrun -m lockstep.cli.main grpo --beta=1 --bta 1") == ["bta"]


def test_every_page_is_in_the_menu() -> None:
    menu = yaml.compose((ROOT / "mkdocs.yml").read_text())
    named = {leaf for leaf in leaves(menu) if leaf.endswith(".md")}
    assert named == {str(page.relative_to(DOCS)) for page in EVERY}


def leaves(node: yaml.Node) -> list[str]:
    if isinstance(node, yaml.ScalarNode):
        return [node.value]
    parts = (
        node.value if isinstance(node, yaml.SequenceNode) else [part for pair in node.value for part in pair]
    )
    return [leaf for part in parts for leaf in leaves(part)]


def test_links_of_a_page_stay_within_the_site() -> None:
    outside = [
        (of(page), target)
        for page in EVERY
        for target in re.findall(r"\]\(([^)\s#]+)", page.read_text())
        if not target.startswith(("http://", "https://"))
        and not (page.parent / target).resolve().is_relative_to(DOCS)
    ]
    assert outside == []


def test_what_a_page_would_load_from_another_host_is_found() -> None:
    assert loads(
        '<link rel="stylesheet" href="https://fonts.example/a.css"><a href="https://b.example">b</a>'
    ) == ["https://fonts.example/a.css"]
    assert loads(
        '<script src="//c.example/x.js"></script><img src="figures/a.svg"><link rel="next" href="https://d">'
    ) == ["//c.example/x.js"]
