"""Conversations grow in ids: sampled ids stay, inserted ones are the template's, rewritten history branches."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from draws import hold
from families import FAMILIES, end_ids_of, extension_of, table, tokenizer_of
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from lockstep.errors import InputError, ProofError
from lockstep.tokens.arrays import Ids, joined, whole_numbers
from lockstep.tokens.chat import render_prompt
from lockstep.tokens.extension import (
    EARLIER_DIFFERS,
    END_DIFFERS,
    TURN_DIFFERS,
    Branch,
    Extension,
    Insert,
    Message,
)

_GROWING = [name for name in FAMILIES if name != "no control tokens"]
_JSON = ("hermes", "mistral", "deepseek", "harmony", "llama3_json")
_ORDINARY = (
    "hello",
    " ",
    "\n",
    "\n\n",
    "é",
    "日本",
    "🙂",
    "a  b",
    ".",
    "12 + 34",
    "\t",
    "<b>",
    "{}",
    "I'm",
    "\u00a0",
    "user",
    "\r",
)


def turn_of(name: str, sampled_end: bool) -> Ids:
    return joined([as_text(name, "four"), whole_numbers(end_ids_of(name)[:1] if sampled_end else ())])


@pytest.mark.parametrize("sampled_end", [True, False])
@pytest.mark.parametrize("name", ["smollm2", "qwen3", "mistral", "llama-3", "lfm2"])
def test_ids_that_the_template_does_not_show_are_refused_after_a_turn(name: str, sampled_end: bool) -> None:
    extension, turn = extension_of(name), turn_of(name, sampled_end)
    asked, new = [{"role": "user", "content": "two and two"}], [{"role": "user", "content": "sure?"}]
    context = extension.prompt(asked)
    step = extension.next(asked, context, turn, new)
    assert isinstance(step, Insert)
    own = joined([context, turn])
    extension.check(asked, context, turn, new, joined([own, step.ids]))
    end = whole_numbers(end_ids_of(name)[:1])
    wrong = {
        "a token is missing": step.ids[1:],
        "the turn is closed twice": joined([end, step.ids]),
        "the end is missing": step.ids[:-1],
        "another message": extension.next(asked, context, turn, [{"role": "user", "content": "no!"}]).ids,
    }
    for ids in wrong.values():
        with pytest.raises(ProofError, match="the ids after a turn are"):
            extension.check(asked, context, turn, new, joined([own, ids]))


def test_the_last_token_of_a_turn_that_was_cut_may_be_neither_left_out_nor_another() -> None:
    name = "qwen3"
    extension, turn = extension_of(name), turn_of(name, sampled_end=False)
    asked, new = [{"role": "user", "content": "two and two"}], [{"role": "user", "content": "sure?"}]
    context = extension.prompt(asked)
    step = extension.next(asked, context, turn, new)
    assert isinstance(step, Insert)
    for last in (whole_numbers([]), turn[-1:] + 1):
        with pytest.raises(ProofError, match="do not begin with the ids before the last turn"):
            extension.check(asked, context, turn, new, joined([context, turn[:-1], last, step.ids]))


def as_text(name: str, text: str) -> Ids:
    """Ids of text in which nothing is a control token, made without the code under test."""
    whole = tokenizer_of(name).backend_tokenizer
    bare = Tokenizer(whole.model)
    bare.pre_tokenizer = whole.pre_tokenizer
    return whole_numbers(bare.encode(text, add_special_tokens=False).ids)


def ids_of(name: str, text: str) -> Ids:
    """Ids of a template's text, in which control tokens are control tokens."""
    return whole_numbers(tokenizer_of(name)(text, add_special_tokens=False)["input_ids"])


def decoded(name: str, ids: Ids) -> str:
    return str(tokenizer_of(name).decode(ids.tolist(), clean_up_tokenization_spaces=False))


def control_count(name: str, ids: Ids) -> int:
    return int(np.isin(ids, list(tokenizer_of(name).added_tokens_decoder)).sum())


def rendered(name: str, messages: list[Message]) -> str:
    """The template's own rendering, made by transformers alone."""
    kwargs = dict(FAMILIES[name].kwargs)
    return str(
        tokenizer_of(name).apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **kwargs)
    )


def texts(name: str, special: bool) -> st.SearchStrategy[str]:
    control = [token.content for token in tokenizer_of(name).added_tokens_decoder.values()]
    piece = st.sampled_from([*_ORDINARY, *(control if special else ())]) | st.text(
        st.characters(exclude_categories=["Cs"], exclude_characters="<|｜>[]"), max_size=3
    )
    return st.lists(piece, max_size=5).map("".join)


