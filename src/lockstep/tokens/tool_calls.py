"""Reads the tool calls of a sampled turn, in the formats in which model families write them.

The chat template decides the format, or a user names it. `marked` turns ids into a text in which each control token is
one character that no decoded text contains: a surrogate. Therefore a marker that is a single token is found by its id,
and text that looks like the marker stays text. A marker that a tokenizer writes with several tokens is found as text.
One function per format of `FORMATS` reads the calls in this text.

A malformed call raises no error. It becomes an error text for the model, and its own text stays in the content of the
turn. JSON that others have written, a client or a model, is bounded: Python's own reader takes values that fail later,
in a chat template, in a file or in an answer.
"""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from lockstep.tokens.arrays import Ids
from lockstep.tokens.chat import Template

# Levels of brackets. Chat templates and copies need several calls of Python per level, and Python allows 1000 in all.
_DEEPEST = 100


def read_json(text: str | bytes) -> Any:
    """The value of a JSON text; a `ValueError` if it is no JSON, or `check_json` refuses it."""
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    check_json(value)
    return value


def check_json(value: Any) -> None:
    """Refuse (`ValueError`) a value that is nested too deeply, or has a number that JSON cannot represent."""
    level = [value]
    for _ in range(_DEEPEST):
        inside: list[Any] = []
        for one in level:
            if isinstance(one, dict):
                inside += one.values()
            elif isinstance(one, list):
                inside += one
            elif isinstance(one, float) and not math.isfinite(one):
                # 1e999 is a number of JSON, and no float.
                raise ValueError("it has a number that is too large, or none at all")
        if not inside:
            return
        level = inside
    raise ValueError(_TOO_DEEP)


def is_whole(text: str) -> bool:
    """Whether a text has no half of a character: a surrogate without its pair, which no tokenizer takes."""
    return text.isascii() or not _SURROGATE.search(text)


def whole_characters(value: Any) -> Any:
    """A value of JSON, not nested too deeply, with U+FFFD in place of each half of a character."""
    if isinstance(value, str):
        return value if is_whole(value) else _SURROGATE.sub("\ufffd", value)
    if isinstance(value, dict):
        return {whole_characters(key): whole_characters(inside) for key, inside in value.items()}
    if isinstance(value, list):
        return [whole_characters(inside) for inside in value]
    return value


_TOO_DEEP = f"it has more than {_DEEPEST} brackets inside each other"
_SURROGATE = re.compile("[\ud800-\udfff]")
_SPACE = re.compile(r"\s*")


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call of a tool: its name and its arguments by name. `id` is the call's own id if the model wrote one."""

    name: str
    arguments: dict[str, Any]
    id: str | None = None


@dataclass(slots=True)
class FoundCalls:
    """What a function finds in a text.

    Attributes:
        outside: the parts of the text that belong to no well-formed call, in order.
        calls: the well-formed calls, in order.
        errors: one text per malformed call, written for the model.
    """

    outside: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


class BadCall(Exception):
    """A call is malformed. The message is for the model."""


Mark = Callable[[str], str]
Schemas = Mapping[str, Mapping[str, Any]]
Format = Callable[[str, Mark, Schemas], FoundCalls]


def _json_at(text: str, at: int) -> tuple[Any, int]:
    """The JSON value at a position of a text, and the position after the value and its white space."""

    def refused(name: str) -> Any:
        raise ValueError(f"{name} is not JSON")

    try:
        value, end = json.JSONDecoder(parse_constant=refused).raw_decode(text, _skip_space(text, at))
    except (ValueError, RecursionError) as error:
        raise BadCall(f"is not valid JSON: {error}") from error
    return value, _skip_space(text, end)


