"""What is recorded of an agent's calls, id for id. The agents use OpenAI's SDK; the engine is transformers'."""

from __future__ import annotations

import threading
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import torch
from agent_rollouts import HELLO, LIMIT, TEMPLATE, Runs, Scripted, Watched, tokenizer_with
from conftest import start
from openai import OpenAI
from transformers import AutoModelForCausalLM

from lockstep.contract.inbox import Inbox
from lockstep.contract.protocol import Completion
from lockstep.contract.sampling import Sampling
from lockstep.errors import InputError, ProofError
from lockstep.rollouts.group import Rollout

NEXT = {"role": "user", "content": "and 12 + 34"}


@pytest.fixture(scope="module")
def engine(talkative_dir: str) -> Any:
    made = start("transformers", talkative_dir)
    made.commit_version(0)
    return made


@pytest.fixture
def watched(engine: Any) -> Watched:
    return Watched(engine)


@pytest.fixture
def runs(watched: Watched) -> Runs:
    return Runs(watched, tokenizer_with())


# Making a client takes longer than a rollout of this model. All agents share the connections of one client.
CLIENT = OpenAI(base_url="http://127.0.0.1:1", api_key="none", timeout=LIMIT, max_retries=0)


def sdk(base_url: str, api_key: str, **more: Any) -> OpenAI:
    return CLIENT.with_options(base_url=base_url, api_key=api_key, **more)


def ask(client: OpenAI, messages: list[dict[str, Any]], max_tokens: int = 8, **more: Any) -> Any:
    found = client.chat.completions.create(model="any", messages=messages, max_tokens=max_tokens, **more)
    return found.choices[0].message


def three_turns(base_url: str, api_key: str, row: dict[str, Any]) -> float:
    """An agent that knows nothing of Lockstep."""
    client, messages = sdk(base_url, api_key), list(row["prompt"])
    for _ in range(3):
        messages.append(ask(client, messages).to_dict())
        messages.append(NEXT)
    return 0.5


def check_ids(watched: Watched, completion: Completion, calls: list[int]) -> None:
    """A branch consists of what the engine sampled in these calls, and each call saw exactly the ids before it."""
    whole = np.concatenate([completion.prompt_ids, completion.token_ids])
    sampled = np.zeros(len(completion.token_ids), bool)
    for number in calls:
        (request,) = [r for r in watched.requests if r.key.call == number]
        (answer,) = [c for c in watched.completions if c.key.call == number]
        end = len(request.prompt_ids) + len(answer.token_ids)
        assert np.array_equal(whole[: len(request.prompt_ids)], request.prompt_ids)
        assert np.array_equal(whole[len(request.prompt_ids) : end], answer.token_ids)
        place = len(request.prompt_ids) - len(completion.prompt_ids)
        sampled[place : place + len(answer.token_ids)] = True
        assert np.array_equal(completion.logprobs[place : place + len(answer.token_ids)], answer.logprobs)
    mask = np.ones_like(sampled) if completion.sampled is None else completion.sampled
    assert np.array_equal(mask, sampled)


def largest_gap(model: str, completion: Completion) -> float:
    """Largest difference to the log-probs of a forward over the whole branch."""
    ids = torch.tensor(np.concatenate([completion.prompt_ids, completion.token_ids]))[None]
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)(ids).logits[0]
    scores = logits[:-1].log_softmax(-1).gather(1, ids[0, 1:, None])[len(completion.prompt_ids) - 1 :, 0]
    places = completion.sampled_places
    return float(np.abs(scores.numpy()[places] - completion.logprobs[places]).max())


def branches(rollout: Rollout) -> tuple[Completion, ...]:
    return rollout.branches


