"""The record of a rollout's answers: a rollout holds exactly these, each behind the ids that the engine was sent."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from played_engine import LETTERS, PlayedEngine
from test_driver import run, says, starts

from lockstep.contract.protocol import Completion
from lockstep.errors import ProofError
from lockstep.rollouts.conversation import Conversation
from lockstep.rollouts.group import Rollout


async def branched(conversation: Conversation) -> None:
    await conversation.sample(4)
    conversation.insert([1, 2])
    await conversation.sample(4)
    await conversation.sample(4)
    conversation.branch([70, 71, 72])
    await conversation.sample(4)


def first(change: Callable[[Completion], Completion]) -> Callable[[Rollout], Rollout]:
    return lambda rollout: replace(rollout, completion=change(rollout.completion))


def further(change: Callable[[Completion], Completion]) -> Callable[[Rollout], Rollout]:
    return lambda rollout: replace(rollout, further=(change(rollout.further[0]),))


def marked(c: Completion, place: int, value: bool) -> Completion:
    assert c.sampled is not None
    flags = c.sampled.copy()
    flags[place] = value
    return replace(c, sampled=flags)


def without(c: Completion, place: int) -> Completion:
    columns = ("token_ids", "logprobs", "weight_versions", "sampled")
    return replace(c, **{name: np.delete(getattr(c, name), place) for name in columns})


def changed(c: Completion, name: str, place: int, by: float) -> Completion:
    values = getattr(c, name).copy()
    values[place] += by
    return replace(c, **{name: values})


WRONG: dict[str, Callable[[Rollout], Rollout]] = {
    "a sampled id": first(lambda c: changed(c, "token_ids", 0, 1)),
    "an inserted id": first(lambda c: changed(c, "token_ids", int(np.argmin(c.sampled)), 1)),  # type: ignore[arg-type]
    "a log-prob": first(lambda c: changed(c, "logprobs", 1, 1e-6)),
    "a version": first(lambda c: changed(c, "weight_versions", -1, 1)),
    "an inserted id is marked as sampled": first(lambda c: marked(c, int(np.argmin(c.sampled)), True)),  # type: ignore[arg-type]
    "a sampled id is marked as inserted": first(lambda c: marked(c, 0, False)),
    "an inserted id is missing": first(lambda c: without(c, int(np.argmin(c.sampled)))),  # type: ignore[arg-type]
    "the prompt of a branch": further(lambda c: changed(c, "prompt_ids", 0, 1)),
    "the context of another branch": lambda r: replace(
        r, further=(replace(r.further[0], prompt_ids=r.completion.prompt_ids),)
    ),
    "a branch is missing": lambda r: replace(r, further=()),
    "a branch stands twice": lambda r: replace(r, further=(*r.further, *r.further)),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_rollout_that_differs_from_its_answers_is_refused(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert len(run(branched)) == 4
    honest = Conversation.rollout
    monkeypatch.setattr(Conversation, "rollout", lambda self: WRONG[what](honest(self)))
    with pytest.raises(ProofError) as failed:
        run(branched)
    assert failed.value.check == "turns"


@pytest.mark.parametrize("texts", [("ab", "cab", "a."), ("ab", "cabab", "b.")])
def test_turns_that_are_cut_behind_a_stop_string_are_proven(texts: tuple[str, ...], monkeypatch: Any) -> None:
    """The stop string bc began in the first turn.

    The third turn begins with the ids that were cut from the second one, or not.
    """

    async def three(conversation: Conversation) -> None:
        for _ in texts:
            await conversation.sample(6)

    found = run(three, PlayedEngine(change=says(*texts)), starts(stop=("bc",)))
    ids = next(iter(found.values())).completion.token_ids.tolist()
    assert ids[:3] == [LETTERS.index(c) for c in "abc"]
    assert len(ids) == 3 + len(texts[2])
