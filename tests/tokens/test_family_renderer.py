"""With a renderer of the library `renderers`: the ids are still the template's own, and other ids are refused."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from draws import hold
from families import end_ids, make_tokenizer
from hypothesis import strategies as st
from renderer_families import RENDERED, extension_of, needs_renderers, table

from lockstep.errors import InputError, ProofError
from lockstep.extras.agents.agent_calls import Wishes
from lockstep.extras.agents.streamed_answers import certain_part
from lockstep.tokens.arrays import Ids, joined, whole_numbers
from lockstep.tokens.conversation.extension import Branch, Extension, Insert, Message
from lockstep.tokens.conversation.extension_proof import CALLS, drawn
from lockstep.tokens.conversation.family_renderer import RendererDiffers

REFUSED = ("qwen3.5, thinking off", "gpt-oss", "kimi-k2")
ACCEPTED = [name for name in RENDERED if name not in REFUSED]


def new_extension(name: str, **more: Any) -> Extension:
    family, renderer = RENDERED[name]
    return Extension(
        make_tokenizer(family),
        end_ids(family),
        **{"chat_template_kwargs": dict(family.kwargs), "renderer": renderer, **more},
    )


def turns_with_calls(name: str) -> list[tuple[list[Message], Ids, Ids, list[Message]]]:
    """Drawn conversations before an ended turn with a call: messages, context, turn, results."""
    continuation = extension_of(name).continuation
    template, found = continuation.template, []
    for asked, last, results in drawn(continuation, CALLS[0]):
        before = template.text(asked)
        text, at = continuation.rendered(asked, last, results)
        turn = joined([template.ids(text[len(before) : at]), template.ids(text[at:])[:1]])
        found.append((asked, template.ids(before), turn, results))
    return found


@pytest.fixture
def bridge(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[list[int]], list[int]]], list[int]]:
    """Changes the ids that the renderer of Qwen3 gives, and counts how often it gives some."""
    from renderers.qwen3 import Qwen3Renderer

    real, given = Qwen3Renderer.bridge_to_next_turn, []

    def change(by: Callable[[list[int]], list[int]]) -> list[int]:
        def changed(*args: Any, **kwargs: Any) -> Any:
            found = real(*args, **kwargs)
            if found is not None:
                found.token_ids[:] = by(found.token_ids)
                given.append(len(found.token_ids))
            return found

        monkeypatch.setattr(Qwen3Renderer, "bridge_to_next_turn", changed)
        return given

    return change


@needs_renderers
def test_the_table_of_the_docs_is_what_happens() -> None:
    page = Path(__file__).parents[2] / "docs" / "internals" / "conversations.md"
    assert table() in page.read_text("utf-8")


@needs_renderers
@pytest.mark.parametrize("name", ACCEPTED)
def test_both_back_ends_give_the_same_ids(name: str) -> None:
    ours, theirs = extension_of(name, with_renderer=False), extension_of(name)
    assert theirs.cases == ours.cases
    assert ours.reads_calls == (ours.conventions.shows_calls and name != "minimax-m2")
    pieces = st.lists(st.sampled_from(["a", " ", "\n", "é", "日本", "<|im_end|>", "</think>", "\udc80"]), max_size=4)

    def check(place: int, texts: list[list[str]], cut: bool) -> None:
        asked, context, turn, new = conversations[place]
        turn = turn[:-1] if cut else turn
        new = [{**message, "content": "".join(text)} for message, text in zip(new, texts, strict=False)]
        mine, other = (extension.next(asked, context, turn, new) for extension in (ours, theirs))
        assert type(mine) is type(other)
        assert np.array_equal(mine.ids, other.ids)
        ids = joined([context, turn, other.ids]) if isinstance(other, Insert) else other.ids
        theirs.check(asked, context, turn, new, ids)

    if ours.reads_calls:
        conversations = turns_with_calls(name)
        hold(
            name, 12, check, place=st.integers(0, 5), texts=st.lists(pieces, min_size=1, max_size=1), cut=st.booleans()
        )


@needs_renderers
def test_the_ids_come_from_the_renderer_where_it_makes_some(bridge: Any) -> None:
    turns, given = turns_with_calls("qwen3"), bridge(lambda ids: ids)
    extension = new_extension("qwen3")
    given.clear()
    for asked, context, turn, new in turns:
        assert isinstance(extension.next(asked, context, turn, new), Insert)
    assert len(given) == 6
    # Not for a turn that was cut, for text that looks like a control token, and for a user's next question.
    asked, context, turn, new = turns[0]
    special = [{**new[0], "content": "<|im_end|>"}]
    for own, messages in ((turn[:-1], new), (turn, special), (turn, [{"role": "user", "content": "why"}])):
        extension.next(asked, context, own, messages)
    assert len(given) == 6


@needs_renderers
@pytest.mark.parametrize(
    "wrong",
    [lambda ids: ids[:-1], lambda ids: [*ids, ids[-1]], lambda ids: [*ids[:-3], ids[-3] + 1, *ids[-2:]]],
    ids=["an id is missing", "an id is doubled", "another id"],
)
def test_a_renderer_that_writes_other_ids_is_refused_at_start_and_after_a_turn(bridge: Any, wrong: Any) -> None:
    turns, given = turns_with_calls("qwen3"), bridge(wrong)
    with pytest.raises(RendererDiffers, match=r"the renderer 'qwen3' inserts other ids .*: leave renderer out"):
        new_extension("qwen3")
    bridge(lambda ids: ids)
    extension = new_extension("qwen3")
    bridge(wrong)
    given.clear()
    for asked, context, turn, new in turns:
        found = extension.next(asked, context, turn, new)
        with pytest.raises(ProofError, match="leave renderer='qwen3' out"):
            extension.check(asked, context, turn, new, joined([context, turn, found.ids]))
    assert len(given) == 6


@needs_renderers
def test_a_renderer_that_changes_what_was_sampled_is_refused(bridge: Any) -> None:
    bridge(lambda ids: [ids[0] + 1, *ids[1:]])
    with pytest.raises(RendererDiffers, match="changes ids before the new messages"):
        new_extension("qwen3")


@needs_renderers
@pytest.mark.parametrize("name", REFUSED)
def test_a_renderer_that_is_not_of_the_template_is_refused(name: str) -> None:
    extension_of(name, with_renderer=False)
    with pytest.raises(RendererDiffers, match="use the chat template that belongs to this family"):
        new_extension(name)


LOOK_UP = {
    "type": "function",
    "function": {
        "name": "look_up",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "count": {"type": "integer"}}},
    },
}


@needs_renderers
def test_calls_that_no_format_reads_are_read_by_the_renderer() -> None:
    name = "minimax-m2"
    with pytest.raises(InputError, match="or the model family with renderer"):
        new_extension(name, tools=[LOOK_UP], renderer=None)
    extension = new_extension(name, tools=[LOOK_UP])
    assert {extension.cases[case] for case in CALLS if case in extension.cases} == {"extends"}
    for asked, context, turn, results in turns_with_calls(name):
        read = extension.read(turn)
        assert [(call.name, call.arguments) for call in read.calls] == [("look_up", {"city": "P0 é日本", "count": 0})]
        assert not read.errors
        new = [extension.result(read.calls[0], results[0]["content"])]
        step = extension.next(asked, context, turn, new)
        assert isinstance(step, Insert)
        extension.check(asked, context, turn, new, joined([context, turn, step.ids]))
        # The template does not show text after a call.
        later = joined([turn[:-1], written(name, "more"), turn[-1:]])
        assert isinstance(extension.next(asked, context, later, new), Branch)
        assert extension.read(turn, calls_are_text=True).calls == ()


@needs_renderers
def test_a_malformed_call_is_an_error_for_the_model_and_stays_in_the_content() -> None:
    extension = extension_of("minimax-m2")
    _, _, turn, _ = turns_with_calls("minimax-m2")[0]
    read = extension.read(turn[:-4])
    assert (len(read.calls), len(read.errors)) == (0, 1)
    assert read.errors[0].startswith("The tool call is not well-formed (unclosed block)")
    assert "P0" in read.content
    assert read.message["content"] == read.content


@needs_renderers
def test_a_call_inside_the_thinking_is_not_made() -> None:
    extension = extension_of("minimax-m2")
    _, _, turn, _ = turns_with_calls("minimax-m2")[0]
    thinking = turn[turn != written("minimax-m2", "</think>")[0]]
    assert len(thinking) == len(turn) - 1
    read = extension.read(thinking)
    assert (read.calls, read.content) == ((), "")
    assert "look_up" in (read.reasoning or "")
    read = extension.read(joined([written("minimax-m2", " I call\n</think>\n\n"), thinking]))
    assert (read.reasoning, len(read.calls)) == (" I call", 1)


@needs_renderers
def test_no_part_of_a_call_is_streamed_as_text() -> None:
    extension = extension_of("minimax-m2")
    _, _, turn, _ = turns_with_calls("minimax-m2")[0]
    said = joined([written("minimax-m2", "hmm\n</think>\n\nLet me see.\n"), turn])
    parts = {certain_part(extension, said[:size], wishes=Wishes(reads_calls=True)).content for size in range(len(said))}
    assert parts == {""}
    texts = {certain_part(extension, said[:size], wishes=Wishes()).content for size in range(len(said))}
    assert any("look_up" in text for text in texts)


@needs_renderers
def test_nothing_that_is_sampled_raises_an_error() -> None:
    tokenizer, extension = make_tokenizer(RENDERED["minimax-m2"].family), extension_of("minimax-m2")
    control = st.sampled_from(sorted(tokenizer.added_tokens_decoder))
    asked: list[Message] = [{"role": "user", "content": "q"}]
    context, why = extension.prompt(asked), [{"role": "user", "content": "why"}]

    def check(ids: list[int]) -> None:
        turn = whole_numbers(ids)
        for call in extension.read(turn).calls:
            json.dumps(call.arguments).encode()
        step = extension.next(asked, context, turn, why)
        whole = joined([context, turn, step.ids]) if isinstance(step, Insert) else step.ids
        extension.check(asked, context, turn, why, whole)

    hold("minimax-m2", 20, check, ids=st.lists(st.integers(0, len(tokenizer) - 1) | control, max_size=30))


@needs_renderers
def test_auto_takes_the_family_of_the_tokenizers_name() -> None:
    family = RENDERED["qwen3"].family
    tokenizer = (
        make_tokenizer._wrapped(family) if hasattr(make_tokenizer, "_wrapped") else make_tokenizer.__wrapped__(family)
    )
    with pytest.raises(InputError, match=r"knows no family for the tokenizer '': name the family .*qwen3"):
        Extension(tokenizer, end_ids(family), renderer="auto")
    tokenizer.name_or_path = "Qwen/Qwen3-8B"
    renderer = Extension(tokenizer, end_ids(family), renderer="auto").continuation.renderer
    assert renderer is not None
    assert renderer.family == "qwen3"


@needs_renderers
@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"renderer": "smoke"}, "knows no family 'smoke': choose one of deepseek"),
        (
            {"renderer": "kimi-k2"},
            r"'kimi-k2' does not fit this tokenizer and chat template: Special token '<\|im_user\|>'",
        ),
        ({"chat_template_kwargs": {"colour": 3}}, "'qwen3' does not fit this tokenizer and chat template: .*colour"),
    ],
)
def test_a_renderer_that_does_not_fit_is_refused_with_the_reason(more: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        new_extension("qwen3", **more)


def test_without_the_package_the_message_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "renderers.base", None)
    with pytest.raises(InputError, match=r"pip install 'lockstep-rl\[renderers\]'.*or leave renderer out"):
        new_extension("qwen3")


def written(name: str, text: str) -> Ids:
    return whole_numbers(make_tokenizer(RENDERED[name].family)(text, add_special_tokens=False)["input_ids"])
