"""Requests that nobody should send: each is answered, and neither the run nor a stream ends by it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from agent_rollouts import HELLO, LIMIT, Runs, Scripted, tokenizer_with
from portions import portion

ODD_TEXT = "\ud83d"
CALLS = [{"id": "1", "type": "function", "function": {"name": "add", "arguments": "{}"}}]
TOOL = {
    "type": "function",
    "function": {"name": "add", "description": "Add.", "parameters": {"type": "object"}},
}
# A complete request of each API. Each of its values is replaced by each odd value.
REQUESTS: dict[str, dict[str, Any]] = {
    "chat/completions": {
        "messages": [
            {"role": "system", "content": "be brief", "name": "boss"},
            {"role": "user", "content": [{"type": "text", "text": "hello"}, {"type": "image_url",
            "image_url": {"url": "x"}}]},
            {"role": "assistant", "content": "I add.", "reasoning_content": "hm", "tool_calls": CALLS},
            {"role": "tool", "content": "3", "tool_call_id": "1"},
        ],
        "tools": [TOOL],
        "tool_choice": {"type": "function", "function": {"name": "add"}},
        "response_format": {"type": "json_schema"},
        "stream_options": {"include_usage": True},
        "stop": ["x"],
        "max_tokens": 4,
        "metadata": {"a": "b"},
        **dict.fromkeys(("model", "temperature", "top_k", "n", "parallel_tool_calls", "logprobs", "logit_bias")),
    },
    "responses": {
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "hello"}]},
            {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}]},
            {"type": "function_call", "name": "add", "arguments": "{}", "call_id": "1"},
            {"type": "function_call_output", "call_id": "1", "output": "3"},
        ],
        "instructions": "be brief",
        "tools": [{"type": "function", "name": "add", "description": "Add.", "parameters": {"type": "object"}}],
        "text": {"format": {"type": "json_schema"}},
        "max_output_tokens": 4,
        "metadata": {"a": "b"},
        **dict.fromkeys(("tool_choice", "previous_response_id", "top_p", "include", "truncation", "store")),
    },
}  # fmt: skip
ODD = [
    0,
    -1,
    10**400,
    1e300,
    True,
    "",
    ODD_TEXT,
    [],
    [[]],
    {},
    {"a": {}},
    [None],
    None,
    ["x", 1],
    {"type": []},
    "x" * 5000,
]
_PARTS = 12
# Texts of JSON that Python's reader takes, or fails at in an unusual way.
RAW = [
    '"a": ' + "[" * 5000 + "]" * 5000,
    '"a": ' + "[" * 100_000,
    '"metadata": ' + '{"a": ' * 900 + "1" + "}" * 900,
    '"metadata": ' + '{"a": ' * 120 + "1" + "}" * 120,
    '"metadata": {"a": NaN}',
    '"metadata": {"a": -Infinity}',
    '"temperature": 1e999',
    '"temperature": ' + "9" * 400,
    '"max_tokens": ' + "9" * 5000,
    '"tools": [{"type": "function", "function": {"name": "f\\ud800"}}]',
    '"tools": [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"\\ud800": {}}}}}]',
    '"tools": [{"type": "function", "function": {"name": "f", "parameters": '
    + '{"a": ' * 500
    + "1"
    + "}" * 503
    + "]",
    '"user": "\\udfff"',
    '"\\ud800": 1',
    '"stop": "\\ud800"',
    '"tool_choice": {"type": "function", "name": "\\ud800"}, "tools": [{"type": "function", "name": "f"}]',
]


def replaced(value: Any) -> Iterator[Any]:
    """A value with each part of it replaced by each odd value, and with each field left out."""
    yield from ODD
    if isinstance(value, dict):
        for name in value:
            yield from ({**value, name: other} for other in replaced(value[name]))
            yield {key: inside for key, inside in value.items() if key != name}
            yield {**value, f"{name}{ODD_TEXT}": 1}
    elif isinstance(value, list):
        for place in range(len(value)):
            yield from ([*value[:place], other, *value[place + 1 :]] for other in replaced(value[place]))


class Endless(Scripted):
    """An engine that says the same text to every request."""

    class Texts(list):  # type: ignore[type-arg]
        def pop(self, place: Any = -1) -> Any:
            return self[0]

    def __init__(self, text: str) -> None:
        super().__init__([], context=4096)
        self.texts = self.Texts([text])


def answered(bodies: Any, text: str = "hi") -> list[tuple[Any, int, str]]:
    """What a run's gateway answers to bodies, each with the path of its API. The run goes on afterwards."""
    found: list[tuple[Any, int, str]] = []

    def agent(base_url: str, api_key: str, row: Any) -> float:
        with httpx.Client(timeout=LIMIT) as client:
            for path, body in bodies:
                answer = client.post(f"{base_url}/{path}", content=body)
                found.append((body, answer.status_code, answer.text))
            assert client.post(f"{base_url}/chat/completions", json={"messages": HELLO}).status_code == 200
        return 1.0

    (rollout,) = Runs(Endless(text), tokenizer_with())(agent, max_tokens=3_000, timeout=300)
    assert "failed" not in rollout.notes
    return found


@pytest.mark.parametrize("path", REQUESTS)
def test_json_that_python_reads_and_nothing_else_does_is_answered_400(path: str) -> None:
    own = '"messages": [{"role": "user", "content": "hello"}]' if "chat" in path else '"input": "hello"'
    for body, status, said in answered((path, f"{{{own}, {raw}}}") for raw in RAW):
        assert status == 400, (body[:200], said[:300])


@pytest.mark.parametrize("part", portion(range(_PARTS), lambda part: part == 0))
@pytest.mark.parametrize("path", REQUESTS)
def test_fields_of_every_other_type_are_answered_and_end_nothing(path: str, part: int) -> None:
    """Each of `_PARTS` parts has every twelfth request; CI sends the first part."""
    requests = [request for request in replaced(REQUESTS[path]) if isinstance(request, dict)][part::_PARTS]
    assert len(requests) > 50
    bodies = [
        (path, json.dumps({**request, "stream": number % 2 == 0})) for number, request in enumerate(requests)
    ]
    for number, (body, status, said) in enumerate(answered(bodies)):
        assert status in (200, 400), (body, status, said)
        if status == 200 and number % 2 == 0:
            assert "event: error" not in said, (body, said)
            assert "data: [DONE]" in said or "response.completed" in said or "response.incomplete" in said


DEEP = (
    "<tool_call>{'name': 'add', 'arguments': {'a': ".replace("'", '"')
    + "[" * 600
    + "]" * 600
    + "}}</tool_call>"
)


@pytest.mark.parametrize("said", ["[" * 2500, DEEP, "1" * 2500])
def test_what_the_model_says_is_answered_however_deep_it_is(said: str) -> None:
    asked = {"messages": HELLO, "tools": [TOOL], "response_format": {"type": "json_object"}}
    ((_, status, text),) = answered([("chat/completions", json.dumps(asked))], said)
    assert (status, json.loads(text)["choices"][0]["message"].get("tool_calls")) == (200, None)
