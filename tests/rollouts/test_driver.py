"""The rollout loop: many programs run at once, without a barrier; an error or interrupt leaves nothing behind."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from draws import draws
from hypothesis import given
from hypothesis import strategies as st
from played_engine import END, LETTERS, TOKENIZER, PlayedEngine, decode, next_token

from lockstep.contract.protocol import Completion, RequestKey, derived_seed
from lockstep.contract.sampling import Sampling
from lockstep.errors import InputError, LockstepError, ProofError
from lockstep.progress import waiting
from lockstep.rollouts.conversation import Conversation, OutOfRoom, Program, Turn, single_turn
from lockstep.rollouts.driver import Driver, Start, collect
from lockstep.rollouts.group import Prompt, Rollout
from lockstep.watch.custody import Record

KEYS = [RequestKey(f"p{i}", 0) for i in range(4)]


def starts(count: int = 4, *, ids: Sequence[int] = (1, 2), **sampling: Any) -> list[Start]:
    settings = Sampling(**{"max_tokens": 40, **sampling})
    return [
        Start(Prompt(f"p{i}", (*ids, 50 + i), f"row {i}"), RequestKey(f"p{i}", 0), 100 + i, settings)
        for i in range(count)
    ]


def run(
    program: Program,
    engine: PlayedEngine | None = None,
    begun: list[Start] | None = None,
    on_rollout: Callable[[Rollout], None] | None = None,
    **more: Any,
) -> dict[RequestKey, Rollout]:
    with Driver(engine or PlayedEngine(), TOKENIZER, Record) as driver:  # type: ignore[arg-type]
        return driver.run(begun or starts(), program, on_rollout, **more)


def says(*texts: str) -> Callable[[list[Completion]], list[Completion]]:
    """A change of answers: a rollout's n-th call says the n-th of these texts, cut there unless it ends itself."""

    def change(answers: list[Completion]) -> list[Completion]:
        found = []
        for a in answers:
            ids = tuple(LETTERS.index(c) if c != "." else END for c in texts[a.key.call])
            reason: Any = "stop" if ids[-1] == END else "length"
            logps = (-1.0,) * len(ids)
            found.append(
                replace(
                    a, token_ids=ids, logprobs=logps, weight_versions=(7,) * len(ids), finish_reason=reason
                )
            )
        return found

    return change


# ---- what a rollout consists of ----------------------------------------------------------------------------------


@st.composite
def plans(draw: st.DrawFn) -> list[tuple[str, Any]]:
    """Actions of a program: turns of a length, ids to insert, branches that keep some of the ids."""
    action = (
        st.tuples(st.just("sample"), st.none() | st.integers(1, 6))
        | st.tuples(st.just("insert"), st.lists(st.integers(1, 3), max_size=5))
        | st.tuples(st.just("branch"), st.integers(0, 12))
    )
    return draw(st.lists(action, max_size=10))


