"""The rows of docs/migrating-from-openrlhf.md are true of Lockstep's fields and commands (nothing of OpenRLHF is tested)."""

from __future__ import annotations

import ast
import re
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any

import pytest

from lockstep import PPOConfig, ReinforcePPConfig
from lockstep.cli.fields.adapter import AdaptedRunArguments
from lockstep.cli.main import main

PAGE = Path(__file__).parents[2] / "docs" / "migrating-from-openrlhf.md"
CONFIGS = (ReinforcePPConfig, PPOConfig)


def cells(row: str) -> list[str]:
    return [cell.strip() for cell in row.strip().strip("|").split("|")]


def rows(section: str) -> list[dict[str, str]]:
    text = PAGE.read_text().split(f"\n## {section}\n", 1)[1].split("\n## ", 1)[0]
    head, _, *lines = [line for line in text.splitlines() if line.startswith("|")]
    names = ["flag", "dotted", "default", "here", "default here", "status", "what differs"]
    assert len(cells(head)) == len(names)
    return [dict(zip(names, cells(line), strict=True)) for line in lines]


ROWS = [row for section in ("Method", "Sizes", "Optimizer, models, data") for row in rows(section)]


def quoted(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def defaults(config: Any) -> dict[str, Any]:
    def default(f: Field[Any]) -> Any:
        return f.default_factory() if f.default_factory is not MISSING else f.default

    return {f.name: default(f) for f in fields(config) if f.init}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["flag"] or row["dotted"])
def test_what_a_row_says_of_lockstep_is_true(row: dict[str, str]) -> None:
    names = quoted(row["here"])
    assert row["status"] in {"same", "different", "not there"}
    assert (row["status"] == "not there") == (names == [])
    assert row["status"] == "same" or row["what differs"]
    if row["default here"]:
        said = row["default here"].split(" · ") if names else ["–", "–"]
        for config, cell in zip(CONFIGS, said, strict=True):
            own = defaults(config)
            assert (cell == "–") == (not names or names[0] not in own)
            if cell != "–":
                assert own[names[0]] == ast.literal_eval(cell.strip("`"))
                assert row["status"] != "same" or own[names[0]] == ast.literal_eval(quoted(row["default"])[0])
    else:
        own = defaults(AdaptedRunArguments)
        assert set(names) <= own.keys()
        assert row["status"] != "same" or own[names[0]] == ast.literal_eval(quoted(row["default"])[0])


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["flag"] or row["dotted"])
def test_fields_that_a_remark_names_are_fields(row: dict[str, str]) -> None:
    known = set().union(*(defaults(config) for config in (*CONFIGS, AdaptedRunArguments)))
    mine = row["what differs"].split("GRPO")[0].split("GSPO")[0].split("RLOO")[0]
    named = {name.split(":")[0] for name in quoted(mine) if re.fullmatch(r"[a-z_0-9]+(: \w+)?", name)}
    others = {"entropy", "prompt", "tis", "icepop", "token_truncate", "token_mask", "sequence_geometric_mask"}
    assert named - others <= known


def test_no_flag_has_two_rows() -> None:
    flags = [flag for row in ROWS for flag in quoted(row["flag"])]
    assert len(flags) == len(set(flags))


def commands() -> list[str]:
    text = PAGE.read_text()
    example = re.search(r"\n(lockstep [^…]+)…", text)
    assert example is not None
    return [*re.findall(r"\| `(lockstep [^`]+)` \|", text), example[1].replace("\\\n", " ")]


@pytest.mark.parametrize("command", commands())
def test_every_command_of_the_page_is_one(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = command.split()[1:]
    # A group needs two completions, and a run needs a folder; all other arguments are from the page.
    more = [] if "--num_generations" in words else ["--num_generations", "2"]
    assert main([*words, *more, "--output_dir", "unused", "--dry_run"]) == 0, capsys.readouterr().err
