"""The agents of a run: a user's agent makes each rollout, by calls to the gateway.

An agent is a Python function that runs in a thread, or a command that runs in a process. It gets the base URL and the
key of its rollout, and the rollout ends with it. `RolloutAgents` has the same methods as `RolloutTools`
(`run/programs.py`): a run has either tools or agents. The rank that holds the engine serves the gateway and runs the
agents.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import math
import os
import shlex
import subprocess
import tempfile
import threading
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TypeVar

import numpy as np
from transformers import PreTrainedTokenizerBase

from lockstep.config.fields import AgentFunction, Reward
from lockstep.config.run import OnlineConfig
from lockstep.config.sampling import sampling_of
from lockstep.errors import InputError, quoted
from lockstep.extras.agents.recording import Counts, Recording
from lockstep.extras.agents.request_fields import RunLimits, bad_value
from lockstep.extras.agents.web import Gateway
from lockstep.images.prompts import PromptReader
from lockstep.images.reading import with_image_urls
from lockstep.processes import for_users_code, kill_group, of_users_code
from lockstep.progress import waiting
from lockstep.rollouts.call_fits import not_callable_as
from lockstep.rollouts.conversation import Conversation
from lockstep.rollouts.group import Rollout, RolloutGroup
from lockstep.rollouts.ranks import Ranks
from lockstep.threads import folder_as_before
from lockstep.tokens.arrays import Ids
from lockstep.tokens.extension import Extension

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
        function: called as `function(base_url, api_key, row)` in a thread of its own. A coroutine function gets a loop
            there.
        command: words of a command line. The row is JSON on its standard input; `OPENAI_BASE_URL` and `OPENAI_API_KEY`
            are in its environment. If the last line of its output is a JSON object with `reward`, this is the reward.
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
            AgentFailed: it failed, or did not end in time. A command is killed then. A function's thread cannot be
                killed: it goes on alone, and its calls are refused.
            InputError: the reward is not a finite number, or the row cannot be written as JSON for a command.
        """
        work = self._call if self.command is None else self._execute
        who = f"agent {self.name}"
        try:
            with waiting(who, self.timeout):
                found = await asyncio.wait_for(work(base_url, api_key, row), self.timeout)
        except TimeoutError:
            raise AgentFailed(f"{who} did not end within {self.timeout:g} s (agent_timeout)") from None
        return checked_reward(found, who)

    async def _call(self, base_url: str, api_key: str, row: Mapping[str, Any]) -> Any:
        def work() -> Any:
            assert self.function is not None
            with folder_as_before(f"agent {self.name}", self.timeout):
                result: Any = self.function(base_url, api_key, dict(row))
                return asyncio.run(_awaited(result)) if inspect.isawaitable(result) else result

        result, error = await _in_thread(work)
        if error is not None:
            advice = ""
            if isinstance(error, TypeError) and self.function is not None:
                called = "agent(base_url, api_key, row)"
                advice = not_callable_as(self.function, called, base_url, api_key, row)
            raise AgentFailed(
                f"agent {self.name} raised {type(error).__name__}: {quoted(error)}{advice}"
            ) from error
        return result

    async def _execute(self, base_url: str, api_key: str, row: Mapping[str, Any]) -> Any:
        assert self.command is not None
        with (
            tempfile.TemporaryFile() as given,
            tempfile.TemporaryFile() as said,
            tempfile.TemporaryFile() as errors,
        ):
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
                why = f"cannot be started: {error.strerror}"
                raise InputError(f"agent command {self.command[0]} {why}") from error
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
    """A reward as a float; an `InputError` if it is neither None nor a finite number."""
    if found is None:
        return None
    try:
        reward = float(found) if isinstance(found, int | float | np.number) else math.nan
    except OverflowError:
        reward = math.inf
    if not math.isfinite(reward):
        wanted = "a finite number, or None for no reward"
        raise InputError(f"the reward of {name} is {found!r:.80}; it must be {wanted}")
    return reward


async def _awaited(result: Awaitable[Any]) -> Any:
    return await result


def _in_thread(work: Callable[[], Any]) -> asyncio.Future[tuple[Any, BaseException | None]]:
    """What work returns or raises, in a thread of its own: what blocks holds up no other agent and not the gateway."""
    # Not as the exception of the future: a cancellation would be one of this rollout.
    found: Future[tuple[Any, BaseException | None]] = Future()
    # A running future cannot be cancelled: after a time limit the thread still sets its result.
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


