"""An error of a user's code is quoted as far as a reader needs it, in one line, whoever raised it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from scored import score_groups
from test_process_as_before import rollout_function
from test_rewards import groups

from lockstep.extras.agents.agent_program import Agent
from lockstep.rollouts.judges import judge_pairs
from lockstep.rollouts.programs.environments import Environments
from lockstep.rollouts.programs.tools import Tool, ToolCalls


def long(*_: Any, **__: Any) -> Any:
    raise ValueError("what went wrong\n" + "x" * 100_000)


class Judge:
    judge = staticmethod(long)


class Game:
    reset = staticmethod(long)


def by_an_environment(factory: Callable[[], Any], *, resets: bool) -> None:
    calls = ToolCalls(60.0)

    async def act() -> None:
        found = await Environments(factory, calls).take(None)
        assert resets
        await found.reset({}, 0)

    try:
        calls.finish(act(), 60.0)
    finally:
        calls.close()


WAYS: dict[str, Callable[[], object]] = {
    "reward function": lambda: score_groups(groups(), [long], [1.0]),
    "judge": lambda: judge_pairs([type(g)(g.prompt, g.rollouts[:2]) for g in groups()], Judge(), 60.0),
    "rollout_func": lambda: rollout_function(long).groups([], 2, 1),
    "agent": lambda: asyncio.run(Agent(long, None, 60.0).run("http://127.0.0.1", "key", {})),
    "environment Game: reset": lambda: by_an_environment(Game, resets=True),
    "its constructor": lambda: by_an_environment(long, resets=False),
}


@pytest.mark.parametrize("who", WAYS)
def test_a_long_error_is_cut_and_its_length_is_said(who: str) -> None:
    with pytest.raises(Exception, match=who) as found:
        WAYS[who]()
    said = str(found.value)
    assert "what went wrong x" in said
    assert "(100,016 characters in all)" in said
    assert len(said) < 900


def test_the_model_reads_the_beginning_of_a_tools_error() -> None:
    calls = ToolCalls(60.0)
    try:
        (found,) = calls.finish(calls.run({"long": Tool("long", long, {})}, [("long", {})]), 60.0)
    finally:
        calls.close()
    assert found.failed
    assert "what went wrong x" in found.text
    assert len(found.text) < 400
