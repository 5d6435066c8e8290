"""What the gateway reads from requests, what it refuses, and what it writes: without an engine."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from lockstep.contract.sampling import Sampling
from lockstep.extras.agents import chat_completions as chat
from lockstep.extras.agents import responses
from lockstep.extras.agents.agent_calls import Answer, AnsweredCall
from lockstep.extras.agents.recording import KnownTurn, Turns
from lockstep.extras.agents.request_fields import Refused, RunLimits
from lockstep.extras.agents.streamed_answers import SentText

LIMITS = RunLimits("tiny", Sampling(max_tokens=8, temperature=0.7, stop=("END",)))
HELLO = {"role": "user", "content": "hello"}
TOOL = {
    "type": "function",
    "function": {"name": "add", "description": "Add.", "parameters": {"type": "object"}},
}
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
            ("top_logprobs", 5),
            ("reasoning_effort", "low"),
            ("best_of_all", 1),
            ("temperature", True),
        ],
    )
    def test_a_field_that_would_change_the_distribution_is_refused_by_name(
        self, field: str, value: Any
    ) -> None:
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
            {"seed": 3, "parallel_tool_calls": True, "response_format": {"type": "text"}},
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

    @pytest.mark.parametrize(
        ("field", "value"),
        [
            ("stop", [""]),
            ("stop", 3),
            ("stop", ["x"] * 17),
            ("tool_choice", "any"),
            ("tool_choice", {"type": "function"}),
            ("tool_choice", {"type": "allowed_tools"}),
            ("parallel_tool_calls", "no"),
            ("logprobs", 5),
            ("response_format", {"type": "grammar"}),
            ("n", 0),
            ("n", True),
            ("n", 1000),
        ],
    )
    def test_a_wish_without_a_meaning_is_refused_by_name(self, field: str, value: Any) -> None:
        assert refusal({"messages": [HELLO], "tools": [TOOL], field: value}).param == field

    def test_a_call_that_must_be_made_needs_a_tool(self) -> None:
        assert refusal({"messages": [HELLO], "tool_choice": "required"}).param == "tool_choice"

    def test_several_answers_are_not_streamed(self) -> None:
        assert "stream" in refusal({"messages": [HELLO], "n": 2, "stream": True}).message

    @pytest.mark.parametrize("value", [0, -1, 1.5, "8", True])
    def test_a_token_limit_is_a_whole_number_above_zero(self, value: Any) -> None:
        assert refusal({"messages": [HELLO], "max_tokens": value}).param == "max_tokens"
        assert refusal({"input": "hello", "max_output_tokens": value}, responses).param == "max_output_tokens"

    def test_tools_of_other_kinds_are_refused(self) -> None:
        assert refusal({"messages": [HELLO], "tools": [{"type": "web_search"}]}).param == "tools"

    @pytest.mark.parametrize(
        ("field", "value"),
        [
            ("truncation", "auto"),
            ("background", True),
            ("include", ["x"]),
            ("conversation", "c"),
            ("temperature", 1.0),
        ],
    )
    def test_responses_are_refused_in_the_same_way(self, field: str, value: Any) -> None:
        assert refusal({"input": "hello", field: value}, responses).param == field

    def test_items_of_other_kinds_are_refused(self) -> None:
        assert refusal({"input": [{"type": "web_search_call", "id": "w"}]}, responses).param == "input[0]"
        alone = [{"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}]}]
        assert refusal({"input": alone}, responses).param == "input"


class TestWishes:
    """What a request asks of its turn, and when a turn has it."""

    def wishes(self, api: Any = chat, **fields: Any) -> Any:
        asked = {"messages": [HELLO]} if api is chat else {"input": "hello"}
        return api.read_call({**asked, "tools": [TOOL], **fields}, LIMITS).wishes

    @pytest.mark.parametrize(
        ("fields", "content", "called", "met"),
        [
            ({}, "3", [], True),
            ({"tool_choice": "required"}, "3", [], False),
            ({"tool_choice": "required"}, "", ["other"], True),
            ({"tool_choice": {"type": "function", "function": {"name": "add"}}}, "", ["other"], False),
            ({"tool_choice": {"type": "function", "function": {"name": "add"}}}, "", ["other", "add"], True),
            ({"parallel_tool_calls": False}, "", ["add"], True),
            ({"parallel_tool_calls": False}, "", ["add", "add"], False),
            ({"response_format": {"type": "json_object"}}, '{"a": 1}', [], True),
            ({"response_format": {"type": "json_schema", "json_schema": {}}}, "{oops", [], False),
            # A turn that calls a tool is not an answer yet.
            ({"response_format": {"type": "json_object"}}, "I look", ["add"], True),
        ],
    )
    def test_a_turn_has_what_was_asked_for(
        self, fields: dict[str, Any], content: str, called: list[str], met: bool
    ) -> None:
        assert self.wishes(**fields).are_met(content, called) is met

    def test_both_apis_name_a_function_in_their_own_form(self) -> None:
        named = {"type": "function", "name": "add"}
        assert self.wishes(tool_choice={"type": "function", "function": {"name": "add"}}).call == "add"
        assert self.wishes(responses, tool_choice=named).call == "add"
        assert self.wishes(
            responses, text={"format": {"type": "json_schema", "name": "x", "schema": {}}}
        ).is_json

    def test_calls_are_text_where_none_may_be_made(self) -> None:
        assert self.wishes().reads_calls
        assert not self.wishes(tool_choice="none").reads_calls
        assert not chat.read_call({"messages": [HELLO]}, LIMITS).wishes.reads_calls

    def test_the_runs_stop_strings_hold_beside_those_of_the_call(self) -> None:
        assert self.wishes().stop == ("END",)
        assert self.wishes(stop=["Obs:", "END", "Obs:"]).stop == ("END", "Obs:")
        assert self.wishes(stop="Obs:").before_stop("so Obs: and END") == "so "

    def test_what_nothing_forces_is_said_once(self, caplog: pytest.LogCaptureFixture) -> None:
        limits = RunLimits("tiny", Sampling(max_tokens=8))
        for _ in range(3):
            chat.read_call(
                {"messages": [HELLO], "tools": [TOOL], "tool_choice": "required", "seed": 1}, limits
            )
        said = caplog.text
        assert said.count("tool_choice='required'") == said.count("sends a seed") == 1


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
                    {
                        "role": "user",
                        "content": [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}],
                    },
                    {
                        "role": "assistant",
                        "content": "so: ",
                        "tool_calls": [call],
                        "refusal": None,
                        "annotations": [],
                    },
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
                    {
                        "type": "message",
                        "role": "assistant",
                        "content": [{"type": "output_text", "text": "so: "}],
                    },
                    {
                        "type": "function_call",
                        "call_id": "c1",
                        "name": "add",
                        "arguments": '{"a": 1, "b": 2}',
                    },
                    {"type": "function_call_output", "call_id": "c1", "output": "3"},
                ],
                "tools": [{"type": "function", **TOOL["function"], "strict": False}],
            },
            LIMITS,
        )
        assert (by_items.instructions, *by_items.messages) == by_chat.messages
        assert by_items.tools == by_chat.tools == (TOOL,)

    def test_an_answer_that_is_sent_back_is_the_same_message(self) -> None:
        message = chat.whole({}, [TURN], LIMITS)["choices"][0]["message"]
        whole = TURN.as_message() | {"reasoning_content": "hm"}
        assert chat.read_call({"messages": [HELLO, message]}, LIMITS).messages[1] == whole
        items = responses.whole({}, [TURN], LIMITS)["output"]
        assert responses.read_call({"input": items}, LIMITS).messages == (whole,)


class TestAnswers:
    @pytest.mark.parametrize(("answer", "reason"), [(TURN, "tool_calls"), (CUT, "length")])
    def test_a_stream_of_chunks_says_what_the_whole_completion_says(
        self, answer: Answer, reason: str
    ) -> None:
        whole = ChatCompletion.model_validate(chat.whole({}, [answer], LIMITS), strict=True)
        lines = (
            streamed_at_once(chat, {"stream_options": {"include_usage": True}}, answer).decode().split("\n\n")
        )
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
        whole = Response.model_validate(responses.whole(request, [answer], LIMITS))
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


class TestSeveralAnswers:
    def test_each_answer_is_a_choice_and_the_prompt_counts_once(self) -> None:
        whole = ChatCompletion.model_validate(chat.whole({}, [TURN, CUT], LIMITS), strict=True)
        assert [(c.index, c.finish_reason) for c in whole.choices] == [(0, "tool_calls"), (1, "length")]
        assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (11, 10)

    def test_log_probs_are_those_of_the_sampled_ids_whole_and_streamed(self) -> None:
        answer = replace(CUT, logprobs=(("and", -0.5), (" th", -1.25)))
        whole = ChatCompletion.model_validate(chat.whole({}, [answer], LIMITS), strict=True)
        found = [(token.token, token.logprob) for token in whole.choices[0].logprobs.content]
        assert found == [("and", -0.5), (" th", -1.25)]
        lines = streamed_at_once(chat, {}, answer).decode().split("\n\n")
        chunks = [ChatCompletionChunk.model_validate_json(line[6:]).choices[0] for line in lines[:-2]]
        streamed = [token.logprob for c in chunks if c.logprobs for token in c.logprobs.content]
        assert streamed == [-0.5, -1.25]
        assert whole.choices[0].logprobs is not None
        assert chat.whole({}, [CUT], LIMITS)["choices"][0]["logprobs"] is None


class TestJoining:
    def add(
        self, turns: Turns, *messages: dict[str, Any], tools: tuple[dict[str, Any], ...] = ()
    ) -> KnownTurn:
        turn = KnownTurn(tuple(messages), np.arange(5), np.arange(2), 1, ("stop",))
        turns.add(turn, messages, tools)
        return turn

    def test_a_call_extends_the_longest_conversation_that_it_begins_with(self) -> None:
        answer = {"role": "assistant", "content": "hi"}
        turns = Turns()
        short, long = self.add(turns, HELLO, answer), self.add(turns, HELLO, answer, HELLO, answer)
        assert turns.longest([HELLO, answer, HELLO, answer, HELLO], ()) is long
        assert turns.longest([HELLO, answer, HELLO], ()) is short
        assert (
            turns.longest([HELLO, answer, {"role": "user", "content": "other"}, answer, HELLO], ()) is short
        )
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
            turns.longest([HELLO, answer("hi", {"a": 1, "b": 2}) | {"reasoning_content": "hm"}, HELLO], ())
            is not None
        )
        assert turns.longest([HELLO, answer("hi", {"b": 2, "a": 2}), HELLO], ()) is None
        assert (
            turns.longest([{**HELLO, "content": "hello "}, answer("hi", {"a": 1, "b": 2}), HELLO], ()) is None
        )

    def test_half_of_a_character_is_a_text_like_any_other(self) -> None:
        answer, cut = {"role": "assistant", "content": "hi"}, {"role": "user", "content": "\ud83d"}
        turns = Turns()
        known = self.add(turns, cut, answer)
        assert turns.longest([cut, answer, HELLO], ()) is known
        assert turns.longest([{**cut, "content": "\ud83e"}, answer, HELLO], ()) is None

    def test_other_tools_are_another_conversation(self) -> None:
        answer = {"role": "assistant", "content": "hi"}
        turns = Turns()
        self.add(turns, HELLO, answer, tools=(TOOL,))
        assert turns.longest([HELLO, answer, HELLO], (TOOL,)) is not None
        assert turns.longest([HELLO, answer, HELLO], ()) is None
