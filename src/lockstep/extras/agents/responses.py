"""OpenAI's responses (`/responses`): a request becomes a call, and the answer becomes a response or its stream.

Items of a request become messages of a chat: an assistant's text and the function calls that follow it are one message.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lockstep.extras.agents import agent_messages
from lockstep.extras.agents.agent_calls import Answer, Call, read_wishes
from lockstep.extras.agents.request_fields import RunLimits, bad_value, check_parameters, flag, token_limit
from lockstep.tokens.chat import Message

_UNDERSTOOD = {
    "input", "instructions", "model", "tools", "stream", "max_output_tokens", "previous_response_id",
    "tool_choice", "parallel_tool_calls", "text",
}  # fmt: skip
_PREFIX = "resp_"


def read_call(request: Mapping[str, Any], limits: RunLimits) -> Call:
    """The call of a request.

    Raises:
        Refused: a field is missing, has a wrong value, or asks for another distribution than the run's.
    """
    check_parameters(request, _UNDERSTOOD, limits)
    given = request.get("input")
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    if not isinstance(items, list) or not items:
        raise bad_value("input", "input must be a text or a list with at least one item")
    instructions, previous = request.get("instructions"), request.get("previous_response_id")
    if not isinstance(instructions, str | None):
        raise bad_value("instructions", "instructions must be a text")
    if not isinstance(previous, str | None):
        raise bad_value("previous_response_id", "previous_response_id must be the id of an earlier response")
    tools = agent_messages.function_tools(request.get("tools"))
    return Call(
        messages=tuple(messages_of(items)),
        tools=tools,
        wishes=read_wishes(request, limits, bool(tools)),
        max_tokens=token_limit(request, "max_output_tokens"),
        stream=flag(request, "stream"),
        instructions={"role": "system", "content": instructions} if instructions else None,
        previous=previous.removeprefix(_PREFIX) if previous else None,
    )


def messages_of(items: list[Any]) -> list[Message]:
    """Messages of a chat, from the items of a request.

    Raises:
        Refused: an item is of another kind than a message, a function call or its output.
    """
    messages: list[Message] = []
    reasoning = ""
    for i, item in enumerate(items):
        param = f"input[{i}]"
        kind = item.get("type", "message") if isinstance(item, Mapping) else None
        if kind == "message":
            said = {name: item.get(name) for name in ("role", "content")}
            messages.append(agent_messages.template_message(said, param))
        elif kind == "reasoning":
            # It stands before the turn that it belongs to.
            reasoning = agent_messages.text_of(item.get("content"), f"{param}.content")
            continue
        elif kind == "function_call":
            call = agent_messages.template_call({"id": item.get("call_id"), "function": item}, param)
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
            messages[-1].setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            output = agent_messages.content_of(item.get("output"), f"{param}.output")
            message = {"role": "tool", "content": output}
            if item.get("call_id") is not None:
                message["tool_call_id"] = agent_messages.checked_text(item["call_id"], f"{param}.call_id")
            messages.append(message)
        else:
            known = "a message, a function call or the output of one"
            raise bad_value(param, f"{param} is not {known}; leave it out")
        if reasoning and messages[-1]["role"] == "assistant":
            messages[-1][agent_messages.THINKING] = reasoning
        reasoning = ""
    if not messages:
        raise bad_value("input", "input has no message")
    return messages


def choices_of(request: Mapping[str, Any]) -> int:
    """Number of answers that a request asks for: the API knows one only."""
    return 1


def whole(request: Mapping[str, Any], answers: Sequence[Answer], limits: RunLimits) -> dict[str, Any]:
    """The answer as a response."""
    (answer,) = answers
    cut = answer.finish_reason == "length"
    return {
        **_head(request, answer.name, answer.created, limits),
        "status": "incomplete" if cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "output": list(_items(answer)),
        "usage": {
            "input_tokens": answer.prompt_tokens,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": answer.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": answer.prompt_tokens + answer.completion_tokens,
        },
    }


class Events:
    """The events of a streamed answer, in the order of these methods (as in `extras/agents/chat_completions.py`)."""

    def __init__(self, request: Mapping[str, Any], name: str, created: int, limits: RunLimits) -> None:
        self._request, self._name, self._limits = request, name, limits
        head = _head(request, name, created, limits)
        self._started = {**head, "status": "in_progress", "output": [], "usage": None}
        # Number of events, finished items, and the text of the item that is open.
        self._number = self._index = 0
        self._open: str | None = None
        self._text = ""

    def start(self) -> Iterator[bytes]:
        """The events before all text."""
        yield self._event("created", response=self._started)
        yield self._event("in_progress", response=self._started)

    def thought(self, text: str) -> Iterator[bytes]:
        """More of the thinking."""
        yield from self._more("reasoning", text)

    def said(self, text: str) -> Iterator[bytes]:
        """More of the content. No thinking may follow."""
        if self._open == "reasoning":
            yield from self._close(_reasoning_item(self._name, self._text))
        yield from self._more("message", text)

    def end(self, answer: Answer) -> Iterator[bytes]:
        """What follows after all text of the answer has been sent."""
        finished = whole(self._request, [answer], self._limits)
        for item in finished["output"][self._index :]:
            if item["type"] == "function_call":
                yield from self._call(item)
            else:
                # An empty text has had no events yet.
                if self._open != item["type"]:
                    yield from self._begin(item["type"])
                yield from self._close(item)
        yield self._event(finished["status"], response=finished)

    def _event(self, kind: str, **fields: Any) -> bytes:
        found = {"type": f"response.{kind}", "sequence_number": self._number, **fields}
        self._number += 1
        return f"event: response.{kind}\ndata: {json.dumps(found)}\n\n".encode()

    def _more(self, kind: str, text: str) -> Iterator[bytes]:
        if self._open != kind:
            yield from self._begin(kind)
        self._text += text
        if kind == "reasoning":
            yield self._event("reasoning_text.delta", **self._inside(), delta=text)
        else:
            yield self._event("output_text.delta", **self._inside(), delta=text, logprobs=[])

    def _begin(self, kind: str) -> Iterator[bytes]:
        self._open, self._text = kind, ""
        is_thought = kind == "reasoning"
        item = _reasoning_item(self._name, "") if is_thought else _message_item(self._name, "", "in_progress")
        yield self._event("output_item.added", output_index=self._index, item={**item, "content": []})
        if not is_thought:
            yield self._event("content_part.added", **self._inside(), part=item["content"][0])

    def _close(self, item: dict[str, Any]) -> Iterator[bytes]:
        part = item["content"][0]
        if item["type"] == "reasoning":
            yield self._event("reasoning_text.done", **self._inside(), text=part["text"])
        else:
            yield self._event("output_text.done", **self._inside(), text=part["text"], logprobs=[])
            yield self._event("content_part.done", **self._inside(), part=part)
        yield self._event("output_item.done", output_index=self._index, item=item)
        self._index, self._open = self._index + 1, None

    def _call(self, item: dict[str, Any]) -> Iterator[bytes]:
        at = {"item_id": item["id"], "output_index": self._index}
        begun = {**item, "status": "in_progress", "arguments": ""}
        yield self._event("output_item.added", output_index=self._index, item=begun)
        given = item["arguments"]
        yield self._event("function_call_arguments.delta", **at, delta=given)
        yield self._event("function_call_arguments.done", **at, arguments=given, name=item["name"])
        yield self._event("output_item.done", output_index=self._index, item=item)
        self._index += 1

    def _inside(self) -> dict[str, Any]:
        start = "rs" if self._open == "reasoning" else "msg"
        return {"item_id": f"{start}_{self._name}", "output_index": self._index, "content_index": 0}


def _head(request: Mapping[str, Any], name: str, created: int, limits: RunLimits) -> dict[str, Any]:
    return {
        "id": f"{_PREFIX}{name}",
        "object": "response",
        "created_at": created,
        "model": limits.model,
        "error": None,
        "incomplete_details": None,
        "instructions": request.get("instructions"),
        "max_output_tokens": request.get("max_output_tokens"),
        "metadata": request.get("metadata") or {},
        "parallel_tool_calls": request.get("parallel_tool_calls") is not False,
        "previous_response_id": request.get("previous_response_id"),
        "temperature": limits.sampling.temperature,
        "text": request.get("text") or {"format": {"type": "text"}},
        "tool_choice": request.get("tool_choice") or "auto",
        "tools": request.get("tools") or [],
        "top_p": limits.sampling.top_p,
        "truncation": "disabled",
    }


def _items(answer: Answer) -> Iterator[dict[str, Any]]:
    if answer.reasoning is not None:
        yield _reasoning_item(answer.name, answer.reasoning)
    status = "incomplete" if answer.finish_reason == "length" else "completed"
    if answer.content or not answer.calls:
        yield _message_item(answer.name, answer.content, status)
    for call in answer.calls:
        yield {
            "id": f"fc_{call.id}",
            "type": "function_call",
            "call_id": call.id,
            "name": call.name,
            "arguments": call.arguments,
            "status": status,
        }


def _reasoning_item(name: str, text: str) -> dict[str, Any]:
    thought = {"type": "reasoning_text", "text": text}
    return {"id": f"rs_{name}", "type": "reasoning", "summary": [], "content": [thought]}


def _message_item(name: str, text: str, status: str) -> dict[str, Any]:
    said = {"type": "output_text", "text": text, "annotations": []}
    return {"id": f"msg_{name}", "type": "message", "role": "assistant", "status": status, "content": [said]}
