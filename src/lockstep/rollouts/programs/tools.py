"""Tools: Python functions that the model may call during a rollout, with TRL's convention.

A trainer's `tools` come here. Type hints and the Google-style docstring of a function make its JSON schema, which the chat template
shows to the model. `rollouts/programs/tool_program.py` runs the calls of each turn.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

from transformers.utils import get_json_schema
from transformers.utils.chat_template_utils import DocstringParsingException, TypeHintParsingException

from lockstep.errors import InputError, LockstepError, ProofError
from lockstep.report.waits import waiting
from lockstep.rollouts.programs.content import Content, Process, content_of, giving, printable, shows_no_images
from lockstep.rollouts.programs.workers import Raised, TookTooLong, ToolLoop, Worker, in_thread
from lockstep.rollouts.scores.coroutines import is_coroutine_function

Schema = dict[str, Any]

# Characters of an error that the model reads.
_LONGEST_ERROR = 300
# Seconds that a quick call takes at most.
_QUICK = 0.3
# The driver may wait for a function this long per call on average, after it has waited this long in all.
_PER_CALL, _IN_ALL = 0.01, 0.5


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call.

    Attributes:
        name: the function's name, by which the model calls it.
        function: called with the arguments of a call by keyword; may be a coroutine function.
        schema: its JSON schema, as `transformers.utils.get_json_schema` makes it.
        worker: thread of an environment's methods; None: each call gets a thread of its own.
    """

    name: str
    function: Callable[..., Any]
    schema: Schema
    worker: Worker | None = None


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
            f"tool {name} has no JSON schema: {' '.join(str(error).split())}; give every argument a type hint, and a description "
            "under 'Args:' in a Google-style docstring"
        ) from error
    return Tool(name, function, schema)


def tools_of(functions: Sequence[Callable[..., Any]]) -> dict[str, Tool]:
    """Tools by name.

    Raises:
        InputError: as in `tool_of`; or two functions have the same name.
    """
    found: dict[str, Tool] = {}
    for function in functions:
        tool = tool_of(function)
        if tool.name in found:
            raise InputError(f"two tools are named {tool.name!r}; the model could not say which one it calls")
        found[tool.name] = tool
    return found


class ToolCalls:
    """Runs tool calls: all calls of all rollouts concurrently, each with a time limit.

    Coroutine functions run in one event loop of their own. Every call of a plain function runs in a thread of its own, unless it is
    a method of an environment (`rollouts/programs/environments.py`).

    Args:
        timeout: seconds that one call may take.

    Attributes:
        process: processes an image that a call returned, in the thread of the call.
    """

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout
        self.process: Process = shows_no_images
        self.loop = ToolLoop()
        # The turns whose rollouts wait for calls: these calls, ended ones too, with the names of their functions.
        self._open: list[dict[asyncio.Task[Any], str]] = []
        # The functions that took long.
        self._slow: set[str] = set()
        # Seconds that the driver has waited for the calls of each function, and the number of these calls.
        self._waited: dict[str, tuple[float, int]] = {}

    async def run(
        self, tools: Mapping[str, Tool], calls: Sequence[tuple[str, Any]], turn: str = "a turn"
    ) -> list[ToolResult]:
        """The results of the calls of one turn, in the order of the calls. A call that fails gives an error as its text.

        Args:
            tools: the tools of this rollout, by name.
            calls: name and arguments of each call.
            turn: names the turn and its rollout. No other turn that runs meanwhile may have this name.

        Raises:
            ProofError: a result belongs to another call.
        """
        tickets = [f"call {number} of {turn}" for number in range(len(calls))]
        turn_calls = {
            asyncio.ensure_future(self._one(tools, name, given, ticket)): _name_of(tools[name].function)
            if name in tools
            else ""
            for (name, given), ticket in zip(calls, tickets, strict=True)
        }
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

    async def call(self, function: Callable[..., Any], given: Mapping[str, Any], worker: Worker | None = None) -> Any:
        """The result of one function.

        Args:
            given: its arguments, by name.
            worker: the thread of a plain function; None: a thread for this call only.

        Raises:
            TookTooLong: it did not come within the time limit.
            Raised: the function raised an error.
        """
        task = asyncio.ensure_future(self._result(function, given, worker))
        with self._counted({task: _name_of(function)}):
            return await task

    @contextmanager
    def _counted(self, calls: dict[asyncio.Task[Any], str]) -> Iterator[None]:
        """Count the calls of a turn as open until the coroutine that awaits them goes on.

        A call ends some passes of the event loop before this coroutine goes on. If the call did not count as open meanwhile,
        `settled` could miss a rollout whose next request is still to come.
        """
        self._open.append(calls)
        try:
            yield
        finally:
            self._open.remove(calls)

    async def _result(self, function: Callable[..., Any], given: Mapping[str, Any], worker: Worker | None) -> Any:
        with waiting(f"the call of {_name_of(function)}", self.timeout):
            if is_coroutine_function(function):
                return await self.loop.run(lambda: function(**given), self.timeout)
            if worker is not None:
                return await worker.run(lambda: function(**given), self.timeout)
            return await in_thread(lambda: function(**given), self.timeout)

    async def settled(self) -> bool:
        """Wait for calls of quick functions. False: no rollout waits for such a call, or has yet to go on after one.

        The driver calls it between two steps of the engine, so that quick calls do not make batches depend on threads: a run with
        quick tools can be repeated exactly. The engine stands still meanwhile. Therefore a function is not waited for again after
        one call took longer than 0.3 s, or after the waits were longer than 10 ms per call and 0.5 s in all.
        """
        # A turn with a slow call goes on when that call ends: nobody waits for its quick calls.
        turns = [t for t in self._open if all(task.done() or name not in self._slow for task, name in t.items())]
        if not turns:
            return False
        quick = {task: name for turn in turns for task, name in turn.items() if not task.done()}
        if not quick:
            await asyncio.sleep(0)
            return True
        begun, ends = time.monotonic(), dict[Any, float]()
        for task in quick:
            task.add_done_callback(lambda task: ends.setdefault(task, time.monotonic()))
        _, late = await asyncio.wait(quick, timeout=_QUICK)
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
            content, done = await self._result(self._answering(tool.function, ticket), given, tool.worker)
        except (TookTooLong, Raised) as error:
            return failed_call(name, str(error), error=error, ticket=ticket)
        return ToolResult(name, content, ticket=done)

    def _answering(self, function: Callable[..., Any], ticket: str) -> Callable[..., Any]:
        """The function with what the model reads of its result, and the ticket of the call beside it. Both are made where the
        function runs: the first, because making text of a value is the user's code too; the ticket, because it shows which call
        the result came from."""
        return giving(function, lambda result: (content_of(result, self.process), ticket))

    def close(self) -> None:
        """End the threads."""
        self.loop.end()


def failed_call(name: str, why: str, error: LockstepError | None = None, ticket: str = "") -> ToolResult:
    """The result of a call that failed: the model reads `{"error": …}`, in at most a few hundred characters."""
    said = " ".join(printable(why).split())
    text = json.dumps({"error": said[:_LONGEST_ERROR]}, ensure_ascii=False)
    return ToolResult(name, Content((text,)), True, error, ticket)


def _name_of(function: Callable[..., Any]) -> str:
    return getattr(function, "__qualname__", repr(function))
