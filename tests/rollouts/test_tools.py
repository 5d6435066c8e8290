"""Tools: schemas from functions, and calls that never end a run."""

from __future__ import annotations

import asyncio
import json
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
from caller import NEVER, multiply

import lockstep.rollouts.programs.tools as tools_module
from lockstep.errors import InputError, ProofError
from lockstep.rollouts.programs.tools import ToolCalls, ToolResult, tool_of, tools_of
from lockstep.rollouts.programs.workers import TookTooLong, Worker

T = TypeVar("T")


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


@pytest.fixture
def threads() -> Iterator[ToolCalls]:
    """Calls of plain tools that each get a thread of their own."""
    made = ToolCalls(60.0, threads=True)
    yield made
    made.close()


def run(calls: ToolCalls, *given: tuple[str, Any], tools: Any = ALL) -> list[ToolResult]:
    return calls.finish(calls.run(tools, given), 60.0)


def error_of(result: ToolResult) -> str:
    assert result.failed
    return json.loads(result.text)["error"]


def test_a_schema_comes_from_type_hints_and_docstring() -> None:
    function = ALL["multiply"].schema["function"]
    assert function["name"] == "multiply"
    assert function["description"] == "The product of two numbers."
    assert function["parameters"]["properties"]["a"] == {
        "type": "integer",
        "description": "The first number.",
    }
    assert function["parameters"]["required"] == ["a", "b"]


def test_a_result_that_a_thread_made_for_another_call_is_refused(
    threads: ToolCalls, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = [("multiply", {"a": 1, "b": b}) for b in (2, 3)]
    assert [result.text for result in run(threads, *given)] == ["2", "3"]
    honest, made = tools_module.in_thread, list[Any]()

    async def exchanged(*arguments: Any) -> Any:
        made.append(await honest(*arguments))
        return made[0]

    monkeypatch.setattr(tools_module, "in_thread", exchanged)
    with pytest.raises(ProofError, match=r"call \d of a turn got the result of call \d of a turn"):
        run(threads, *given)


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


@pytest.mark.parametrize("asks", ["the tool", "the field"])
def test_calls_in_threads_of_their_own_and_coroutines_run_at_the_same_time(asks: str) -> None:
    calls = ToolCalls(60.0, threads=asks == "the field")
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

    meet.own_thread = asks == "the tool"  # type: ignore[attr-defined]
    found = run(calls, ("meet", {}), ("meet_later", {}), ("meet", {}), tools=tools_of([meet, meet_later]))
    assert [result.text for result in found] == ["met"] * 3
    calls.close()


def tell_thread() -> str:
    """Tell the thread of this call."""
    return str(threading.get_ident())


def test_plain_calls_run_in_the_thread_that_asked_or_in_one_other_thread_for_good(threads: ToolCalls) -> None:
    tools, asked = tools_of([tell_thread]), [("tell_thread", {})] * 3
    here, worker = ToolCalls(60.0), ToolCalls(60.0, Worker("tools"))
    found = {
        name: {result.text for _ in range(2) for result in run(calls, *asked, tools=tools)}
        for name, calls in {"here": here, "worker": worker, "threads": threads}.items()
    }
    assert found["here"] == {str(threading.get_ident())}
    assert len(found["worker"]) == 1
    assert not found["worker"] & found["here"]
    worker.close()


def alarm() -> str:
    """Set an alarm."""
    before = signal.signal(signal.SIGALRM, lambda *_: None)
    signal.alarm(60)
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)
    return "set"


async def alarm_later() -> str:
    """Set an alarm in a coroutine."""
    return alarm()


def in_other_thread(work: Callable[[], T]) -> T:
    with ThreadPoolExecutor(1) as other:
        return other.submit(work).result()


def test_a_signal_works_in_the_main_thread_and_is_refused_elsewhere_by_what_to_change() -> None:
    tools = tools_of([alarm, alarm_later])
    assert run(ToolCalls(60.0), ("alarm", {}), tools=tools)[0].text == "set"
    refused: dict[str, Callable[[], Any]] = {
        "set max_staleness to 0": lambda: run(ToolCalls(60.0, Worker("tools")), ("alarm", {}), tools=tools),
        "leave out tool_threads": lambda: run(ToolCalls(60.0, threads=True), ("alarm", {}), tools=tools),
        "make it a plain function": lambda: run(ToolCalls(60.0), ("alarm_later", {}), tools=tools),
        "start it in the main thread": lambda: in_other_thread(
            lambda: run(ToolCalls(60.0), ("alarm", {}), tools=tools)
        ),
    }
    for what, work in refused.items():
        with pytest.raises(InputError, match=f"^alarm.* uses a signal: .*{what}"):
            work()


