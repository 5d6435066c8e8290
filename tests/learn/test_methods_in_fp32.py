"""The loss and gradients of every method in fp32, a run's precision, are within 1e-5 of the padded reference."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from drawn import attending_by_trees, check, config, shapes
from draws import hold
from hypothesis import strategies as st
from method_variants import FIRST, VARIANTS, fit, sizes_of
from portions import portion
from subjects import ARCHITECTURES, ROWS, in_single

pytestmark = pytest.mark.usefixtures("trees")

SUBJECTS = {kind: in_single(kind) for kind in ARCHITECTURES | ROWS}


@pytest.fixture(scope="module")
def trees() -> Iterator[None]:
    with attending_by_trees():
        yield


def shape_of(size: int) -> dict[str, Any]:
    """Groups with different, equal and missing rewards; packs that contain parts of several groups."""
    groups = 4
    count = groups * size
    rewards: list[list[float | None]] = [[float((3 * i + g) % 4) for i in range(size)] for g in range(groups)]
    rewards[1] = [1.0] * size
    rewards[2][-1] = None
    return {
        "size": size,
        "steps": 1,
        "micro": 2,
        "rewards": rewards,
        "lengths": [1 + (7 * i) % 24 for i in range(count)],
        "holes": [[2, 0, 5][: i % 4] for i in range(count)],
        "cut": [i % 3 == 0 for i in range(count)],
        "prompts": [3, 30, 11, 20],
        "moved": True,
        "scored": False,
        "budget": 160,
        "chunk": 50,
        "seed": 3,
    }


KINDS = sorted(ARCHITECTURES)
# CI takes the architectures in turn; `test_methods.py` has every variant on all of them, in double precision.
CASES = [
    pytest.param(name, kind, marks=[] if (number + place) % len(KINDS) == 0 else [pytest.mark.release])
    for number, name in enumerate(VARIANTS)
    for place, kind in enumerate(KINDS)
]


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_loss_and_gradients_are_within_1e_5_of_the_padded_reference(name: str, kind: str) -> None:
    variant = VARIANTS[name]
    shape = fit(variant, shape_of({"OnlineDPO": 2, "PPO": 2}.get(variant.method, 4)))
    run = config(variant.config, shape, **variant.fields)
    check(SUBJECTS[kind], variant.objective(run), shape, variant.reference(run))


# CI draws for one variant of each method. In double precision `test_methods.py` draws for all of them.
@pytest.mark.parametrize("name", portion(VARIANTS, lambda name: name in FIRST))
def test_whatever_is_drawn_loss_and_gradients_are_within_1e_5_of_the_padded_reference(name: str) -> None:
    variant = VARIANTS[name]

    def near(drawn: dict[str, Any], kind: str) -> None:
        shape = fit(variant, drawn) | {"anew": True}
        run = config(variant.config, shape, **variant.fields)
        check(SUBJECTS[kind], variant.objective(run), shape, variant.reference(run))

    hold(name, 2, near, drawn=shapes(sizes_of(variant)), kind=st.sampled_from(sorted(SUBJECTS)))