# The name under which the rewards that agents return are scored.
AGENT_REWARD = "agent"
# A tool that every template with tools shows, and the number of sets of tools whose extensions are kept.
_PARAMETERS = {"type": "object", "properties": {"place": {"type": "string", "description": "Where."}}}
_LOOK = {"name": "look", "description": "Look.", "parameters": _PARAMETERS}
_ANY_TOOL: tuple[dict[str, Any], ...] = ({"type": "function", "function": _LOOK},)
_KEPT = 64


class Extensions:
    """The extension for each set of tools that agents offer, made when it is first needed.

    Raises:
        InputError: the tokenizer has no chat template, or its conversations cannot be extended.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        end_ids: Sequence[int],
        chat_template_kwargs: dict[str, Any] | None = None,
        tool_format: str | None = None,
        placeholder: int | None = None,
    ) -> None:
        self._tokenizer, self._end_ids = tokenizer, end_ids
        self._how: dict[str, Any] = {"chat_template_kwargs": chat_template_kwargs, "tool_format": tool_format}
        self._how["placeholder"] = placeholder
        self._made: dict[str, Extension] = {}
        # Before an agent is started.
        self(())

    def __call__(self, tools: tuple[dict[str, Any], ...]) -> Extension:
        """The extension for these tools.

        Raises:
            InputError: the chat template does not show tools, or no format of tool calls is known.
            Refused: it shows tools, but not these ones.
        """
        name = json.dumps(tools, sort_keys=True)
        if name not in self._made:
            try:
                made = self._extension(tools)
            except Exception as error:
                if tools in ((), _ANY_TOOL):
                    raise
                # If the template shows no tools at all, the run ends here. Otherwise it is about these ones.
                self(_ANY_TOOL)
                why = f"these tools cannot be shown to the model: {error!s:.300}"
                raise bad_value("tools", why) from error
            # An agent may describe its tools in another way at each call.
            while len(self._made) >= _KEPT:
                del self._made[next(other for other in self._made if other != "[]")]
            self._made[name] = made
        return self._made[name]

    def _extension(self, tools: tuple[dict[str, Any], ...]) -> Extension:
        made = Extension(self._tokenizer, self._end_ids, tools=list(tools) or None, **self._how)
        asked = [{"role": "user", "content": "asked"}]
        if tools and len(made.prompt(asked)) == len(self(()).prompt(asked)):
            raise InputError(
                "the agent offers tools, and the chat template does not show them to the model: use a template "
                "with tools, or let the agent describe its tools in a message and offer none"
            )
        return made


class AgentProgram:
    """The program of all rollouts of a run."""

    def __init__(self, agent: Agent, gateway: Gateway, extensions: Extensions, reader: PromptReader) -> None:
        self._agent, self._gateway, self._extensions, self._reader = agent, gateway, extensions, reader

    async def __call__(self, conversation: Conversation) -> None:
        """Make one rollout.

        Raises:
            InputError: the agent's reward is no number, its command cannot be started, or its tools cannot be shown.
            LockstepError: the engine failed.
        """
        recording = Recording(conversation, self._extensions, self._reader)
        key = self._gateway.open(recording)
        reward: Reward = None
        try:
            reward = await self._run(recording, key, conversation)
        except AgentFailed as error:
            conversation.notes["failed"] = str(error)
        finally:
            self._gateway.end(key)
            await recording.end()
        if not recording.counts.answered:
            why = f"agent {self._agent.name} ended without an answered call"
            conversation.notes.setdefault("failed", why)
        if reward is not None:
            conversation.notes["rewards"] = {AGENT_REWARD: reward}
        conversation.notes.update(recording.notes())

    async def _run(self, recording: Recording, key: str, conversation: Conversation) -> Reward:
        """Run the agent to its end, or until the engine fails."""
        prompt = conversation.prompt
        row = {"prompt": prompt.source, "seed": conversation.environment_seed, **prompt.columns}
        if prompt.pictures:
            row = await asyncio.to_thread(with_image_urls, row)
        run = self._agent.run(self._gateway.base_url(key), key, row)
        work: asyncio.Future[Any] = asyncio.ensure_future(run)
        try:
            both: list[asyncio.Future[Any]] = [work, recording.failure]
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            if recording.failure.done():
                recording.failure.result()
            return work.result()
        finally:
            work.cancel()
            await asyncio.wait([work])


T = TypeVar("T")
_logger = logging.getLogger(__name__)


class RolloutAgents:
    """The agents of a run, and the gateway that they call.

    Args:
        agent: a function `agent(base_url, api_key, row)`, or a command line.
        model: the policy's name or directory. The gateway serves it under the last part of this name.

    Raises:
        InputError: the agent is neither, or fields contradict an agent.
    """

    # Rewards need nothing that is on one rank only.
    has_environments = False
    # The engine's thread waits for no agent, and runs none.
    calls = None
    rehearsed: Callable[[Any], Any] | None = None
    # What the agents return is one more score.
    reward_names = (AGENT_REWARD,)

    def __init__(self, agent: Any, config: OnlineConfig, ranks: Ranks, model: str) -> None:
        _check(config)
        self._agent = agent_of(agent, config.agent_timeout)
        self._config, self._ranks, self._model = config, ranks, Path(model).name
        self._extensions: Extensions | None = None
        self._reader: PromptReader | None = None
        self._gateway: Gateway | None = None
        self._end_ids: Sequence[int] = ()

    @property
    def rewards(self) -> dict[str, Any]:
        """The arguments `own` and `environment_of` of a scorer."""
        return {"own": self.reward_names, "environment_of": None}

    def open(self, reader: PromptReader, end_ids: Sequence[int]) -> None:
        """Prepare the conversations of a run with this reader.

        Raises:
            InputError: the tokenizer has no chat template, or its conversations cannot be extended.
        """
        config = self._config
        self._reader, self._end_ids = reader, end_ids
        self._extensions = Extensions(
            reader.tokenizer, end_ids, config.template_arguments, config.tool_format, reader.placeholder
        )

    def start(self) -> AgentProgram:
        """Start the gateway, and return the program of the rollouts. On the rank that holds the engine, after `open`.

        Raises:
            InputError: the gateway cannot listen on its address.
        """
        assert self._extensions is not None
        assert self._reader is not None
        config = self._config
        limits = RunLimits(self._model, sampling_of(config, self._reader.tokenizer, self._end_ids))
        self._gateway = Gateway(limits, config.gateway_host, config.gateway_port)
        _logger.info(f"agents call the gateway at {self._gateway.url}")
        return AgentProgram(self._agent, self._gateway, self._extensions, self._reader)

    def prompt_ids(self, row: Mapping[str, Any]) -> Ids:
        """Ids of a row's prompt; an `InputError` if it cannot be tokenized. An agent may ask something else."""
        assert self._reader is not None
        assert self._extensions is not None
        if self._reader.shows_pictures and isinstance(row["prompt"], list):
            return self._extensions(()).prompt(row["prompt"])
        return self._reader.ids(row)

    def shown_tools(self, row: Mapping[str, Any]) -> list[dict[str, Any]]:
        """None: an agent sends its tools with its own messages."""
        return []

    def beside_environments(self, work: Callable[[], T], limit: float) -> T:
        """The result of work that needs nothing of another thread."""
        return work()

    def release(self, rollouts: Iterable[Rollout]) -> None:
        """Nothing is kept until rollouts are scored."""

    def release_all(self) -> None:
        """Nothing is kept until rollouts are scored."""

    def metrics(self, groups: Sequence[RolloutGroup]) -> dict[str, float]:
        """What the calls of the agents were, per rollout: the names of `recording.Counts`, `branches` and `failed`."""
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        sums = {name: sum(r.notes["agent"][name] for r in rollouts) for name in Counts.__slots__}
        sums["branches"] = sum(len(r.branches) for r in rollouts)
        sums["failed"] = sum(r.failed is not None for r in rollouts)
        return {f"agent/{name}": found / len(rollouts) for name, found in sums.items()}

    def close(self) -> None:
        """Stop the gateway."""
        if self._gateway is not None:
            self._gateway.close()
            self._gateway = None


def agent_of(agent: Any, timeout: float) -> Agent:
    """A user's agent; an `InputError` if it is neither a function nor a command line."""
    if callable(agent):
        return Agent(agent, None, timeout)
    if not isinstance(agent, str) or not agent.strip():
        raise InputError(
            f"agent={agent!r:.80}; give a function agent(base_url, api_key, row), or a command line as one text"
        )
    try:
        words = shlex.split(agent)
    except ValueError as error:
        why = f"cannot be split into words: {error}"
        raise InputError(f"the agent's command line {agent!r:.80} {why}") from error
    return Agent(None, tuple(words), timeout)


def _check(config: OnlineConfig) -> None:
    if config.max_thinking_length is not None:
        raise InputError("max_thinking_length is not supported together with an agent; leave one of them out")
    if config.agent_timeout >= config.generation_timeout:
        raise InputError(
            f"agent_timeout={config.agent_timeout:g} must be below {config.generation_timeout:g} s, the time "
            "for which the engine waits while no agent asks anything; raise vllm_server_timeout"
        )