def _skip_space(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    return found.end() if found else at


def _call(value: Any, arguments_key: str = "arguments") -> ToolCall:
    """The call that a JSON object with a name and arguments describes."""
    if not isinstance(value, dict):
        raise BadCall("is not a JSON object")
    name, call_id = value.get("name"), value.get("id")
    arguments = value.get(arguments_key, value.get("arguments", {}))
    if not isinstance(name, str) or not name:
        raise BadCall('has no "name"')
    return _checked(name, arguments, call_id if isinstance(call_id, str) else None)


def _checked(name: str, arguments: Any, call_id: str | None = None) -> ToolCall:
    if not isinstance(arguments, dict):
        raise BadCall("has arguments that are not a JSON object")
    try:
        check_json(arguments)
    except ValueError as error:
        raise BadCall(f"has arguments that cannot be used: {error}") from error
    said = json.dumps([name, arguments, call_id], ensure_ascii=False)
    if _SURROGATE.search(said):
        raise BadCall("contains a control token, or half of a character")
    return ToolCall(name, arguments, call_id)


def _goes_on(text: str, at: int) -> BadCall:
    return BadCall(f"does not end after its arguments, but continues with {text[at : at + 20]!r}")


def _between(
    text: str, opening: str, closing: str, read: Callable[[str, int], tuple[list[ToolCall], int]]
) -> FoundCalls:
    """Calls between two markers. `read` reads calls at a position, and returns them with the position after them."""
    found, at = FoundCalls(), 0
    while (start := text.find(opening, at)) >= 0:
        found.outside.append(text[at:start])
        inside = start + len(opening)
        try:
            calls, end = read(text, inside)
            if not text.startswith(closing, end):
                raise _goes_on(text, end)
            at = end + len(closing)
            found.calls += calls
        except BadCall as error:
            found.errors.append(str(error))
            ends = [p for p in (text.find(closing, inside), text.find(opening, inside)) if p >= 0]
            at = min(ends, default=len(text))
            at += len(closing) if closing and text.startswith(closing, at) else 0
            found.outside.append(text[start:at])
    found.outside.append(text[at:])
    return found


def _hermes(text: str, mark: Mark, schemas: Schemas) -> FoundCalls:
    def read(text: str, at: int) -> tuple[list[ToolCall], int]:
        value, end = _json_at(text, at)
        return [_call(value)], end

    return _between(text, mark("<tool_call>"), mark("</tool_call>"), read)


def _llama3_json(text: str, mark: Mark, schemas: Schemas) -> FoundCalls:
    """The whole turn is one JSON object, or several JSON objects with `;` between them."""
    at = _skip_space(text, 0)
    if text.startswith(mark("<|python_tag|>"), at):
        at = _skip_space(text, at + len(mark("<|python_tag|>")))
    if not re.compile(r'\{\s*"(name|parameters|arguments|type|function)"').match(text, at):
        return FoundCalls([text])
    found = FoundCalls()
    try:
        while at < len(text):
            value, at = _json_at(text, at)
            found.calls.append(_call(value, "parameters"))
            if at < len(text):
                if text[at] not in ";{":
                    raise _goes_on(text, at)
                at += text[at] == ";"
    except BadCall as error:
        return FoundCalls([text], [], [str(error)])
    return found


def _harmony(text: str, mark: Mark, schemas: Schemas) -> FoundCalls:
    """`to=functions.name<|channel|>commentary json<|message|>{...}<|call|>`, the channel before or after the name."""
    channel, message, call = re.escape(mark("<|channel|>")), re.escape(mark("<|message|>")), mark("<|call|>")
    kind = rf"(?:{re.escape(mark('<|constrain|>'))})?\s*(?:json)?\s*"
    commentary = rf"\s*(?:{channel}commentary)?\s*"
    head = re.compile(rf"{commentary}to=functions\.([\w.-]+){commentary}{kind}{message}").match(text)
    if head is None:
        return FoundCalls([text])
    try:
        value, end = _json_at(text, head.end())
        if text[end:] not in ("", call):
            raise _goes_on(text, end)
        return FoundCalls([], [_checked(head[1], value)])
    except BadCall as error:
        return FoundCalls([text], [], [str(error)])


def _mistral(text: str, mark: Mark, schemas: Schemas) -> FoundCalls:
    """`[TOOL_CALLS][{...}, ...]`, or `[TOOL_CALLS]name[ARGS]{...}` once or several times."""
    arguments, call_id = mark("[ARGS]"), mark("[CALL_ID]")
    named = re.compile(rf"\s*([\w.-]+)(?:{re.escape(call_id)}([\w-]+))?(?:{re.escape(arguments)})?(?=\s*\{{)")

    def read(text: str, at: int) -> tuple[list[ToolCall], int]:
        if name := named.match(text, at):
            value, end = _json_at(text, name.end())
            return [_checked(name[1], value, name[2])], end
        value, end = _json_at(text, at)
        return [_call(one) for one in (value if isinstance(value, list) else [value])], end

    return _between(text, mark("[TOOL_CALLS]"), "", read)


def _pythonic(text: str, mark: Mark, schemas: Schemas) -> FoundCalls:
    """`[name(key=value), ...]`: the whole turn, or the text between two markers."""
    opening, closing = mark("<|tool_call_start|>"), mark("<|tool_call_end|>")
    if opening in text:

        def read(text: str, at: int) -> tuple[list[ToolCall], int]:
            end = text.find(closing, at)
            if end < 0:
                raise BadCall("has no end")
            return _python_calls(text[at:end]), end

        return _between(text, opening, closing, read)
    if not re.match(r"\s*\[\s*[A-Za-z_][\w.]*\(", text):
        return FoundCalls([text])
    try:
        return FoundCalls([], _python_calls(text))
    except BadCall as error:
        return FoundCalls([text], [], [str(error)])


_NAMES = {"true": True, "false": False, "null": None}


def _python_calls(text: str) -> list[ToolCall]:
    try:
        tree = ast.parse(text.strip(), mode="eval").body
        calls = tree.elts if isinstance(tree, ast.List) else [tree]
        return [_python_call(call) for call in calls]
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError) as error:
        raise BadCall(f"is not a list of calls such as [name(key=value)]: {error}") from error


