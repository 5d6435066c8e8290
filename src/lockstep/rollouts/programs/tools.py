"""Tools: Python functions that the model may call during a rollout, with TRL's convention.

Type hints and the Google-style docstring of a function make its JSON schema, which the chat template shows to the
model. `ToolCalls` runs the calls of a rollout's turns. What the model reads of a result is made in the thread of the
user's code (`images/content.py`).

| function | where it runs |
|---|---|
| coroutine function | in the loop of the user's coroutine functions; calls run concurrently |
| plain function | in the thread that serves the engine, most often the main thread; one call after the other |
| the same, with generations ahead | in one other thread, the same for the whole run; one call after the other |
| with the attribute `own_thread = True`, or the field `tool_threads` | a thread per call; calls run concurrently |

Proof `tool_results`.
Shows: the thread that ran a tool call names the call, and it is the call that gets the result.
Does not show: a tool that mixes up its own results; a result that is an error.
When: every tool call.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from transformers.utils import get_json_schema
from transformers.utils.chat_template_utils import DocstringParsingException, TypeHintParsingException

from lockstep.contract.inbox import Errands
from lockstep.errors import InputError, LockstepError, ProofError, one_line
from lockstep.images.content import NO_IMAGES, Content, Process, content_of, printable, refusing
from lockstep.progress import waiting
from lockstep.rollouts.programs.workers import Here, Raised, TookTooLong, Worker, in_loop, in_thread
from lockstep.threads import CallLoop, is_coroutine_function, uses_signal


def giving(function: Callable[..., Any], made: Callable[[Any], Any]) -> Callable[..., Any]:
    """A function whose result `made` converts in the same place: in its thread, or in its event loop."""
    if is_coroutine_function(function):

        async def awaited(**given: Any) -> Any:
            return made(await function(**given))

        return functools.update_wrapper(awaited, function, updated=())

    def called(**given: Any) -> Any:
        return made(function(**given))

    return functools.update_wrapper(called, function, updated=())


Schema = dict[str, Any]
T = TypeVar("T")

# Characters of an error that the model reads.
_LONGEST_ERROR = 300
# Seconds that a quick call takes at most.
QUICK = 0.3
# The driver may wait for a function this long per call on average, after it has waited this long in all.
_PER_CALL, _IN_ALL = 0.01, 0.5


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call, with the arguments of a call by keyword.

    Attributes:
        schema: its JSON schema, as `transformers.utils.get_json_schema` makes it.
        place: where an environment's plain methods run; None: where the function's own plain calls run.
    """

    name: str
    function: Callable[..., Any]
    schema: Schema
    place: Here | Worker | None = None


class ToolResult(NamedTuple):
    """What the model reads after a call.

    Attributes:
        name: the name that the model called.
        content: the result, or a short error.
        failed: whether it is an error.
        error: the error of the tool's own code, or that its time limit passed; None: there is none.
        ticket: which call this is the result of. The thread that ran the call has written it.
    """

    name: str
    content: Content
    failed: bool = False
    error: LockstepError | None = None
    ticket: str = ""

    @property
    def text(self) -> str:
        """The text of the result, without its images."""
        return self.content.text


def tool_of(function: Callable[..., Any]) -> Tool:
    """The tool of one function.

    Raises:
        InputError: the function has no name, no docstring, or arguments without a type or a description.
    """
    name = getattr(function, "__name__", None)
    if not callable(function) or name is None or name == "<lambda>":
        raise InputError(
            f"tool {function!r:.80} is not a function with a name; give a function with type hints and a docstring"
        )
    try:
        schema = get_json_schema(function)
    except (DocstringParsingException, TypeHintParsingException, ValueError, TypeError, NameError) as error:
        raise InputError(
            f"tool {name} has no JSON schema: {one_line(error)}; give every argument a type hint, and a description "
            "under 'Args:' in a Google-style docstring"
        ) from error
    return Tool(name, function, schema)


