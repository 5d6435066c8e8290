"""`make newcomer` types every command of the pages, and `--short` types each of them in some form or names it."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "scripts"))

import newcomer
from newcomer import PAGES, commands_of, data_of, files_of, row_of, steps

ROOT = Path(__file__).parents[2]
TEXTS = {name: (ROOT / page).read_text() for name, page in PAGES.items()}


def test_the_commands_of_a_page_are_found_in_blocks_and_in_sentences() -> None:
    page = """
Type `make train`, or `lockstep demo`. A field is `--max_steps`.

```bash
# a comment
lockstep                     # what to do next
lockstep grpo --model_name_or_path PATH_OR_HUB_ID \\
    --seed 2
lockstep demo
```

```python
# rewards.py
lockstep = 1
```
"""
    found = [
        "make train",
        "lockstep demo",
        "lockstep",
        f"lockstep grpo --model_name_or_path {newcomer.MODEL} --seed 2",
    ]
    assert commands_of(page) == found
    assert files_of(page) == {"rewards.py": "# rewards.py\nlockstep = 1\n"}


def test_every_command_line_of_a_block_is_typed_in_full() -> None:
    typed = {step.line for step in steps(TEXTS)[0]}
    for text in TEXTS.values():
        lines = [
            line for block in re.findall(r"```bash\n(.*?)```", text, re.S) for line in block.splitlines()
        ]
        for line in lines:
            words = line.partition("#")[0].replace("PATH_OR_HUB_ID", newcomer.MODEL).rstrip("\\ ")
            if words and not words.startswith((" ", "pip ")):
                assert any(one.startswith(words) for one in typed), line
    # Nothing is left out, and no command is shortened.
    assert steps(TEXTS)[1] == []
    assert {
        f"lockstep verify --model {newcomer.MODEL}",
        f"lockstep verify --model {newcomer.MODEL} --self-test",
    } <= typed
    assert {"make train", "make train-agent", "lockstep demo"} <= typed
    assert not [line for line in typed if newcomer.FEW in line]


def test_the_short_newcomer_types_or_names_every_command() -> None:
    typed, left_out = steps(TEXTS, short=True)
    lines = [step.line for step in typed]
    for text in TEXTS.values():
        for command in commands_of(text):
            short = row_of(command).short
            assert (
                row_of(command).installs or command in left_out or (short and short.format(command) in lines)
            )
    assert left_out == [f"lockstep verify --model {newcomer.MODEL}{more}" for more in ("", " --self-test")]


def test_a_new_command_on_a_page_needs_a_row() -> None:
    new = "\n```bash\nlockstep audit rollouts.jsonl\n```\n"
    with pytest.raises(ValueError, match="no row of COMMANDS fits 'lockstep audit"):
        steps({**TEXTS, "readme": TEXTS["readme"] + new})
    with pytest.raises(ValueError, match="no row of COMMANDS fits 'make bench'"):
        steps({**TEXTS, "readme": TEXTS["readme"] + "\nOr `make bench`.\n"})


def test_every_row_is_of_a_command_of_a_page() -> None:
    used = {row_of(command).begin for text in TEXTS.values() for command in commands_of(text)}
    assert used == {row.begin for row in newcomer.COMMANDS}


def test_the_files_of_the_pages_fit_their_commands() -> None:
    assert set(files_of(TEXTS["readme"])) == {"rewards.py"}
    assert set(files_of(TEXTS["first_task"])) == {"rewards.py", "fruit.yaml"}
    assert len(data_of(TEXTS["first_task"]).splitlines()) == newcomer.ROWS
