"""OpenAI's chat completions: a request becomes a call, and the answer becomes a completion or its stream.

`gateway/web.py` uses it for `/chat/completions`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from lockstep.gateway.calls import Answer, Call
from lockstep.gateway.messages import THINKING, function_tools, template_message
from lockstep.gateway.parameters import RunLimits, check_parameters, flag, token_limit
from lockstep.gateway.refusals import bad_value

_UNDERSTOOD = {"messages", "model", "tools", "stream", "max_tokens", "max_completion_tokens"}


def read_call(request: Mapping[str, Any], limits: RunLimits) -> Call:
    """The call of a request.

    Raises:
        Refused: a field is missing, has a wrong value, or asks for another distribution than the run's.
    """
    check_parameters(request, _UNDERSTOOD, limits)
    messages = request.get("messages")
    if not isinstance(messages, list) or not messages:
        raise bad_value("messages", "messages must be a list with at least one message")
    return Call(
        messages=tuple(template_message(message, f"messages[{i}]") for i, message in enumerate(messages)),
        tools=function_tools(request.get("tools")),
        max_tokens=token_limit(request, "max_tokens", "max_completion_tokens"),
        stream=flag(request, "stream"),
    )


def whole(request: Mapping[str, Any], answer: Answer, limits: RunLimits) -> dict[str, Any]:
    """The answer as a chat completion."""
    message: dict[str, Any] = {"role": "assistant", "content": answer.content, "refusal": None, "annotations": []}
    if answer.reasoning is not None:
        message[THINKING] = answer.reasoning
    if answer.calls:
        message |= {"content": answer.content or None, "tool_calls": _calls(answer)}
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": _finish_reason(answer)}
    return {
        **_head(answer.name, answer.created, "chat.completion", limits),
        "choices": [choice],
        "usage": _usage(answer),
    }


class Events:
    """The events of a streamed answer, in the order of these methods.

    Args:
        name, created: those of the answer.
    """

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
        yield self._chunk({}, _finish_reason(answer))
        if self._counted:
            yield _event({**self._head, "choices": [], "usage": _usage(answer)})
        yield b"data: [DONE]\n\n"

    def _chunk(self, delta: dict[str, Any], finish_reason: str | None = None) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
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


def _usage(answer: Answer) -> dict[str, int]:
    return {
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": answer.completion_tokens,
        "total_tokens": answer.prompt_tokens + answer.completion_tokens,
    }


def _event(value: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"