@draws(100)
@given(plans(), st.integers(1, 30), st.integers(5, 40))
def test_a_rollout_consists_of_exactly_what_was_sampled_and_what_was_inserted(
    plan: list[tuple[str, Any]], budget: int, context: int
) -> None:
    """Beside the loop, a list of all ids that were ever added, each with who added it and what stood before it."""
    begun = starts(3, max_tokens=min(budget, context - 3))
    added: dict[RequestKey, list[tuple[tuple[int, ...], int, bool]]] = {start.key: [] for start in begun}
    ended: dict[RequestKey, bool] = {}

    async def program(c: Conversation) -> None:
        before, own = c.ids.tolist(), added[c.key]
        ended[c.key] = False
        try:
            for what, value in plan:
                if what == "branch":
                    before = [9, *before[:value]]
                    c.branch(before)
                    continue
                ids = (await c.sample(value)).token_ids.tolist() if what == "sample" else value
                if what == "insert":
                    c.insert(value)
                for i in ids:
                    own.append((tuple(before), i, what == "sample"))
                    before = [*before, i]
                assert c.ids.tolist() == before
        except OutOfRoom:
            ended[c.key] = True
            raise

    engine = PlayedEngine(context=context)
    for key, rollout in run(program, engine, begun).items():
        assert len(added[key]) <= min(budget, context - 3)
        assert rollout.key == key
        found = []
        for branch in rollout.branches:
            ids = branch.token_ids.tolist()
            mask = [True] * len(ids) if branch.sampled is None else branch.sampled.tolist()
            assert branch.sampled is None or not all(mask)
            assert len(branch.prompt_ids) + len(ids) <= context
            for n, (token, sampled) in enumerate(zip(ids, mask, strict=True)):
                before = (*branch.prompt_ids.tolist(), *ids[:n])
                found.append((before, token, sampled))
                own = next_token(before)
                assert (
                    (token, branch.logprobs[n]) == pytest.approx(own)
                    if sampled
                    else branch.logprobs[n] == 0.0
                )
        # Every sampled id is in exactly one branch, in the context in which it was sampled, and no other id is marked
        # as sampled.
        assert sorted(x for x in found if x[2]) == sorted(x for x in added[key] if x[2])
        assert set(found) <= set(added[key])
        assert len({branch.key for branch in rollout.branches}) == len(rollout.branches)
        turns = sum(1 for what, _ in plan if what == "sample")
        assert len(rollout.finish_reasons) <= turns
        if ended[key]:
            assert rollout.finish_reason == "length"
        if not any(x[2] for x in added[key]):
            assert len(rollout.token_ids) == 0
            assert rollout.further == ()


def test_each_call_has_a_key_and_a_seed_of_its_own_that_depend_on_the_rollout_alone() -> None:
    async def program(c: Conversation) -> None:
        for _ in range(3):
            c.insert([2])
            if (await c.sample(2)).finish_reason == "never":
                return

    engine, again = PlayedEngine(), PlayedEngine()
    run(program, engine)
    run(program, again, starts(1))
    requests = [request for asked in engine.rounds for request in asked]
    assert len({r.key for r in requests}) == len({r.seed for r in requests}) == len(requests) == 12
    for start in starts():
        first, second, third = [r for r in requests if r.key[:2] == start.key[:2]]
        assert (first.key, second.key.call, third.key.call) == (start.key, 1, 2)
        assert (first.seed, second.seed) == (start.seed, derived_seed(start.seed, "going on"))
    assert [r for asked in again.rounds for r in asked] == [r for r in requests if r.key.prompt_id == "p0"]


def test_a_stop_string_over_three_turns_ends_the_last_one_where_it_is_complete() -> None:
    turns: list[Turn] = []

    async def program(c: Conversation) -> None:
        for _ in range(3):
            turns.append(await c.sample(2))

    engine = PlayedEngine(change=says("aa", "bb", "ccab"))
    (rollout,) = run(program, engine, starts(1, stop=("abbc",))).values()
    assert decode(rollout.completion.token_ids) == "aabbc"
    assert [t.finish_reason for t in turns] == ["length", "length", "stop"]
    assert rollout.finish_reasons == ("length", "length", "stop")

    async def apart(c: Conversation) -> None:
        await c.sample(2)
        c.insert([3])
        await c.sample(2)

    engine = PlayedEngine(change=says("aa", "bb"))
    (rollout,) = run(apart, engine, starts(1, stop=("ab",))).values()
    assert decode(rollout.completion.token_ids) == "aacbb"


def test_what_counts_the_tokens_of_one_call_is_refused_in_a_second_call() -> None:
    async def program(c: Conversation) -> None:
        await c.sample(1)
        await c.sample(1)

    for penalty in ("presence_penalty", "frequency_penalty"):
        assert run(single_turn, begun=starts(**{penalty: 0.5}))
        with pytest.raises(InputError, match=f"{penalty} would start again when rollout p.#0 continues"):
            run(program, begun=starts(**{penalty: 0.5}))