def tools_of(functions: Sequence[Callable[..., Any]]) -> dict[str, Tool]:
    """Tools by name. Raises as `tool_of`, and an `InputError` for two tools of one name."""
    found: dict[str, Tool] = {}
    for function in functions:
        tool = tool_of(function)
        if tool.name in found:
            raise InputError(f"two tools are named {tool.name!r}; the model could not say which one it calls")
        found[tool.name] = tool
    return found


class ToolCalls:
    """Runs the calls of tools and environments, each with a time limit.

    Args:
        timeout: seconds that one call may take.
        home: where plain functions and environments run; None: in the thread that serves the engine.
        threads: whether every call of a tool, and every environment, gets a thread of its own.

    Attributes:
        process: processes an image that a call returned, in the thread of the call.
        errands: what the thread that serves the engine does for these calls.
        failing: which tools fail at every call.
    """

    def __init__(self, timeout: float, home: Here | Worker | None = None, *, threads: bool = False) -> None:
        self.timeout = timeout
        self.home = home if home is not None else Here()
        self.errands = self.home.errands if isinstance(self.home, Here) else Errands()
        self._threads = threads
        self.process: Process = refusing(NO_IMAGES)
        self.failing = Failing()
        # The turns whose rollouts wait for calls: these calls, ended ones too, with the names of their functions.
        # None in place of a name: the thread that serves the engine runs the call, and nothing else meanwhile.
        self._open: list[dict[asyncio.Task[Any], str | None]] = []
        self._slow: set[str | None] = set()
        # Seconds that the driver has waited for the calls of each function, and the number of these calls.
        self._waited: dict[str | None, tuple[float, int]] = {}

    def place_of(self, asks: Any) -> Here | Worker | None:
        """Where plain calls of a tool, or what a factory of environments makes, run; None: in threads of their own."""
        return None if self._threads or getattr(asks, "own_thread", False) else self.home

    def finish(self, work: Coroutine[Any, Any, T], patience: float) -> T:
        """The result of a coroutine that makes calls, for the thread that otherwise serves the engine.

        Raises:
            LockstepError: it did not end within `patience` seconds after the last call.
        """
        loop = CallLoop("lockstep-calls-of-tools")
        try:
            pending = loop.start(work, lambda found: found)
            self.errands.do_during(pending, patience)
            if not pending.done():
                raise LockstepError(f"calls of tools or environments have not ended within {patience:.0f} s")
            return pending.result()
        finally:
            loop.close()

    @property
    def waiting(self) -> bool:
        """Whether a rollout waits for a call. The call has a time limit."""
        return bool(self._open)

    async def run(
        self, tools: Mapping[str, Tool], calls: Sequence[tuple[str, Any]], turn: str = "a turn"
    ) -> list[ToolResult]:
        """The results of the calls of one turn, in their order. A call that fails gives an error as its text.

        Args:
            calls: name and arguments of each call.
            turn: names the turn and its rollout. No other turn that runs meanwhile may have this name.

        Raises:
            ProofError: a result belongs to another call.
        """
        tickets = [f"call {number} of {turn}" for number in range(len(calls))]
        turn_calls: dict[asyncio.Task[ToolResult], str | None] = {}
        for (name, given), ticket in zip(calls, tickets, strict=True):
            tool = tools.get(name)
            counted_as = self._counted_as(tool.function, self._place(tool)) if tool is not None else ""
            turn_calls[asyncio.ensure_future(self._one(tools, name, given, ticket))] = counted_as
        with self._counted(turn_calls):
            found = await asyncio.gather(*turn_calls)
        for result, ticket in zip(found, tickets, strict=True):
            if result.ticket != ticket:
                raise ProofError(
                    "tool_results",
                    f"{ticket} got the result of {result.ticket or 'no call'}",
                    "the threads that run tools have exchanged their results",
                    "this is a defect of Lockstep: report it with this message",
                )
        return found

    async def call(
        self, function: Callable[..., Any], given: Mapping[str, Any], place: Here | Worker | None = None
    ) -> Any:
        """The result of one function of an environment.

        Args:
            place: where a plain function runs; None: where the function's own plain calls run.

        Raises:
            TookTooLong: it did not come within the time limit.
            Raised: the function raised an error.
            InputError: it uses a signal where none works.
        """
        place = place if place is not None else self.place_of(function)
        task = asyncio.ensure_future(self._result(function, given, place))
        with self._counted({task: self._counted_as(function, place)}):
            return await task

    def _counted_as(self, function: Callable[..., Any], place: Here | Worker | None) -> str | None:
        return None if isinstance(place, Here) and not is_coroutine_function(function) else name_of(function)

    def _place(self, tool: Tool) -> Here | Worker | None:
        return tool.place if tool.place is not None else self.place_of(tool.function)

    @contextmanager
    def _counted(self, calls: dict[asyncio.Task[Any], str | None]) -> Iterator[None]:
        """Count the calls of a turn as open until the coroutine that awaits them goes on.

        A call ends some passes of the event loop earlier. Without the count, `settled` could miss a rollout whose next
        request is still to come.
        """
        self._open.append(calls)
        try:
            yield
        finally:
            self._open.remove(calls)

    async def _result(
        self, function: Callable[..., Any], given: Mapping[str, Any], place: Here | Worker | None
    ) -> Any:
        what, is_coroutine = name_of(function), is_coroutine_function(function)
        try:
            with waiting(f"the call of {what}", self.timeout):
                if is_coroutine:
                    return await in_loop(lambda: function(**given), self.timeout, what)
                if place is None:
                    return await in_thread(lambda: function(**given), self.timeout, what)
                return await place.run(lambda: function(**given), self.timeout, what)
        except Raised as error:
            # In the main thread it is the function that has started a thread.
            in_main_thread = isinstance(place, Here) and place.in_main_thread and not is_coroutine
            if uses_signal(error) and not in_main_thread:
                raise InputError(f"{what} uses a signal: {self._why_no_signal(function, place)}") from error
            raise

    def _why_no_signal(self, function: Callable[..., Any], place: Here | Worker | None) -> str:
        """Why a signal does not work where a function ran, and what to do."""
        otherwise = "or use none: tool_timeout ends a call that takes too long"
        if is_coroutine_function(function):
            return f"coroutine functions run in a loop beside the main thread; make it a plain function, {otherwise}"
        if isinstance(place, Here):
            return f"training was started outside the main thread; start it in the main thread, {otherwise}"
        if place is self.home:
            advice = f"set max_staleness to 0, {otherwise}"
            return f"with max_staleness, tools and environments run beside the main thread; {advice}"
        return f"it runs in a thread of its own; leave out tool_threads or its own_thread, {otherwise}"

    async def settled(self) -> bool:
        """Wait for calls of quick functions. False: no rollout waits for such a call, or has yet to go on after one.

        Quick calls must not make batches depend on threads: a run with quick tools can be repeated exactly. The engine
        stands still meanwhile. Therefore a function is not waited for again after one call took longer than 0.3 s, or
        after the waits were longer than 10 ms per call and 0.5 s in all. Calls in the thread of the engine are always
        waited for.
        """
        # A turn with a slow call goes on when that call ends: nobody waits for its quick calls.
        slow = self._slow
        turns = [t for t in self._open if all(task.done() or of not in slow for task, of in t.items())]
        if not turns:
            return False
        quick = {task: name for turn in turns for task, name in turn.items() if not task.done()}
        if here := [task for task, name in quick.items() if name is None]:
            await asyncio.wait(here)
            return True
        if not quick:
            await asyncio.sleep(0)
            return True
        begun, ends = time.monotonic(), dict[Any, float]()
        for task in quick:
            task.add_done_callback(lambda task: ends.setdefault(task, time.monotonic()))
        _, late = await asyncio.wait(quick, timeout=QUICK)
        self._slow |= {quick[task] for task in late}
        for name in set(quick.values()):
            own = [ends.get(task, time.monotonic()) - begun for task, of in quick.items() if of == name]
            seconds, calls = self._waited.get(name, (0.0, 0))
            seconds, calls = self._waited[name] = (seconds + max(own), calls + len(own))
            if seconds > _IN_ALL and seconds > _PER_CALL * calls:
                self._slow.add(name)
        return True

    async def _one(self, tools: Mapping[str, Tool], name: str, given: Any, ticket: str) -> ToolResult:
        tool = tools.get(name)
        if tool is None:
            said = f"there is no tool {name!r:.80}; the tools are {', '.join(tools) or 'none'}"
            return failed_call(name, said, ticket=ticket)
        if not isinstance(given, Mapping) or not all(isinstance(key, str) for key in given):
            said = "the arguments must be an object with the names of the tool's parameters"
            return failed_call(name, said, ticket=ticket)
        try:
            inspect.signature(tool.function).bind(**given)
        except TypeError as error:
            return failed_call(name, str(error), ticket=ticket)
        try:
            answering = self._answering(tool.function, ticket)
            content, done = await self._result(answering, given, self._place(tool))
        except (TookTooLong, Raised) as error:
            self.failing.note(name_of(tool.function), error)
            return failed_call(name, str(error), error=error, ticket=ticket)
        self.failing.note(name_of(tool.function), None)
        return ToolResult(name, content, ticket=done)

    def _answering(self, function: Callable[..., Any], ticket: str) -> Callable[..., Any]:
        """The function with what the model reads of its result, and the ticket of its call: both made where it runs."""
        return giving(function, lambda result: (content_of(result, self.process), ticket))

    def close(self) -> None:
        """End the thread, unless it is the caller's."""
        self.home.end()


