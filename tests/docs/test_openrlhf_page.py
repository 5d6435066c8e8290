"""The rows of docs/reference/migrating-from-openrlhf.md are true of our fields and commands and of OpenRLHF's flags.

`openrlhf_flags.json` has the flags of two releases with their defaults; `scripts/openrlhf_flags.py` makes it from
their packages.
"""

from __future__ import annotations

import ast
import json
import re
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any

import pytest

from lockstep import PPOConfig, ReinforcePPConfig
from lockstep.cli.fields import AdaptedRunArguments
from lockstep.cli.main import main

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "migrating-from-openrlhf.md"
CONFIGS = (ReinforcePPConfig, PPOConfig)
RELEASED = json.loads((Path(__file__).parent / "openrlhf_flags.json").read_text())
OLDER, DOTTED = "0.9.10", "0.11.2"


def cells(row: str) -> list[str]:
    return [cell.strip() for cell in row.strip().strip("|").split("|")]


def rows(section: str, *names: str) -> list[dict[str, str]]:
    text = PAGE.read_text().split(f"\n## {section}\n", 1)[1].split("\n## ", 1)[0]
    head, _, *lines = [line for line in text.splitlines() if line.startswith("|")]
    assert len(cells(head)) == len(names)
    return [dict(zip(names, cells(line), strict=True)) for line in lines]


NAMES = ("flag", "dotted", "default", "here", "default here", "what differs")
ROWS = [row for section in ("Method", "Sizes", "Optimizer, models, data") for row in rows(section, *NAMES)]
OF_RUNS = rows("Runs, machines, logs", "flag", "dotted", "here", "what differs")


def quoted(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def defaults(config: Any) -> dict[str, Any]:
    def default(f: Field[Any]) -> Any:
        return f.default_factory() if f.default_factory is not MISSING else f.default

    return {f.name: default(f) for f in fields(config) if f.init}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["flag"] or row["dotted"])
def test_what_a_row_says_of_lockstep_is_true(row: dict[str, str]) -> None:
    names = quoted(row["here"])
    assert names or row["here"] == "–"
    if row["default here"]:
        said = row["default here"].split(" · ")
        for config, cell in zip(CONFIGS, said * 2 if len(said) == 1 else said, strict=True):
            own = defaults(config)
            assert (cell == "–") == (names[0] not in own)
            assert cell == "–" or own[names[0]] == ast.literal_eval(cell.strip("`"))
    else:
        # Fields of the command line, whose defaults the page does not have.
        assert set(names) <= defaults(AdaptedRunArguments).keys()


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["flag"] or row["dotted"])
def test_fields_that_a_remark_names_are_fields(row: dict[str, str]) -> None:
    known = set().union(*(defaults(config) for config in (*CONFIGS, AdaptedRunArguments)))
    mine = row["what differs"].split("GRPO")[0].split("GSPO")[0].split("RLOO")[0]
    named = {name.split(":")[0] for name in quoted(mine) if re.fullmatch(r"[a-z_0-9]+(: \w+)?", name)}
    others = {"entropy", "prompt", "tis", "icepop", "token_truncate", "token_mask", "sequence_geometric_mask"}
    assert named - others <= known


@pytest.mark.parametrize("row", OF_RUNS, ids=lambda row: (row["flag"] or row["dotted"])[:40])
def test_a_row_on_runs_names_fields(row: dict[str, str]) -> None:
    known = set().union(*(defaults(config) for config in (*CONFIGS, AdaptedRunArguments)))
    assert set(quoted(row["here"])) <= known
    assert quoted(row["here"]) or row["here"] == "–"


def flags(cell: str) -> list[str]:
    """The flags of a cell, without the values that follow them."""
    return [quote.split()[0] for quote in quoted(cell)]


@pytest.mark.parametrize(("release", "column"), [(OLDER, "flag"), (DOTTED, "dotted")])
def test_the_page_has_every_released_flag_and_no_other(release: str, column: str) -> None:
    assert f"of {release}" in " ".join(PAGE.read_text().split())
    named = [flag for row in (*ROWS, *OF_RUNS) for flag in flags(row[column])]
    assert len(named) == len(set(named))
    estimator = {OLDER: "--advantage_estimator", DOTTED: "--algo.advantage.estimator"}[release]
    assert estimator in PAGE.read_text()
    assert {*named, estimator} == RELEASED[release].keys()


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["flag"] or row["dotted"])
def test_the_defaults_of_a_row_are_the_released_ones(row: dict[str, str]) -> None:
    said = row["default"].split(" (with dots ")
    for release, column, cell in ((OLDER, "flag", said[0]), (DOTTED, "dotted", said[-1])):
        values = [_plain(ast.literal_eval(value)) for value in quoted(cell)]
        names = flags(row[column])
        assert not names or values == [RELEASED[release][name] for name in names]


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


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