@pytest.mark.parametrize("home", [None, Worker("tools")], ids=["here", "worker"])
def test_a_call_after_one_that_hangs_runs_and_its_own_time_begins_when_it_begins(home: Worker | None) -> None:
    calls = ToolCalls(0.5, home)
    asked = [("hang", {}), ("spin", {}), ("multiply", {"a": 2, "b": 4})]
    late, later, fine = run(calls, *asked, tools={**ALL, **tools_of([hang, spin])})
    assert isinstance(late.error, TookTooLong)
    assert isinstance(later.error, TookTooLong)
    assert (fine.text, fine.failed) == ("8", False)
    calls.close()


def test_an_interrupt_during_a_call_in_this_thread_goes_through() -> None:
    def interrupt() -> str:
        """Press Ctrl-C."""
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(ToolCalls(60.0), ("interrupt", {}), tools=tools_of([interrupt]))


def test_a_tool_that_always_fails_in_one_way_is_found_and_others_are_not(calls: ToolCalls) -> None:
    def fail(text: str, how: str = "one way") -> str:
        """Fail.

        Args:
            text: The text of the error.
            how: Where it fails.
        """
        if how == "one way":
            raise RuntimeError(text)
        raise RuntimeError(text) from None

    tools = {**ALL, **tools_of([fail])}
    name = "test_a_tool_that_always_fails_in_one_way_is_found_and_others_are_not.<locals>.fail"

    def failing(*asked: tuple[str, Any]) -> list[tuple[str, int, str]]:
        run(calls, *asked, tools=tools)
        return calls.failing.take()

    fails, good = [("fail", {"text": str(i)}) for i in range(2)], ("multiply", {"a": 1, "b": 2})
    assert failing(*fails, good) == [(name, 2, "RuntimeError: 0")]
    assert failing(good, ("multiply", {"a": "x", "b": "y"})) == []
    assert failing(fails[0], ("fail", {"text": "0", "how": "another"})) == []
    # Calls that the tool never got are the model's.
    assert failing(("fail", {}), ("fail", {}), ("nothing", {})) == []
    # One call shows nothing; with the next step's it does.
    assert failing(fails[0]) == []
    assert failing(fails[1]) == [(name, 2, "RuntimeError: 0")]


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
def test_a_call_that_fails_gives_the_model_a_short_error(
    calls: ToolCalls, name: str, given: Any, message: str
) -> None:
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


def spin() -> str:
    """Never come back, and compute."""
    ends = time.monotonic() + NEVER
    while time.monotonic() < ends:
        pass
    return "never"


async def hang_later() -> str:
    """Never come back, but give way."""
    await asyncio.sleep(NEVER)
    return "never"


async def block() -> str:
    """Never come back, and block the event loop."""
    threading.Event().wait(NEVER)
    return "never"


@pytest.mark.parametrize("function", [hang, spin, hang_later, block])
def test_a_call_that_hangs_is_given_up_and_later_calls_are_answered(function: Callable[..., Any]) -> None:
    calls = ToolCalls(0.2)
    (late,) = run(calls, (function.__name__, {}), tools=tools_of([function]))
    assert isinstance(late.error, TookTooLong)
    assert error_of(late) == "no result within 0.2 s"
    calls.timeout = 60.0
    assert [
        r.text for r in run(calls, ("multiply_later", {"a": 2, "b": 3}), ("multiply", {"a": 2, "b": 4}))
    ] == [
        "6",
        "8",
    ]
    calls.close()


def test_the_driver_waits_for_quick_tools_and_only_once_for_a_slow_one(threads: ToolCalls) -> None:
    may_end = threading.Event()

    def slow() -> str:
        """Wait for the end of the test."""
        may_end.wait(60)
        return "late"

    async def begun(name: str, given: dict[str, Any]) -> asyncio.Future[list[ToolResult]]:
        running = asyncio.ensure_future(threads.run({**ALL, **tools_of([slow])}, [(name, given)]))
        for _ in range(8):
            await asyncio.sleep(0)
        return running

    async def play() -> None:
        assert not await threads.settled()
        quick = await begun("multiply_later", {"a": 6, "b": 7})
        while await threads.settled():
            pass
        assert (await quick)[0].text == "42"
        first = await begun("slow", {})
        assert await threads.settled()
        assert not await threads.settled()
        second = await begun("slow", {})
        assert not await threads.settled()
        may_end.set()
        assert [(await running)[0].text for running in (first, second)] == ["late", "late"]

    asyncio.run(play())


def test_a_coroutine_function_of_an_environment_holds_the_engine_no_longer_than_a_tool(
    calls: ToolCalls,
) -> None:
    async def play() -> None:
        running = asyncio.ensure_future(calls.call(hang_later, {}, calls.home))
        for _ in range(8):
            await asyncio.sleep(0)
        assert await calls.settled()
        assert not await calls.settled()
        running.cancel()

    calls.finish(play(), 60.0)


def test_the_driver_stops_waiting_for_a_tool_that_holds_the_engine_again_and_again(
    threads: ToolCalls, monkeypatch: pytest.MonkeyPatch
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
            running = asyncio.ensure_future(threads.run(tools_of([spend_little, spend_more]), [(name, {})]))
            for _ in range(8):
                await asyncio.sleep(0)
            settled = asyncio.ensure_future(threads.settled())
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