class TestConversations:
    def test_an_unchanged_script_is_recorded_id_for_id(
        self, watched: Watched, runs: Runs, talkative_dir: str
    ) -> None:
        (rollout,) = runs(three_turns)
        assert rollout.notes["rewards"] == {"agent": 0.5}
        assert (rollout.notes["agent"]["answered"], rollout.notes["agent"]["extended"]) == (3, 2)
        (whole,) = branches(rollout)
        check_ids(watched, whole, [0, 1, 2])
        assert whole is rollout.completion
        assert 0 < (~whole.sampled).sum() < len(whole.token_ids)
        assert largest_gap(talkative_dir, whole) < 1e-4

    def test_many_rollouts_do_not_mix(self, watched: Watched, runs: Runs) -> None:
        rollouts = runs(three_turns, count=6)
        assert [r.completion.key.sample for r in rollouts] == list(range(6))
        for rollout in rollouts:
            own = [c for c in watched.completions if c.key.sample == rollout.completion.key.sample]
            assert sorted(np.concatenate([c.token_ids for c in own])) == sorted(
                rollout.completion.token_ids[rollout.completion.sampled]
            )

    def test_the_same_seed_gives_the_same_rollout(self, runs: Runs) -> None:
        (first,), (second,), (other,) = (runs(three_turns, seed=seed) for seed in (5, 5, 6))
        assert first.completion == second.completion
        assert first.completion != other.completion

    def test_the_answer_says_what_was_sampled(self, watched: Watched, runs: Runs) -> None:
        answers: list[Any] = []

        def agent(base_url: str, api_key: str, row: Any) -> None:
            client = sdk(base_url, api_key)
            answers.append(client.chat.completions.create(model="x", messages=HELLO, max_tokens=4))
            answers.append(client.responses.create(model="x", input="hello", max_output_tokens=4))

        runs(agent, max_tokens=64)
        for answer, completion in zip(answers, watched.completions, strict=True):
            text = runs.tokenizer.decode(completion.token_ids, skip_special_tokens=True)
            said = answer.choices[0].message.content if hasattr(answer, "choices") else answer.output_text
            assert said == text
            usage = answer.usage.to_dict()
            assert usage.get("prompt_tokens", usage.get("input_tokens")) == len(completion.prompt_ids)
            assert usage.get("completion_tokens", usage.get("output_tokens")) == len(completion.token_ids)
        assert answers[0].choices[0].finish_reason == watched.completions[0].finish_reason

    def test_responses_continue_by_id_and_by_items(self, watched: Watched, runs: Runs) -> None:
        def agent(base_url: str, api_key: str, row: Any) -> None:
            client = sdk(base_url, api_key)
            first = client.responses.create(
                model="x", input="hello", instructions="be brief", max_output_tokens=4
            )
            client.responses.create(
                model="x",
                input="and?",
                instructions="be brief",
                previous_response_id=first.id,
                max_output_tokens=4,
            )
            items = [{"role": "user", "content": "hello"}, *[item.to_dict() for item in first.output]]
            more = [*items, {"role": "user", "content": "or?"}]
            client.responses.create(model="x", input=more, instructions="be brief", max_output_tokens=4)
            with pytest.raises(openai.BadRequestError, match="previous_response_id"):
                client.responses.create(model="x", input="and?", previous_response_id="resp_other")

        (rollout,) = runs(agent)
        assert rollout.notes["agent"]["extended"] == 2
        first, second = branches(rollout)
        check_ids(watched, first, [0, 1])
        # The first turn was continued twice: the second time it is context.
        check_ids(watched, second, [2])

    def test_what_the_client_said_itself_is_carried_over_by_id(self, watched: Watched, runs: Runs) -> None:
        def agent(base_url: str, api_key: str, row: Any) -> None:
            client = sdk(base_url, api_key)
            items = [{"role": "developer", "content": "be brief"}, {"role": "user", "content": "hello"}]
            first = client.responses.create(model="x", input=items, max_output_tokens=4)
            client.responses.create(
                model="x", input="and?", previous_response_id=first.id, max_output_tokens=4
            )

        (rollout,) = runs(agent)
        assert rollout.notes["agent"]["extended"] == 1
        (whole,) = branches(rollout)
        check_ids(watched, whole, [0, 1])

    def test_streams_give_the_same_turns(self, runs: Runs) -> None:
        def streaming(base_url: str, api_key: str, row: Any) -> None:
            client, messages = sdk(base_url, api_key), list(HELLO)
            for _ in range(3):
                stream = client.chat.completions.create(
                    model="x", messages=messages, max_tokens=8, stream=True
                )
                text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
                messages += [{"role": "assistant", "content": text}, NEXT]

        (whole,), (streamed,) = runs(three_turns), runs(streaming)
        assert whole.completion == streamed.completion

    def test_the_finish_reasons_of_the_last_conversation_belong_to_its_own_turns(self) -> None:
        written = {"role": "assistant", "content": "I say so"}

        def agent(base_url: str, api_key: str, row: Any) -> None:
            client = sdk(base_url, api_key)
            first = ask(client, HELLO, 64).to_dict()
            ask(client, [{"role": "user", "content": "a sub-agent's"}], 64)
            # The agent wrote one of the assistant's turns itself.
            ask(client, [*HELLO, first, NEXT, written, NEXT], 2)

        (rollout,) = Runs(Scripted(["one", "two", "a long answer"]), tokenizer_with())(agent, max_tokens=200)
        assert rollout.finish_reasons == ("stop", "stop", "length")
        assert [turn.branch for turn in rollout.turns] == [0, 1, 0]
        assert rollout.notes["finish_reasons"] == ["stop", None, "length"]
        assert [m["role"] for m in rollout.notes["messages"]].count("assistant") == 3


