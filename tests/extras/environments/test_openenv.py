"""Sessions with a real OpenEnv server, each from a Python of its own."""

from __future__ import annotations

import asyncio
import random
import subprocess
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
from other_pythons import needs, python_with

from lockstep.extras.environments.openenv import server
from lockstep.rollouts.programs.environments import Environment, EnvironmentFailed, Environments
from lockstep.rollouts.programs.tools import Content, ToolCalls

pytestmark = needs("openenv")
PYTHON = str(python_with("openenv"))
PROGRAM = Path(__file__).with_name("openenv_server.py")


def running(action: str) -> Iterator[str]:
    process = subprocess.Popen([PYTHON, str(PROGRAM), action], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    # The socket listens as soon as the server starts; until then a connection waits.
    yield f"http://127.0.0.1:{int(process.stdout.readline())}"
    process.kill()
    process.wait()


@pytest.fixture(scope="module")
def guesses() -> Iterator[str]:
    yield from running("guess")


@pytest.fixture(scope="module")
def words() -> Iterator[str]:
    yield from running("word")


class Table:
    """Environments of a test."""

    def __init__(self) -> None:
        self.calls = ToolCalls(60.0)
        self.made: list[Environments] = []

    def take(self, factory: Callable[[], Any]) -> Environment:
        self.made.append(Environments(factory, self.calls))
        return asyncio.run(self.made[-1].take(None))

    def step(self, environment: Environment, **given: Any) -> str:
        (found,) = asyncio.run(self.calls.run(environment.tools, [("step", given)]))
        return found.text


def text(said: Coroutine[Any, Any, Content | None]) -> str:
    """What an environment says, which has no images."""
    content = asyncio.run(said)
    assert content is not None
    assert not content.pictures
    return content.text


@pytest.fixture
def table() -> Iterator[Table]:
    made = Table()
    yield made
    for each in made.made:
        each.close()
    made.calls.close()


def test_the_fields_of_an_action_are_the_parameters_of_a_tool_and_rewards_are_summed(
    guesses: str, table: Table
) -> None:
    found = table.take(server(guesses, python=PYTHON, shown="hint", columns=["limit"]))
    (step,) = found.tools.values()
    assert step.schema["function"]["description"] == "Guess the number."
    parameters = step.schema["function"]["parameters"]
    assert parameters["properties"] == {"number": {"type": "integer", "description": "What you guess."}}
    assert parameters["required"] == ["number"]
    assert not found.speaks
    for seed in (1, 2, 1):
        # The server draws from the seed and the column of the row.
        number = random.Random(seed).randint(0, 5)
        assert text(found.reset({"limit": 5, "other": 1}, seed)) == " 0 to 5"
        assert table.step(found, number=number + 1) == "lower"
        assert table.step(found, number=number) == "right"
        assert table.step(found, number=number) == "The episode is over."
        assert asyncio.run(found.reward()) == 0.75


def test_a_field_of_an_action_may_take_the_text_of_a_turn(words: str, table: Table) -> None:
    found = table.take(server(words, python=PYTHON, answer="text", name="Words"))
    assert (found.tools, found.title) == ({}, "Words")
    number = random.Random(4).randint(0, 9)
    assert text(found.reset({}, 4)) == '{"hint": " 0 to 9"}'
    assert text(found.next_user_message("x" * (number + 1))) == '{"hint": "lower"}'
    assert asyncio.run(found.next_user_message("x" * number)) is None
    assert asyncio.run(found.reward()) == 0.75


def test_what_does_not_fit_the_server_is_said(guesses: str, table: Table) -> None:
    with pytest.raises(EnvironmentFailed, match="no field 'text'; it has number"):
        table.take(server(guesses, python=PYTHON, answer="text"))
    found = table.take(server(guesses, python=PYTHON, columns=["level"]))
    with pytest.raises(EnvironmentFailed, match="the row has no column 'level'"):
        asyncio.run(found.reset({}, 0))
    with pytest.raises(EnvironmentFailed, match="no OpenEnv server answers"):
        table.take(server("http://127.0.0.1:1", python=PYTHON))