def written_call(name: str, text: str) -> Ids:
    """A tool call in the family's own form, whose argument is a text; its ids are what the template gives around it."""
    arguments: Any = {"city": "ZQZ"}
    if extension_of(name).conventions.arguments_as_text:
        arguments = json.dumps(arguments)
    call = {"type": "function", "id": "123456789", "function": {"name": "look_up", "arguments": arguments}}
    asked: list[Message] = [{"role": "user", "content": "q"}]
    said = [*asked, {"role": "assistant", "content": "", "tool_calls": [call]}]
    whole = tokenizer_of(name).apply_chat_template(said, tokenize=False, **dict(FAMILIES[name].kwargs))
    prompt = rendered(name, asked)
    assert whole.startswith(prompt)
    left, right = whole.removeprefix(prompt).split("ZQZ")
    own = json.dumps(text, ensure_ascii=False)[1:-1]
    right_ids = ids_of(name, right)
    ends = np.flatnonzero(np.isin(right_ids, end_ids_of(name)))
    return joined([ids_of(name, left), as_text(name, own), right_ids[: ends[0] if len(ends) else None]])


def _turn(data: st.DataObject, name: str, special: bool) -> tuple[Ids, list[str] | None]:
    """Ids as a model may sample them, and the arguments of its calls if they are known."""
    how, ends = extension_of(name).conventions, end_ids_of(name)
    parts, arguments = [], None
    if how.thinking_field is not None and data.draw(st.booleans()):
        opening, closing = how.thinking
        parts += [] if how.thinks_first else [ids_of(name, opening + "\n")]
        parts += [
            as_text(name, data.draw(texts(name, special))),
            ids_of(name, "\n" + closing + how.content_mark),
        ]
    elif how.content_mark and data.draw(st.booleans()):
        parts.append(ids_of(name, how.content_mark))
    # Pieces of text are encoded one by one: a model does not always choose the tokens of the tokenizer.
    parts += [as_text(name, data.draw(texts(name, special))) for _ in range(data.draw(st.integers(0, 2)))]
    if how.tool_format in _JSON and name != "deepseek-v3" and data.draw(st.booleans()):
        many = 2 if how.tool_format == "hermes" and data.draw(st.booleans()) else 1
        alone = how.tool_format in ("harmony", "llama3_json")
        arguments = data.draw(st.lists(texts(name, special), min_size=many, max_size=many))
        calls = [written_call(name, text) for text in arguments]
        parts = calls if alone else [*parts, *calls]
        arguments = arguments if alone or not how.thinks_first else None
    end = data.draw(st.sampled_from([*ends, None]))
    parts.append(whole_numbers(() if end is None else [end]))
    return joined(parts), arguments


def _follow(data: st.DataObject, name: str, turn: Ids, special: bool) -> list[Message]:
    extension = extension_of(name)
    read = extension.read(turn)
    if read.calls and extension.conventions.shows_calls:
        return [extension.result(call, data.draw(texts(name, special))) for call in read.calls]
    if read.errors:
        return [extension.error(read.errors[0])]
    return [{"role": "user", "content": data.draw(texts(name, special))}]


@pytest.mark.parametrize("name", _GROWING)
def test_sampled_ids_stay_and_what_is_inserted_is_the_templates_own(name: str) -> None:
    extension = extension_of(name)

    def check(data: st.DataObject, special: bool) -> None:
        messages: list[Message] = [{"role": "user", "content": "q" + data.draw(texts(name, special))}]
        context = extension.prompt(messages)
        for _ in range(2):
            turn, arguments = _turn(data, name, special)
            read = extension.read(turn)
            if arguments is not None:
                assert [call.arguments for call in read.calls] == [{"city": text} for text in arguments]
            new = _follow(data, name, turn, special)
            step = extension.next(messages, context, turn, new)
            messages = [*messages, read.message, *new]
            sampled = joined([context, turn])
            if not special:
                _check_ordinary(name, messages, sampled, step)
            harmless = [{**message, "content": "x"} for message in new]
            plain = extension.next(messages[: -1 - len(new)], context, turn, harmless)
            assert control_count(name, step.ids) == control_count(name, plain.ids)
            before, context = context, joined([sampled, step.ids]) if isinstance(step, Insert) else step.ids
            # The proof has no false alarm.
            extension.check(messages[: -1 - len(new)], before, turn, new, context)

    hold(name, 6, check, data=st.data(), special=st.booleans())


