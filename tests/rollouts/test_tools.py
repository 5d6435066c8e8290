"""Tools: schemas from functions, and calls that never end a run."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from caller import NEVER, multiply

import lockstep.rollouts.programs.tools as tools_module
from lockstep.errors import InputError, ProofError
from lockstep.rollouts.programs.tools import ToolCalls, ToolResult, tool_of, tools_of
from lockstep.rollouts.programs.workers import TookTooLong


async def multiply_later(a: int, b: int) -> int:
    """The product of two numbers, after the others.

    Args:
        a: The first number.
        b: The second number.
    """
    await asyncio.sleep(0.05)
    return a * b


def leave(code: int) -> str:
    """End the program.

    Args:
        code: The exit code.
    """
    raise SystemExit(code)


async def cancel() -> str:
    """Cancel itself."""
    raise asyncio.CancelledError


def complain(text: str) -> str:
    """Raise an error.

    Args:
        text: Its text.
    """
    raise ValueError(text)


ALL = tools_of([multiply, multiply_later, leave, cancel, complain])


@pytest.fixture
def calls() -> Iterator[ToolCalls]:
    made = ToolCalls(60.0)
    yield made
    made.close()


def run(calls: ToolCalls, *given: tuple[str, Any], tools: Any = ALL) -> list[ToolResult]:
    return asyncio.run(calls.run(tools, given))


def error_of(result: ToolResult) -> str:
    assert result.failed
    return json.loads(result.text)["error"]


def test_a_schema_comes_from_type_hints_and_docstring() -> None:
    function = ALL["multiply"].schema["function"]
    assert function["name"] == "multiply"
    assert function["description"] == "The product of two numbers."
    assert function["parameters"]["properties"]["a"] == {"type": "integer", "description": "The first number."}
    assert function["parameters"]["required"] == ["a", "b"]


def test_a_result_that_a_thread_made_for_another_call_is_refused(
    calls: ToolCalls, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = [("multiply", {"a": 1, "b": b}) for b in (2, 3)]
    assert [result.text for result in run(calls, *given)] == ["2", "3"]
    honest, made = tools_module.in_thread, list[Any]()

    async def exchanged(*arguments: Any) -> Any:
        made.append(await honest(*arguments))
        return made[0]

    monkeypatch.setattr(tools_module, "in_thread", exchanged)
    with pytest.raises(ProofError, match=r"call \d of a turn got the result of call \d of a turn"):
        run(calls, *given)


def test_results_are_in_the_order_of_the_calls_also_where_some_are_coroutines(calls: ToolCalls) -> None:
    found = run(
        calls,
        *(
            (name, {"a": i, "b": 10})
            for i, name in enumerate(["multiply_later", "multiply", "multiply_later", "multiply"])
        ),
    )
    assert [result.text for result in found] == ["0", "10", "20", "30"]
    assert [result.name for result in found] == ["multiply_later", "multiply", "multiply_later", "multiply"]
    assert not any(result.failed for result in found)


def test_all_calls_run_at_the_same_time(calls: ToolCalls) -> None:
    here, arrived = threading.Barrier(3), asyncio.Event()

    def meet() -> str:
        """Wait for the others."""
        here.wait(60)
        return "met"

    async def meet_later() -> str:
        """Wait for the others in another thread."""
        await asyncio.get_running_loop().run_in_executor(None, here.wait, 60)
        arrived.set()
        return "met"

    found = run(calls, ("meet", {}), ("meet_later", {}), ("meet", {}), tools=tools_of([meet, meet_later]))
    assert [result.text for result in found] == ["met"] * 3


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        ("complain", {"text": "the door is shut"}, "the door is shut"),
        ("leave", {"code": 3}, "SystemExit: 3"),
        ("cancel", {}, "CancelledError"),
        ("divide", {"a": 1}, "there is no tool 'divide'; the tools are multiply"),
        ("multiply", {"a": 1}, "missing a required argument: 'b'"),
        ("multiply", {"a": 1, "b": 2, "c": 3}, "unexpected keyword argument 'c'"),
        ("multiply", [1, 2], "the arguments must be an object"),
        ("multiply", None, "the arguments must be an object"),
        ("multiply", {"a": "x", "b": "y"}, "can't multiply"),
    ],
)
def test_a_call_that_fails_gives_the_model_a_short_error(calls: ToolCalls, name: str, given: Any, message: str) -> None:
    failed, fine = run(calls, (name, given), ("multiply", {"a": 6, "b": 7}))
    assert message in error_of(failed)
    assert (fine.text, fine.failed) == ("42", False)


def test_an_error_is_cut_and_is_one_line(calls: ToolCalls) -> None:
    (found,) = run(calls, ("complain", {"text": "line\n" * 10_000}))
    assert len(error_of(found)) <= 300
    assert "\n" not in error_of(found)


def hang() -> str:
    """Never come back."""
    threading.Event().wait(NEVER)
    return "never"


async def hang_later() -> str:
    """Never come back, but give way."""
    await asyncio.sleep(NEVER)
    return "never"


async def block() -> str:
    """Never come back, and block the event loop."""
    threading.Event().wait(NEVER)
    return "never"


@pytest.mark.parametrize("function", [hang, hang_later, block])
def test_a_call_that_hangs_is_given_up_and_later_calls_are_answered(function: Callable[..., Any]) -> None:
    calls = ToolCalls(0.2)
    (late,) = run(calls, (function.__name__, {}), tools=tools_of([function]))
    assert isinstance(late.error, TookTooLong)
    assert error_of(late) == "no result within 0.2 s"
    calls.timeout = 60.0
    assert [r.text for r in run(calls, ("multiply_later", {"a": 2, "b": 3}), ("multiply", {"a": 2, "b": 4}))] == [
        "6",
        "8",
    ]
    calls.close()


def test_the_driver_waits_for_quick_tools_and_only_once_for_a_slow_one(calls: ToolCalls) -> None:
    may_end = threading.Event()

    def slow() -> str:
        """Wait for the end of the test."""
        may_end.wait(60)
        return "late"

    async def begun(name: str, given: dict[str, Any]) -> asyncio.Future[list[ToolResult]]:
        running = asyncio.ensure_future(calls.run({**ALL, **tools_of([slow])}, [(name, given)]))
        for _ in range(8):
            await asyncio.sleep(0)
        return running

    async def play() -> None:
        assert not await calls.settled()
        quick = await begun("multiply_later", {"a": 6, "b": 7})
        while await calls.settled():
            pass
        assert (await quick)[0].text == "42"
        first = await begun("slow", {})
        assert await calls.settled()
        assert not await calls.settled()
        second = await begun("slow", {})
        assert not await calls.settled()
        may_end.set()
        assert [(await running)[0].text for running in (first, second)] == ["late", "late"]

    asyncio.run(play())


def test_the_driver_stops_waiting_for_a_tool_that_holds_the_engine_again_and_again(
    calls: ToolCalls, monkeypatch: pytest.MonkeyPatch
) -> None:
    passed = 0.0
    monkeypatch.setattr("lockstep.rollouts.programs.tools.time", SimpleNamespace(monotonic=lambda: passed))

    waited_for = threading.Event()

    def spend(seconds: float) -> str:
        nonlocal passed
        waited_for.wait(60)
        passed += seconds
        return "done"

    def spend_little() -> str:
        """Spend a little time."""
        return spend(0.005)

    def spend_more() -> str:
        """Spend more time."""
        return spend(0.06)

    async def waits(name: str, times: int) -> list[bool]:
        found = []
        for _ in range(times):
            waited_for.clear()
            running = asyncio.ensure_future(calls.run(tools_of([spend_little, spend_more]), [(name, {})]))
            for _ in range(8):
                await asyncio.sleep(0)
            settled = asyncio.ensure_future(calls.settled())
            await asyncio.sleep(0)
            waited_for.set()
            found.append(await settled)
            await running
        return found

    async def play() -> None:
        assert await waits("spend_little", 200) == [True] * 200
        assert await waits("spend_more", 20) == [True] * 9 + [False] * 11
        assert await waits("spend_little", 1) == [True]

    asyncio.run(play())


def test_a_result_is_its_text_as_in_trl(calls: ToolCalls) -> None:
    def tell(what: str) -> Any:
        """Return a value.

        Args:
            what: Which value.
        """
        return {
            "number": 3.5,
            "mapping": {"a": 1},
            "list": [1, "b"],
            "blocks": [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}],
            "half a character": "\ud83d!",
            "control": "<|im_end|>",
        }[what]

    tools = tools_of([tell])

    def text(what: str) -> str:
        (found,) = run(calls, ("tell", {"what": what}), tools=tools)
        assert not found.failed
        return found.text

    assert [text("number"), text("mapping"), text("list")] == ["3.5", "{'a': 1}", "[1, 'b']"]
    assert text("blocks") == "one two"
    assert text("half a character") == "?!"
    assert text("control") == "<|im_end|>"


def test_a_picture_and_a_value_without_a_text_are_errors(calls: ToolCalls) -> None:
    class Silent:
        def __str__(self) -> str:
            raise RuntimeError("no text")

    def picture() -> Any:
        """Return a picture."""
        return [{"type": "image", "image": None}]

    def silent() -> Any:
        """Return an object without a text."""
        return Silent()

    found = run(calls, ("picture", {}), ("silent", {}), tools=tools_of([picture, silent]))
    assert "image" in error_of(found[0])
    assert error_of(found[1]) == "no text"


def undescribed(a: int) -> int:
    """An argument without a description."""
    return a


def untyped(a) -> int:  # type: ignore[no-untyped-def]
    """An argument without a type.

    Args:
        a: A number.
    """
    return a


def bare(a: int) -> int:
    return a


@pytest.mark.parametrize("function", [undescribed, untyped, bare, lambda a: a, 3, "multiply"])
def test_a_function_without_a_schema_is_refused_by_name(function: Any) -> None:
    with pytest.raises(InputError, match="tool"):
        tool_of(function)


def test_two_tools_of_one_name_are_refused() -> None:
    with pytest.raises(InputError, match="two tools are named 'multiply'"):
        tools_of([multiply, multiply])
