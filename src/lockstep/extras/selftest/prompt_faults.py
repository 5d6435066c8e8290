"""Faults of prompts: a generation has other rows than those that are due, or a row has other ids.

The data set, the rewards and the answers are right, so that everything behind the prompts agrees.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from unittest.mock import patch

from lockstep.extras.selftest.seams import Fault, Patch
from lockstep.extras.verify.stage import Stage
from lockstep.rollouts.group import Prompt
from lockstep.tokens.arrays import joined


def _prompts_become(change: Callable[[Sequence[Prompt]], Sequence[Prompt]]) -> Callable[[Stage], Patch]:
    """The run's prompts are others from now on."""

    @contextmanager
    def inject(stage: Stage) -> Iterator[None]:
        prompts = stage.trainer._train_prompts
        kept = list(prompts)
        prompts[:] = change(kept)
        try:
            yield
        finally:
            prompts[:] = kept

    return inject


def _of_the_next(prompts: Sequence[Prompt]) -> list[Prompt]:
    return [
        replace(own, ids=other.ids, pictures=other.pictures)
        for own, other in zip(prompts, [*prompts[1:], prompts[0]], strict=True)
    ]


def _without_opening(prompts: Sequence[Prompt]) -> list[Prompt]:
    return [replace(prompt, ids=prompt.ids[:-1]) for prompt in prompts]


def _repeated(prompts: Sequence[Prompt]) -> list[Prompt]:
    return [replace(prompt, ids=joined([prompt.ids, prompt.ids[-1:]])) for prompt in prompts]


def _places_become(change: Callable[[list[int], int], list[int]]) -> Callable[[Stage], Patch]:
    """Generations have other rows. `change` gets the places of those that are due, and the number of rows."""

    def inject(stage: Stage) -> Patch:
        order, rows = stage.trainer._order, len(stage.prompts)
        real = order.places
        return patch.object(order, "places", lambda generation: change(real(generation), rows))

    return inject


PROMPT_FAULTS = (
    Fault("N1", "every row has the ids of the next row", _prompts_become(_of_the_next), learns=True),
    Fault(
        "N1b",
        "prompts lose the end of the opening of the turn",
        _prompts_become(_without_opening),
        learns=True,
    ),
    Fault("N1c", "the last id of a prompt is there twice", _prompts_become(_repeated), learns=True),
    Fault(
        "N2",
        "every generation has the rows after those that are due",
        _places_become(lambda due, rows: [(place + 1) % rows for place in due]),
        learns=True,
    ),
    Fault(
        "N2b",
        "the rows of a generation are turned round",
        _places_become(lambda due, _: due[::-1]),
        learns=True,
    ),
)