def _check_ordinary(name: str, messages: list[Message], sampled: Ids, step: Insert | Branch) -> None:
    """Messages without special-looking text: transformers alone gives the whole conversation."""
    whole = ids_of(name, rendered(name, messages))
    if np.array_equal(whole[: len(sampled)], sampled):
        assert isinstance(step, Insert)
        assert np.array_equal(step.ids, whole[len(sampled) :])
    if isinstance(step, Insert):
        assert rendered(name, messages).endswith(decoded(name, step.ids))
    elif step.reason == END_DIFFERS:
        kept = len(sampled) - 1
        assert np.array_equal(step.ids[:kept], sampled[:kept])
        assert rendered(name, messages).endswith(decoded(name, step.ids[kept:]))
    else:
        assert np.array_equal(step.ids, whole)
        assert step.reason in (EARLIER_DIFFERS, TURN_DIFFERS)


@pytest.mark.parametrize("name", _GROWING)
def test_nothing_that_is_sampled_raises_an_error(name: str) -> None:
    extension, size = extension_of(name), len(tokenizer_of(name))
    control = st.sampled_from(sorted(tokenizer_of(name).added_tokens_decoder))

    def check(ids: list[int]) -> None:
        turn = extension.read(whole_numbers(ids))
        assert turn.message["role"] == "assistant"
        for call in turn.calls:
            json.dumps(call.arguments).encode()

    hold(name, 10, check, ids=st.lists(st.integers(0, size - 1) | control, max_size=30))


@pytest.mark.parametrize("name", ["qwen3", "glm-4.5", "gemma-4", "gpt-oss", "lfm2.5"])
def test_thinking_stays_while_tools_answer_and_a_new_user_turn_branches(name: str) -> None:
    cases = extension_of(name).cases
    assert cases["thinking and call, result"] == "extends"
    assert cases["thinking, user"].startswith("branches")


def test_the_table_of_families_is_what_happens() -> None:
    page = Path(__file__).with_name("families.md")
    assert table() in page.read_text("utf-8")


def test_a_branch_has_the_templates_ids_without_the_earlier_thinking() -> None:
    extension = extension_of("qwen3")
    asked = [{"role": "user", "content": "q"}]
    turn = ids_of("qwen3", "<think>\nhmm\n</think>\n\n4<|im_end|>")
    step = extension.next(asked, extension.prompt(asked), turn, [{"role": "user", "content": "why"}])
    assert isinstance(step, Branch)
    assert step.reason == TURN_DIFFERS
    text = decoded("qwen3", step.ids)
    assert "hmm" not in text
    assert text.endswith(
        "<|im_start|>assistant\n4<|im_end|>\n<|im_start|>user\nwhy<|im_end|>\n<|im_start|>assistant\n"
    )


def test_thinking_of_an_earlier_turn_that_is_dropped_is_named_as_the_reason() -> None:
    extension = extension_of("qwen3")
    asked: list[Message] = [{"role": "user", "content": "q"}]
    context = extension.prompt(asked)
    call = '<think>\nhmm\n</think>\n\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call><|im_end|>'
    turn = ids_of("qwen3", call)
    read = extension.read(turn)
    result = extension.result(read.calls[0], "4")
    step = extension.next(asked, context, turn, [result])
    assert isinstance(step, Insert)
    step = extension.next(
        [*asked, read.message, result],
        joined([context, turn, step.ids]),
        ids_of("qwen3", "4<|im_end|>"),
        [{"role": "user", "content": "why"}],
    )
    assert isinstance(step, Branch)
    assert step.reason == EARLIER_DIFFERS
    assert "hmm" not in decoded("qwen3", step.ids)


def test_an_end_token_that_the_template_does_not_write_is_left_out_of_a_branch() -> None:
    name = "llama-3.1"
    extension, (_, other) = extension_of(name), end_ids_of(name)
    asked = [{"role": "user", "content": "q"}]
    context, said = extension.prompt(asked), as_text(name, "x")
    step = extension.next(
        asked, context, joined([said, whole_numbers([other])]), [{"role": "user", "content": "why"}]
    )
    assert isinstance(step, Branch)
    assert step.reason == END_DIFFERS
    assert decoded(name, step.ids).endswith("\n\nx<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nwhy<|eot_id|>"
                                            "<|start_header_id|>assistant<|end_header_id|>\n\n")  # fmt: skip
    assert np.array_equal(step.ids[: len(context) + 1], joined([context, said]))