class TestWishes:
    """Stop strings, several answers and log-probs of one call."""

    def test_a_turn_ends_at_a_stop_string_of_its_call_and_the_next_turn_extends_its_ids(
        self, runs: Runs, watched: Watched, talkative_dir: str
    ) -> None:
        letters = list("abcdefghijklmnopqrstuvwxyz ")
        answers: list[Any] = []

        def agent(base_url: str, api_key: str, row: Any) -> None:
            client = sdk(base_url, api_key)
            answers.append(ask(client, HELLO, 60, stop=letters[:16]))
            ask(client, [*HELLO, answers[0].to_dict(), NEXT], 4)

        (rollout,) = runs(agent, max_tokens=160)
        first, second = watched.requests
        assert (first.own_stop, second.own_stop) == (tuple(letters[:16]), ())
        (whole,) = branches(rollout)
        check_ids(watched, whole, [0, 1])
        ended = watched.completions[0]
        assert (ended.finish_reason, rollout.notes["agent"]["extended"]) == ("stop", 1)
        text = runs.tokenizer.decode(ended.token_ids)
        assert any(stop in text for stop in letters[:16])
        # The client's text has no stop string; the ids have it, and it is learned from.
        assert text.startswith(answers[0].content)
        assert not any(stop in answers[0].content for stop in letters[:16])
        assert largest_gap(talkative_dir, whole) < 1e-4

    def test_several_answers_are_turns_of_their_own_and_each_can_be_extended(
        self, runs: Runs, watched: Watched
    ) -> None:
        runs.engine = watched = Watched(Scripted(["one", "two", "three", "on"]))  # type: ignore[arg-type]

        def agent(base_url: str, api_key: str, row: Any) -> None:
            client = sdk(base_url, api_key)
            found = client.chat.completions.create(model="any", messages=HELLO, max_tokens=8, n=3)
            assert [choice.message.content for choice in found.choices] == ["one", "two", "three"]
            ask(client, [*HELLO, found.choices[1].message.to_dict(), NEXT])

        (rollout,) = runs(agent)
        assert len(branches(rollout)) == 3
        for branch, calls in zip(branches(rollout), ([0], [1, 3], [2]), strict=True):
            check_ids(watched, branch, calls)

    def test_log_probs_that_an_agent_asks_for_are_those_of_the_sampled_ids(
        self, runs: Runs, watched: Watched
    ) -> None:
        found: list[Any] = []

        def agent(base_url: str, api_key: str, row: Any) -> None:
            found.append(
                sdk(base_url, api_key).chat.completions.create(
                    model="any", messages=HELLO, max_tokens=8, logprobs=True
                )
            )

        runs(agent)
        told = [token.logprob for token in found[0].choices[0].logprobs.content]
        assert told == watched.completions[0].logprobs.tolist()


