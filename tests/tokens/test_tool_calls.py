"""Tool calls are read from ids: markers are tokens, similar text is text, and a malformed call is an error text."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import pytest
from draws import hold
from families import end_ids_of, extension_of, tokenizer_of
from hypothesis import strategies as st
from test_extension import as_text, ids_of

from lockstep.tokens.arrays import joined, whole_numbers
from lockstep.tokens.extension import Extension
from lockstep.tokens.tool_calls import FORMATS
from lockstep.tokens.turns import ParsedTurn


class Written(NamedTuple):
    """A family, and how it writes look_up(city="Paris", count=3), twice, and with a fault."""

    family: str
    one: str
    two: str
    fault: str
    error: str


_HERMES = '<tool_call>\n{"name": "look_up", "arguments": {"city": "Paris", "count": 3}}\n</tool_call>'
_XML = (
    "<tool_call>\n<function=look_up>\n<parameter=city>\nParis\n</parameter>\n<parameter=count>\n3\n</parameter>\n"
    "</function>\n</tool_call>"
)
_GLM = (
    "<tool_call>look_up\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n"
    "<arg_key>count</arg_key>\n<arg_value>3</arg_value>\n</tool_call>"
)
_ITEM = '{"name": "look_up", "arguments": {"city": "Paris", "count": 3}}'
_SEEK = '<｜tool▁call▁begin｜>function<｜tool▁sep｜>look_up\n```json\n{"city": "Paris", "count": 3}\n```<｜tool▁call▁end｜>'  # noqa: E501
_LLAMA = '{"name": "look_up", "parameters": {"city": "Paris", "count": 3}}'
_GEMMA = '<|tool_call>call:look_up{city:<|"|>Paris<|"|>,count:3}<tool_call|>'
_KIMI = (
    '<|tool_call_begin|>functions.look_up:0<|tool_call_argument_begin|>{"city": "Paris", "count": '
    "3}<|tool_call_end|>"
)
_LFM = "look_up(city='Paris', count=3)"

WRITTEN = {
    "hermes": Written(
        "qwen3", _HERMES, f"{_HERMES}\n{_HERMES}", _HERMES.replace("3}}", "3}"), "is not valid JSON"
    ),
    "qwen3_xml": Written(
        "qwen3.5, thinking off", _XML, _XML + _XML, _XML.replace("</parameter>", ""), "is not an argument"
    ),
    "glm": Written(
        "glm-4.5", _GLM, _GLM + _GLM, _GLM.replace("</arg_value>", ""), "does not end after its arguments"
    ),
    "mistral": Written(
        "mistral",
        f"[TOOL_CALLS][{_ITEM}]",
        f"[TOOL_CALLS][{_ITEM}, {_ITEM}]",
        f"[TOOL_CALLS][{_ITEM}",
        "not valid JSON",
    ),
    "deepseek": Written(
        "deepseek-v3",
        f"</think><｜tool▁calls▁begin｜>{_SEEK}<｜tool▁calls▁end｜>",
        f"</think><｜tool▁calls▁begin｜>{_SEEK}\n{_SEEK}<｜tool▁calls▁end｜>",
        f"</think><｜tool▁calls▁begin｜>{_SEEK.replace('```json', '')}<｜tool▁calls▁end｜>",
        "has no name and no JSON block",
    ),
    "kimi": Written(
        "kimi-k2",
        f"<|tool_calls_section_begin|>{_KIMI}<|tool_calls_section_end|>",
        f"<|tool_calls_section_begin|>{_KIMI}{_KIMI.replace(':0', ':1')}<|tool_calls_section_end|>",
        f"<|tool_calls_section_begin|>{_KIMI.replace('3}', '3')}<|tool_calls_section_end|>",
        "is not valid JSON",
    ),
    "gemma": Written("gemma-4", _GEMMA, _GEMMA + _GEMMA, _GEMMA.replace(",count", "count"), "has no ','"),
    "pythonic": Written(
        "lfm2.5",
        f"<|tool_call_start|>[{_LFM}]<|tool_call_end|>",
        f"<|tool_call_start|>[{_LFM}, {_LFM}]<|tool_call_end|>",
        "<|tool_call_start|>[look_up('Paris')]<|tool_call_end|>",
        "not a call with named arguments",
    ),
    "harmony": Written(
        "gpt-oss",
        '<|channel|>commentary to=functions.look_up <|constrain|>json<|message|>{"city": "Paris", "count": 3}',
        "",
        ' to=functions.look_up<|channel|>commentary json<|message|>{"city": "Paris", "count": 3',
        "is not valid JSON",
    ),
    "llama3_json": Written("llama-3.1", _LLAMA, f"{_LLAMA}; {_LLAMA}", _LLAMA[:-1], "is not valid JSON"),
}


def read(family: str, text: str) -> ParsedTurn:
    """A turn whose control tokens are single ids, and that ends with the family's end token."""
    return extension_of(family).read(joined([ids_of(family, text), whole_numbers(end_ids_of(family)[:1])]))