def failed_call(name: str, why: str, error: LockstepError | None = None, ticket: str = "") -> ToolResult:
    """The result of a call that failed: the model reads `{"error": …}`, in at most a few hundred characters."""
    said = " ".join(printable(why).split())
    text = json.dumps({"error": said[:_LONGEST_ERROR]}, ensure_ascii=False)
    return ToolResult(name, Content((text,)), True, error, ticket)


class Failing:
    """Finds the tools that fail at every call, each time in the same way."""

    def __init__(self) -> None:
        # How a tool's calls have ended since the last look: the ways in which they failed, and None for success.
        self._ends: dict[str, list[tuple[Any, str] | None]] = {}

    def note(self, name: str, error: LockstepError | None) -> None:
        """Note how a call has ended: with a result, with an error of the tool's own code, or at its time limit."""
        self._ends.setdefault(name, []).append(None if error is None else (_way_of(error), _in_words(error)))

    def take(self) -> list[tuple[str, int, str]]:
        """Name, number of calls, and error of each tool whose calls since the last time have all failed in one way.

        A single call shows nothing yet. It is kept until there is another.
        """
        found = []
        for name, ends in list(self._ends.items()):
            failed = [end for end in ends if end is not None]
            same = len(failed) == len(ends) and len({way for way, _ in failed}) == 1
            if same and len(ends) == 1:
                continue
            if same:
                found.append((name, len(ends), failed[0][1]))
            del self._ends[name]
        return found


def _way_of(error: LockstepError) -> Any:
    """How a call failed: the kind of its error and the line that raised it. The text may name a thread."""
    cause = error.__cause__
    if not isinstance(error, Raised) or cause is None:
        return type(error)
    line = cause.__traceback__
    while line is not None and line.tb_next is not None:
        line = line.tb_next
    # An error of another process is raised in one line of ours.
    text = str(cause) if isinstance(cause, LockstepError) else ""
    return type(cause), line and (line.tb_frame.f_code.co_filename, line.tb_lineno), text


def _in_words(error: LockstepError) -> str:
    cause, said = error.__cause__, str(error)
    if isinstance(error, Raised) and cause is not None:
        said = f"{type(cause).__name__}: {cause}"
    return " ".join(said.split())[:_LONGEST_ERROR]


def name_of(function: Callable[..., Any]) -> str:
    """Name of a tool or of a method of an environment, with its class."""
    return getattr(function, "__qualname__", repr(function))
