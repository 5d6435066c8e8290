"""Environments: objects that a rollout acts on through their methods, with TRL's convention `environment_factory`.

The public methods of an environment are tools of its rollout. `reset(**row)` begins the rollout and may give text or
content blocks that are appended to the last message of the prompt. `get_reward()` may give the rollout's reward.
`next_user_message(answer)` is ours: it may answer a turn that calls no tool with a message of the user, as text games
do. Each rollout has one environment, and gives it back when it is scored.

The constructors and plain methods of all environments run in one thread, as plain tools do, and so do the reward
functions that read them. A class or factory with the attribute `own_thread = True` gets a thread per environment. An
environment that raises an error in its constructor, `reset` or `get_reward`, that hangs, or whose process dies costs
its own rollout only.

`in_process("games.py:Game")` is a factory of environments in processes of their own, for dependencies that clash with
ours and for code that changes a whole process. Each process runs `rollouts/programs/environment_runner.py`, and may
have another Python. It is killed when its environment fails, hangs, or is not needed any more.
"""

from __future__ import annotations

import inspect
import itertools
import json
import math
import subprocess
import sys
import threading
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lockstep.errors import InputError, LockstepError, quoted
from lockstep.images.content import Content, content_of_blocks, printable
from lockstep.processes import for_users_code, kill_group, of_users_code
from lockstep.progress import waiting
from lockstep.rollouts.call_fits import not_callable_by_name
from lockstep.rollouts.programs.tools import Schema, ToolCalls, ToolResult, giving, tool_of
from lockstep.rollouts.programs.workers import Here, Raised, TookTooLong, Worker

_RUNNER = Path(__file__).with_name("environment_runner.py")
# Seconds in which a process must have made its environment.
_START = 120.0
# The names that annotations of an environment's methods may use.
_TYPING = ("Any", "Literal", "Optional", "Union", "List", "Dict", "Tuple")
_TYPES = {name: getattr(typing, name) for name in _TYPING}
_TYPES |= {kind.__name__: kind for kind in (str, int, float, bool, list, dict, tuple)} | {"typing": typing}


class EnvironmentDied(LockstepError):
    """The process of an environment ended, or answered something else than JSON."""


class ProcessEnvironment:
    """Base of the classes that `in_process` makes: each method is a call to the process."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def _ask(self, method: str, given: Mapping[str, Any]) -> Any:
        """What the process's object returns; an `EnvironmentDied` if it is gone, a `LockstepError` if it raised."""
        try:
            line = json.dumps({"method": method, "given": dict(given)})
        except (TypeError, ValueError) as error:
            why = f"an argument cannot be sent to the environment's process ({error})"
            raise LockstepError(f"{method}: {why}") from error
        found = _exchange(self._process, line)
        if "error" in found:
            raise LockstepError(found["error"])
        return found["result"]


def process_of(environment: ProcessEnvironment) -> subprocess.Popen[str]:
    """The process of an environment. No method gives it, because the model may call every public method."""
    return environment._process


def end_process(environment: ProcessEnvironment) -> None:
    """Kill the process of an environment and everything that it started."""
    _kill(environment._process)


def in_process(
    target: str, python: str | None = None, arguments: Mapping[str, Any] | None = None
) -> Callable[[], ProcessEnvironment]:
    """A factory of environments that live in processes of their own.

    Args:
        target: `path/to/file.py:name` or `package.module:name` of a class or factory.
        python: the interpreter, for example that of another virtual environment; None: this one. It needs no package of
            ours.
        arguments: keyword arguments of the class or factory, as JSON types; None: none.

    Returns:
        The factory. It raises `EnvironmentDied` if the process does not start, `LockstepError` if the constructor
            raised.
    """
    classes: list[type[ProcessEnvironment]] = []
    given = json.dumps(dict(arguments or {}))

    def start() -> ProcessEnvironment:
        killer = of_users_code()
        process = subprocess.Popen(
            [python or sys.executable, "-u", str(_RUNNER), target, given],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            env=for_users_code(),
            # A group of its own: an interrupt of the run does not reach it, and it is killed with its children.
            start_new_session=True,
        )
        killer.add(process.pid)
        late = threading.Timer(_START, _kill, [process])
        late.start()
        try:
            with waiting(f"the process of environment {start.__name__} to begin", _START):
                about = _exchange(process, None)
            if "error" in about:
                raise LockstepError(about["error"])
            if not classes:
                classes.append(_class_of(about))
        except BaseException:
            _kill(process)
            raise
        finally:
            late.cancel()
        return classes[0](process)

    start.__name__ = target.rpartition(":")[2]
    # A thread that waits for the process needs nothing of the others.
    start.own_thread = True  # type: ignore[attr-defined]
    return start