class TestBranches:
    def test_a_rewritten_history_is_a_branch(self, watched: Watched, runs: Runs) -> None:
        def agent(base_url: str, api_key: str, row: Any) -> None:
            client = sdk(base_url, api_key)
            answer = ask(client, HELLO).to_dict()
            ask(client, [*HELLO, {**answer, "content": "a summary"}, NEXT])
            ask(client, [*HELLO, answer, NEXT])

        (rollout,) = runs(agent)
        assert (rollout.notes["agent"]["answered"], rollout.notes["agent"]["extended"]) == (3, 1)
        first, second = branches(rollout)
        check_ids(watched, first, [0, 2])
        check_ids(watched, second, [1])

    def test_sub_agents_are_branches_that_each_go_on(self, watched: Watched, runs: Runs) -> None:
        def agent(base_url: str, api_key: str, row: Any) -> None:
            client = sdk(base_url, api_key)
            own: list[Any] = list(HELLO)
            other: list[Any] = [{"role": "system", "content": "search"}, NEXT]
            for _ in range(2):
                for messages in (own, other):
                    messages += [ask(client, messages, 5).to_dict(), NEXT]

        (rollout,) = runs(agent)
        first, second = branches(rollout)
        check_ids(watched, first, [0, 2])
        check_ids(watched, second, [1, 3])

    def test_the_same_messages_again_are_another_sample(self, watched: Watched, runs: Runs) -> None:
        answers: list[Any] = []

        def agent(base_url: str, api_key: str, row: Any) -> None:
            client = sdk(base_url, api_key)
            answers.extend(ask(client, HELLO).content for _ in range(2))

        (rollout,) = runs(agent)
        assert answers[0] != answers[1]
        first, second = branches(rollout)
        assert np.array_equal(first.prompt_ids, second.prompt_ids)
        check_ids(watched, second, [1])

    def test_white_space_that_a_framework_removes_is_no_branch(self, runs: Runs, watched: Watched) -> None:
        runs.engine = Scripted([" yes \n", "no"])

        def agent(base_url: str, api_key: str, row: Any) -> None:
            client = sdk(base_url, api_key)
            answer = ask(client, HELLO).to_dict()
            assert answer["content"] == " yes \n"
            ask(client, [*HELLO, {"role": "assistant", "content": "yes"}, NEXT])

        (rollout,) = runs(agent)
        assert len(branches(rollout)) == 1


# An agent that knows curl and jq.
SCRIPT = """
set -e
ask() { curl -sf "$OPENAI_BASE_URL/chat/completions" -d "{\\"messages\\": $1, \\"max_tokens\\": 8}" | jq -c '.choices[0].message'; }
messages=$(jq -c .prompt)
answer=$(ask "$messages")
messages=$(jq -cn "$messages + [$answer, {role: \\"user\\", content: \\"and?\\"}]")
ask "$messages" >&2
echo '{"reward": 0.25}'
"""  # noqa: E501

