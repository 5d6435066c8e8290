"""The wait of the driver between two steps of the engine: it misses no rollout that goes on after a quick call."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from caller import multiply
from played_engine import TOKENIZER, PlayedEngine

import lockstep.rollouts.programs.tools as tools_module
from lockstep.contract.protocol import RequestKey
from lockstep.contract.sampling import Sampling
from lockstep.errors import LockstepError
from lockstep.rollouts.conversation import Conversation
from lockstep.rollouts.driver import Driver, Start
from lockstep.rollouts.group import Prompt
from lockstep.rollouts.programs.tools import ToolCalls, tools_of
from lockstep.watch.custody import Record

ALL = tools_of([multiply])


@pytest.fixture
def calls() -> Iterator[ToolCalls]:
    made = ToolCalls(60.0, threads=True)
    yield made
    made.close()


# Passes of the event loop between the end of a call and the look of the driver. After the last number a rollout has
# gone on.
@pytest.mark.parametrize("passes", range(12))
@pytest.mark.parametrize("owner", ["rollout", "environment"])
def test_a_call_is_open_until_its_rollout_has_gone_on_whenever_the_driver_looks(
    owner: str, passes: int, calls: ToolCalls, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_end = asyncio.Event()

    async def in_thread(function: Callable[[], Any], limit: float, what: str) -> Any:
        await may_end.wait()
        return function()

    monkeypatch.setattr(tools_module, "in_thread", in_thread)
    monkeypatch.setattr(tools_module, "QUICK", 60.0)
    gone_on: list[Any] = []

    async def rollout() -> None:
        given = {"a": 6, "b": 7}
        if owner == "rollout":
            gone_on.append(await calls.run(ALL, [("multiply", given), ("multiply", given)]))
        else:
            gone_on.append(await calls.call(multiply, given))

    async def play() -> None:
        running = asyncio.ensure_future(rollout())
        for _ in range(8):
            await asyncio.sleep(0)
        may_end.set()
        for _ in range(passes):
            await asyncio.sleep(0)
        while await calls.settled():
            pass
        assert gone_on
        await running

    asyncio.run(play())


def test_quick_calls_beside_a_slow_one_of_the_same_turn_are_not_waited_for(calls: ToolCalls) -> None:
    may_end = threading.Event()

    def slow() -> str:
        """Wait for the end of the test."""
        may_end.wait(60)
        return "late"

    async def play() -> None:
        asked: list[tuple[str, Any]] = [("slow", {}), ("multiply", {"a": 6, "b": 7})]
        running = asyncio.ensure_future(calls.run({**ALL, **tools_of([slow])}, asked))
        await asyncio.sleep(0)
        assert await calls.settled()
        assert not await calls.settled()
        may_end.set()
        assert [result.text for result in await running] == ["late", "42"]

    asyncio.run(play())


@pytest.mark.parametrize("looks", [0, 1], ids=["before_the_first_step", "between_two_steps"])
def test_an_error_in_the_wait_for_tools_ends_the_generation(looks: int) -> None:
    class Calls(ToolCalls):
        left = looks

        async def settled(self) -> bool:
            self.left -= 1
            if self.left < 0:
                raise LockstepError("nobody counted the calls")
            return False

    async def two_turns(conversation: Conversation) -> None:
        await conversation.sample(1)
        await conversation.sample(1)

    start = Start(Prompt("p", (1, 2), "row"), RequestKey("p", 0), 1, Sampling(40))
    with (
        Driver(PlayedEngine(), TOKENIZER, Record, Calls(60.0)) as driver,  # type: ignore[arg-type]
        pytest.raises(LockstepError, match="nobody counted the calls"),
    ):
        driver.run([start], two_turns)
