"""One session with an OpenEnv server (`extras/environments/openenv.py`). It imports nothing of Lockstep.

The server lists the fields of an action (`GET /schema`). These fields become the parameters of the tool `step`, or
one of them receives the text of the model's turn.
"""

from __future__ import annotations

import inspect
import json
import sys
import urllib.request
from collections.abc import Sequence
from typing import Any

try:
    from openenv.core import GenericEnvClient
except ImportError as error:
    raise ImportError(
        f"{sys.executable} cannot import openenv ({error}): run pip install openenv there, or name another "
        "Python with python="
    ) from error

_TYPES: dict[str, type] = {"string": str, "integer": int, "number": float, "boolean": bool}
_TYPES |= {"array": list, "object": dict}
# Fields that OpenEnv itself adds to actions and observations.
_OPENENV_FIELDS = ("metadata", "done", "reward")
_TIMEOUT = 30.0
# Bytes of the description of an action.
_LARGEST = 16 << 20


class _Session:
    def __init__(self, base_url: str, shown: str | None, columns: Sequence[str]) -> None:
        self._client = GenericEnvClient(base_url=base_url).sync()
        self._shown, self._columns = shown, columns
        self._reward_sum, self._done = 0.0, False

    def reset(self, seed: int = 0, **row: Any) -> str:
        """Begin an episode with the seed and the chosen columns of the row."""
        self._reward_sum = 0.0
        missing = [name for name in self._columns if name not in row]
        if missing:
            raise ValueError(f"the row has no column {missing[0]!r}, which columns= names")
        return self._observed(self._client.reset(seed=seed, **{name: row[name] for name in self._columns}))

    def get_reward(self) -> float:
        """Sum of the rewards of all steps."""
        return self._reward_sum

    def _act(self, action: dict[str, Any]) -> str:
        if self._done:
            return "The episode is over."
        return self._observed(self._client.step(action))

    def _observed(self, result: Any) -> str:
        """Add a result's reward to the sum. Returns the observation as text."""
        self._done = bool(result.done)
        self._reward_sum += float(result.reward or 0.0)
        if self._shown is None:
            own = {k: v for k, v in result.observation.items() if k not in _OPENENV_FIELDS}
            return json.dumps(own, ensure_ascii=False)
        if self._shown not in result.observation:
            known = ", ".join(result.observation)
            raise ValueError(f"the observation has no field {self._shown!r}; it has {known}")
        return str(result.observation[self._shown])


def make_session(
    base_url: str, name: str, answer: str | None, shown: str | None, columns: Sequence[str]
) -> _Session:
    """The session, as an object of a class whose methods fit the server's actions."""
    try:
        url = f"{base_url.rstrip('/')}/schema"
        with urllib.request.urlopen(url, timeout=_TIMEOUT) as response:
            found = response.read(_LARGEST + 1)
            if len(found) > _LARGEST:
                raise ValueError(f"it sent more than {_LARGEST >> 20} MiB")
            action = json.loads(found)["action"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConnectionError(f"no OpenEnv server answers at {base_url} ({error})") from error
    fields = {key: value for key, value in action.get("properties", {}).items() if key not in _OPENENV_FIELDS}
    if answer is not None and answer not in fields:
        raise ValueError(f"an action has no field {answer!r}; it has {', '.join(fields) or 'none'}")
    if answer is not None:
        methods = {"next_user_message": _next_user_message(answer)}
    else:
        methods = {"step": _step_tool(action, fields)}
    session_class: type[_Session] = type(name, (_Session,), methods)
    return session_class(base_url, shown, columns)


def _next_user_message(field: str) -> Any:
    def next_user_message(self: _Session, answer: str) -> str | None:
        observation = self._act({field: answer})
        return None if self._done else observation

    return next_user_message


def _step_tool(action: dict[str, Any], fields: dict[str, Any]) -> Any:
    def step(self: _Session, **given: Any) -> str:
        return self._act(given)

    required = action.get("required", [])
    positional, keyword = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
    parameters = [inspect.Parameter("self", positional)]
    lines = [(action.get("description") or "Take an action.").split("\n")[0], "", "Args:"]
    for name, schema in fields.items():
        default = inspect.Parameter.empty if name in required else schema.get("default")
        kind = _TYPES.get(schema.get("type"), str)
        parameters.append(inspect.Parameter(name, keyword, default=default, annotation=kind))
        lines.append(f"    {name}: {schema.get('description') or schema.get('title') or name}")
    step.__signature__ = inspect.Signature(parameters, return_annotation=str)  # type: ignore[attr-defined]
    step.__doc__ = "\n".join(lines)
    return step