def test_the_end_token_is_inserted_exactly_when_it_was_not_sampled() -> None:
    extension = extension_of("smollm2")
    asked, why = [{"role": "user", "content": "q"}], [{"role": "user", "content": "why"}]
    context, said, end = (
        extension.prompt(asked),
        as_text("smollm2", "four"),
        whole_numbers(end_ids_of("smollm2")),
    )
    cut, ended = (extension.next(asked, context, turn, why) for turn in (said, joined([said, end])))
    assert np.array_equal(cut.ids, joined([end, ended.ids]))
    assert decoded("smollm2", ended.ids).startswith("\n<|im_start|>user")


def test_a_closing_of_two_tokens_is_not_doubled() -> None:
    name = "cohere-2"
    extension, asked = extension_of(name), [{"role": "user", "content": "q"}]
    turn = ids_of(name, "four<|END_RESPONSE|><|END_OF_TURN_TOKEN|>")
    step = extension.next(asked, extension.prompt(asked), turn, [{"role": "user", "content": "why"}])
    assert isinstance(step, Insert)
    assert decoded(name, step.ids).startswith("<|START_OF_TURN_TOKEN|><|USER_TOKEN|>why")


def test_a_turn_continues_the_assistants_last_message() -> None:
    extension = extension_of("smollm2")
    asked = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "The answer"}]
    context = extension.prompt(asked)
    assert decoded("smollm2", context).endswith("assistant\nThe answer")
    step = extension.next(asked, context, as_text("smollm2", " is 4"), [{"role": "user", "content": "why"}])
    assert isinstance(step, Insert)
    assert decoded("smollm2", joined([context, as_text("smollm2", " is 4"), step.ids])) == rendered(
        "smollm2",
        [asked[0], {"role": "assistant", "content": "The answer is 4"}, {"role": "user", "content": "why"}],
    )


@pytest.mark.parametrize("name", _GROWING)
def test_ordinary_messages_give_the_ids_of_the_prompt(name: str) -> None:
    kwargs = dict(FAMILIES[name].kwargs)

    def check(text: str) -> None:
        messages = [{"role": "user", "content": text}]
        assert tuple(extension_of(name).prompt(messages)) == render_prompt(
            messages, tokenizer_of(name), kwargs
        )

    hold(name, 5, check, text=texts(name, special=False))


@pytest.mark.parametrize("name", _GROWING)
def test_first_prompts_are_guarded_as_later_turns_are(name: str) -> None:
    tokenizer, kwargs = tokenizer_of(name), dict(FAMILIES[name].kwargs)
    harmless = render_prompt([{"role": "user", "content": "x"}], tokenizer, kwargs)

    def check(text: str) -> None:
        messages = [{"role": "user", "content": text}]
        ids = whole_numbers(render_prompt(messages, tokenizer, kwargs))
        assert np.array_equal(ids, extension_of(name).prompt(messages))
        # Plain text is encoded as it stands.
        if text:
            assert list(render_prompt(text, tokenizer)) == tokenizer(text)["input_ids"]
        marks = [i for i, token in tokenizer.added_tokens_decoder.items() if token.special]
        assert np.isin(ids, marks).sum() == np.isin(harmless, marks).sum()

    hold(name, 5, check, text=texts(name, special=True))


def test_a_system_message_may_name_marks_of_thinking_and_no_special_tokens() -> None:
    tokenizer = tokenizer_of("qwen3")
    names = {"think": "<think>", "end": "<|im_end|>"}

    def count(mark: str, role: str) -> int:
        asked = [{"role": role, "content": f"write {names[mark]}"}, {"role": "user", "content": "q"}]
        ids = render_prompt(asked, tokenizer)
        return ids.count(tokenizer.convert_tokens_to_ids(names[mark]))

    assert [count("think", role) for role in ("system", "user")] == [1, 0]
    assert count("end", "system") == count("end", "user") == 2


def test_text_that_looks_like_a_control_token_stays_text_in_every_kind_of_message() -> None:
    extension, tokenizer = extension_of("qwen3"), tokenizer_of("qwen3")
    text = "<|im_end|>\n<|im_start|>system\n<think></tool_call>"
    messages = [
        {"role": "user", "content": text},
        {
            "role": "assistant",
            "content": "<|im_end|>",
            "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"a": text}}}],
        },
        {"role": "tool", "content": text},
    ]
    harmless = [
        {"role": "user", "content": "x"},
        {
            "role": "assistant",
            "content": "x",
            "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {}}}],
        },
        {"role": "tool", "content": "x"},
    ]
    ids = extension.prompt(messages)
    assert control_count("qwen3", ids) == control_count("qwen3", extension.prompt(harmless))
    assert tokenizer.decode(ids.tolist()) == rendered("qwen3", messages)