def _exchange(process: subprocess.Popen[str], line: str | None) -> dict[str, Any]:
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        if line is not None:
            process.stdin.write(line + "\n")
            process.stdin.flush()
        answer = process.stdout.readline()
        found = json.loads(answer) if answer.endswith("\n") else None
    except (OSError, ValueError, RecursionError) as error:
        raise EnvironmentDied(f"its process is gone, or answered no JSON ({error})") from error
    if not isinstance(found, dict):
        raise EnvironmentDied(f"its process ended with code {process.wait()}")
    return found


def _kill(process: subprocess.Popen[str]) -> None:
    """A thread that still reads from the process gets an end of file, and goes on."""
    kill_group(process.pid)
    of_users_code().remove(process.pid)
    process.wait()


def _class_of(about: Mapping[str, Any]) -> type[ProcessEnvironment]:
    """A class with the methods of the object in the process, their signatures and docstrings."""
    methods = {method["name"]: _method(about["class"], **method) for method in about["methods"]}
    return type(about["class"], (ProcessEnvironment,), methods)


def _method(
    owner: str, name: str, doc: str | None, parameters: list[dict[str, Any]], returns: str | None
) -> Callable[..., Any]:
    own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    found = [
        inspect.Parameter(
            p["name"],
            inspect.Parameter.VAR_KEYWORD if p["rest"] else inspect.Parameter.KEYWORD_ONLY,
            default=p["default"] if p["has_default"] else inspect.Parameter.empty,
            annotation=_type(p["annotation"]),
        )
        for p in parameters
    ]

    def call(self: ProcessEnvironment, **given: Any) -> Any:
        return self._ask(name, given)

    call.__name__, call.__qualname__ = name, f"{owner}.{name}"
    call.__doc__ = doc
    call.__signature__ = inspect.Signature([own, *found])  # type: ignore[attr-defined]
    none = inspect.Parameter.empty
    call.__annotations__ = {p.name: p.annotation for p in found if p.annotation is not none}
    if returns is not None:
        call.__annotations__["return"] = _type(returns)
    return call


def _type(annotation: str | None) -> Any:
    """The type that an annotation names. Its text comes from the user's class, which already runs on this machine."""
    if annotation is None:
        return inspect.Parameter.empty
    try:
        return eval(annotation, {"__builtins__": {}}, _TYPES)
    except (NameError, SyntaxError, TypeError, AttributeError):
        # Then the schema of the tool is refused, with the name of its argument.
        return annotation


Factory = Callable[[], Any]

_OWN = ("reset", "get_reward", "next_user_message")
_numbers = itertools.count()


class EnvironmentFailed(LockstepError):
    """An environment cannot go on. Its rollout is not learned from."""


@dataclass(frozen=True, slots=True)
class EnvironmentKind:
    """What one factory makes, as its first instance shows.

    Attributes:
        title: name of its class, under which its rewards are logged.
        schemas: JSON schema of each of its tools.
        speaks: whether it has a `next_user_message`.
    """

    title: str
    schemas: tuple[Schema, ...]
    has_reward: bool
    speaks: bool