def test_every_format_has_its_examples() -> None:
    assert WRITTEN.keys() == FORMATS.keys()


@pytest.mark.parametrize("name", WRITTEN)
def test_the_templates_format_is_found_and_its_calls_are_read(name: str) -> None:
    written = WRITTEN[name]
    assert extension_of(written.family).conventions.tool_format == name
    expected = ("look_up", {"city": "Paris", "count": 3})
    turn = read(written.family, written.one)
    assert [(call.name, call.arguments) for call in turn.calls] == [expected]
    assert not turn.errors
    if written.two:
        turn = read(written.family, written.two)
        one = extension_of(written.family).conventions.max_calls == 1
        assert [(call.name, call.arguments) for call in turn.calls] == [expected] * (1 if one else 2)
        assert len({call.id for call in turn.calls}) == len(turn.calls)
        assert bool(turn.errors) == one


@pytest.mark.parametrize("name", WRITTEN)
def test_a_malformed_call_is_an_error_text_and_stays_in_the_content(name: str) -> None:
    written = WRITTEN[name]
    turn = read(written.family, written.fault)
    assert not turn.calls
    assert len(turn.errors) == 1
    assert written.error in turn.errors[0]
    assert turn.errors[0].startswith("The tool call ")
    assert "look_up" in turn.content
    assert "tool_calls" not in turn.message


def test_a_good_call_beside_a_malformed_one_is_read() -> None:
    turn = read("qwen3", f'Well <tool_call>{{"name": 7}}</tool_call>\n{_HERMES} so')
    assert [call.name for call in turn.calls] == ["look_up"]
    assert turn.errors == ('The tool call has no "name".',)
    assert turn.content == 'Well <tool_call>{"name": 7}</tool_call>\n so'


@pytest.mark.parametrize(
    ("call", "error"),
    [
        ('{"name": "f", "arguments": [1]}', "arguments that are not a JSON object"),
        ('{"name": "f", "arguments": {"a": NaN}}', "NaN is not JSON"),
        ("[1, 2]", "is not a JSON object"),
        ('{"name": "f"} and more', "does not end after its arguments, but continues with 'and more"),
        ("[" * 100_000, "not valid JSON"),
        ('{"name": "f", "arguments": {"a": ' + "9" * 5000 + "}}", "not valid JSON"),
        ('{"name": "f", "arguments": {"a": "\\ud800"}}', "half of a character"),
        ('{"name": "f", "arguments": {"a": 1e999}}', "a number that is too large"),
        ('{"name": "f", "id": "\\ud800"}', "half of a character"),
        ("", "not valid JSON"),
    ],
)
def test_what_json_cannot_be_a_call_is_said_in_the_error(call: str, error: str) -> None:
    turn = read("qwen3", f"<tool_call>{call}</tool_call>")
    assert not turn.calls
    assert error in turn.errors[0]


