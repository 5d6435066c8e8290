"""Every field and option of every command, with what a user may give: the command starts with it, or says one sentence.

The sentence has at most 500 characters, names the field, and comes within seconds of the processor (`every_input.py`).
CI draws some hundred cases of one seed. `make nightly` draws thousands by its date (`LOCKSTEP_INPUT_SEED`).
"""

from __future__ import annotations

import os
import random
from collections import Counter

import pytest
from every_input import FIELDS, OPTIONS, Case, Place, options, pairs, singles, ways

SEED = int(os.environ.get("LOCKSTEP_INPUT_SEED", "20261128"))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return Place(tmp_path_factory.mktemp("every"))


def check_all(place: Place, cases: list[Case], capfd: pytest.CaptureFixture[str]) -> None:
    """Run the cases, print how many had which end, and fail with the faults of all of them."""
    counts: Counter[str] = Counter()
    wrong = []
    with capfd.disabled():
        for case in cases:
            found = place.run(case)
            counts[found.kind] += 1
            if found.faults:
                wrong.append(f"{case}\n    {', '.join(found.faults)}: {found.said.strip()[-300:]}")
    print(f"seed {SEED}: {dict(counts)}")
    assert not wrong, f"{len(wrong)} of {len(cases)} (seed {SEED}):\n" + "\n".join(wrong[:20])


def drawn(singles_each: int, pairs_each: int, options_in_all: int) -> list[Case]:
    draw = random.Random(SEED)
    cases = draw.sample([case for command in OPTIONS for case in options(command)], options_in_all)
    for command in FIELDS:
        cases += draw.sample(singles(command), singles_each) + pairs(command, draw, pairs_each)
    draw.shuffle(cases)
    return cases


def test_what_is_given_is_taken_or_refused_in_one_sentence(
    place: Place, capfd: pytest.CaptureFixture[str]
) -> None:
    check_all(place, drawn(10, 5, 30), capfd)


@pytest.mark.release
@pytest.mark.timeout(3600)
def test_whatever_is_drawn_is_taken_or_refused_in_one_sentence(
    place: Place, capfd: pytest.CaptureFixture[str]
) -> None:
    check_all(place, drawn(600, 250, 700), capfd)


def test_every_field_is_drawn_in_every_way() -> None:
    for command in FIELDS:
        assert {case.way for case in singles(command)} == set(ways(command))
