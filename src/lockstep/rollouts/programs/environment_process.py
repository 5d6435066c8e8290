"""Environments in processes of their own, for dependencies that clash with ours and for code that changes a whole process.

`in_process("games.py:Game")` is an `environment_factory`. Each environment is one process, which runs
`rollouts/programs/environment_runner.py` and may have another Python. The two processes exchange lines of JSON over pipes. The
process is killed when its environment fails, hangs, or is not needed any more.
"""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
import threading
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lockstep.child_environment import for_users_code
from lockstep.errors import LockstepError
from lockstep.kill_at_exit import kill_group, of_users_code
from lockstep.report.waits import waiting

_RUNNER = Path(__file__).with_name("environment_runner.py")
# Seconds in which a process must have made its environment.
_START = 120.0
# The names that annotations of an environment's methods may use.
_TYPES = {name: getattr(typing, name) for name in ("Any", "Literal", "Optional", "Union", "List", "Dict", "Tuple")}
_TYPES |= {kind.__name__: kind for kind in (str, int, float, bool, list, dict, tuple)} | {"typing": typing}


class EnvironmentDied(LockstepError):
    """The process of an environment ended, or answered something else than JSON."""


class ProcessEnvironment:
    """Base of the classes that `in_process` makes: each method is a call to the process."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def _ask(self, method: str, given: Mapping[str, Any]) -> Any:
        """What the process's own object returns.

        Raises:
            EnvironmentDied: the process is gone.
            LockstepError: the method raised an error there, or an argument is no JSON type.
        """
        try:
            line = json.dumps({"method": method, "given": dict(given)})
        except (TypeError, ValueError) as error:
            raise LockstepError(
                f"{method}: an argument cannot be sent to the environment's process ({error})"
            ) from error
        found = _exchange(self._process, line)
        if "error" in found:
            raise LockstepError(found["error"])
        return found["result"]


def process_of(environment: ProcessEnvironment) -> subprocess.Popen[str]:
    """The process of an environment. This is no method, because the model may call every public method of an environment."""
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
        python: the interpreter, for example that of another virtual environment; None: this one. It needs no package of ours.
        arguments: keyword arguments of the class or factory, as JSON types; None: none.

    Returns:
        The factory. It raises `EnvironmentDied` if the process does not start, and `LockstepError` if the constructor raised.
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
    call.__annotations__ = {p.name: p.annotation for p in found if p.annotation is not inspect.Parameter.empty}
    if returns is not None:
        call.__annotations__["return"] = _type(returns)
    return call


def _type(annotation: str | None) -> Any:
    """The type that an annotation names. The text comes from the user's own class, which already runs on this machine."""
    if annotation is None:
        return inspect.Parameter.empty
    try:
        return eval(annotation, {"__builtins__": {}}, _TYPES)
    except (NameError, SyntaxError, TypeError, AttributeError):
        # Then the schema of the tool is refused, with the name of its argument.
        return annotation