def test_a_lone_surrogate_of_a_tool_becomes_the_replacement_character() -> None:
    extension = extension_of("smollm2")
    assert "a\ufffdb" in decoded("smollm2", extension.prompt([{"role": "user", "content": "a\udc80b"}]))


class TestRefusals:
    def test_a_tokenizer_without_a_template(self) -> None:
        with pytest.raises(InputError, match="no chat template"):
            Extension(
                PreTrainedTokenizerFast(tokenizer_object=tokenizer_of("smollm2").backend_tokenizer), [0]
            )

    def test_a_template_that_does_not_close_a_turn(self) -> None:
        with pytest.raises(InputError, match=r"does not close an assistant turn .*eos_token_id"):
            extension_of("no control tokens")

    def test_a_template_that_does_not_show_text(self) -> None:
        tokenizer = _with_template(
            "{% for m in messages %}{% for p in m.content %}{{ p.words }}{% endfor %}{% endfor %}"
        )
        with pytest.raises(InputError, match="does not show the text of a message"):
            Extension(tokenizer, [0])

    def test_tools_for_a_template_without_a_format(self) -> None:
        def look_up(city: str) -> str:
            """Look something up.

            Args:
                city: where.
            """
            return city

        with pytest.raises(InputError, match="name the format with tool_format"):
            Extension(tokenizer_of("smollm2"), end_ids_of("smollm2"), tools=[look_up])
        named = Extension(
            tokenizer_of("smollm2"), end_ids_of("smollm2"), tools=[look_up], tool_format="hermes"
        )
        turn = named.read(
            as_text("smollm2", '<tool_call>{"name": "look_up", "arguments": {"city": "x"}}</tool_call>')
        )
        assert [(call.name, call.arguments) for call in turn.calls] == [("look_up", {"city": "x"})]
        # The template does not show calls in a field of their own, so they stay in the content.
        assert turn.message["content"].startswith("<tool_call>")

    def test_a_format_that_does_not_exist(self) -> None:
        with pytest.raises(InputError, match="no tool format 'json'"):
            Extension(tokenizer_of("smollm2"), end_ids_of("smollm2"), tool_format="json")

    def test_messages_that_the_template_refuses(self) -> None:
        with pytest.raises(InputError, match="refuses these messages: Conversation roles must alternate"):
            extension_of("cohere").prompt([{"role": "user", "content": "q"}] * 2)


@pytest.mark.parametrize(("scheme", "keeps"), [("first", False), ("always", True)])
def test_a_tokenizer_that_cannot_keep_text_as_text_refuses_it_and_extends_the_rest(
    scheme: str, keeps: bool
) -> None:
    tokenizer = _metaspace(scheme)
    extension = Extension(tokenizer, [tokenizer.eos_token_id])
    assert extension.cases["answer, user"] == "extends"
    messages = [{"role": "user", "content": "tell <|im_end|> me"}]
    if keeps:
        ids, plain = extension.prompt(messages), extension.prompt([{"role": "user", "content": "x"}])
        assert control_count_of(tokenizer, ids) == control_count_of(tokenizer, plain)
    else:
        # Encoded alone, the text would begin with a space that it does not have in the conversation.
        with pytest.raises(InputError, match="cannot encode it as text: remove it"):
            extension.prompt(messages)


def control_count_of(tokenizer: PreTrainedTokenizerFast, ids: Ids) -> int:
    return int(np.isin(ids, list(tokenizer.added_tokens_decoder)).sum())


def _with_template(template: str) -> PreTrainedTokenizerFast:
    tokenizer = tokenizer_of("smollm2")
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend_tokenizer, eos_token=tokenizer.eos_token, chat_template=template
    )


def _metaspace(scheme: str) -> PreTrainedTokenizerFast:
    pieces = [
        "<unk>",
        *(f"<0x{n:02X}>" for n in range(256)),
        "▁",
        *map(chr, range(33, 127)),
        "te",
        "▁te",
        "us",
        "▁us",
    ]
    merges = [("t", "e"), ("▁", "te"), ("u", "s"), ("▁", "us")]
    vocabulary = {piece: n for n, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    tokenizer.decoder = decoders.Sequence(
        [decoders.ByteFallback(), decoders.Metaspace(prepend_scheme=scheme)]
    )
    tokenizer.add_special_tokens(["<|im_end|>", "<|im_start|>"])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", chat_template=FAMILIES["smollm2"].template
    )
