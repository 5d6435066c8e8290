"""Reads the tool calls of a sampled turn from its ids.

The chat template decides the format, or a user names it (`tokens/conversation/tool_formats.py`). `marked` turns ids
into a text in which each control token is one character that no text contains. Therefore a marker that is a single
token is found by its id, and text that looks like the marker stays text. A marker that a tokenizer writes with several
tokens is found as text.

A malformed call raises no error. It becomes an error text for the model, and its own text stays in the content of the turn.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from lockstep.tokens.arrays import Ids
from lockstep.tokens.chat import Template
from lockstep.tokens.conversation.tool_formats import FORMATS, SURROGATE, FoundCalls, Schemas

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
        text: the marked text.
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
        return SURROGATE.sub(lambda found: self.tokens[found[0]], text)


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

    Args:
        form: a key of `FORMATS`.
        schemas: JSON schema of the arguments, by tool name. Formats that write values without their type need the schema.
    """
    return FORMATS[form](text, turn.mark, schemas)


def schemas_of(tools: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """JSON schema of the arguments, by tool name, from tools in OpenAI's format."""
    functions = [tool.get("function", tool) for tool in tools]
    return {f["name"]: f.get("parameters", {}) for f in functions}


def text_before_calls(text: str, form: str | None) -> str:
    """The beginning of an unfinished turn's text that is surely outside every call. `form` is a key of `FORMATS`, or None."""
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