def test_two_branches_of_a_rollout_may_be_sampled_at_once_and_share_its_budget() -> None:
    async def program(c: Conversation) -> None:
        one, other = c.branches[0], c.branch([1, 2, 3])
        turn, _ = await asyncio.gather(one.sample(6), other.sample(6))
        assert c.room == 40 - sum(len(t.token_ids) for b in c.branches for t in b.turns)
        if turn.finish_reason == "length":
            one.insert([2, 2])

    engine = PlayedEngine()
    for rollout in run(program, engine).values():
        assert [b.prompt_ids.tolist()[:2] for b in rollout.branches] == [[1, 2], [1, 2]]
        assert [b.key.call for b in rollout.branches] == [0, 1]
    # Both calls of all rollouts were made in one round.
    assert [len(asked) for asked in engine.rounds] == [8]

    async def twice(c: Conversation) -> None:
        await asyncio.gather(c.sample(2), c.sample(2))

    with pytest.raises(LockstepError, match="asked for a turn before the last one of its branch was there"):
        run(twice)


# ---- no barrier --------------------------------------------------------------------------------------------------


def test_a_slow_tool_holds_no_other_rollout() -> None:
    """The tool of the first rollout returns only after all others have made three turns and have been handed over."""
    others_done, handed = asyncio.Event(), []

    async def program(c: Conversation) -> None:
        await c.sample(2)
        if c.key == KEYS[0]:
            await others_done.wait()
        for _ in range(2):
            c.insert([1])
            await c.sample(2)

    def finished(rollout: Rollout) -> None:
        handed.append(rollout.key)
        if len(handed) == 3:
            others_done.set()

    engine = PlayedEngine()
    found = run(program, engine, on_rollout=finished)
    assert handed[-1] == KEYS[0]
    assert list(found) == KEYS
    assert [len(asked) for asked in engine.rounds] == [4, 3, 3, 1, 1]


def test_a_request_of_another_thread_joins_while_the_engine_works() -> None:
    async def program(c: Conversation) -> None:
        # A plain function in a thread, as tools run.
        told = await asyncio.to_thread(lambda: [1, 2])
        c.insert(told)
        await c.sample(2)

    assert len(run(program)) == 4


def test_a_program_that_waits_for_something_else_than_the_engine_is_given_up_after_the_limit() -> None:
    async def program(c: Conversation) -> None:
        if c.key in KEYS[:2]:
            await asyncio.Event().wait()
        await c.sample(1)

    with pytest.raises(LockstepError, match="got no request for 0 s, and rollout p0#0, p1#0 has not ended"):
        run(program, patience=0.2)


# ---- errors ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (
            ValueError("no such city"),
            LockstepError,
            "the program of rollout p2#0 raised ValueError: no such city",
        ),
        (SystemExit(3), LockstepError, "the program of rollout p2#0 raised SystemExit: 3"),
        (
            asyncio.CancelledError(),
            LockstepError,
            "the program of rollout p2#0 was cancelled by its own code",
        ),
        (InputError("give a tool"), InputError, "give a tool"),
    ],
)
def test_an_error_of_one_program_ends_the_others(
    error: BaseException, kind: type[Exception], message: str
) -> None:
    cancelled: list[RequestKey] = []

    async def program(c: Conversation) -> None:
        try:
            await c.sample(1)
            if c.key == KEYS[2]:
                raise error
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            if c.key != KEYS[2]:
                cancelled.append(c.key)
            raise

    with pytest.raises(kind, match=message):
        run(program)
    assert sorted(cancelled) == [KEYS[0], KEYS[1], KEYS[3]]


