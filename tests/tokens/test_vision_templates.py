"""The deployed chat templates of the vision families: pictures in messages become their ids, and text stays text."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import numpy as np
import pytest
from families import VISION, tokenizer_of

from lockstep.errors import InputError
from lockstep.tokens.arrays import Ids, joined, whole_numbers
from lockstep.tokens.chat import Message, picture_part
from lockstep.tokens.extension import EARLIER_DIFFERS, Branch, Extension, Insert


class Shown(NamedTuple):
    """A picture of which nothing but its ids matters here."""

    ids: Ids


def placeholder_of(name: str) -> int:
    return int(tokenizer_of(name).convert_tokens_to_ids("<|image_pad|>" if "qwen" in name else "<image>"))


def extension_of(name: str) -> Extension:
    tokenizer = tokenizer_of(name)
    return Extension(
        tokenizer, [tokenizer.eos_token_id], placeholder=placeholder_of(name), tool_format="hermes"
    )


def pictures(name: str, *sizes: int) -> list[Shown]:
    """Pictures with a mark before their placeholders, as families with tiles have."""
    return [Shown(whole_numbers([7, *[placeholder_of(name)] * size])) for size in sizes]


def due(name: str, messages: list[Message], shown: list[Shown]) -> list[int]:
    """The ids of a conversation, from transformers' own rendering of lists of parts."""
    bare = [
        {
            **message,
            "content": [{k: v for k, v in part.items() if k != "picture"} for part in message["content"]]
            if isinstance(message["content"], list)
            else [{"type": "text", "text": message["content"]}],
        }
        for message in messages
    ]
    tokenizer, left, found = tokenizer_of(name), iter(shown), []
    text = tokenizer.apply_chat_template(bare, tokenize=False, add_generation_prompt=True)
    for token in tokenizer(text, add_special_tokens=False)["input_ids"]:
        found += next(left).ids.tolist() if token == placeholder_of(name) else [token]
    return found


def text(given: str) -> dict[str, Any]:
    return {"type": "text", "text": given}


@pytest.mark.parametrize("name", VISION)
def test_text_of_messages_is_shown_also_by_templates_that_take_parts_only(name: str) -> None:
    """Text as content would be left out without a word by the templates of SmolVLM and Idefics3."""
    asked: list[Message] = [
        {"role": "system", "content": "be short"},
        {"role": "user", "content": "what is 12 + 34"},
    ]
    assert extension_of(name).prompt(asked).tolist() == due(name, asked, [])


@pytest.mark.parametrize("name", VISION)
def test_a_result_with_pictures_continues_the_ids_of_the_whole_conversation(name: str) -> None:
    extension, (first, second, third) = extension_of(name), pictures(name, 3, 2, 4)
    asked: list[Message] = [{"role": "user", "content": [picture_part(first), text("look")]}]
    context = extension.prompt(asked)
    assert context.tolist() == due(name, asked, [first])
    (end, *_) = VISION[name].special.split()
    # Behind "Assistant:" a model samples a space.
    said = "the thing" if "qwen" in name else " the thing"
    turn = whole_numbers(tokenizer_of(name)(f"{said}{end}", add_special_tokens=False)["input_ids"])
    new: list[Message] = [
        {"role": "tool", "name": "f", "content": [picture_part(second), text("and"), picture_part(third)]}
    ]
    step = extension.next(asked, context, turn, new)
    assert isinstance(step, Insert)
    messages: list[Message] = [*asked, {"role": "assistant", "content": "the thing"}, *new]
    whole = joined([context, turn, step.ids])
    assert whole.tolist() == due(name, messages, [first, second, third])
    extension.check(asked, context, turn, new, whole)


@pytest.mark.parametrize("name", VISION)
def test_text_that_looks_like_a_placeholder_stays_text_beside_a_picture(name: str) -> None:
    mark = tokenizer_of(name).convert_ids_to_tokens(placeholder_of(name))
    (shown,) = pictures(name, 2)
    ids = extension_of(name).prompt(
        [{"role": "tool", "name": "f", "content": [text(f"a {mark} b"), picture_part(shown)]}]
    )
    assert int((ids == placeholder_of(name)).sum()) == 2
    assert mark in tokenizer_of(name).decode(ids[ids != placeholder_of(name)].tolist())


def extension_with(template: str) -> Extension:
    """An extension of the tokenizer of Qwen2.5-VL with another template."""
    tokenizer = copy.deepcopy(tokenizer_of("qwen2.5-vl"))
    tokenizer.chat_template = template
    placeholder = placeholder_of("qwen2.5-vl")
    return Extension(tokenizer, [tokenizer.eos_token_id], placeholder=placeholder, tool_format="hermes")


def test_a_branch_has_the_pictures_of_all_messages() -> None:
    name = "qwen2.5-vl"
    first, second = pictures(name, 3, 2)
    extension = extension_with("{{ messages | length }}" + tokenizer_of(name).chat_template)
    asked: list[Message] = [{"role": "user", "content": [picture_part(first)]}]
    context = extension.prompt(asked)
    turn = whole_numbers(tokenizer_of(name)("so<|im_end|>", add_special_tokens=False)["input_ids"])
    step = extension.next(asked, context, turn, [{"role": "user", "content": [picture_part(second)]}])
    assert isinstance(step, Branch)
    assert step.reason == EARLIER_DIFFERS
    edges = np.flatnonzero(np.diff(step.ids == placeholder_of(name)))
    assert np.diff(edges)[::2].tolist() == [3, 2]


IGNORING = (
    "{% for m in messages %}<|im_start|>{{ m.role }} {% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{% if part.type == 'text' %}{{ part.text }}"
    "{% elif m.role == 'user' %}<|image_pad|>{% endif %}{% endfor %}{% endif %}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant {% endif %}"
)


def test_a_template_that_shows_no_pictures_in_results_says_so() -> None:
    (shown,) = pictures("qwen2.5-vl", 2)
    extension = extension_with(IGNORING)
    assert "role 'tool'" in str(extension.why_no_pictures(shown))
    with pytest.raises(InputError, match="0 placeholders for 1 pictures"):
        extension.prompt([{"role": "tool", "content": [picture_part(shown)]}])
    assert extension_of("qwen2.5-vl").why_no_pictures(shown) is None
