"""Interrupted completions equal, token for token, those of a simple loop that inserts the interruption when due."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from draws import draws
from hypothesis import given
from hypothesis import strategies as st
from played_engine import (
    END,
    LETTERS,
    TOKENIZER,
    VOCABULARY,
    PlayedEngine,
    decode,
    kept_ids,
    kept_of,
    next_token,
)

from lockstep.contract.inbox import check_answers
from lockstep.contract.protocol import Completion, GenerationRequest, RequestKey, request_seed
from lockstep.contract.sampling import Grammar, Sampling
from lockstep.errors import InputError, ProofError
from lockstep.rollouts.conversation import Conversation
from lockstep.rollouts.driver import Driver, Start
from lockstep.rollouts.group import Prompt
from lockstep.rollouts.programs.interruptions import Interruption, interrupted
from lockstep.watch.custody import Record


def sampled(
    requests: Sequence[GenerationRequest],
    engine: PlayedEngine,
    interruption: Interruption,
    seen: list[Any] | None = None,
) -> dict[RequestKey, Completion]:
    """The completions of rollouts that begin with these requests."""
    for request in requests:
        interrupted(interruption, request.sampling)

    async def program(conversation: Conversation) -> None:
        await interrupted(interruption, conversation.sampling)(conversation)

    starts = [Start(Prompt(r.key.prompt_id, r.prompt_ids, ""), r.key, r.seed, r.sampling) for r in requests]
    with Driver(engine, TOKENIZER, Record) as driver:  # type: ignore[arg-type]
        found = driver.run(starts, program, None if seen is None else seen.append)
    return {key: rollout.completion for key, rollout in found.items()}


def holds(ids: Sequence[int], part: Sequence[int]) -> bool:
    return any(list(ids[i : i + len(part)]) == list(part) for i in range(len(ids)))


def token_by_token(request: GenerationRequest, interruption: Interruption) -> Completion:
    """The same completion from one loop. The inserted text ends the text in which a stop string is searched."""
    ids: list[int] = []
    logps: list[float] = []
    sampled: list[bool] = []
    own: list[int] = []
    sets: list[list[int]] = []
    reason = ""
    while not reason:
        if len(ids) == interruption.place(request.seed) and not holds(ids, interruption.end_ids):
            ids += interruption.ids
            logps += [0.0] * len(interruption.ids)
            sampled += [False] * len(interruption.ids)
            own = []
        sets.append(kept_of((*request.prompt_ids.tolist(), *ids)))
        token, logp = next_token((*request.prompt_ids.tolist(), *ids))
        ids.append(token)
        logps.append(logp)
        sampled.append(True)
        own.append(token)
        stopped = token == END or any(s in decode(own) for s in request.sampling.stop)
        reason = "stop" if stopped else "length" if len(ids) == request.sampling.max_tokens else ""
    mask = None if all(sampled) else tuple(sampled)
    kept = kept_ids(sets) if request.sampling.is_filtered else None
    return Completion(request.key, request.prompt_ids, ids, logps, (7,) * len(ids), reason, mask, kept)  # type: ignore[arg-type]


def asked(count: int, **sampling: Any) -> list[GenerationRequest]:
    keys = [RequestKey(f"p{i // 2}", i % 2) for i in range(count)]
    limit = Sampling(**{"max_tokens": 20, **sampling})
    return [
        GenerationRequest(key, (1, 2, i + 4), limit, request_seed(1, 7, key)) for i, key in enumerate(keys)
    ]


tokens = st.integers(1, 3)


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[GenerationRequest], Interruption]:
    after, ids = draw(st.integers(1, 8)), draw(st.lists(tokens, min_size=1, max_size=4))
    earliest = draw(st.none() | st.integers(1, after))
    interruption = Interruption(
        after, tuple(ids), tuple(draw(st.lists(tokens, min_size=1, max_size=2))), earliest
    )
    rooms = st.integers(1, earliest or after) | st.integers(after + len(ids) + 1, 24)
    stop = tuple(draw(st.lists(st.text("abc", min_size=1, max_size=4), max_size=2)))
    requests = asked(draw(st.integers(1, 8)), stop=stop, top_p=draw(st.sampled_from([0.9, 1.0])))
    salt = draw(st.integers(0, VOCABULARY - 1))
    return [
        replace(
            r, prompt_ids=(*r.prompt_ids.tolist(), salt), sampling=replace(r.sampling, max_tokens=draw(rooms))
        )
        for r in requests
    ], interruption


@draws(100)
@given(cases())
def test_what_comes_out_is_what_one_loop_over_tokens_gives(
    case: tuple[list[GenerationRequest], Interruption],
) -> None:
    requests, interruption = case
    seen: list[Any] = []
    found = sampled(requests, PlayedEngine(), interruption, seen)
    assert found == {r.key: token_by_token(r, interruption) for r in requests}
    # Each completion is handed over once, as a whole.
    assert sorted((r.completion for r in seen), key=lambda c: c.key) == sorted(
        found.values(), key=lambda c: c.key
    )
    assert check_answers(requests, found.values(), [7]) == found


def test_all_three_ways_occur_and_each_asks_for_what_it_needs_alone() -> None:
    requests, interruption = asked(60), Interruption(5, (3, 3), (2, 1))
    engine = PlayedEngine()
    found = sampled(requests, engine, interruption)
    first, second = engine.rounds
    assert [r.key for r in first] == [r.key for r in requests]
    assert {r.sampling.max_tokens for r in first} == {5}
    done = {key for key, c in found.items() if len(c.token_ids) <= 5}
    interrupted = {key for key, c in found.items() if c.sampled is not None}
    assert done
    assert interrupted
    assert found.keys() - done - interrupted
    assert {r.key._replace(call=0) for r in second} == found.keys() - done
    assert {r.key.call for r in second} == {1}
    for r in second:
        assert r.sampling.max_tokens == (13 if r.key._replace(call=0) in interrupted else 15)
    # No seed occurs twice, within a call or in both calls. A second run has the same seeds.
    seeds = [r.seed for call in (first, second) for r in call]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**62 for seed in seeds)
    again = PlayedEngine()
    sampled(requests, again, interruption)
    first_again, second_again = again.rounds
    assert first_again == first
    assert sorted(second_again, key=lambda r: r.key) == sorted(second, key=lambda r: r.key)


def test_a_stop_string_that_begins_in_one_part_and_ends_in_the_next_ends_the_completion() -> None:
    # When thinking has ended, both parts are one text. A string with the interruption in the middle is not a stop
    # string.
    (request,) = asked(1, stop=("ab",), top_p=0.9)

    def says(ids: str) -> Callable[[list[Completion]], list[Completion]]:
        def change(answers: list[Completion]) -> list[Completion]:
            n = answers[0].prompt_ids.tolist() != request.prompt_ids.tolist()
            own = tuple(LETTERS.index(c) for c in ids.split("|")[n])
            return [
                replace(
                    a,
                    token_ids=own,
                    logprobs=(-1.0,) * len(own),
                    weight_versions=(7,) * len(own),
                    finish_reason="length",
                    kept_ids=kept_ids([[token, 10] for token in own]),
                )
                for a in answers
            ]

        return change

    interruption = Interruption(3, (3,), (3,))
    (ended,) = sampled([request], PlayedEngine(change=says("aca|bcb")), interruption).values()
    assert (decode(ended.token_ids), ended.finish_reason, ended.logprobs.tolist()) == (
        "acab",
        "stop",
        [-1.0] * 4,
    )
    assert ended.weight_versions.tolist() == [7] * 4
    assert ended.kept_ids == kept_ids([[token, 10] for token in ended.token_ids])
    (apart,) = sampled([request], PlayedEngine(change=says("aaa|bcb")), interruption).values()
    assert (decode(apart.token_ids), apart.finish_reason) == ("aaacbcb", "length")


def test_what_was_put_in_bears_the_version_that_first_read_it() -> None:
    (request,) = asked(1)
    found = sampled([request], PlayedEngine(versions=(7, 8)), Interruption(2, (3, 3), (9,)))
    (completion,) = found.values()
    assert completion.weight_versions[:5].tolist() == [7, 7, 8, 8, 8]


@pytest.mark.parametrize(
    ("change", "proof"),
    [
        (lambda answers: answers[1:], "keys"),
        (lambda answers: [replace(a, prompt_ids=a.prompt_ids[:-1]) for a in answers], "echo"),
        (lambda answers: [replace(a, logprobs=a.logprobs[:-1]) for a in answers], "logprobs"),
    ],
)
@pytest.mark.parametrize("at", [0, 1])
def test_an_answer_that_is_not_to_what_was_asked_is_refused_in_either_part(
    change: Any, proof: str, at: int
) -> None:
    engine = PlayedEngine()
    engine.change = lambda answers: change(answers) if len(engine.rounds) == at + 1 else answers
    with pytest.raises(ProofError) as caught:
        sampled(asked(6), engine, Interruption(2, (3,), (9,)))
    assert caught.value.check == proof


def test_nothing_is_asked_where_no_answer_would_have_room() -> None:
    engine = PlayedEngine()
    for limit in (4, 5, 6):
        with pytest.raises(
            InputError, match=r"interruption of 3 tokens leave nothing for an answer within the \d tokens"
        ):
            sampled(asked(1, max_tokens=limit), engine, Interruption(3, (1, 2, 3), (9,)))
    assert engine.rounds == []
    sampled(asked(1, max_tokens=7), engine, Interruption(3, (1, 2, 3), (9,)))
    # If the place is drawn, every possible draw must leave enough tokens. Otherwise all seeds are refused.
    for limit in (3, 5, 9):
        with pytest.raises(InputError, match="leave nothing for an answer"):
            sampled(asked(1, max_tokens=limit), engine, Interruption(6, (1, 2, 3), (9,), 2))
    sampled(asked(1, max_tokens=2), PlayedEngine(), Interruption(6, (1, 2, 3), (9,), 2))


def test_places_are_drawn_evenly_and_for_each_request_anew() -> None:
    interruption = Interruption(12, (1,), (2,), 10)
    requests = [replace(r, key=RequestKey("p", i), seed=i) for i, r in enumerate(asked(1) * 3000)]
    places = [interruption.place(r.seed) for r in requests]
    assert {place: round(places.count(place) / 1000, 1) for place in places} == {10: 1.0, 11: 1.0, 12: 1.0}
    assert places == [interruption.place(r.seed) for r in requests]
    engine = PlayedEngine()
    sampled(requests[:60], engine, Interruption(3, (1,), (9,), 1))
    assert {r.sampling.max_tokens for r in engine.rounds[0]} == {1, 2, 3}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("presence_penalty", 0.5),
        ("frequency_penalty", 0.5),
        ("bad_words", ((1, 2),)),
        ("min_tokens", 4),
        ("grammar", Grammar("regex", "a+")),
    ],
)
def test_settings_that_look_at_a_completion_alone_are_refused(name: str, value: Any) -> None:
    with pytest.raises(InputError, match=name):
        sampled(asked(1, **{name: value}), PlayedEngine(), Interruption(3, (1,), (9,)))


@pytest.mark.parametrize(
    "wrong", [(0, (1,), (2,)), (1, (), (2,)), (1, (1,), ()), (3, (1,), (2,), 0), (3, (1,), (2,), 4)]
)
def test_an_interruption_of_nothing_is_none(wrong: Any) -> None:
    with pytest.raises(ValueError, match=r"interrupted (after|by)"):
        Interruption(*wrong)