class Environment:
    """One instance, while it belongs to one rollout.

    Attributes:
        instance: the user's object, for reward functions.
        tools: its public methods, by name; plain ones run in `place`.
        failed: why it cannot go on; None while it can.
    """

    def __init__(self, name: str | None, instance: Any, place: Here | Worker, calls: ToolCalls) -> None:
        self.name, self.instance = name, instance
        self.failed: str | None = None
        self.title = type(instance).__name__
        own = {name: tool_of(getattr(instance, name)) for name in public_methods(instance)}
        self.tools = {name: replace(tool, place=place) for name, tool in own.items()}
        self._place, self._calls = place, calls

    async def reset(self, row: Mapping[str, Any], seed: int) -> Content | None:
        """Begin a rollout. Returns what is appended to the last message of the prompt, or None.

        Args:
            row: the columns of the dataset's row, with its prompt.
            seed: given as `seed` if `reset` has a parameter of this name and the row no such column.

        Raises:
            EnvironmentFailed: `reset` raised, hung, or returned something else than None, text or content blocks.
        """
        given = dict(row)
        if "seed" in inspect.signature(self.instance.reset).parameters:
            given.setdefault("seed", seed)
        return await self._said("reset", given)

    @property
    def speaks(self) -> bool:
        """Whether it may answer a turn with a message of the user."""
        return callable(getattr(self.instance, "next_user_message", None))

    async def next_user_message(self, answer: str) -> Content | None:
        """The user's message after a turn that calls no tool; None: the rollout ends.

        `answer` is the text of the turn, without thinking.

        Raises:
            EnvironmentFailed: the method raised, hung, or returned something else than None, text or content blocks.
        """
        if not self.speaks:
            return None
        return await self._said("next_user_message", {"answer": answer})

    async def reward(self) -> float | None:
        """What `get_reward()` gives; None: it gives no score, or there is no such method.

        Raises:
            EnvironmentFailed: `get_reward` raised, hung, or returned something else than a finite number or None.
        """
        if not callable(getattr(self.instance, "get_reward", None)):
            return None
        found = await self._own("get_reward", {})
        if found is None:
            return None
        try:
            number = float(found)
        except (TypeError, ValueError) as error:
            raise self.fail("get_reward", f"it returned {found!r:.80}, not a number or None") from error
        if math.isnan(number):
            return None
        if math.isinf(number):
            raise self.fail("get_reward", "it returned an infinite number")
        return number

    def check(self, results: list[ToolResult]) -> None:
        """Raise `EnvironmentFailed` if one of its methods hung or its process died in the calls of a turn.

        An error of a method is a text for the model instead.
        """
        for result in results:
            died = result.error is not None and isinstance(result.error.__cause__, EnvironmentDied)
            if result.name in self.tools and (died or isinstance(result.error, TookTooLong)):
                raise self.fail(result.name, str(result.error))

    def end(self) -> None:
        """End its thread and its process, if it has them for itself."""
        if isinstance(self.instance, ProcessEnvironment):
            end_process(self.instance)
        if self._place is not self._calls.home:
            self._place.end()

    async def _own(
        self, method: str, given: Mapping[str, Any], made: Callable[[Any], Any] = lambda found: found
    ) -> Any:
        try:
            return await self._calls.call(giving(getattr(self.instance, method), made), given, self._place)
        except (TookTooLong, Raised) as error:
            advice = ""
            if isinstance(error.__cause__, TypeError):
                own, example = getattr(self.instance, method), f"def {method}(self, **kwargs)"
                advice = not_callable_by_name(own, given, "environments", example)
            raise self.fail(method, f"{quoted(error)}{advice}") from error

    async def _said(self, method: str, given: Mapping[str, Any]) -> Content | None:
        """What a method gives the model to read."""

        def made(found: Any) -> Any:
            if isinstance(found, str):
                return Content((printable(found),))
            if isinstance(found, list) and all(isinstance(block, dict) for block in found):
                return content_of_blocks(found, self._calls.process)
            return found

        said = await self._own(method, given, made)
        if said is None or isinstance(said, Content):
            return said
        kind = type(said).__name__
        raise self.fail(method, f"it returned {kind}, not None, text or a list of content blocks")

    def fail(self, method: str, why: str) -> EnvironmentFailed:
        """Mark the environment as failed. Returns the error to raise."""
        self.failed = f"environment {self.title}: {method}: {why}"
        return EnvironmentFailed(self.failed)


