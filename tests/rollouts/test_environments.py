"""Environments:

TRL's convention, in one thread or in processes of their own; one that fails costs its own rollout only.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import games
import pytest

from lockstep.errors import InputError
from lockstep.rollouts.programs.environments import (
    Environment,
    EnvironmentFailed,
    Environments,
    ProcessEnvironment,
    in_process,
    process_of,
)
from lockstep.rollouts.programs.tools import ToolCalls

T = TypeVar("T")
FILE = Path(games.__file__)
# Where the same class lives: in this process, and in a process of its own.
PLACES = {"here": lambda name: getattr(games, name), "process": lambda name: in_process(f"{FILE}:{name}")}


@pytest.fixture
def calls() -> Iterator[ToolCalls]:
    made = ToolCalls(60.0)
    yield made
    made.close()


class Stage:
    """One environment, and the calls that a rollout makes."""

    def __init__(self, factory: Callable[[], Any], timeout: float = 60.0) -> None:
        self.calls = ToolCalls(timeout)
        self.all = Environments(factory, self.calls)
        self.one: Environment = self.wait(self.all.take(None))

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        return self.calls.finish(work, 60.0)

    def reset(self, seed: int = 5, **row: Any) -> str | None:
        found = self.wait(self.one.reset(row, seed))
        return None if found is None else found.text

    def call(self, name: str, **given: Any) -> str:
        (found,) = self.wait(self.calls.run(self.one.tools, [(name, given)]))
        self.one.check([found])
        return found.text

    def reward(self) -> float | None:
        return self.wait(self.one.reward())


@pytest.fixture
def stage() -> Iterator[Callable[..., Stage]]:
    made: list[Stage] = []

    def make(factory: Callable[[], Any], timeout: float = 60.0) -> Stage:
        made.append(Stage(factory, timeout))
        return made[-1]

    yield make
    for each in made:
        each.all.close()
        each.calls.close()


@pytest.mark.parametrize("place", PLACES)
def test_public_methods_are_the_tools_and_state_stays_between_calls(place: str, stage: Any) -> None:
    found = stage(PLACES[place]("Guess"))
    assert sorted(found.one.tools) == ["guess", "hang", "hint", "leave", "thread"]
    assert found.one.tools["hint"].schema["function"]["parameters"]["properties"]["kind"]["enum"] == [
        "low",
        "high",
    ]
    assert (
        found.reset(answer=7, prompt=[{"role": "user", "content": "Guess."}]) == " The number has one digit."
    )
    assert [found.call("guess", number=n) for n in (3, 9)] == ["higher", "lower"]
    assert found.reward() == 0.0
    assert found.call("hint", kind="high") == "8"
    assert found.call("guess", number=7) == "right"
    assert found.reward() == 1.0
    assert "below 0" in found.call("guess", number=-1)
    assert found.call("thread") == "True"
    assert found.reset(answer=7) is not None
    assert found.reward() == 0.0


@pytest.mark.parametrize("place", PLACES)
def test_reset_gets_the_row_and_the_seed_of_its_rollout(place: str, stage: Any) -> None:
    found = stage(PLACES[place]("Guess"))

    def answer(seed: int) -> str:
        found.reset(seed)
        return found.call("hint", kind="high")

    drawn = [answer(seed) for seed in range(8)]
    assert drawn == [answer(seed) for seed in range(8)]
    assert len(set(drawn)) > 1


def test_a_column_named_seed_comes_before_the_seed_of_the_rollout(stage: Any) -> None:
    found = stage(games.Guess)
    found.wait(found.one.reset({"seed": 11, "level": 2}, 5))
    assert (found.one.instance.seed, found.one.instance.row) == (11, {"level": 2})


def test_a_reset_that_does_not_take_the_columns_gets_advice(stage: Any) -> None:
    class Narrow:
        def reset(self) -> None:
            """Nothing to begin."""

    with pytest.raises(EnvironmentFailed, match=r"as in def reset\(self, \*\*kwargs\)"):
        stage(Narrow).reset(answer=7)


def test_a_reward_may_come_from_a_coroutine_or_not_at_all(stage: Any) -> None:
    for kind, reward in ((games.Later, 0.5), (games.Quiet, None)):
        found = stage(kind)
        found.reset()
        assert found.reward() == reward


@pytest.mark.parametrize(("how", "reward"), [("none", None), ("nan", None), ("true", 1.0), ("", 0.25)])
def test_a_reward_is_a_number_or_none(how: str, reward: float | None, stage: Any) -> None:
    found = stage(games.Broken)
    found.reset(how=how)
    assert found.reward() == reward


@pytest.mark.parametrize("how", ["reset raises", "reset leaves", "reset hangs", "a picture", "a number"])
def test_an_environment_that_cannot_be_reset_fails(how: str, stage: Any) -> None:
    found = stage(games.Broken, timeout=0.2 if "hangs" in how else 60.0)
    with pytest.raises(EnvironmentFailed, match="environment Broken: reset: "):
        found.reset(how=how)
    assert found.one.failed is not None


@pytest.mark.parametrize("how", ["reward raises", "reward hangs", "text", "infinite"])
def test_an_environment_without_a_valid_reward_fails(how: str, stage: Any) -> None:
    found = stage(games.Broken)
    found.reset(how=how)
    found.calls.timeout = 0.2 if "hangs" in how else 60.0
    with pytest.raises(EnvironmentFailed, match="environment Broken: get_reward: "):
        found.reward()


def test_a_method_that_hangs_fails_its_environment(stage: Any) -> None:
    found = stage(games.Guess)
    found.reset()
    found.calls.timeout = 0.2
    with pytest.raises(EnvironmentFailed, match=r"hang: no result within 0\.2 s"):
        found.call("hang")


@pytest.mark.parametrize("place", PLACES)
def test_an_environment_may_answer_as_the_user_and_that_is_no_tool(place: str, stage: Any) -> None:
    found = stage(PLACES[place]("SpokenGuess"))
    found.reset(turns=1)
    assert list(found.one.tools) == ["multiply"]
    assert found.one.speaks
    said = found.wait(found.one.next_user_message("seven"))
    assert said is not None
    assert said.text == "and 0?<|end|>"
    assert found.wait(found.one.next_user_message("eight")) is None
    assert found.reward() == 2.0
    quiet = stage(PLACES[place]("Quiet"))
    assert not quiet.one.speaks
    assert quiet.wait(quiet.one.next_user_message("seven")) is None


@pytest.mark.parametrize(
    ("how", "message"),
    [("raises", "lost for words"), ("hangs", "no result within"), ("a number", "returned int")],
)
def test_an_environment_that_cannot_answer_fails(how: str, message: str, stage: Any) -> None:
    found = stage(games.Spoken)
    found.reset(how=how)
    found.calls.timeout = 0.2 if how == "hangs" else 60.0
    with pytest.raises(EnvironmentFailed, match=f"environment Spoken: next_user_message: .*{message}"):
        found.wait(found.one.next_user_message("seven"))


def test_a_process_makes_its_environment_with_the_given_arguments(stage: Any) -> None:
    found = stage(in_process(f"{FILE}:counted", arguments={"start": 3, "name": "four"}))
    found.reset()
    assert found.reward() == 7.0


def alive(instance: ProcessEnvironment) -> bool:
    return process_of(instance).poll() is None


def test_a_process_that_dies_fails_its_environment_only(stage: Any) -> None:
    factory = in_process(f"{FILE}:Guess")
    found, other = stage(factory), stage(factory)
    found.reset(answer=1)
    other.reset(answer=2)
    with pytest.raises(EnvironmentFailed, match="leave: its process ended with code 7"):
        found.call("leave")
    assert other.call("guess", number=2) == "right"
    assert type(found.one.instance) is type(other.one.instance)
    assert other.one.title == "Guess"


def test_a_process_that_hangs_is_killed(stage: Any) -> None:
    found = stage(in_process(f"{FILE}:Guess"))
    found.reset()
    found.calls.timeout = 0.2
    with pytest.raises(EnvironmentFailed, match="hang"):
        found.call("hang")
    assert alive(found.one.instance)
    found.all.give_back(found.one)
    assert not alive(found.one.instance)
    with pytest.raises(ProcessLookupError):
        os.kill(process_of(found.one.instance).pid, 0)


def test_every_process_ends_with_its_run(stage: Any) -> None:
    found = stage(in_process(f"{FILE}:Guess"))
    spare = found.wait(found.all.take(None))
    found.all.give_back(spare)
    found.all.close()
    assert not alive(found.one.instance)
    assert not alive(spare.instance)


@pytest.mark.parametrize(
    ("target", "message"),
    [(f"{FILE}:NeverMade", "no licence"), (f"{FILE}:Nobody", "Nobody"), ("nowhere.py:Game", "nowhere.py")],
)
def test_a_process_without_an_environment_says_why(target: str, message: str, calls: ToolCalls) -> None:
    with pytest.raises(EnvironmentFailed, match=message):
        calls.finish(Environments(in_process(target), calls).take(None), 60.0)


def test_an_environment_is_used_again_but_one_that_failed_is_not(calls: ToolCalls) -> None:
    async def both() -> None:
        environments = Environments(games.Broken, calls)
        first, second = await environments.take(None), await environments.take(None)
        assert first.instance is not second.instance
        with pytest.raises(EnvironmentFailed):
            await first.reset({"how": "reset raises"}, 0)
        environments.give_back(first)
        environments.give_back(second)
        assert (await environments.take(None)) is second
        assert (await environments.take(None)) is not first

    calls.finish(both(), 60.0)


def test_the_column_environment_chooses_and_is_not_given_to_reset(calls: ToolCalls) -> None:
    async def route() -> None:
        environments = Environments({"game": games.Guess, "none": games.named_quiet}, calls)
        kinds = await environments.probe({"environment": "none", "prompt": "x"})
        assert [(name, kind.title, kind.has_reward) for name, kind in kinds.items()] == [
            ("game", "Guess", True),
            ("none", "Quiet", False),
        ]
        assert [s["function"]["name"] for s in kinds["none"].schemas] == ["look"]
        assert environments.name_of({"environment": "game"}) == "game"
        assert environments.row_of({"environment": "none", "level": 1}) == {"level": 1}
        found = await environments.take("none")
        assert found.instance.row == {"prompt": "x"}
        with pytest.raises(InputError, match="environment='chess'; environment_factory has 'game', 'none'"):
            environments.name_of({"environment": "chess"})
        environments.close()

    calls.finish(route(), 60.0)


def test_a_single_factory_gives_reset_every_column(calls: ToolCalls) -> None:
    environments = Environments(games.Quiet, calls)
    assert environments.name_of({"environment": "anything"}) is None
    assert environments.row_of({"environment": "x", "level": 1}) == {"environment": "x", "level": 1}


def twin() -> Any:
    return type("Guess", (games.Quiet,), {})()


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        (games.NeverMade, "NeverMade: its constructor: no licence .*before training"),
        (games.NeverReset, "NeverReset has no method 'reset'"),
        ({"a": games.Guess, "b": twin}, "two environment classes are named Guess"),
    ],
)
def test_an_environment_that_cannot_work_is_refused_before_training(
    factory: Any, message: str, calls: ToolCalls
) -> None:
    with pytest.raises(InputError, match=message):
        calls.finish(Environments(factory, calls).probe(), 60.0)


def test_a_first_row_that_cannot_be_reset_is_refused_before_training(calls: ToolCalls) -> None:
    with pytest.raises(InputError, match="reset: no board"):
        calls.finish(Environments(games.Broken, calls).probe({"how": "reset raises"}), 60.0)
