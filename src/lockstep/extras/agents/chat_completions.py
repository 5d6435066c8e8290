"""OpenAI's chat completions (`/chat/completions`): a request becomes a call, the answer a completion or its stream."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lockstep.extras.agents.agent_calls import Answer, Call, read_wishes
from lockstep.extras.agents.agent_messages import THINKING, function_tools, template_message
from lockstep.extras.agents.request_fields import RunLimits, bad_value, check_parameters, flag, token_limit

_UNDERSTOOD = {
    "messages", "model", "tools", "stream", "max_tokens", "max_completion_tokens", "n",
    "tool_choice", "parallel_tool_calls", "response_format", "stop", "logprobs",
}  # fmt: skip
_MOST_CHOICES = 128


def read_call(request: Mapping[str, Any], limits: RunLimits) -> Call:
    """The call of a request.

    Raises:
        Refused: a field is missing, has a wrong value, or asks for another distribution than the run's.
    """
    check_parameters(request, _UNDERSTOOD, limits)
    choices_of(request)
    if not isinstance(request.get("stream_options"), Mapping | None):
        raise bad_value("stream_options", "stream_options must be an object")
    messages = request.get("messages")
    if not isinstance(messages, list) or not messages:
        raise bad_value("messages", "messages must be a list with at least one message")
    tools = function_tools(request.get("tools"))
    return Call(
        messages=tuple(template_message(message, f"messages[{i}]") for i, message in enumerate(messages)),
        tools=tools,
        wishes=read_wishes(request, limits, bool(tools)),
        max_tokens=token_limit(request, "max_tokens", "max_completion_tokens"),
        stream=flag(request, "stream"),
    )


def choices_of(request: Mapping[str, Any]) -> int:
    """Number of answers that a request asks for (`n`).

    Raises:
        Refused: it is not such a number, or there are several and they are to be streamed.
    """
    count = request.get("n")
    if count is None or (count == 1 and not isinstance(count, bool)):
        return 1
    if not isinstance(count, int) or isinstance(count, bool) or not 1 <= count <= _MOST_CHOICES:
        raise bad_value("n", f"n={count!r:.80}; it must be a whole number from 1 to {_MOST_CHOICES}")
    if request.get("stream"):
        raise bad_value("n", f"n={count} is not supported for a stream; send one call for each answer")
    return count


def whole(request: Mapping[str, Any], answers: Sequence[Answer], limits: RunLimits) -> dict[str, Any]:
    """The answers as a chat completion with one choice for each."""
    first = answers[0]
    return {
        **_head(first.name, first.created, "chat.completion", limits),
        "choices": [_choice(place, answer) for place, answer in enumerate(answers)],
        "usage": _usage(answers),
    }


def _choice(place: int, answer: Answer) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": answer.content}
    message |= {"refusal": None, "annotations": []}
    if answer.reasoning is not None:
        message[THINKING] = answer.reasoning
    if answer.calls:
        message |= {"content": answer.content or None, "tool_calls": _calls(answer)}
    about = {"logprobs": _logprobs(answer), "finish_reason": _finish_reason(answer)}
    return {"index": place, "message": message, **about}


class Events:
    """The events of a streamed answer, in the order of these methods. `name` and `created` are the answer's."""

    def __init__(self, request: Mapping[str, Any], name: str, created: int, limits: RunLimits) -> None:
        self._head = _head(name, created, "chat.completion.chunk", limits)
        self._counted = bool((request.get("stream_options") or {}).get("include_usage"))

    def start(self) -> Iterator[bytes]:
        """The events before all text."""
        yield self._chunk({"role": "assistant", "content": ""})

    def thought(self, text: str) -> Iterator[bytes]:
        """More of the thinking."""
        yield self._chunk({THINKING: text})

    def said(self, text: str) -> Iterator[bytes]:
        """More of the content. No thinking may follow."""
        yield self._chunk({"content": text})

    def end(self, answer: Answer) -> Iterator[bytes]:
        """What follows after all text of the answer has been sent."""
        for i, call in enumerate(_calls(answer)):
            yield self._chunk({"tool_calls": [{"index": i, **call}]})
        yield self._chunk({}, _finish_reason(answer), _logprobs(answer))
        if self._counted:
            yield _event({**self._head, "choices": [], "usage": _usage([answer])})
        yield b"data: [DONE]\n\n"

    def _chunk(
        self, delta: dict[str, Any], finish_reason: str | None = None, logprobs: dict[str, Any] | None = None
    ) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        return _event({**self._head, "choices": [choice], **({"usage": None} if self._counted else {})})


def _head(name: str, created: int, kind: str, limits: RunLimits) -> dict[str, Any]:
    return {"id": f"chatcmpl-{name}", "object": kind, "created": created, "model": limits.model}


def _calls(answer: Answer) -> list[dict[str, Any]]:
    return [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in answer.calls
    ]


def _finish_reason(answer: Answer) -> str:
    return "tool_calls" if answer.calls and answer.finish_reason == "stop" else answer.finish_reason


def _logprobs(answer: Answer) -> dict[str, Any] | None:
    if answer.logprobs is None:
        return None
    # One id may be a part of a character, which is not valid text. OpenAI's field for its bytes stays empty.
    empty: dict[str, Any] = {"bytes": None, "top_logprobs": []}
    tokens = [{"token": text, "logprob": value, **empty} for text, value in answer.logprobs]
    return {"content": tokens, "refusal": None}


def _usage(answers: Sequence[Answer]) -> dict[str, int]:
    """The prompt counts once, as in OpenAI's API."""
    before, sampled = answers[0].prompt_tokens, sum(answer.completion_tokens for answer in answers)
    return {"prompt_tokens": before, "completion_tokens": sampled, "total_tokens": before + sampled}


def _event(value: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"
