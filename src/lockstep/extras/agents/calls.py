"""A call of an agent and its answer, as both APIs share them.

A call comes from a request, and its answer goes to the client. The event loop of its rollout answers it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Protocol

from lockstep.contract.protocol import FinishReason
from lockstep.extras.agents.wishes import NO_WISHES, Wishes
from lockstep.tokens.chat import Message


@dataclass(frozen=True, slots=True)
class Call:
    """One request of an agent for one assistant turn.

    Attributes:
        messages: new messages, in the form of chat templates.
        tools: functions that the agent offers, in the form of chat templates.
        wishes: what the agent asks of the turn.
        max_tokens: most tokens that the turn may have; None: as many as the rollout has room for.
        instructions: a system message that stands before all others, also before those of `previous`.
        previous: id of an earlier answer whose messages come before `messages`.
        name: names the call for a client that repeats it.
        may_repeat: whether the client says that the call can be a repetition of an earlier one with this name.
    """

    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] = ()
    wishes: Wishes = NO_WISHES
    max_tokens: int | None = None
    stream: bool = False
    instructions: Message | None = None
    previous: str | None = None
    name: str = ""
    may_repeat: bool = False


@dataclass(frozen=True, slots=True)
class AnsweredCall:
    """A tool call in an answer. `id` is made by the gateway; `arguments` is JSON."""

    id: str
    name: str
    arguments: str

    def as_message(self) -> dict[str, Any]:
        """The call as a chat template reads it in an assistant message."""
        arguments = json.loads(self.arguments)
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": arguments}}


@dataclass(frozen=True, slots=True)
class Answer:
    """One assistant turn.

    Attributes:
        name: names the answer within its rollout. The APIs' ids are made of it.
        content: the turn's text without its thinking and its tool calls.
        reasoning: the thinking. None: there is none, or it is part of the content because the chat template has no field for it.
        prompt_tokens: number of ids before the turn.
        completion_tokens: number of sampled ids, the end token included.
        logprobs: the text and the log-prob of each sampled id, in order. None: the agent did not ask for them.
    """

    name: str
    created: int
    content: str
    reasoning: str | None
    calls: tuple[AnsweredCall, ...]
    finish_reason: FinishReason
    prompt_tokens: int
    completion_tokens: int
    logprobs: tuple[tuple[str, float], ...] | None = None

    def as_message(self) -> Message:
        """The turn as a client sends it back."""
        message: Message = {"role": "assistant", "content": self.content}
        return message | ({"tool_calls": [call.as_message() for call in self.calls]} if self.calls else {})


@dataclass(frozen=True, slots=True)
class Partial:
    """The beginning of an answer while its turn is sampled. The finished answer begins with these texts.

    Attributes:
        reasoning: the thinking. None: no thinking is known yet. It is whole if there is content.
    """

    reasoning: str | None
    content: str


class Listener(Protocol):
    """Follows an answer that is streamed. Its methods may be called in any thread, and must not block."""

    def begun(self, name: str, created: int) -> None:
        """Nothing but the engine is waited for any more. `name` and `created` are those of the answer."""

    def said(self, partial: Partial) -> None:
        """More of the turn is sampled. Engines that report no progress never call it."""
