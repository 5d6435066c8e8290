"""A call of an agent and its answer, as both APIs share them.

A call may ask more of its turn than messages (`Wishes`): a tool call, at most one call, JSON, an end at further
strings. None of it changes the distribution that the turn is sampled from: a run samples all its turns from one
distribution and trains the same one. Other servers force a required call or JSON by a grammar; here the model is free.
A turn that lacks what was asked for is answered as it is, and counted (`Counts.unmet`). An agent meets such a turn like
any other malformed answer, and the reward says whether the model does better next time.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from lockstep.contract.protocol import FinishReason
from lockstep.extras.agents.request_fields import RunLimits, bad_value
from lockstep.tokens.chat import Message

# OpenAI takes four stop strings. More would make the search for them in each answer slow.
_MOST_STOPS = 16


@dataclass(frozen=True, slots=True)
class Wishes:
    """The wishes of one call.

    Attributes:
        reads_calls: whether tool calls in the turn are given as calls. Otherwise they stay text.
        call: the function that must be called; the empty text: any function; None: none must be.
        one_call: whether further calls of the turn are left out of the answer.
        is_json: whether the content must be JSON.
        logprobs: whether the answer tells the log-prob of each sampled id.
        stop: strings that end the turn. They are not part of the answer's text.
    """

    reads_calls: bool = False
    call: str | None = None
    one_call: bool = False
    is_json: bool = False
    logprobs: bool = False
    stop: tuple[str, ...] = ()

    def are_met(self, content: str, called: Sequence[str]) -> bool:
        """Whether a turn, with this text outside thinking and calls and these called functions, is as asked for."""
        if self.call is not None and not (self.call in called if self.call else called):
            return False
        if self.one_call and len(called) > 1:
            return False
        return not self.is_json or bool(called) or _is_json(content)

    def before_stop(self, text: str) -> str:
        """The text before the first stop string."""
        places = [found for stop in self.stop if (found := text.find(stop)) >= 0]
        return text[: min(places, default=len(text))]


NO_WISHES = Wishes()


def read_wishes(request: Mapping[str, Any], limits: RunLimits, has_tools: bool) -> Wishes:
    """The wishes of a request of either API; a `Refused` if a field has a value without a meaning."""
    reads_calls, call = _tool_choice(request.get("tool_choice"), has_tools)
    parallel = request.get("parallel_tool_calls")
    if parallel not in (None, True, False):
        raise bad_value("parallel_tool_calls", "parallel_tool_calls must be true or false")
    logprobs = request.get("logprobs")
    if logprobs not in (None, True, False):
        raise bad_value("logprobs", "logprobs must be true or false")
    wishes = Wishes(
        reads_calls=reads_calls,
        call=call,
        one_call=parallel is False,
        is_json=_wants_json(request),
        logprobs=bool(logprobs),
        stop=(*limits.sampling.stop, *_stop(request.get("stop"), limits.sampling.stop)),
    )
    _tell(request, wishes, limits)
    return wishes


def _tool_choice(given: Any, has_tools: bool) -> tuple[bool, str | None]:
    """Whether calls are read, and the function that must be called."""
    if given in (None, "auto", "none"):
        return has_tools and given != "none", None
    name: Any = "" if given == "required" else None
    if isinstance(given, Mapping) and given.get("type") == "function":
        # The chat completions API has the name in an object of its own.
        name = given.get("function", given)
        name = name.get("name") if isinstance(name, Mapping) else None
    if not isinstance(name, str) or (given != "required" and not name):
        raise bad_value(
            "tool_choice",
            f"tool_choice={given!r:.80}; it must be 'auto', 'none', 'required', or a function by its name: "
            "{'type': 'function', 'function': {'name': …}}",
        )
    if not has_tools:
        raise bad_value("tool_choice", "tool_choice asks for a tool call, and the request offers no tools")
    return True, name


def _wants_json(request: Mapping[str, Any]) -> bool:
    """Whether `response_format` (chat completions) or `text.format` (responses) asks for JSON."""
    text, given = request.get("text"), request.get("response_format")
    if text is not None:
        if (
            not isinstance(text, Mapping)
            or set(text) - {"format", "verbosity"}
            or text.get("verbosity") is not None
        ):
            raise bad_value("text", f"text={text!r:.80} is not supported; only its field format is")
        given = text.get("format")
    kind = given.get("type") if isinstance(given, Mapping) else given
    if kind not in (None, "text", "json_object", "json_schema"):
        name = "response_format" if text is None else "text"
        raise bad_value(name, f"the format {given!r:.80} is not supported")
    return kind in ("json_object", "json_schema")


def _stop(given: Any, of_run: Sequence[str]) -> tuple[str, ...]:
    """The stop strings of a request that the run does not have; a `Refused` if they are not texts, or too many."""
    found = [given] if isinstance(given, str) else given if given is not None else []
    if not isinstance(found, list) or not all(isinstance(text, str) and text for text in found):
        wanted = "a text or a list of texts that are not empty"
        raise bad_value("stop", f"stop={given!r:.80}; it must be {wanted}")
    if len(found) > _MOST_STOPS:
        raise bad_value("stop", f"stop has {len(found)} strings; at most {_MOST_STOPS} are supported")
    return tuple(dict.fromkeys(text for text in found if text not in of_run))


def _is_json(content: str) -> bool:
    try:
        json.loads(content)
    except (ValueError, RecursionError):
        return False
    return True


def _tell(request: Mapping[str, Any], wishes: Wishes, limits: RunLimits) -> None:
    if wishes.call is not None:
        limits.tell(
            "tool_choice",
            f"an agent asks for tool_choice={request['tool_choice']!r:.80}: nothing forces the call, because "
            "the run samples all turns from one distribution. Turns without it are answered as they are "
            "(agent/unmet counts them)",
        )
    if wishes.is_json:
        limits.tell(
            "response_format",
            "an agent asks for JSON: nothing forces it, because the run samples all turns from one "
            "distribution. Turns whose text is no JSON are answered as they are (agent/unmet counts them)",
        )
    if request.get("seed") is not None:
        limits.tell(
            "seed",
            "an agent sends a seed: it has no effect, because each call has a seed of its own that follows "
            "from the rollout's",
        )


@dataclass(frozen=True, slots=True)
class Call:
    """One request of an agent for one assistant turn.

    Attributes:
        messages: new messages, in the form of chat templates.
        tools: functions that the agent offers, in the form of chat templates.
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
        reasoning: the thinking. None: there is none, or the chat template has no field for it and it is in the content.
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

    The thinking is None while none is known, and whole if there is content.
    """

    reasoning: str | None
    content: str


class Listener(Protocol):
    """Follows an answer that is streamed. Its methods may be called in any thread, and must not block."""

    def begun(self, name: str, created: int) -> None:
        """Nothing but the engine is waited for any more. `name` and `created` are those of the answer."""

    def said(self, partial: Partial) -> None:
        """More of the turn is sampled. Engines that report no progress never call it."""
