"""The program of an environment's own process: makes the object, then answers calls of its methods as lines of JSON.

It is started by its path and imports nothing of Lockstep, so that it runs in any Python. What the environment prints
goes to standard error. The program ends when its standard input ends, also in the middle of a call.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import inspect
import json
import os
import queue
import sys
import threading
from typing import Any


def main(target: str, arguments: str) -> None:
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    calls = os.fdopen(os.dup(0), "r", encoding="utf-8")
    os.dup2(2, 1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(calls, lines), daemon=True).start()

    def say(answer: dict[str, Any]) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    try:
        environment = _load(target)(**json.loads(arguments))
        about = _about(environment)
    except BaseException as error:  # noqa: BLE001 - the other side raises it
        say({"error": _said(error)})
        return
    say(about)
    loop = asyncio.new_event_loop()
    while True:
        asked = json.loads(lines.get())
        try:
            found = getattr(environment, asked["method"])(**asked["given"])
            if inspect.isawaitable(found):
                found = loop.run_until_complete(_awaited(found))
            say({"result": _sent(found)})
        except BaseException as error:  # noqa: BLE001 - the other side raises it
            say({"error": _said(error)})


def _read(calls: Any, lines: queue.SimpleQueue[str]) -> None:
    for line in calls:
        lines.put(line)
    os._exit(0)


async def _awaited(found: Any) -> Any:
    return await found


def _load(target: str) -> Any:
    where, _, name = target.rpartition(":")
    if where.endswith(".py"):
        spec = importlib.util.spec_from_file_location("environment", where)
        if spec is None or spec.loader is None:
            raise ImportError(f"no module in {where}")
        module = importlib.util.module_from_spec(spec)
        sys.modules["environment"] = module
        sys.path.insert(0, os.path.dirname(os.path.abspath(where)))
        spec.loader.exec_module(module)
    else:
        module = importlib.import_module(where)
    return getattr(module, name)


def _about(environment: Any) -> dict[str, Any]:
    members = inspect.getmembers(type(environment), inspect.isfunction)
    methods = [_method(name, getattr(environment, name)) for name, _ in members if not name.startswith("_")]
    return {"class": type(environment).__name__, "methods": methods}


def _method(name: str, function: Any) -> dict[str, Any]:
    signature = inspect.signature(function, eval_str=True)
    parameters = [
        {
            "name": p.name,
            "rest": p.kind is inspect.Parameter.VAR_KEYWORD,
            "annotation": _annotation(p.annotation),
            "has_default": p.default is not inspect.Parameter.empty,
            "default": _sent(p.default) if p.default is not inspect.Parameter.empty else None,
        }
        for p in signature.parameters.values()
        if p.kind is not inspect.Parameter.VAR_POSITIONAL
    ]
    returns = _annotation(signature.return_annotation)
    return {"name": name, "doc": inspect.getdoc(function), "parameters": parameters, "returns": returns}


def _annotation(annotation: Any) -> str | None:
    return None if annotation is inspect.Parameter.empty else inspect.formatannotation(annotation)


def _sent(value: Any) -> Any:
    """The value if JSON keeps it as it is, else its text."""
    try:
        return value if json.loads(json.dumps(value)) == value else str(value)
    except (TypeError, ValueError):
        return str(value)


def _said(error: BaseException) -> str:
    said = str(error)
    return said if said and isinstance(error, Exception) else f"{type(error).__name__}: {said}".rstrip(": ")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
