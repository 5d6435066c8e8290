"""Messages of an agent's calls, as chat templates read them, and in a normal form that finds the turn they continue."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from lockstep.extras.agents.request_fields import bad_value
from lockstep.images.urls import is_data_url, is_url
from lockstep.tokens.chat import Content, Message
from lockstep.tokens.tool_calls import read_json, whole_characters

# OpenAI calls a system message `developer` for its newer models. Chat templates know `system` only.
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
# Fields that templates read. Other fields are refused, unless they are empty.
THINKING = "reasoning_content"
_FIELDS = {"role", "content", "name", "tool_calls", "tool_call_id", THINKING}
_TEXT_PARTS = {"text", "input_text", "output_text", "reasoning_text"}
# Images of the chat completions API, and of the responses API.
_IMAGE_PARTS = {"image_url", "input_image"}
_SHOWING_ROLES = ("user", "tool")


def template_message(given: Any, param: str) -> Message:
    """A message of the chat completions API, as a chat template reads it.

    Raises:
        Refused: it is not such a message, or contains more than text, images and tool calls.
    """
    named = given.get("role") if isinstance(given, Mapping) else None
    if not isinstance(named, str) or named not in _ROLES:
        raise bad_value(param, f"{param} needs a role out of {', '.join(_ROLES)}")
    if unknown := [name for name, value in given.items() if name not in _FIELDS and value]:
        raise bad_value(f"{param}.{unknown[0]}", f"{param}.{unknown[0]} is not supported; leave it out")
    role = _ROLES[named]
    read = content_of if role in _SHOWING_ROLES else text_of
    message: Message = {"role": role, "content": read(given.get("content"), f"{param}.content")}
    for name in ("name", "tool_call_id", THINKING):
        if given.get(name) is not None:
            message[name] = checked_text(given[name], f"{param}.{name}")
    if calls := given.get("tool_calls"):
        if not isinstance(calls, list):
            raise bad_value(f"{param}.tool_calls", f"{param}.tool_calls must be a list of calls")
        message["tool_calls"] = [template_call(call, f"{param}.tool_calls") for call in calls]
    return message


def checked_text(value: Any, param: str) -> str:
    """A field that is a text; a `Refused` if it is none."""
    if not isinstance(value, str):
        raise bad_value(param, f"{param}={value!r:.80}; it must be a text")
    return value


def template_call(call: Any, param: str) -> dict[str, Any]:
    """A call of a function in an assistant message (else `Refused`), with its arguments read as JSON."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise bad_value(param, f"{param} must be calls of functions, each with a name and arguments")
    call_id = call.get("id")
    return {
        "id": checked_text(call_id, f"{param}.id") if call_id is not None else None,
        "type": "function",
        "function": {"name": function["name"], "arguments": _read_arguments(function.get("arguments"))},
    }


def content_of(content: Any, param: str) -> Content:
    """The content of a message that may show images: text, or parts of which an image has its URL.

    Raises:
        Refused: a part is neither text nor an image with a URL.
    """
    if not isinstance(content, list) or not any(map(_is_image, content)):
        return text_of(content, param)
    return [
        {"type": "image", "image": _url_of(part, param)}
        if _is_image(part)
        else {"type": "text", "text": text_of(part, param)}
        for part in content
    ]


def _is_image(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") in _IMAGE_PARTS


def _url_of(part: Mapping[str, Any], param: str) -> str:
    """The URL of an image part. A path of this machine is none: an agent may not read the trainer's files."""
    given = part.get("image_url")
    fields = given if isinstance(given, Mapping) else {**part, "url": given}
    if fields.get("detail") not in (None, "auto"):
        asked = f"{param} asks for detail={fields['detail']!r:.40}"
        raise bad_value(param, f"{asked}; the run sets the sizes of images (max_pixels)")
    url = fields.get("url")
    if not isinstance(url, str) or not (is_data_url(url) or is_url(url)):
        wanted = "a data: URL or an http(s) URL that image_urls allows"
        raise bad_value(param, f"{param} has an image without {wanted}")
    return url


def text_of(content: Any, param: str) -> str:
    """The text of a message's content: a string, or parts of text (else `Refused`). None is the empty text."""
    if content is None or isinstance(content, str):
        return content or ""
    found = ""
    for part in content if isinstance(content, list) else [content]:
        text = part.get("text") if isinstance(part, Mapping) and part.get("type") in _TEXT_PARTS else None
        if not isinstance(text, str):
            why = "only users and tools may show images, and other parts are not supported"
            raise bad_value(param, f"{param} must be text; {why}")
        found += text
    return found


def function_tools(tools: Any) -> tuple[dict[str, Any], ...]:
    """Functions (else `Refused`) as chat templates read them. Both APIs' forms are accepted."""
    if not isinstance(tools, list | None):
        raise bad_value("tools", "tools must be a list of functions")
    found = []
    for tool in tools or ():
        is_function = isinstance(tool, Mapping) and tool.get("type") == "function"
        function = tool.get("function", tool) if is_function else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            wanted = "a function of the agent's own: type 'function', with a name"
            raise bad_value("tools", f"every tool must be {wanted}")
        fields = ("name", "description", "parameters")
        kept = {name: function[name] for name in fields if function.get(name) is not None}
        checked_text(kept.get("description", ""), "tools.function.description")
        if not isinstance(kept.get("parameters", {}), Mapping):
            raise bad_value("tools", "the parameters of a tool must be a JSON schema: an object")
        found.append({"type": "function", "function": kept})
    return tuple(found)


def normal_form(message: Message) -> str:
    """A text that is the same for two messages that say the same.

    White space around an assistant's text does not count, because many frameworks remove it from the answers that they
    got. Its thinking does not count, because most of them do not send it back.
    """
    if message["role"] == "assistant":
        message = {name: value for name, value in message.items() if name != THINKING}
        message["content"] = message["content"].strip()
    return json.dumps(message, sort_keys=True, ensure_ascii=False)


def _read_arguments(arguments: Any) -> Any:
    if not isinstance(arguments, str):
        return {} if arguments is None else arguments
    try:
        found = read_json(arguments)
    except ValueError:
        return arguments
    return whole_characters(found) if isinstance(found, dict) else arguments
