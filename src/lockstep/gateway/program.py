"""The program of a rollout that an agent makes: it starts the agent, serves its calls, and ends with it.

`rollouts/driver.py` runs it, once per rollout. What rewards and reports need is left in the notes of the conversation.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from lockstep.errors import InputError
from lockstep.gateway.agents import Agent, AgentFailed, Reward
from lockstep.gateway.recording import Recording
from lockstep.gateway.refusals import bad_value
from lockstep.gateway.web import Gateway
from lockstep.images.prompts import ImagePrompts
from lockstep.images.reading import with_image_urls
from lockstep.rollouts.conversation import Conversation
from lockstep.tokens.conversation.extension import Extension

# The name under which the rewards that agents return are scored.
AGENT_REWARD = "agent"
# A tool that every template with tools shows, and the number of sets of tools whose extensions are kept.
_ANY_TOOL = (
    {
        "type": "function",
        "function": {
            "name": "look",
            "description": "Look.",
            "parameters": {"type": "object", "properties": {"place": {"type": "string", "description": "Where."}}},
        },
    },
)
_KEPT = 64


class Extensions:
    """The extension for each set of tools that agents offer, made when it is first needed.

    Args:
        end_ids: ids that end a turn.
        tool_format: the format of tool calls (`tokens/conversation/tool_calls.py`). None: the format that the chat template shows.
        placeholder: the id that stands for a part of an image; None: the run shows no images.

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
                raise bad_value("tools", f"these tools cannot be shown to the model: {error!s:.300}") from error
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
                "the agent offers tools, and the chat template does not show them to the model: use a template with tools, or "
                "let the agent describe its tools in a message and offer none"
            )
        return made


class AgentProgram:
    """The program of all rollouts of a run.

    Args:
        extensions: how messages become ids.
        images: reads the images of messages; None: the run shows none.
    """

    def __init__(
        self, agent: Agent, gateway: Gateway, extensions: Extensions, images: ImagePrompts | None = None
    ) -> None:
        self._agent, self._gateway, self._extensions, self._images = agent, gateway, extensions, images

    async def __call__(self, conversation: Conversation) -> None:
        """Make one rollout.

        Raises:
            InputError: the agent's reward is no number, its command cannot be started, or its tools cannot be shown.
            LockstepError: the engine failed.
        """
        recording = Recording(conversation, self._extensions, self._images)
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
            conversation.notes.setdefault("failed", f"agent {self._agent.name} ended without an answered call")
        if reward is not None:
            conversation.notes["rewards"] = {AGENT_REWARD: reward}
        conversation.notes.update(recording.notes())

    async def _run(self, recording: Recording, key: str, conversation: Conversation) -> Reward:
        """Run the agent to its end, or until the engine fails."""
        prompt = conversation.prompt
        row = {"prompt": prompt.source, "seed": conversation.environment_seed, **prompt.columns}
        if prompt.pictures is not None:
            row = await asyncio.to_thread(with_image_urls, row)
        work: asyncio.Future[Any] = asyncio.ensure_future(self._agent.run(self._gateway.base_url(key), key, row))
        try:
            both: list[asyncio.Future[Any]] = [work, recording.failure]
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            if recording.failure.done():
                recording.failure.result()
            return work.result()
        finally:
            work.cancel()
            await asyncio.wait([work])
