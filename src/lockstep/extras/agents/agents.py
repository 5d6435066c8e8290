"""Runs a user's agent for one rollout: a Python function in a thread, or a command in a process.

An agent gets the base URL and the key of its rollout. The rollout ends with it. The user names the agent in the run's
config.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import math
import os
import subprocess
import tempfile
import threading
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import IO, Any

import numpy as np

from lockstep.child_environment import for_users_code
from lockstep.errors import InputError
from lockstep.kill_at_exit import kill_group, of_users_code
from lockstep.report.waits import waiting
from lockstep.rollouts.call_fits import not_callable_as
from lockstep.training.config.fields.agents import AgentFunction, Reward

BASE_URL, API_KEY = "OPENAI_BASE_URL", "OPENAI_API_KEY"
# Bytes of a command's output that an error shows and in which the reward is looked for.
_SHOWN, _READ = 400, 1 << 16
# Seconds after its time limit in which a killed command must be gone.
_GRACE = 10.0


class AgentFailed(Exception):
    """The agent of one rollout raised an exception, exited with an error, or exceeded its time limit."""


@dataclass(frozen=True, slots=True)
class Agent:
    """A user's agent.

    Attributes:
        function: called as `function(base_url, api_key, row)` in a thread of its own. A coroutine function gets a loop there.
        command: words of a command line. The row is JSON on its standard input; `OPENAI_BASE_URL` and `OPENAI_API_KEY` are in its
            environment. If the last line of its output is a JSON object with `reward`, this is the reward.
        timeout: seconds that one rollout may take.
    """

    function: AgentFunction | None
    command: tuple[str, ...] | None
    timeout: float

    @property
    def name(self) -> str:
        """Names the agent in messages."""
        return self.command[0] if self.command else getattr(self.function, "__name__", repr(self.function))

    async def run(self, base_url: str, api_key: str, row: Mapping[str, Any]) -> Reward:
        """Run the agent to its end. Returns its reward; None: it gives none.

        Raises:
            AgentFailed: it failed, or did not end in time. A command is killed then. A function's thread cannot be killed: it
                goes on alone, and its calls are refused.
            InputError: the reward is not a finite number, or the row cannot be written as JSON for a command.
        """
        work = self._call(base_url, api_key, row) if self.command is None else self._execute(base_url, api_key, row)
        try:
            with waiting(f"agent {self.name}", self.timeout):
                found = await asyncio.wait_for(work, self.timeout)
        except TimeoutError:
            raise AgentFailed(f"agent {self.name} did not end within {self.timeout:g} s (agent_timeout)") from None
        return checked_reward(found, f"agent {self.name}")

    async def _call(self, base_url: str, api_key: str, row: Mapping[str, Any]) -> Any:
        def work() -> Any:
            assert self.function is not None
            result: Any = self.function(base_url, api_key, dict(row))
            return asyncio.run(_awaited(result)) if inspect.isawaitable(result) else result

        result, error = await _in_thread(work)
        if error is not None:
            advice = ""
            if isinstance(error, TypeError) and self.function is not None:
                advice = not_callable_as(self.function, "agent(base_url, api_key, row)", base_url, api_key, row)
            raise AgentFailed(f"agent {self.name} raised {type(error).__name__}: {error}{advice}") from error
        return result

    async def _execute(self, base_url: str, api_key: str, row: Mapping[str, Any]) -> Any:
        assert self.command is not None
        with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as said, tempfile.TemporaryFile() as errors:
            given.write(_row_as_json(row))
            given.seek(0)
            killer = of_users_code()
            try:
                # Not by asyncio: this process could be killed before asyncio says which process it has started.
                process = subprocess.Popen(
                    self.command, stdin=given, stdout=said, stderr=errors, start_new_session=True,
                    env=_environment(base_url, api_key),
                )  # fmt: skip
            except OSError as error:
                raise InputError(f"agent command {self.command[0]} cannot be started: {error.strerror}") from error
            killer.add(process.pid)
            ended = _in_thread(process.wait)
            try:
                code, _ = await asyncio.shield(ended)
            finally:
                kill_group(process.pid)
                await asyncio.wait_for(ended, _GRACE)
                killer.remove(process.pid)
            if code != 0:
                tail = _end_of(errors, _SHOWN).strip() or _end_of(said, _SHOWN).strip()
                raise AgentFailed(f"agent {self.name} ended with exit code {code}: {tail}")
            return _reward_in(_end_of(said, _READ))


def checked_reward(found: Any, name: str) -> Reward:
    """A reward as a float.

    Raises:
        InputError: it is neither None nor a finite number.
    """
    if found is None:
        return None
    try:
        reward = float(found) if isinstance(found, int | float | np.number) else math.nan
    except OverflowError:
        reward = math.inf
    if not math.isfinite(reward):
        raise InputError(f"the reward of {name} is {found!r:.80}; it must be a finite number, or None for no reward")
    return reward


async def _awaited(result: Awaitable[Any]) -> Any:
    return await result


def _in_thread(work: Callable[[], Any]) -> asyncio.Future[tuple[Any, BaseException | None]]:
    """What work returns or raises, in a thread of its own: what blocks holds up no other agent and not the gateway."""
    # Not as the exception of the future: a cancellation would be one of this rollout, and StopIteration is not allowed there.
    found: Future[tuple[Any, BaseException | None]] = Future()
    # A running future cannot be cancelled: at a time limit the caller waits no longer, and the thread still sets its result.
    found.set_running_or_notify_cancel()

    def run() -> None:
        try:
            found.set_result((work(), None))
        except BaseException as error:  # noqa: BLE001 - its caller raises it
            found.set_result((None, error))

    threading.Thread(target=run, name="lockstep-agent", daemon=True).start()
    return asyncio.wrap_future(found)


def _environment(base_url: str, api_key: str) -> dict[str, str]:
    return {**for_users_code(), BASE_URL: base_url, API_KEY: api_key}


def _row_as_json(row: Mapping[str, Any]) -> bytes:
    try:
        return json.dumps(dict(row)).encode()
    except (TypeError, ValueError) as error:
        raise InputError(f"an agent command reads its row as JSON, and this row is none: {error}") from error


def _end_of(file: IO[bytes], size: int) -> str:
    file.seek(max(0, file.seek(0, os.SEEK_END) - size))
    return file.read().decode(errors="replace")


def _reward_in(output: str) -> Any:
    lines = output.strip().splitlines()
    try:
        last = json.loads(lines[-1]) if lines else None
    except (ValueError, RecursionError):
        return None
    return last.get("reward") if isinstance(last, dict) else None