def _python_call(call: ast.expr) -> ToolCall:
    if not isinstance(call, ast.Call) or call.args or any(k.arg is None for k in call.keywords):
        raise BadCall("is not a call with named arguments such as [name(key=value)]")
    values = {str(k.arg): _python_value(k.value) for k in call.keywords}
    try:
        values = json.loads(json.dumps(values, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise BadCall(f"has an argument that JSON cannot represent: {error}") from error
    return _checked(ast.unparse(call.func), values)


def _python_value(value: ast.expr) -> Any:
    if isinstance(value, ast.Name) and value.id in _NAMES:
        return _NAMES[value.id]
    return ast.literal_eval(value)


def _typed(value: str, schema: Mapping[str, Any]) -> Any:
    """A value that a format writes without its type. The tool's schema says whether it is text."""
    if schema.get("type") == "string":
        return value
    try:
        found, end = _json_at(value, 0)
        return found if end == len(value) else value
    except BadCall:
        return value


def _mapping(schema: Any) -> Mapping[str, Any]:
    return schema if isinstance(schema, Mapping) else {}


def _tagged(name: re.Pattern[str], argument: re.Pattern[str], end: re.Pattern[str], schemas: Schemas) -> Any:
    """A function that reads a name, then all arguments, then the end of a call."""

    def read(text: str, at: int) -> tuple[list[ToolCall], int]:
        head = name.match(text, at)
        if head is None:
            raise BadCall("has no name")
        at, values = head.end(), {}
        # A schema may say true in place of a mapping, or null.
        properties = _mapping(_mapping(schemas.get(head[1])).get("properties"))
        while found := argument.match(text, at):
            values[found[1]] = _typed(found[2], _mapping(properties.get(found[1])))
            at = found.end()
        tail = end.match(text, at)
        if tail is None:
            raise BadCall(f"has text that is not an argument: {text[at : at + 40]!r}")
        return [_checked(head[1], values)], tail.end()

    return read


def _qwen3_xml(text: str, mark: Mark, schemas: Schemas) -> FoundCalls:
    """`<tool_call><function=name><parameter=key>value</parameter></function></tool_call>`."""
    read = _tagged(
        re.compile(r"\s*<function=([^>\n]+)>\s*"),
        re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>\s*", re.DOTALL),
        re.compile(r"</function>\s*"),
        schemas,
    )
    return _between(text, mark("<tool_call>"), mark("</tool_call>"), read)


def _glm(text: str, mark: Mark, schemas: Schemas) -> FoundCalls:
    """`<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>`."""
    key, key_end = re.escape(mark("<arg_key>")), re.escape(mark("</arg_key>"))
    value, value_end = re.escape(mark("<arg_value>")), re.escape(mark("</arg_value>"))
    read = _tagged(
        re.compile(r"\s*([\w.-]+)\s*"),
        re.compile(rf"{key}(.*?){key_end}\s*{value}(.*?){value_end}\s*", re.DOTALL),
        re.compile(r"(?=.)", re.DOTALL),
        schemas,
    )
    return _between(text, mark("<tool_call>"), mark("</tool_call>"), read)


_BARE_KEY = re.compile(r"[\w.-]+")
# A literal or a number, or a bare word. `2024-01-05` and `nullable` are words.
_NUMBER = r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?"
_BARE_VALUE = re.compile(rf"(true|false|null|{_NUMBER})(?![\w.+-])|([\w.+-]+)")


def _gemma(text: str, mark: Mark, schemas: Schemas) -> FoundCalls:
    """`<|tool_call>call:name{key:value}<tool_call|>`: JSON whose keys may be bare, with `<|"|>` around each string."""
    quote = mark('<|"|>')

    def value_at(text: str, at: int) -> tuple[Any, int]:
        if text.startswith(quote, at):
            end = text.find(quote, at + len(quote))
            if end < 0:
                raise BadCall("has a string without an end")
            return text[at + len(quote) : end], end + len(quote)
        if text[at : at + 1] in "{[" and at < len(text):
            return container_at(text, at)
        if bare := _BARE_VALUE.match(text, at):
            return (_json_at(bare[1], 0)[0] if bare[1] else bare[2]), bare.end()
        raise BadCall(f"has no value at {text[at : at + 20]!r}")

    def container_at(text: str, at: int) -> tuple[Any, int]:
        keyed, end = text[at] == "{", {"{": "}", "[": "]"}[text[at]]
        values: list[Any] = []
        at = _skip_space(text, at + 1)
        while not text.startswith(end, at):
            key = _BARE_KEY.match(text, at) if keyed else None
            one, at = (key[0], key.end()) if key is not None else value_at(text, at)
            at = _skip_space(text, at)
            if keyed:
                if not text.startswith(":", at):
                    raise BadCall(f"has no ':' after a name, but {text[at : at + 20]!r}")
                other, at = value_at(text, _skip_space(text, at + 1))
                one, at = (str(one), other), _skip_space(text, at)
            values.append(one)
            if text.startswith(",", at):
                at = _skip_space(text, at + 1)
            elif not text.startswith(end, at):
                raise BadCall(f"has no ',' or '{end}' at {text[at : at + 20]!r}")
        return (dict(values) if keyed else values), at + 1

    def read(text: str, at: int) -> tuple[list[ToolCall], int]:
        name = re.compile(r"\s*call:([\w.-]+)\s*(?=\{)").match(text, at)
        if name is None:
            raise BadCall("has no name and no arguments")
        try:
            values, end = container_at(text, name.end())
        except RecursionError as error:
            raise BadCall("is nested too deeply") from error
        return [_checked(name[1], values)], _skip_space(text, end)

    return _between(text, mark("<|tool_call>"), mark("<tool_call|>"), read)


def _deepseek(text: str, mark: Mark, schemas: Schemas) -> FoundCalls:
    """`<｜tool▁calls▁begin｜>`, then each call with its name and a JSON block, then `<｜tool▁calls▁end｜>`."""
    begin, end = re.escape(mark("<｜tool▁call▁begin｜>")), mark("<｜tool▁call▁end｜>")
    separator = re.escape(mark("<｜tool▁sep｜>"))
    head = re.compile(rf"\s*{begin}(?P<id>)\w*{separator}(?P<name>[\w.-]+)\s*```json\s*")
    return _section(text, mark("<｜tool▁calls▁begin｜>"), mark("<｜tool▁calls▁end｜>"), head, "```" + end)


def _kimi(text: str, mark: Mark, schemas: Schemas) -> FoundCalls:
    """A section of calls, each with its id `functions.name:0`, and JSON."""
    name = r"\s*(?P<id>(?:functions\.)?(?P<name>[\w.-]+):\d+)\s*"
    begin, between = (re.escape(mark(f"<|tool_call_{part}begin|>")) for part in ("", "argument_"))
    head = re.compile(rf"\s*{begin}{name}{between}")
    opening, closing = mark("<|tool_calls_section_begin|>"), mark("<|tool_calls_section_end|>")
    return _section(text, opening, closing, head, mark("<|tool_call_end|>"))


def _section(text: str, opening: str, closing: str, head: re.Pattern[str], tail: str) -> FoundCalls:
    """Calls between two markers, each with a head, JSON, and a tail. The head has the groups `name` and `id`."""

    def read(text: str, at: int) -> tuple[list[ToolCall], int]:
        calls = []
        while found := head.match(text, at):
            value, at = _json_at(text, found.end())
            if not text.startswith(tail, at):
                raise _goes_on(text, at)
            calls.append(_checked(found["name"], value, found["id"] or None))
            at = _skip_space(text, at + len(tail))
        if not calls:
            raise BadCall("has no name and no JSON block")
        return calls, at

    return _between(text, opening, closing, read)


FORMATS: dict[str, Format] = {
    "hermes": _hermes,
    "qwen3_xml": _qwen3_xml,
    "glm": _glm,
    "mistral": _mistral,
    "deepseek": _deepseek,
    "kimi": _kimi,
    "harmony": _harmony,
    "gemma": _gemma,
    "pythonic": _pythonic,
    "llama3_json": _llama3_json,
}

# The texts with which a call may begin. Harmony is missing: there the name of a call comes before its first marker.
_OPENINGS = {
    "hermes": ("<tool_call>",),
    "qwen3_xml": ("<tool_call>",),
    "glm": ("<tool_call>",),
    "mistral": ("[TOOL_CALLS]",),
    "deepseek": ("<｜tool▁calls▁begin｜>",),
    "kimi": ("<|tool_calls_section_begin|>",),
    "gemma": ("<|tool_call>",),
    "pythonic": ("<|tool_call_start|>", "["),
    "llama3_json": ("<|python_tag|>", "{"),
}
# Each control token of a turn becomes a surrogate, because decoded text contains none.
_FIRST, _COUNT, _ABSENT = 0xD800, 0x7F0, "\udfff"


@dataclass(frozen=True, slots=True)
class Marked:
    """The text of a turn in which each control token is one character that no text contains.

    Attributes:
        tokens: the text of each control token of the turn, by its character.
        control: finds text that looks like a control token.
    """

    text: str
    tokens: dict[str, str]
    control: re.Pattern[str]

    def mark(self, text: str) -> str:
        """A text in the form that it has in the marked text: control tokens become their characters."""
        characters = {token: character for character, token in self.tokens.items()}
        return self.control.sub(lambda found: characters.get(found[0], _ABSENT), text)

    def plain(self, text: str) -> str:
        """A part of the marked text as plain text: the characters become the text of their control tokens again."""
        return _SURROGATE.sub(lambda found: self.tokens[found[0]], text)


def marked(template: Template, ids: Ids) -> Marked:
    """The marked text of ids (N,)."""
    places = np.flatnonzero(np.isin(ids, template.control_ids))
    present = dict.fromkeys(template.control[int(ids[place])] for place in places)
    characters = {token: chr(_FIRST + n) for n, token in zip(range(_COUNT), present, strict=False)}
    parts, start = [], 0
    for place in [*places.tolist(), len(ids)]:
        parts.append(_decoded(template.tokenizer, ids[start:place]))
        if place < len(ids):
            token = template.control[int(ids[place])]
            parts.append(characters.get(token, token))
        start = place + 1
    return Marked("".join(parts), {c: t for t, c in characters.items()}, template.control_pattern)


def _decoded(tokenizer: PreTrainedTokenizerBase, ids: Ids) -> str:
    if not len(ids):
        return ""
    # Some decoders drop the space of the first token. Therefore another token is put before the ids.
    first = [tokenizer.eos_token_id]
    how = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
    return str(tokenizer.decode([*first, *ids.tolist()], **how)).removeprefix(tokenizer.decode(first, **how))


def read_calls(turn: Marked, text: str, form: str, schemas: Schemas) -> FoundCalls:
    """The calls in a part of a turn's marked text.

    `schemas` has the JSON schema of the arguments by tool name, for formats that write values without their type.
    """
    return FORMATS[form](text, turn.mark, schemas)


def schemas_of(tools: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """JSON schema of the arguments, by tool name, from tools in OpenAI's format."""
    functions = [tool.get("function", tool) for tool in tools]
    return {f["name"]: f.get("parameters", {}) for f in functions}


def text_before_calls(text: str, form: str | None) -> str:
    """The beginning of an unfinished turn's text that is surely outside every call. `form` is a key of `FORMATS`."""
    if form not in _OPENINGS or text[:1].isspace():
        # If a call follows, the white space around the text is removed. So this text is not yet sure.
        return ""
    for opening in _OPENINGS[form]:
        text = without_beginning(text.partition(opening)[0], opening)
    return text


def without_beginning(text: str, marker: str) -> str:
    """A text without its end, if this end may be the beginning of a marker."""
    size = next((n for n in range(min(len(marker), len(text)), 0, -1) if text.endswith(marker[:n])), 0)
    return text[: len(text) - size]