def test_a_call_without_arguments_and_a_call_with_an_own_id_are_read() -> None:
    (call,) = read("qwen3", '<tool_call>{"name": "f"}</tool_call>').calls
    assert (call.name, call.arguments) == ("f", {})
    (call,) = read("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {}, "id": "abcdefghi"}]').calls
    assert call.id == "abcdefghi"
    (call,) = read("kimi-k2", WRITTEN["kimi"].one).calls
    assert call.id == "functions.look_up:0"
    (call,) = read("mistral", '[TOOL_CALLS]f{"a": 1}').calls
    assert (call.name, call.arguments) == ("f", {"a": 1})


def test_a_marker_is_an_id_and_the_same_text_in_other_tokens_is_text() -> None:
    turn = extension_of("qwen3").read(as_text("qwen3", _HERMES))
    assert not turn.calls
    assert not turn.errors
    assert turn.content == _HERMES


def test_a_marker_that_is_no_token_is_found_as_text_but_not_within_a_json_string() -> None:
    extension = Extension(tokenizer_of("smollm2"), end_ids_of("smollm2"), tool_format="hermes")
    inside = "</tool_call><tool_call>"
    call = f'<tool_call>{{"name": "f", "arguments": {{"a": "{inside}"}}}}</tool_call>'
    turn = extension.read(as_text("smollm2", f"{call} {call}"))
    assert [c.arguments for c in turn.calls] == [{"a": inside}] * 2


def test_a_control_token_within_the_arguments_is_an_error() -> None:
    turn = read("qwen3", '<tool_call>{"name": "f", "arguments": {"a": "<|im_start|>"}}</tool_call>')
    assert turn.errors == ("The tool call contains a control token, or half of a character.",)


def test_a_call_within_the_thinking_is_no_call() -> None:
    turn = read("qwen3", f"<think>\n{_HERMES}\n</think>\n\n{_HERMES}")
    assert len(turn.calls) == 1
    assert turn.reasoning == _HERMES
    assert turn.message["reasoning_content"] == _HERMES
    # Thinking that was cut has no end.
    turn = read("qwen3", f"<think>\n{_HERMES}")
    assert not turn.calls
    assert turn.content == ""


def test_bare_words_of_gemma_are_words_also_where_they_begin_like_a_literal_or_a_number() -> None:
    call = "<|tool_call>call:f{nullable:true,2fa:1,true:null,day:2024-01-05,n:-1.5e3,v:1.2.3,w:nullable}<tool_call|>"
    (found,) = read("gemma-4", call).calls
    day, version = "2024-01-05", "1.2.3"
    assert found.arguments == {
        **{"nullable": True, "2fa": 1, "true": None},
        **{"day": day, "n": -1500.0, "v": version, "w": "nullable"},
    }


@pytest.mark.parametrize("properties", [None, {"city": True}])
def test_a_schema_that_says_nothing_of_an_argument_is_taken(properties: Any) -> None:
    family = "qwen3.5, thinking off"
    function = {"name": "look_up", "parameters": {"type": "object", "properties": properties}}
    extension = Extension(
        tokenizer_of(family), end_ids_of(family), tools=[{"type": "function", "function": function}]
    )
    (call,) = extension.read(ids_of(family, _XML)).calls
    assert call.arguments == {"city": "Paris", "count": 3}


def test_the_schema_of_a_tool_says_what_is_text() -> None:
    def look_up(city: str, count: int) -> str:
        """Look something up.

        Args:
            city: where.
            count: how many.
        """
        return city * count

    family = "qwen3.5, thinking off"
    extension = Extension(tokenizer_of(family), end_ids_of(family), tools=[look_up])
    (call,) = extension.read(ids_of(family, _XML.replace("Paris", "75001"))).calls
    assert call.arguments == {"city": "75001", "count": 3}


@pytest.mark.parametrize("name", WRITTEN)
def test_no_change_of_a_call_raises_an_error(name: str) -> None:
    written = WRITTEN[name]
    ids = ids_of(written.family, written.two or written.one).tolist()
    size = len(tokenizer_of(written.family))

    def check(at: int, gone: int, put: list[int]) -> None:
        turn = extension_of(written.family).read(whole_numbers([*ids[:at], *put, *ids[at + gone :]]))
        for call in turn.calls:
            json.dumps(call.arguments, allow_nan=False).encode()

    hold(
        name,
        40,
        check,
        at=st.integers(0, len(ids)),
        gone=st.integers(0, 5),
        put=st.lists(st.integers(0, size - 1) | st.sampled_from(ids), max_size=3),
    )