TOOLS = [
    {"type": "function", "function": {"name": "add", "description": "Add.", "parameters": {
        "type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}}}
]  # fmt: skip
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'


class TestTools:
    def test_a_call_and_its_result_extend_the_ids(self, runs: Runs) -> None:
        runs.engine = watched = Watched(Scripted(["I add. " + CALL, "3"]))  # type: ignore[arg-type]

        def agent(base_url: str, api_key: str, row: Any) -> None:
            client = sdk(base_url, api_key)
            answer = ask(client, HELLO, 96, tools=TOOLS)
            assert answer.content == "I add."
            (call,) = answer.tool_calls
            assert (call.function.name, call.function.arguments) == ("add", '{"a": 1, "b": 2}')
            result = {"role": "tool", "tool_call_id": call.id, "content": "3 <|end|>"}
            # Frameworks write the arguments again.
            sent = answer.to_dict()
            sent["tool_calls"][0]["function"]["arguments"] = '{"b":2,"a":1}'
            assert ask(client, [*HELLO, sent, result], tools=TOOLS).content == "3"

        (rollout,) = runs(agent, max_tokens=200)
        assert (rollout.notes["agent"]["extended"], rollout.notes["agent"]["malformed"]) == (1, 0)
        (whole,) = branches(rollout)
        check_ids(watched, whole, [0, 1])
        text = runs.tokenizer.decode(np.concatenate([whole.prompt_ids, whole.token_ids]))
        assert text.endswith(
            f"<|assistant|>I add. {CALL}<|end|><|tool|>3 <|end|><|end|><|assistant|>3<|end|>"
        )
        # Text that looks like the end token is not an end token.
        inserted = whole.token_ids[~whole.sampled].tolist()
        assert inserted.count(runs.tokenizer.eos_token_id) == 1

    def test_a_malformed_call_is_text_and_is_counted(self, runs: Runs) -> None:
        runs.engine = Scripted(["<tool_call>\n{oops\n</tool_call>"])
        answers: list[Any] = []

        def agent(base_url: str, api_key: str, row: Any) -> None:
            answers.append(ask(sdk(base_url, api_key), HELLO, 96, tools=TOOLS))

        (rollout,) = runs(agent)
        assert answers[0].tool_calls is None
        assert "{oops" in answers[0].content
        assert rollout.notes["agent"]["malformed"] == 1

    def test_a_required_call_is_sampled_freely_and_its_absence_is_counted(
        self, runs: Runs, watched: Watched
    ) -> None:
        runs.engine = watched = Watched(Scripted(["I think.", CALL]))  # type: ignore[arg-type]

        def agent(base_url: str, api_key: str, row: Any) -> None:
            client, messages = sdk(base_url, api_key), list(HELLO)
            answer = ask(client, messages, 96, tools=TOOLS, tool_choice="required")
            assert (answer.content, answer.tool_calls) == ("I think.", None)
            messages += [answer.to_dict(), NEXT]
            assert ask(client, messages, 96, tools=TOOLS, tool_choice="required").tool_calls

        (rollout,) = runs(agent, max_tokens=200)
        assert (rollout.notes["agent"]["unmet"], rollout.notes["agent"]["answered"]) == (1, 2)
        (whole,) = branches(rollout)
        check_ids(watched, whole, [0, 1])
        # Nothing is forced: both calls have the run's own distribution.
        assert {replace(request.sampling, max_tokens=1) for request in watched.requests} == {Sampling(1)}

    def test_a_call_where_none_may_be_made_is_text_and_the_next_call_extends_it(self, runs: Runs) -> None:
        runs.engine = Scripted([CALL, "3"])

        def agent(base_url: str, api_key: str, row: Any) -> None:
            client = sdk(base_url, api_key)
            answer = ask(client, HELLO, 96, tools=TOOLS, tool_choice="none")
            assert (answer.content, answer.tool_calls) == (CALL, None)
            ask(client, [*HELLO, answer.to_dict(), NEXT], tools=TOOLS)

        (rollout,) = runs(agent, max_tokens=300)
        assert rollout.notes["agent"]["extended"] == 1

    def test_of_several_calls_an_agent_that_wants_one_gets_the_first(self, runs: Runs) -> None:
        runs.engine = watched = Watched(Scripted([CALL + CALL, "3"]))  # type: ignore[arg-type]

        def agent(base_url: str, api_key: str, row: Any) -> None:
            client = sdk(base_url, api_key)
            answer = ask(client, HELLO, 160, tools=TOOLS, parallel_tool_calls=False)
            (call,) = answer.tool_calls
            result = {"role": "tool", "tool_call_id": call.id, "content": "3"}
            ask(client, [*HELLO, answer.to_dict(), result], tools=TOOLS)

        (rollout,) = runs(agent, max_tokens=400)
        assert (rollout.notes["agent"]["unmet"], rollout.notes["agent"]["extended"]) == (1, 1)
        (whole,) = branches(rollout)
        # The turn stays as it was sampled, with both calls.
        check_ids(watched, whole, [0, 1])

    def test_without_tools_a_call_is_text(self, runs: Runs) -> None:
        runs.engine = Scripted([CALL])
        answers: list[Any] = []

        def agent(base_url: str, api_key: str, row: Any) -> None:
            answers.append(ask(sdk(base_url, api_key), HELLO, 96))

        runs(agent)
        assert (answers[0].content, answers[0].tool_calls) == (CALL, None)

    def test_tools_that_the_template_does_not_show_stop_the_run(self, watched: Watched) -> None:
        def agent(base_url: str, api_key: str, row: Any) -> None:
            ask(sdk(base_url, api_key), HELLO, tools=TOOLS)

        with pytest.raises(InputError, match="does not show them"):
            Runs(watched, tokenizer_with(TEMPLATE.replace("{% if tools %}", "{% if false %}")))(agent)


class TestCallsThatDoNotEnd:
    def test_an_aborted_call_leaves_nothing_and_its_request_is_given_up(self) -> None:
        engine = Watched(Scripted(["one", None, "two"]))

        def agent(base_url: str, api_key: str, row: Any) -> None:
            client = sdk(base_url, api_key)
            messages = [*HELLO, ask(client, HELLO).to_dict(), NEXT]
            with pytest.raises(openai.APITimeoutError):
                ask(client.with_options(timeout=0.2), messages)
            assert engine.dropped.wait(LIMIT)
            assert ask(client, messages).content == "two"

        (rollout,) = Runs(engine, tokenizer_with())(agent)
        assert (rollout.notes["agent"]["answered"], rollout.notes["agent"]["aborted"]) == (2, 1)
        assert [key.call for key in engine.given_up] == [1]
        # The call that came afterwards goes on where the aborted one stood.
        (whole,) = branches(rollout)
        check_ids(engine, whole, [0, 2])

    def test_a_stream_that_is_left_is_an_aborted_call(self) -> None:
        engine = Watched(Scripted([None, "two"]))

        def agent(base_url: str, api_key: str, row: Any) -> None:
            client = sdk(base_url, api_key)
            stream = client.chat.completions.create(model="x", messages=HELLO, stream=True)
            assert engine.held.wait(LIMIT)
            stream.close()
            assert engine.dropped.wait(LIMIT)
            ask(client, HELLO)

        (rollout,) = Runs(engine, tokenizer_with())(agent)
        assert (rollout.notes["agent"]["answered"], rollout.notes["agent"]["aborted"]) == (1, 1)

    def test_a_call_that_is_open_at_the_agents_end_is_cancelled(self) -> None:
        engine = Watched(Scripted(["one", None]))
        late: list[Any] = []

        def agent(base_url: str, api_key: str, row: Any) -> None:
            client = sdk(base_url, api_key)
            ask(client, HELLO)

            def other() -> None:
                with pytest.raises(openai.APIStatusError) as caught:
                    ask(client, [NEXT])
                late.append(caught.value.status_code)
                with pytest.raises(openai.APIStatusError) as caught:
                    ask(client, [NEXT])
                late.append(caught.value.status_code)

            threads.append(threading.Thread(target=other))
            threads[0].start()
            assert engine.held.wait(LIMIT)

        threads: list[threading.Thread] = []
        (rollout,) = Runs(engine, tokenizer_with(), after=lambda: threads[0].join(LIMIT))(agent)
        assert late == [410, 410]
        assert (rollout.notes["agent"]["answered"], rollout.notes["agent"]["aborted"]) == (1, 1)
        assert len(branches(rollout)) == 1

    def test_a_clients_own_retry_gets_the_same_answer(self, runs: Runs, watched: Watched) -> None:
        answers: list[Any] = []

        def agent(base_url: str, api_key: str, row: Any) -> None:
            client = sdk(base_url, api_key)
            retry = {"x-stainless-retry-count": "1"}
            key = {"Idempotency-Key": "mine"}
            for headers in ({}, retry, key, key):
                answers.append(
                    client.chat.completions.create(
                        model="x", messages=HELLO, max_tokens=8, extra_headers=headers
                    )
                )

        (rollout,) = runs(agent)
        first, repeated, named, again = answers
        assert first == repeated != named == again
        assert (rollout.notes["agent"]["answered"], rollout.notes["agent"]["repeated"]) == (2, 2)
        assert len(watched.requests) == 2

    def test_a_retry_of_a_call_that_was_never_answered_is_sampled(self, runs: Runs) -> None:
        def agent(base_url: str, api_key: str, row: Any) -> None:
            ask(sdk(base_url, api_key), HELLO, extra_headers={"x-stainless-retry-count": "2"})

        (rollout,) = runs(agent)
        assert (rollout.notes["agent"]["answered"], rollout.notes["agent"]["repeated"]) == (1, 0)

    def test_concurrent_calls_are_all_answered_one_after_the_other(self) -> None:
        """Each of them may have all the room that is left."""
        watched = Watched(Scripted(["yes"] * 5))
        answers: list[Any] = []

        def agent(base_url: str, api_key: str, row: Any) -> None:
            client = sdk(base_url, api_key)
            asking = [
                threading.Thread(
                    target=lambda i=i: answers.append(
                        client.chat.completions.create(
                            model="x", messages=[*HELLO, {"role": "user", "content": str(i)}]
                        )
                    )
                )
                for i in range(5)
            ]
            for thread in asking:
                thread.start()
            for thread in asking:
                thread.join(LIMIT)

        (rollout,) = Runs(watched, tokenizer_with())(agent)
        assert len(answers) == 5
        found = branches(rollout)
        assert len(found) == 5
        for number, branch in enumerate(found):
            check_ids(watched, branch, [number])


class TestRoom:
    def test_max_tokens_and_the_budget_bound_every_turn(self, watched: Watched, runs: Runs) -> None:
        refused: list[openai.BadRequestError] = []

        def agent(base_url: str, api_key: str, row: Any) -> None:
            client, messages = sdk(base_url, api_key), list(HELLO)
            try:
                while True:
                    messages += [ask(client, messages, 6).to_dict(), NEXT]
            except openai.BadRequestError as error:
                refused.append(error)

        (rollout,) = runs(agent, max_tokens=60)
        assert refused[0].code == "context_length_exceeded"
        assert all(len(c.token_ids) <= 6 for c in watched.completions)
        assert len(rollout.completion.token_ids) <= 60
        assert rollout.completion.finish_reason == "length"
        assert rollout.notes["agent"]["refused"] == 1

    def test_without_max_tokens_a_turn_may_have_all_that_is_left(self, runs: Runs, watched: Watched) -> None:
        def agent(base_url: str, api_key: str, row: Any) -> None:
            sdk(base_url, api_key).chat.completions.create(model="x", messages=HELLO)

        runs(agent, max_tokens=30)
        assert watched.requests[0].sampling.max_tokens == 30

    def test_a_prompt_longer_than_the_context_is_refused_in_the_format_that_agents_know(self) -> None:
        engine = Scripted(["one", "two"], context=64)
        codes: list[str] = []

        def agent(base_url: str, api_key: str, row: Any) -> None:
            client = sdk(base_url, api_key)
            ask(client, HELLO)
            with pytest.raises(openai.BadRequestError) as caught:
                ask(client, [{"role": "user", "content": "long " * 80}])
            codes.append(caught.value.code)

        Runs(engine, tokenizer_with())(agent, max_tokens=20)
        assert codes == ["context_length_exceeded"]


class Wrong(Scripted):
    """An engine whose answers are to other prompts."""

    def serve(self, inbox: Inbox) -> None:
        with inbox.taken(None, LIMIT) as requests:
            key = requests[0].key
        inbox.answer(Completion(key, [1], [0], [-1.0], [0], "stop"), [0])


class TestFailures:
    def test_an_agent_that_fails_costs_its_own_rollout(self, runs: Runs) -> None:
        def agent(base_url: str, api_key: str, row: Any) -> float:
            ask(sdk(base_url, api_key), HELLO)
            if next(numbers) == 0:
                raise ValueError("no such page")
            return 1.0

        numbers = iter(range(3))
        rollouts = runs(agent, count=3)
        failed = [r.notes["failed"] for r in rollouts if "failed" in r.notes]
        assert len(failed) == 1
        assert "no such page" in failed[0]
        assert [r.notes["rewards"] for r in rollouts if "rewards" in r.notes] == [{"agent": 1.0}] * 2

    def test_an_agent_that_calls_nothing_costs_its_own_rollout(self, runs: Runs) -> None:
        def agent(base_url: str, api_key: str, row: Any) -> None:
            if next(numbers):
                ask(sdk(base_url, api_key), HELLO)

        numbers = iter(range(2))
        rollouts = runs(agent, count=2)
        assert sorted("failed" in r.notes for r in rollouts) == [False, True]

    def test_messages_that_the_template_refuses_are_the_agents_error(self, watched: Watched) -> None:
        template = TEMPLATE.replace(
            "{% for m in",
            "{% if messages[0].role == 'tool' %}{{ raise_exception('tools come later') }}{% endif %}{% for m in",
        )

        def agent(base_url: str, api_key: str, row: Any) -> None:
            client = sdk(base_url, api_key)
            with pytest.raises(openai.BadRequestError, match="tools come later"):
                ask(client, [{"role": "tool", "content": "x", "tool_call_id": "y"}])
            with pytest.raises(openai.BadRequestError, match="assistant's"):
                ask(client, [*HELLO, {"role": "assistant", "content": "x"}])
            ask(client, HELLO)

        (rollout,) = Runs(watched, tokenizer_with(template))(agent)
        assert rollout.notes["agent"]["refused"] == 2

    def test_a_failed_engine_stops_the_run_whatever_the_agent_does(self) -> None:
        def agent(base_url: str, api_key: str, row: Any) -> None:
            with suppress(openai.APIStatusError):
                ask(sdk(base_url, api_key), HELLO)

        # The engine gives an answer to another prompt.
        with pytest.raises(ProofError):
            Runs(Wrong(["one"]), tokenizer_with())(agent)


class TestCommands:
    def test_a_shell_script_with_curl_is_an_agent(self, runs: Runs, watched: Watched, tmp_path: Path) -> None:
        script = tmp_path / "agent.sh"
        script.write_text(SCRIPT)
        (rollout,) = runs(["bash", str(script)])
        assert rollout.notes["rewards"] == {"agent": 0.25}
        assert rollout.notes["agent"]["extended"] == 1
        (whole,) = branches(rollout)
        check_ids(watched, whole, [0, 1])
