"""What is streamed of an unfinished turn: always a beginning of the finished answer, in every family's format."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from draws import hold
from hypothesis import strategies as st

from lockstep.extras.agents.agent_calls import Partial, Wishes
from lockstep.extras.agents.streamed_answers import certain_part
from lockstep.rollouts.driver import decoding
from lockstep.tokens.arrays import Ids

sys.path.append(str(Path(__file__).parents[2] / "tokens"))

from families import FAMILIES, extension_of, tokenizer_of
from test_extension import _GROWING, _turn, ids_of

# Text that may begin a marker, or that changes with what follows.
PIECES = [
    "hello ",
    "\n",
    " ",
    "é",
    "🙂",
    "<",
    "<tool",
    "<think",
    "</thi",
    "[",
    "{",
    "]",
    "a < b",
    '{"name": "look_up"}',
]


STOPS = st.sampled_from([(), ("look",), ("a <", "look_up", "\n")])


def parts(
    name: str, ids: Ids, *, offers_tools: bool, stop: tuple[str, ...] = ()
) -> tuple[list[Partial], Partial]:
    """What is certain after each token, and the finished answer."""
    extension, wishes = extension_of(name), Wishes(reads_calls=offers_tools, stop=stop)
    certain = [certain_part(extension, ids[:n], wishes) for n in range(1, len(ids) + 1)]
    answer = extension.read(ids, calls_are_text=not offers_tools)
    return certain, Partial(answer.reasoning, wishes.before_stop(answer.content))


def sampled(data: st.DataObject, name: str) -> Ids:
    """Ids as a model may sample them: turns of the family's own form, and pieces in any order."""
    if data.draw(st.booleans()):
        return _turn(data, name, special=True)[0]
    control = [token.content for token in tokenizer_of(name).added_tokens_decoder.values()]
    pieces = data.draw(st.lists(st.sampled_from([*PIECES, *control]), max_size=8))
    return ids_of(name, "".join(pieces))


@pytest.mark.parametrize("name", _GROWING)
def test_what_is_streamed_is_a_beginning_of_the_answer_and_thinking_is_whole_before_content(
    name: str,
) -> None:
    def check(data: st.DataObject, offers_tools: bool, stop: tuple[str, ...]) -> None:
        ids = sampled(data, name)
        certain, answer = parts(name, ids, offers_tools=offers_tools, stop=stop)
        for partial in certain:
            assert partial.reasoning is None or str(answer.reasoning).startswith(partial.reasoning)
            assert answer.content.startswith(partial.content)
            if partial.content:
                assert partial.reasoning == answer.reasoning

    hold(name, 25, check, data=st.data(), offers_tools=st.booleans(), stop=STOPS)


@pytest.mark.parametrize(
    "name", sorted({"smollm2", "qwen3", "llama-3", "mistral", "gemma-3", "glm-4.5"} & set(FAMILIES))
)
def test_plain_text_is_certain_as_soon_as_its_characters_are_whole(name: str) -> None:
    text = "what is 🙂 12 + 34 日本"
    ids = ids_of(name, text)
    certain, answer = parts(name, ids, offers_tools=True)
    assert answer.content == certain[-1].content == text
    lengths = [len(partial.content) for partial in certain]
    assert lengths == sorted(lengths)
    decode = decoding(tokenizer_of(name))
    for n, partial in enumerate(certain, 1):
        assert partial.content == decode(ids[:n]).rstrip(" \ufffd")


def test_thinking_is_streamed_before_it_ends() -> None:
    ids = ids_of("qwen3", "<think>\nso it is 12</think>\n\nyes")
    certain, answer = parts("qwen3", ids, offers_tools=True)
    assert any(partial.reasoning == "so it is" and not partial.content for partial in certain)
    assert (answer.reasoning, answer.content) == ("so it is 12", "yes")
    assert np.all(["<" not in (partial.reasoning or "") for partial in certain])


def test_nothing_is_certain_from_where_a_call_may_begin() -> None:
    ids = ids_of("qwen3", 'I look. <tool_call>\n{"name": "look_up", "arguments": {}}\n</tool_call>')
    certain, answer = parts("qwen3", ids, offers_tools=True)
    assert max(len(partial.content) for partial in certain) == len("I look.")
    assert answer.content == "I look."


def test_a_call_is_text_for_a_client_without_tools() -> None:
    text = 'I look. <tool_call>\n{"name": "look_up", "arguments": {}}\n</tool_call>'
    certain, answer = parts("qwen3", ids_of("qwen3", text), offers_tools=False)
    assert certain[-1].content == answer.content == text


def test_no_part_of_a_stop_string_is_sent() -> None:
    certain, answer = parts(
        "qwen3", ids_of("qwen3", "Done. Observation: 3"), offers_tools=False, stop=("Observation:",)
    )
    assert answer.content == "Done. "
    assert max((partial.content for partial in certain), key=len) == "Done."