def test_an_interrupt_in_the_engine_ends_the_programs_and_the_driver_can_go_on() -> None:
    ended: list[RequestKey] = []

    def interrupt(answers: list[Completion]) -> list[Completion]:
        raise KeyboardInterrupt

    async def program(c: Conversation) -> None:
        try:
            await c.sample()
        finally:
            ended.append(c.key)

    engine = PlayedEngine(change=interrupt)
    with Driver(engine, TOKENIZER, Record) as driver:  # type: ignore[arg-type]
        with pytest.raises(KeyboardInterrupt):
            driver.run(starts(), program)
        assert sorted(ended) == KEYS
        engine.change = lambda answers: answers
        assert list(driver.run(starts(), single_turn)) == KEYS


def test_an_error_of_whoever_is_handed_a_rollout_is_the_callers() -> None:
    def broken(rollout: Rollout) -> None:
        raise InputError("no sandbox")

    with pytest.raises(InputError, match="no sandbox"):
        run(single_turn, on_rollout=broken)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda answers: answers[1:], "1 of 4 requests were not answered, p3#0 among them"),
        (lambda answers: [*answers, answers[0]], "two answers came for p3#0"),
        (lambda answers: [replace(a, key=RequestKey("x", 0)) for a in answers], "an answer came for x#0"),
        (
            lambda answers: [replace(a, prompt_ids=a.prompt_ids[1:]) for a in answers],
            "used 2 prompt ids, not the 3",
        ),
        (
            lambda answers: [replace(a, weight_versions=a.weight_versions - 1) for a in answers],
            "sampled at versions",
        ),
    ],
)
def test_an_answer_that_is_not_to_what_was_asked_ends_the_generation(change: Any, message: str) -> None:
    with pytest.raises(ProofError, match=message):
        run(single_turn, PlayedEngine(change=change))


def test_a_turn_that_takes_a_program_too_long_is_dropped_and_the_rollout_goes_on() -> None:
    """The program asks again while the engine still works on the first request. The late answer reaches nobody."""
    taken, release = threading.Event(), threading.Event()

    def slow(answers: list[Completion]) -> list[Completion]:
        if answers[0].key.call == 0:
            taken.set()
            assert release.wait(60)
        return answers

    async def program(c: Conversation) -> None:
        first = asyncio.ensure_future(c.sample(3))
        assert await asyncio.to_thread(taken.wait, 60)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        second = asyncio.ensure_future(c.sample(3))
        await asyncio.sleep(0)
        release.set()
        await second

    engine = PlayedEngine(change=slow)
    (rollout,) = run(program, engine, starts(1)).values()
    assert [[r.key.call for r in asked] for asked in engine.rounds] == [[0], [1]]
    assert rollout.key == KEYS[0]
    assert len(rollout.finish_reasons) == 1


def test_nothing_is_started_where_one_prompt_does_not_fit() -> None:
    engine = PlayedEngine(context=43)
    long = starts(4)
    long[2] = replace(long[2], prompt=replace(long[2].prompt, ids=(1, 2, 3, 4)))
    with pytest.raises(InputError, match="p2 has 4 tokens: with up to 40 new tokens"):
        run(single_turn, engine, long)
    assert engine.rounds == []


def test_a_driver_leaves_no_thread_behind() -> None:
    with waiting("nothing"):
        # The thread that looks at waits is one per process, and stays.
        before = threading.active_count()
    run(single_turn)
    assert threading.active_count() == before


def test_a_rollout_with_tokens_of_other_weights_than_the_trainers_is_refused() -> None:
    async def program(c: Conversation) -> None:
        await c.sample(1)
        c.insert([2])
        await c.sample(1)

    engine = PlayedEngine(versions=(7, 8))
    with pytest.raises(
        ProofError, match=r"p0#0 has tokens sampled at versions \[7, 8\]; the trainer last pushed 7"
    ):
        collect(
            [start.prompt for start in starts()],
            engine,  # type: ignore[arg-type]
            TOKENIZER,
            Sampling(9),
            Record,
            num_generations=1,
            run_seed=0,
            version=7,
            program=program,
        )