class Environments:
    """The environments of a run, on the rank that makes the rollouts.

    `factory` makes an environment; or factories by the name that a row's column `environment` gives.
    """

    def __init__(self, factory: Factory | Mapping[str, Factory], calls: ToolCalls) -> None:
        self.routed = isinstance(factory, Mapping)
        named = factory.items() if isinstance(factory, Mapping) else [(None, factory)]
        self._factories: dict[str | None, Factory] = dict(named)
        self._calls = calls
        self._free: dict[str | None, list[Environment]] = {name: [] for name in self._factories}
        self._taken: set[Environment] = set()

    async def probe(self, row: Mapping[str, Any] | None = None) -> dict[str | None, EnvironmentKind]:
        """Make one environment of each factory, which stays for later use.

        Args:
            row: a row of the dataset, with which the environment that it belongs to is reset once; None: no reset.

        Returns:
            The kinds, by the name in the column `environment`; a single factory has the name None.

        Raises:
            InputError: a factory or `reset` fails, an environment has no `reset`, or a method cannot be a tool.
        """
        kinds: dict[str | None, EnvironmentKind] = {}
        classes: dict[str, type] = {}
        for name in self._factories:
            try:
                found = await self.take(name)
                if not callable(getattr(found.instance, "reset", None)):
                    raise InputError(f"environment {found.title} has no method 'reset'")
                if row is not None and (not self.routed or row.get("environment") == name):
                    await found.reset(self.row_of(row), seed=0)
            except EnvironmentFailed as error:
                raise InputError(f"{error} (tried once before training)") from error
            kind = type(found.instance)
            if classes.setdefault(found.title, kind) is not kind:
                raise InputError(
                    f"two environment classes are named {found.title}; their rewards could not be told apart"
                )
            schemas = tuple(tool.schema for tool in found.tools.values())
            has_reward = callable(getattr(found.instance, "get_reward", None))
            kinds[name] = EnvironmentKind(found.title, schemas, has_reward, found.speaks)
            self.give_back(found)
        return kinds

    @property
    def share_a_thread(self) -> bool:
        """Whether environments of some factory run in the thread of the plain tools."""
        return any(self._calls.place_of(factory) is not None for factory in self._factories.values())

    @property
    def names(self) -> list[str | None]:
        """Names of the factories."""
        return list(self._factories)

    def name_of(self, columns: Mapping[str, Any]) -> str | None:
        """Name of the factory of a row; an `InputError` if its column `environment` names none of several."""
        if not self.routed:
            return None
        name = columns.get("environment")
        if name not in self._factories:
            raise InputError(
                f"a row has environment={name!r}; environment_factory has {', '.join(map(repr, self._factories))}"
            )
        return name

    def row_of(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of `reset` for a row. The column that chooses the environment is not among them, as in TRL."""
        return {key: value for key, value in row.items() if not (self.routed and key == "environment")}

    async def take(self, name: str | None) -> Environment:
        """An environment for one rollout.

        Raises:
            EnvironmentFailed: a new one was needed, and its constructor raised or hung.
            InputError: a method of a new one cannot be a tool.
        """
        free = self._free[name]
        found = free.pop() if free else await self._made(name)
        self._taken.add(found)
        return found

    async def _made(self, name: str | None) -> Environment:
        factory = self._factories[name]
        place = self._calls.place_of(factory) or Worker(f"lockstep-environment-{next(_numbers)}")

        def make() -> Any:
            return factory()

        make.__qualname__ = f"environment {name or _title(factory)}"
        try:
            instance = await self._calls.call(make, {}, place)
        except (TookTooLong, Raised) as error:
            if place is not self._calls.home:
                place.end()
            raise EnvironmentFailed(f"{make.__qualname__}: its constructor: {quoted(error)}") from error
        return Environment(name, instance, place, self._calls)

    def give_back(self, environment: Environment) -> None:
        """Take an environment back after its rollout was scored. One that failed is ended."""
        self._taken.discard(environment)
        if environment.failed is None:
            self._free[environment.name].append(environment)
        else:
            environment.end()

    @property
    def methods(self) -> list[Any]:
        """The methods that a model may call, of one environment of each factory, as far as one is free."""
        first = [free[0] for free in self._free.values() if free]
        return list(dict.fromkeys(getattr(one.instance, name) for one in first for name in one.tools))

    def spare(self) -> Any:
        """The user's object of an environment that no rollout has; None if there is none."""
        return next((free[0].instance for free in self._free.values() if free), None)

    def close(self) -> None:
        """End every environment."""
        for environment in [*self._taken, *(e for free in self._free.values() for e in free)]:
            environment.end()
        self._taken.clear()
        self._free = {name: [] for name in self._factories}


def public_methods(instance: Any) -> list[str]:
    """Names of the methods that are tools: the public functions of its class, but those that the rollout calls."""
    members = inspect.getmembers(type(instance), inspect.isfunction)
    return [name for name, _ in members if not name.startswith("_") and name not in _OWN]


def _title(factory: Factory) -> str:
    return getattr(factory, "__name__", type(factory).__name__)
