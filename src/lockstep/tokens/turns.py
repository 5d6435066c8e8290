"""Reads a sampled turn as a message in the form that the chat template takes.

A `TurnReader` renders made-up conversations at start to learn the template's conventions: which field of a message has
the thinking, which text is around it, and which format the tool calls have.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from itertools import product
from typing import Any

from lockstep.errors import InputError
from lockstep.tokens.arrays import Ids
from lockstep.tokens.chat import Content, Message, Template, shared_start
from lockstep.tokens.tool_calls import FORMATS, FoundCalls, Schemas, ToolCall, marked, read_calls

_THINKING_FIELDS = ("reasoning_content", "thinking", "reasoning")
_THINK, _THINK_END = "<think>", "</think>"
# Words of made-up messages. No template contains them.
_ASKED, _SAID, _THOUGHT, _RESULT = "asked quokka", "said wombat", "thought numbat", "result bilby"
_NAME, _ARGUMENTS = "look_up", {"city": "Paris", "count": 3}
# Forms of a call's id. The strictest templates take nine letters and digits. Kimi's id contains the name of the tool.
_CALL_IDS = ("{n}23456789", "functions.{name}:{n}")


@dataclass(frozen=True, slots=True)
class ParsedTurn:
    """A sampled turn.

    Attributes:
        content: the text outside the thinking and the well-formed calls. A malformed call stays here as text.
        reasoning: the thinking, if the template has a field for it; otherwise the thinking stays in the content.
        calls: the well-formed calls, in order, at most as many as the template can show.
        errors: one text per malformed call, written for the model.
        message: the turn as a message, for the conversation and for `Extension.next`.
        shown: what is compared with the template's rendering: the calls, and the text outside them without white space.
    """

    content: str
    reasoning: str | None
    calls: tuple[ToolCall, ...]
    errors: tuple[str, ...]
    message: Message
    shown: tuple[str, tuple[tuple[str, str], ...]]


@dataclass(frozen=True, slots=True)
class Conventions:
    """How a template renders an assistant turn.

    Attributes:
        thinking_field: the field of a message that has the thinking. None: the thinking is part of the content.
        thinking: the text before and the text after the thinking.
        thinks_first: whether the opening of a turn already contains the text before the thinking.
        content_mark: the text before the content (gpt-oss names a channel there). Usually empty.
        tool_format: the format of the tool calls (`FORMATS`). None: the user named no format, and the template
            renders no calls or renders them in an unknown format.
        shows_calls: whether the template renders `tool_calls`. If not, calls stay in the content.
        arguments_as_text: whether the template takes the arguments as JSON text instead of a dict.
        call_id: the form of a call's id, with the places {name} and {n}.
        max_calls: how many calls of a turn the template renders: 1, or None for any number.
        result_role: the role of a tool's result: "tool" if the template renders this role, otherwise "user".
        error_role: the role of the answer to a turn that has only malformed calls.
    """

    thinking_field: str | None
    thinking: tuple[str, str]
    thinks_first: bool
    content_mark: str
    tool_format: str | None
    shows_calls: bool
    arguments_as_text: bool
    call_id: str
    max_calls: int | None
    result_role: str
    error_role: str


class TurnReader:
    """Reads sampled turns as messages.

    Args:
        template: the deployed template.
        end_ids: ids that end a turn.
        schemas: JSON schema of the arguments by tool name.
        tool_format: a name of `FORMATS`. None: the format in which the template renders calls.

    Raises:
        InputError: the template does not render the text of a user or of the assistant, or there is no such format.
    """

    def __init__(
        self,
        template: Template,
        end_ids: Sequence[int],
        schemas: Schemas,
        tool_format: str | None = None,
    ) -> None:
        if tool_format is not None and tool_format not in FORMATS:
            raise InputError(f"there is no tool format {tool_format!r}: choose one of {', '.join(FORMATS)}")
        self._template, self._ends, self._schemas = template, frozenset(end_ids), schemas
        self.conventions = _conventions(template, self._ends, tool_format)
        self.reads_calls = self.conventions.tool_format is not None

    def read(self, ids: Ids, *, calls_are_text: bool = False) -> ParsedTurn:
        """Read a sampled turn (N,), with or without the token that ended it. No sampled ids raise an error."""
        turn_ids = _without_end(ids, self._ends)
        conventions = replace(self.conventions, tool_format=None) if calls_are_text else self.conventions
        text, found = _read(self._template, conventions, turn_ids, self._schemas)
        errors = [f"The tool call {error}." for error in found.errors]
        limit = self.conventions.max_calls
        if limit is not None and len(found.calls) > limit:
            more = len(found.calls) - limit
            errors.append(f"Only the first tool call of a turn is used; {more} more was ignored.")
        calls = tuple(found.calls[:limit])
        content = found.content.strip() if calls else found.content
        calls = tuple(replace(c, id=c.id or _own_id(turn_ids, n)) for n, c in enumerate(calls))
        message = self._message(content, found.reasoning, calls, text)
        shown = "".join(found.outside.split()), tuple((c.name, _json(c.arguments)) for c in found.calls)
        return ParsedTurn(content, found.reasoning, calls, tuple(errors), message, shown)

    def result(self, call: ToolCall, content: Content) -> Message:
        """The message that gives the model the result of a call."""
        if self.conventions.result_role == "user":
            return {"role": "user", "content": content}
        return {"role": "tool", "name": call.name, "tool_call_id": call.id, "content": content}

    def _message(
        self, content: str, reasoning: str | None, calls: tuple[ToolCall, ...], whole_text: str
    ) -> Message:
        conventions = self.conventions
        if calls and not conventions.shows_calls:
            return {"role": "assistant", "content": whole_text}
        message: Message = {"role": "assistant", "content": content}
        if reasoning is not None and conventions.thinking_field is not None:
            message[conventions.thinking_field] = reasoning
        if calls:
            message["tool_calls"] = [tool_call_field(conventions, call) for call in calls]
        return message


@dataclass(slots=True)
class _Parts:
    content: str
    reasoning: str | None
    outside: str
    calls: list[ToolCall]
    errors: list[str]


def _read(template: Template, conventions: Conventions, ids: Ids, schemas: Schemas) -> tuple[str, _Parts]:
    """The whole text of a turn, and its parts."""
    turn = marked(template, ids)
    text = turn.text
    (before, after), content_mark = map(turn.mark, conventions.thinking), turn.mark(conventions.content_mark)
    start = len(text) - len(text.lstrip())
    begins = 0 if conventions.thinks_first else None
    if text.startswith(before, start):
        begins = start + len(before)
    reasoning, rest = None, 0
    if begins is not None:
        end = text.find(after, begins)
        # If the thinking was cut and has no end, all text is thinking.
        reasoning, rest = (text[begins:end], end + len(after)) if end >= 0 else (text[begins:], len(text))
    answer = text[rest:].lstrip("\n") if rest else text
    if content_mark and answer.lstrip().startswith(content_mark):
        answer = answer.lstrip()[len(content_mark) :]
    head = text[: len(text) - len(answer)]
    form = conventions.tool_format
    found = read_calls(turn, answer, form, schemas) if form else FoundCalls([answer])
    outside = turn.plain("".join(found.outside))
    content = outside
    if conventions.thinking_field is None:
        content, reasoning = turn.plain(head) + outside, None
    elif reasoning is not None:
        reasoning = turn.plain(reasoning).strip("\n")
    errors = [turn.plain(error) for error in found.errors]
    return turn.plain(text), _Parts(content, reasoning, turn.plain(head) + outside, found.calls, errors)


def _without_end(ids: Ids, ends: frozenset[int]) -> Ids:
    last = len(ids)
    while last and int(ids[last - 1]) in ends:
        last -= 1
    return ids[:last]


def tool_call_field(conventions: Conventions, call: ToolCall) -> dict[str, Any]:
    """A call in the form that the template takes."""
    arguments: Any = _json(call.arguments) if conventions.arguments_as_text else call.arguments
    return {"type": "function", "id": call.id, "function": {"name": call.name, "arguments": arguments}}


def made_up_call(conventions: Conventions, name: str, arguments: dict[str, Any], number: int) -> ToolCall:
    """A call for a made-up conversation, with an id that the template takes."""
    return ToolCall(name, arguments, conventions.call_id.format(name=name, n=number))


def _own_id(ids: Ids, number: int) -> str:
    """An id of a call: nine letters and digits, as the strictest templates need it."""
    return sha256(ids.tobytes() + bytes([number % 256])).hexdigest()[:9]


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _conventions(template: Template, ends: frozenset[int], named: str | None) -> Conventions:
    asked: list[Message] = [{"role": "user", "content": _ASKED}]
    before = template.text(asked)
    plain = template.finished([*asked, _assistant_message()])
    if _ASKED not in before or _SAID not in plain:
        raise InputError(
            "the chat template does not show the text of a message: it may need messages of another form "
            "(lists of parts). Use a template that takes text as content"
        )
    mark = plain[len(before) : plain.index(_SAID)].strip() if plain.startswith(before) else ""
    # The text before the content is a mark only if it is a control token and not (empty) thinking.
    content_mark = mark if template.control_pattern.search(mark) and _THINK_END not in mark else ""
    thinking_field, thinking = _thinking(template, asked, before, content_mark)
    conventions = Conventions(
        thinking_field,
        thinking,
        before.rstrip().endswith(thinking[0]),
        content_mark,
        named,
        shows_calls=False,
        arguments_as_text=False,
        call_id=_CALL_IDS[0],
        max_calls=None,
        result_role="user",
        error_role="user",
    )
    conventions = _with_calls(template, ends, conventions, asked)
    if _shown(template, [*asked, _assistant_message(), {"role": "tool", "content": _RESULT}], _SAID, _RESULT):
        conventions = replace(conventions, error_role="tool")
    return conventions


def _assistant_message(**more: Any) -> Message:
    return {"role": "assistant", "content": _SAID, **more}


def _shown(template: Template, messages: list[Message], *words: str) -> str | None:
    """The rendering, if the template renders all these words in this order; otherwise None."""
    try:
        text = template.finished(messages)
    except InputError:
        return None
    return text if re.search(".*".join(map(re.escape, words)), text, re.DOTALL) else None


def _thinking(
    template: Template, asked: list[Message], before: str, content_mark: str
) -> tuple[str | None, tuple[str, str]]:
    for name in _THINKING_FIELDS:
        text = _shown(template, [*asked, _assistant_message(**{name: _THOUGHT})], _THOUGHT, _SAID)
        if text is None:
            continue
        common = shared_start(before, text)
        start = before[:common].rstrip()
        opening = text[common : text.index(_THOUGHT)].strip()
        after = text.index(_THOUGHT) + len(_THOUGHT)
        closing = text[after : text.index(_SAID)].strip().removesuffix(content_mark)
        if not opening:
            opening = _THINK if start.endswith(_THINK) else opening
        return name, (opening or _THINK, closing or _THINK_END)
    return None, (_THINK, _THINK_END)


def _with_calls(
    template: Template, ends: frozenset[int], conventions: Conventions, asked: list[Message]
) -> Conventions:
    words = [_NAME, *_ARGUMENTS.values()]
    result = {"role": "tool", "name": _NAME, "content": _RESULT}
    for as_text, call_id in product((False, True), _CALL_IDS):
        trial = replace(conventions, arguments_as_text=as_text, call_id=call_id)
        calls = [tool_call_field(trial, made_up_call(trial, _NAME, _ARGUMENTS, n)) for n in range(2)]
        results = [{**result, "tool_call_id": call["id"]} for call in calls]
        called = {"role": "assistant", "content": "", "tool_calls": calls[:1]}
        shown = _shown(template, [*asked, called, results[0]], *map(str, words), _RESULT)
        if shown is None:
            continue
        several = _shown(template, [*asked, {**called, "tool_calls": calls}, *results], _RESULT) or ""
        most = None if several.count(_NAME) >= 2 * shown.count(_NAME) else 1
        trial = replace(trial, shows_calls=True, max_calls=most, result_role="tool")
        if trial.tool_format is None:
            trial = replace(trial, tool_format=_format(template, ends, trial, asked, called))
        return trial
    if _shown(template, [*asked, _assistant_message(), result], _SAID, _RESULT):
        return replace(conventions, result_role="tool")
    return conventions


def _format(
    template: Template, ends: frozenset[int], conventions: Conventions, asked: list[Message], called: Message
) -> str | None:
    """The format whose function reads the made-up call in the template's rendering; None if there is none."""
    text = template.finished([*asked, called])
    before = template.text(asked)
    shared = shared_start(before, text)
    # The difference may begin in the middle of a control token.
    spans = [found.span() for found in template.control_pattern.finditer(text)]
    start = max((first for first, last in spans if first < shared < last), default=shared)
    ids = _without_end(template.ids(text[start:]), ends)
    conventions = replace(conventions, thinks_first=False)
    schemas = {_NAME: {"properties": {"city": {"type": "string"}, "count": {"type": "integer"}}}}
    for name in FORMATS:
        _, parts = _read(template, replace(conventions, tool_format=name), ids, schemas)
        if [(c.name, c.arguments) for c in parts.calls] == [(_NAME, _ARGUMENTS)] and not parts.errors:
            return name
    return None
