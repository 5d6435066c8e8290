"""The same agents on real vLLM in this process: ids, log-probs, and a call that is given up."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from agent_rollouts import HELLO, LIMIT, Runs, Watched, tokenizer_with
from conftest import needs_vllm, start
from test_recording import NEXT, ask, check_ids, largest_gap, sdk, three_turns

pytestmark = [pytest.mark.vllm, needs_vllm]


@pytest.fixture(scope="module")
def engine(talkative_dir: str) -> Iterator[Any]:
    made = start("vllm", talkative_dir)
    made.commit_version(0)
    yield made
    made.close()


def test_an_unchanged_script_is_recorded_id_for_id_and_its_log_probs_are_the_models(
    engine: Any, talkative_dir: str
) -> None:
    watched = Watched(engine)
    rollouts = Runs(watched, tokenizer_with())(three_turns, count=4)
    for rollout in rollouts:
        assert rollout.notes["agent"]["extended"] == 2
        (whole,) = rollout.branches
        assert largest_gap(talkative_dir, whole) < 1e-4
    (alone,) = Runs(watched := Watched(engine), tokenizer_with())(three_turns)
    check_ids(watched, alone.completion, [0, 1, 2])


def test_branches_are_sampled_in_their_own_context(engine: Any, talkative_dir: str) -> None:
    def agent(base_url: str, api_key: str, row: Any) -> None:
        client = sdk(base_url, api_key)
        answer = ask(client, HELLO).to_dict()
        ask(client, [*HELLO, {**answer, "content": "a summary"}, NEXT])
        ask(client, [*HELLO, answer, NEXT])
        ask(client, HELLO)

    (rollout,) = Runs(watched := Watched(engine), tokenizer_with())(agent, seed=2)
    assert len(rollout.branches) == 3
    for branch, calls in zip(rollout.branches, ([0, 2], [1], [3]), strict=True):
        check_ids(watched, branch, calls)
        assert largest_gap(talkative_dir, branch) < 1e-4
    sampled = sum(len(branch.sampled_places) for branch in rollout.branches)
    assert sampled == sum(len(c.token_ids) for c in watched.completions)


def test_a_call_whose_client_goes_away_is_dropped_from_vllm(
    engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = Watched(engine)
    step, taken, deadline = engine.llm.llm_engine.step, threading.Event(), time.monotonic() + LIMIT

    def after_the_client_is_gone() -> Any:
        taken.set()
        if watched.given_up or time.monotonic() > deadline:
            return step()
        time.sleep(0.01)
        return []

    monkeypatch.setattr(engine.llm.llm_engine, "step", after_the_client_is_gone)

    def agent(base_url: str, api_key: str, row: Any) -> None:
        client = sdk(base_url, api_key)
        stream = client.chat.completions.create(model="x", messages=HELLO, stream=True)
        assert taken.wait(LIMIT)
        stream.close()
        ask(client, HELLO)

    (rollout,) = Runs(watched, tokenizer_with())(agent, seed=2)
    counts = rollout.notes["agent"]
    assert (counts["aborted"], counts["answered"]) == (1, 1)
    assert [key.call for key in watched.given_up] == [0]
    assert [completion.key.call for completion in watched.completions] == [1]
    assert not engine.llm.llm_engine.has_unfinished_requests()


@pytest.mark.parametrize("api", ["chat", "responses"])
def test_text_is_streamed_while_vllm_samples_and_the_ids_are_recorded_as_sampled(
    engine: Any, monkeypatch: pytest.MonkeyPatch, api: str
) -> None:
    tokenizer, watched = tokenizer_with(), Watched(engine)
    step, received = engine.llm.llm_engine.step, threading.Event()
    # By call: the parts of its text, and how many turns were finished when the first part came.
    parts: list[list[str]] = []
    finished: list[int | None] = []

    def slow_until_text_has_arrived() -> Any:
        received.wait(0.1)
        return step()

    monkeypatch.setattr(engine.llm.llm_engine, "step", slow_until_text_has_arrived)

    def texts(client: Any, asked: str) -> Iterator[str]:
        if api == "chat":
            messages = [{"role": "user", "content": asked}]
            for chunk in client.chat.completions.create(
                model="x", messages=messages, max_tokens=40, stream=True
            ):
                yield chunk.choices[0].delta.content or ""
        else:
            for event in client.responses.create(model="x", input=asked, max_output_tokens=40, stream=True):
                if event.type == "response.output_text.delta":
                    yield event.delta
            assert event.response.output_text == "".join(parts[-1])

    def agent(base_url: str, api_key: str, row: Any) -> None:
        client = sdk(base_url, api_key)
        # Some turns of this model end at once.
        for number in range(5):
            parts.append([])
            finished.append(None)
            received.clear()
            for text in filter(None, texts(client, f"hello {number}")):
                if finished[-1] is None:
                    finished[-1] = len(watched.completions)
                received.set()
                parts[-1].append(text)
        answer = {"role": "assistant", "content": "".join(parts[0])}
        ask(client, [{"role": "user", "content": "hello 0"}, answer, NEXT])

    (rollout,) = Runs(watched, tokenizer)(agent, max_tokens=320)
    assert rollout.failed is None
    # The token that ends a turn is not part of its text. Other control tokens that this model samples are.
    said = [
        tokenizer.decode(c.token_ids[: len(c.token_ids) - (c.finish_reason == "stop")].tolist())
        for c in watched.completions[:5]
    ]
    assert ["".join(own) for own in parts] == said
    assert any(found == number for number, found in enumerate(finished)), (
        "all text came when its turn was finished"
    )
    assert max(map(len, parts)) > 1
    # The streamed text is recognised as the turn that was sampled.
    assert rollout.notes["agent"]["extended"] == 1
    for branch, calls in zip(rollout.branches, [[0, 5], [1], [2], [3], [4]], strict=True):
        check_ids(watched, branch, calls)
