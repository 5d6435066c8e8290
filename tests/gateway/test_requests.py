"""What the gateway reads from requests, what it refuses, and what it writes: without an engine."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from lockstep.engines.protocol import Sampling
from lockstep.gateway import chat, responses
from lockstep.gateway.calls import Answer, AnsweredCall
from lockstep.gateway.joining import KnownTurn, Turns
from lockstep.gateway.parameters import RunLimits
from lockstep.gateway.refusals import Refused
from lockstep.gateway.streams import SentText

LIMITS = RunLimits("tiny", Sampling(max_tokens=8, temperature=0.7, stop=("END",)))
HELLO = {"role": "user", "content": "hello"}
TOOL = {"type": "function", "function": {"name": "add", "description": "Add.", "parameters": {"type": "object"}}}
TURN = Answer("a1", 7, "so: ", "hm", (AnsweredCall("abc123def", "add", '{"a": 1}'),), "stop", 11, 5)
CUT = Answer("a2", 7, "and th", None, (), "length", 11, 5)


def refusal(request: dict[str, Any], api: Any = chat) -> Refused:
    with pytest.raises(Refused) as caught:
        api.read_call(request, LIMITS)
    assert caught.value.status == 400
    return caught.value


def streamed_at_once(api: Any, request: dict[str, Any], answer: Answer) -> bytes:
    """The stream of an answer of which nothing was known before its end."""
    sent = SentText(api.Events(request, answer.name, answer.created, LIMITS))
    return b"".join([*sent.start(), *sent.end(answer)])


class TestRefusals:
    @pytest.mark.parametrize(
        ("field", "value"),
        [
            ("temperature", 0.2),
            ("top_p", 0.9),
            ("presence_penalty", 1),
            ("frequency_penalty", 0.5),
            ("logit_bias", {"5": 10}),
            ("seed", 3),
            ("n", 2),
            ("stop", ["\n"]),
            ("logprobs", True),
            ("response_format", {"type": "json_object"}),
            ("tool_choice", "required"),
            ("parallel_tool_calls", False),
            ("reasoning_effort", "low"),
            ("best_of_all", 1),
            ("temperature", True),
        ],
    )
    def test_a_field_that_would_change_the_distribution_is_refused_by_name(self, field: str, value: Any) -> None:
        error = refusal({"messages": [HELLO], field: value})
        assert error.param == field
        assert field in error.message
        assert error.body()["error"]["type"] == "invalid_request_error"

    @pytest.mark.parametrize(
        "fields",
        [
            {"temperature": 0.7, "top_p": 1, "top_k": 0, "min_p": 0.0, "frequency_penalty": 0},
            {"stop": "END"},
            {"stop": []},
            {"n": 1, "seed": None, "logprobs": False, "tool_choice": "auto", "logit_bias": {}},
            {"user": "me", "metadata": {"a": "b"}, "store": True, "stream_options": {"include_usage": True}},
        ],
    )
    def test_the_values_of_the_run_are_accepted(self, fields: dict[str, Any]) -> None:
        assert chat.read_call({"messages": [HELLO], "model": "x", **fields}, LIMITS).messages == (HELLO,)

    @pytest.mark.parametrize(
        ("messages", "param"),
        [
            (None, "messages"),
            ([], "messages"),
            ("hello", "messages"),
            ([{"role": "judge", "content": "x"}], "messages[0]"),
            ([HELLO, {"role": "user", "content": [{"type": "image_url"}]}], "messages[1].content"),
            ([{"role": "assistant", "tool_calls": [{"type": "custom"}]}], "messages[0].tool_calls"),
            ([{**HELLO, "audio": {"id": "1"}}], "messages[0].audio"),
        ],
    )
    def test_messages_that_cannot_be_rendered_are_refused_by_place(self, messages: Any, param: str) -> None:
        assert refusal({"messages": messages}).param == param

    @pytest.mark.parametrize("value", [0, -1, 1.5, "8", True])
    def test_a_token_limit_is_a_whole_number_above_zero(self, value: Any) -> None:
        assert refusal({"messages": [HELLO], "max_tokens": value}).param == "max_tokens"
        assert refusal({"input": "hello", "max_output_tokens": value}, responses).param == "max_output_tokens"

    def test_tools_of_other_kinds_are_refused(self) -> None:
        assert refusal({"messages": [HELLO], "tools": [{"type": "web_search"}]}).param == "tools"

    @pytest.mark.parametrize(
        ("field", "value"),
        [("truncation", "auto"), ("background", True), ("include", ["x"]), ("conversation", "c"), ("temperature", 1.0)],
    )
    def test_responses_are_refused_in_the_same_way(self, field: str, value: Any) -> None:
        assert refusal({"input": "hello", field: value}, responses).param == field

    def test_items_of_other_kinds_are_refused(self) -> None:
        assert refusal({"input": [{"type": "web_search_call", "id": "w"}]}, responses).param == "input[0]"


class TestCalls:
    def test_the_smaller_of_two_token_limits_counts(self) -> None:
        call = chat.read_call({"messages": [HELLO], "max_tokens": 5, "max_completion_tokens": 3}, LIMITS)
        assert call.max_tokens == 3

    def test_both_apis_give_the_same_messages(self) -> None:
        arguments = '{"b": 2, "a": 1}'
        call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": arguments}}
        by_chat = chat.read_call(
            {
                "messages": [
                    {"role": "developer", "content": "be brief"},
                    {"role": "user", "content": [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]},
                    {"role": "assistant", "content": "so: ", "tool_calls": [call], "refusal": None, "annotations": []},
                    {"role": "tool", "tool_call_id": "c1", "content": "3"},
                ],
                "tools": [TOOL],
            },
            LIMITS,
        )
        by_items = responses.read_call(
            {
                "instructions": "be brief",
                "input": [
                    {"role": "user", "content": "hello"},
                    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "so: "}]},
                    {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"a": 1, "b": 2}'},
                    {"type": "function_call_output", "call_id": "c1", "output": "3"},
                ],
                "tools": [{"type": "function", **TOOL["function"], "strict": False}],
            },
            LIMITS,
        )
        assert (by_items.instructions, *by_items.messages) == by_chat.messages
        assert by_items.tools == by_chat.tools == (TOOL,)

    def test_an_answer_that_is_sent_back_is_the_same_message(self) -> None:
        message = chat.whole({}, TURN, LIMITS)["choices"][0]["message"]
        whole = TURN.as_message() | {"reasoning_content": "hm"}
        assert chat.read_call({"messages": [HELLO, message]}, LIMITS).messages[1] == whole
        items = responses.whole({}, TURN, LIMITS)["output"]
        assert responses.read_call({"input": items}, LIMITS).messages == (whole,)


class TestAnswers:
    @pytest.mark.parametrize(("answer", "reason"), [(TURN, "tool_calls"), (CUT, "length")])
    def test_a_stream_of_chunks_says_what_the_whole_completion_says(self, answer: Answer, reason: str) -> None:
        whole = ChatCompletion.model_validate(chat.whole({}, answer, LIMITS), strict=True)
        lines = streamed_at_once(chat, {"stream_options": {"include_usage": True}}, answer).decode().split("\n\n")
        assert lines[-2:] == ["data: [DONE]", ""]
        chunks = [ChatCompletionChunk.model_validate_json(line[6:]) for line in lines[:-2]]
        assert "".join(c.choices[0].delta.content or "" for c in chunks[:-1]) == answer.content
        assert [c.choices[0].finish_reason for c in chunks[:-1] if c.choices[0].finish_reason] == [reason]
        assert whole.choices[0].finish_reason == reason
        assert chunks[-1].usage == whole.usage
        assert whole.usage.total_tokens == 16
        streamed = [call for c in chunks[:-1] for call in c.choices[0].delta.tool_calls or []]
        assert [c.function.arguments for c in streamed] == [c.arguments for c in answer.calls]

    @pytest.mark.parametrize(("answer", "status"), [(TURN, "completed"), (CUT, "incomplete")])
    def test_a_stream_of_events_says_what_the_whole_response_says(self, answer: Answer, status: str) -> None:
        request = {"input": "hello", "tools": [{"type": "function", **TOOL["function"], "strict": False}]}
        whole = Response.model_validate(responses.whole(request, answer, LIMITS))
        lines = streamed_at_once(responses, request, answer).decode().strip().split("\n\n")
        read = TypeAdapter(ResponseStreamEvent).validate_json
        found = [read(line.split("data: ")[1]) for line in lines]
        assert [event.sequence_number for event in found] == list(range(len(found)))
        assert found[-1].type == f"response.{status}"
        assert found[-1].response == whole
        assert whole.output_text == answer.content
        assert [json.loads(i.arguments) for i in whole.output if i.type == "function_call"] == [
            json.loads(call.arguments) for call in answer.calls
        ]


class TestJoining:
    def add(self, turns: Turns, *messages: dict[str, Any], tools: tuple[dict[str, Any], ...] = ()) -> KnownTurn:
        turn = KnownTurn(tuple(messages), np.arange(5), np.arange(2), 1, ("stop",))
        turns.add(turn, messages, tools)
        return turn

    def test_a_call_extends_the_longest_conversation_that_it_begins_with(self) -> None:
        answer = {"role": "assistant", "content": "hi"}
        turns = Turns()
        short, long = self.add(turns, HELLO, answer), self.add(turns, HELLO, answer, HELLO, answer)
        assert turns.longest([HELLO, answer, HELLO, answer, HELLO], ()) is long
        assert turns.longest([HELLO, answer, HELLO], ()) is short
        assert turns.longest([HELLO, answer, {"role": "user", "content": "other"}, answer, HELLO], ()) is short
        # Nothing new stands behind the answer: the engine has nothing to answer.
        assert turns.longest([HELLO, answer], ()) is None

    def test_white_space_around_an_answer_and_the_order_of_arguments_do_not_matter(self) -> None:
        def answer(text: str, arguments: dict[str, int]) -> dict[str, Any]:
            call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": arguments}}
            return {"role": "assistant", "content": text, "tool_calls": [call]}

        turns = Turns()
        self.add(turns, HELLO, answer("hi \n", {"a": 1, "b": 2}))
        assert turns.longest([HELLO, answer("hi", {"b": 2, "a": 1}), HELLO], ()) is not None
        assert (
            turns.longest([HELLO, answer("hi", {"a": 1, "b": 2}) | {"reasoning_content": "hm"}, HELLO], ()) is not None
        )
        assert turns.longest([HELLO, answer("hi", {"b": 2, "a": 2}), HELLO], ()) is None
        assert turns.longest([{**HELLO, "content": "hello "}, answer("hi", {"a": 1, "b": 2}), HELLO], ()) is None

    def test_other_tools_are_another_conversation(self) -> None:
        answer = {"role": "assistant", "content": "hi"}
        turns = Turns()
        self.add(turns, HELLO, answer, tools=(TOOL,))
        assert turns.longest([HELLO, answer, HELLO], (TOOL,)) is not None
        assert turns.longest([HELLO, answer, HELLO], ()) is None
