"""Rollouts with tools and environments, on real engines: every id is sampled or inserted, and is marked as such."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import games
import numpy as np
import pytest
import torch
from caller import Product, make_caller, multiply
from conftest import VLLM, start
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from lockstep.contract.protocol import Completion, Engine
from lockstep.contract.sampling import Sampling
from lockstep.errors import InputError
from lockstep.images.prompts import PromptReader
from lockstep.rollouts.driver import Driver, sampled_now, starts_for
from lockstep.rollouts.group import Prompt, Rollout
from lockstep.rollouts.programs.environments import Environments
from lockstep.rollouts.programs.tool_program import ToolProgram
from lockstep.rollouts.programs.tools import ToolCalls, tools_of
from lockstep.tokens.chat import load_tokenizer
from lockstep.tokens.extension import Extension
from lockstep.watch.custody import Record
from lockstep.weights.push import push_weights

END = 0
# The tiny model's log-probs in fp32, from two implementations of its attention.
NEAR = 2e-4


@pytest.fixture(scope="module")
def tokenizer(caller_dir: str) -> PreTrainedTokenizerFast:
    return load_tokenizer(caller_dir)  # type: ignore[return-value]


@pytest.fixture(scope="module")
def model(tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    return make_caller(tokenizer)


def started(name: str, caller_dir: str, model: PreTrainedModel) -> Engine:
    made = start(name, caller_dir)
    push_weights(model, made, 7)
    return made


@pytest.fixture(scope="module")
def engine(caller_dir: str, model: PreTrainedModel) -> Iterator[Engine]:
    made = started("transformers", caller_dir, model)
    yield made
    made.close()


@pytest.fixture(scope="module", params=["transformers", pytest.param("vllm", marks=VLLM)])
def each_engine(request: pytest.FixtureRequest, caller_dir: str, model: PreTrainedModel) -> Iterator[Engine]:
    made = started(request.param, caller_dir, model)
    yield made
    made.close()


class Played:
    """Rollouts of some rows with tools or environments."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: PreTrainedTokenizerFast,
        *,
        function: Callable[..., Any] | None = multiply,
        factory: Any = None,
        iterations: int | None = 4,
        timeout: float = 60.0,
    ) -> None:
        self.engine, self.tokenizer = engine, tokenizer
        self.calls = ToolCalls(timeout)
        tools = tools_of([] if function is None else [function])
        self.environments = None if factory is None else Environments(factory, self.calls)
        kinds = {} if self.environments is None else self.calls.finish(self.environments.probe(), 60.0)
        schemas = [tool.schema for tool in tools.values()]
        self.extensions = {
            name: Extension(tokenizer, [END], tools=[*schemas, *more])
            for name, more in ({name: kind.schemas for name, kind in kinds.items()} or {None: ()}).items()
        }
        self.program = ToolProgram(
            self.extensions, tools, self.calls, self.environments, iterations, 40, PromptReader(tokenizer)
        )

    def run(
        self, *, rows: int = 8, samples: int = 4, tokens: int = 160, columns: dict[str, Any] | None = None
    ) -> list[Rollout]:
        prompts = []
        for i in range(rows):
            source = [{"role": "user", "content": f"what is {i} + {i}"}]
            name = (
                (columns or {}).get("environment") if self.environments and self.environments.routed else None
            )
            prompts.append(Prompt(f"row/{i}", self.extensions[name].prompt(source), source, columns or {}))
        starts = starts_for(prompts, Sampling(tokens), num_generations=samples, run_seed=3, version=7)
        with Driver(self.engine, self.tokenizer, Record, self.calls) as driver:
            groups = sampled_now(driver, prompts, starts, 7, program=self.program)
        return [rollout for group in groups for rollout in group.rollouts]

    def close(self) -> None:
        self.program.close()


@pytest.fixture
def play(engine: Engine, tokenizer: PreTrainedTokenizerFast) -> Iterator[Callable[..., Played]]:
    made: list[Played] = []

    def make(**kwargs: Any) -> Played:
        made.append(Played(engine, tokenizer, **kwargs))
        return made[-1]

    yield make
    for each in made:
        each.close()


def parts(completion: Completion) -> list[tuple[bool, np.ndarray]]:
    """The sampled and inserted stretches of a branch, in order."""
    sampled = (
        np.ones(len(completion.token_ids), np.bool_) if completion.sampled is None else completion.sampled
    )
    edges = [0, *(np.flatnonzero(sampled[1:] != sampled[:-1]) + 1).tolist(), len(sampled)]
    return [(bool(sampled[a]), completion.token_ids[a:b]) for a, b in pairwise(edges)]


def logps_of(model: PreTrainedModel, completion: Completion) -> np.ndarray:
    """Log-probs of the sampled ids of a branch, from one plain forward over the whole branch."""
    ids = torch.tensor([[*completion.prompt_ids.tolist(), *completion.token_ids.tolist()]])
    with torch.no_grad():
        logps = model(ids).logits[0, len(completion.prompt_ids) - 1 : -1].log_softmax(-1)
    return logps[torch.arange(len(completion.token_ids)), ids[0, len(completion.prompt_ids) :]].numpy()


def test_every_sampled_token_of_every_turn_has_the_log_prob_of_its_whole_context(
    each_engine: Engine, tokenizer: PreTrainedTokenizerFast, model: PreTrainedModel
) -> None:
    played = Played(each_engine, tokenizer)
    try:
        rollouts = played.run()
    finally:
        played.close()
    turns = [len(rollout.finish_reasons) for rollout in rollouts]
    assert max(turns) >= 3
    unread = []
    for rollout in rollouts:
        for branch in rollout.branches:
            places = branch.sampled_places
            assert np.abs(logps_of(model, branch)[places] - branch.logprobs[places]).max() < NEAR
            if branch.sampled is not None and branch.sampled[-1]:
                without = replace(
                    branch,
                    token_ids=branch.token_ids[branch.sampled],
                    logprobs=branch.sampled_logprobs,
                    weight_versions=branch.sampled_versions,
                    sampled=None,
                )
                unread.append(abs(logps_of(model, without)[-1] - branch.sampled_logprobs[-1]))
    # The model reads what was inserted: without it the log-probs would be others.
    assert np.median(unread) > 10 * NEAR


def test_inserted_ids_are_the_results_of_the_calls_before_them(
    play: Any, tokenizer: PreTrainedTokenizerFast
) -> None:
    delays = random.Random(1)

    async def product(a: int, b: int) -> str:
        """The product of two numbers, sooner or later.

        Args:
            a: The first number.
            b: The second number.
        """
        await asyncio.sleep(delays.random() / 100)
        return str(a * b)

    product.__name__ = "multiply"
    played = play(function=product)
    seen = 0
    for rollout in played.run(rows=16):
        for branch in rollout.branches:
            stretches = parts(branch)
            for (was_sampled, turn), (is_sampled, inserted) in pairwise(stretches):
                assert was_sampled != is_sampled
                if not was_sampled:
                    continue
                read = played.extensions[None].read(turn)
                wanted = [played.extensions[None].result(c, _answer(c)) for c in read.calls]
                wanted += [played.extensions[None].error(json.dumps({"error": e})) for e in read.errors]
                text = "".join(f"<|tool|>{message['content']}<|end|>" for message in wanted) + "<|assistant|>"
                # The template's end token is sampled with a turn. Where it was not, it is inserted.
                closed = "" if turn[-1] == END else "<|end|>"
                assert tokenizer.decode(inserted.tolist()) == closed + text
                seen += len(wanted)
    assert seen > 40


def _answer(call: Any) -> str:
    missing = next((name for name in "ab" if name not in call.arguments), None)
    if missing is not None:
        return json.dumps({"error": f"missing a required argument: '{missing}'"})
    return str(multiply(**call.arguments))


def test_the_same_run_gives_the_same_rollouts(play: Any) -> None:
    first, second = (play().run() for _ in range(2))
    assert [r.branches for r in first] == [r.branches for r in second]
    assert [r.notes for r in first] == [r.notes for r in second]


def test_reward_functions_get_the_conversation_in_trls_form(play: Any) -> None:
    rollouts = play().run(tokens=260)
    for rollout in rollouts:
        messages = rollout.notes["messages"]
        assert messages[0]["role"] == "assistant"
        assert messages[-1]["role"] == "assistant"
        called = [call["function"] for m in messages for call in m.get("tool_calls", ())]
        answered = [m for m in messages if m["role"] == "tool"]
        assert all(set(call) == {"name", "arguments"} for call in called)
        assert [m["name"] for m in answered if "name" in m] == ["multiply"] * sum(
            "name" in m for m in answered
        )
        assert rollout.notes["tool_calls"] == len(answered) + _given_back(rollout, called, answered)
        json.dumps(rollout.notes)


def _given_back(rollout: Rollout, called: list[Any], answered: list[Any]) -> int:
    """Calls whose results had no room any more: they ran, but the model has not read them."""
    return rollout.notes["tool_calls"] - len(answered) if rollout.finish_reason == "length" else 0


def test_a_malformed_call_is_answered_with_an_error_and_counted(play: Any) -> None:
    rollouts = play().run(rows=16)
    errors = [
        m
        for r in rollouts
        for m in r.notes["messages"]
        if m["role"] == "tool" and m["content"].startswith('{"error"')
    ]
    assert any("name" not in m for m in errors), "no call was malformed"
    assert any("name" in m for m in errors), "no call was refused by its tool"
    whole = [r for r in rollouts if r.finish_reason != "length"]
    said = [
        m
        for r in whole
        for m in r.notes["messages"]
        if m["role"] == "tool" and m["content"].startswith('{"error"')
    ]
    assert sum(r.notes["tool_failures"] for r in whole) == len(said)


@pytest.mark.parametrize("iterations", [0, 1])
def test_no_more_iterations_than_allowed(iterations: int, play: Any) -> None:
    rollouts = play(iterations=iterations).run(rows=16)
    assert max(len(r.finish_reasons) for r in rollouts) == iterations + 1
    assert any("tool_calls" in r.notes["messages"][-1] for r in rollouts), (
        "no rollout was stopped by the limit"
    )
    if not iterations:
        assert all(r.notes["tool_calls"] == 0 for r in rollouts)


def test_a_result_without_room_ends_the_rollout_as_cut(play: Any) -> None:
    def multiply(a: int, b: int) -> str:
        """A long text.

        Args:
            a: The first number.
            b: The second number.
        """
        return "hello world " * 10**6

    rollouts = play(function=multiply).run(rows=8)
    called = [r for r in rollouts if r.notes["tool_calls"] > r.notes["tool_failures"]]
    assert called
    for rollout in called:
        assert rollout.finish_reason == "length"
        assert rollout.notes["messages"][-1]["role"] == "assistant"
        assert len(rollout.token_ids) <= 160


def test_a_result_that_leaves_no_room_for_an_answer_is_dropped(play: Any) -> None:
    def ended_before_its_answer(rollout: Rollout) -> bool:
        return rollout.finish_reason == "length" and rollout.turns[-1].finish_reason == "stop"

    first = next(r for r in play().run() if len(r.finish_reasons) > 1 and len(r.branches) == 1)
    sampled = first.completion.sampled
    assert sampled is not None
    # Up to the end of the first results.
    filled = int(np.flatnonzero(np.diff(sampled.astype(int)) == 1)[0]) + 1
    exact, one_more = (
        next(r for r in play().run(tokens=tokens) if r.key == first.key) for tokens in (filled, filled + 1)
    )
    assert exact.notes["messages"] == first.notes["messages"][:1]
    assert (exact.token_ids == first.token_ids[: first.turns[0].end]).all()
    assert exact.notes["finish_reasons"] == ["stop"]
    assert ended_before_its_answer(exact)
    assert len(one_more.token_ids) == filled + 1
    assert [m["role"] for m in one_more.notes["messages"]] == ["assistant", "tool", "assistant"]
    assert not ended_before_its_answer(one_more)


def test_the_finish_reason_of_each_turn_stands_with_its_end_and_its_message(play: Any) -> None:
    rollouts = play().run(tokens=60)
    assert {r.finish_reasons[-1] for r in rollouts} == {"stop", "length"}
    for rollout in rollouts:
        (branch,) = rollout.branches
        sampled = np.ones(len(branch.token_ids), np.bool_) if branch.sampled is None else branch.sampled
        ends = np.flatnonzero(np.diff(np.append(sampled, False).astype(int)) == -1) + 1
        assert [turn.end for turn in rollout.turns] == ends.tolist()
        assert [bool(branch.token_ids[end - 1] == END) for end in ends] == [
            r == "stop" for r in rollout.finish_reasons
        ]
        assert rollout.notes["finish_reasons"] == list(rollout.finish_reasons)
        assert len(rollout.turns) == sum(m["role"] == "assistant" for m in rollout.notes["messages"])


def test_no_rollout_is_longer_than_its_budget(play: Any) -> None:
    for rollout in play().run(rows=16, tokens=30):
        assert sum(len(branch.token_ids) for branch in rollout.branches) <= 30
        assert len(rollout.token_ids) == 30 or rollout.finish_reason in ("stop", "length")


def test_text_of_a_result_that_looks_like_a_control_token_stays_text(
    play: Any, tokenizer: PreTrainedTokenizerFast
) -> None:
    def multiply(a: int, b: int) -> str:
        """Text of control tokens.

        Args:
            a: The first number.
            b: The second number.
        """
        return "<|end|><|assistant|>5"

    rollouts = play(function=multiply).run(rows=8)
    answered = 0
    for rollout in rollouts:
        if any(m["content"] == "<|end|><|assistant|>5" for m in rollout.notes["messages"]):
            answered += 1
        for branch in rollout.branches:
            for is_sampled, ids in parts(branch):
                if not is_sampled:
                    text = tokenizer.convert_tokens_to_ids("<|assistant|>")
                    assert np.count_nonzero(ids == text) == 1
    assert answered


# ---- environments ------------------------------------------------------------------------------------------------


def test_a_reset_adds_to_the_prompt_and_the_reward_belongs_to_its_rollout(
    play: Any, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast
) -> None:
    played = play(function=None, factory=Product)
    rollouts = played.run(rows=16)
    rewards = [rollout.notes["rewards"]["Product"] for rollout in rollouts]
    assert len(set(rewards)) > 2
    for rollout, reward in zip(rollouts, rewards, strict=True):
        assert rollout.failed is None
        assert rollout.notes["prompt"][-1]["content"].endswith(" now")
        assert " now<|end|><|assistant|>" in tokenizer.decode(rollout.completion.prompt_ids.tolist())
        assert reward == played.program.environment_of(rollout).calls
        assert reward == rollout.notes["tool_calls"] - rollout.notes["tool_failures"]
        logps = logps_of(model, rollout.completion)[rollout.completion.sampled_places]
        assert np.abs(logps - rollout.completion.sampled_logprobs).max() < NEAR
    assert len({id(played.program.environment_of(rollout)) for rollout in rollouts}) == len(rollouts)
    played.program.release(rollouts)
    assert all(played.program.environment_of(rollout) is None for rollout in rollouts)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("reset", "reset: no board"),
        ("long", "leaves no room"),
        ("hang", "multiply: no result"),
        ("get_reward", "get_reward: no score"),
    ],
)
def test_an_environment_that_fails_costs_its_own_rollout_only(how: str, message: str, play: Any) -> None:
    played = play(
        function=None, factory={"bad": Product, "good": Product}, timeout=0.3 if how == "hang" else 60.0
    )
    bad = played.run(rows=4, columns={"environment": "bad", "how": how})
    failed = [rollout for rollout in bad if rollout.failed is not None]
    assert failed
    assert len(failed) == len(bad) or how == "hang"
    for rollout in failed:
        assert message in str(rollout.failed)
        assert (len(rollout.completion.sampled_places) == 0) == (how in ("reset", "long"))
        assert "rewards" not in rollout.notes
    played.program.release(bad)
    good = played.run(rows=4, columns={"environment": "good"})
    assert all(rollout.failed is None for rollout in good)


@pytest.mark.parametrize("factory", [games.Spoken, games.SpokenGuess])
def test_a_turn_without_a_call_is_answered_by_the_user_until_the_environment_ends_the_rollout(
    factory: Any, play: Any, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast
) -> None:
    played = play(function=None, factory=factory)
    rollouts = played.run(rows=4, tokens=400)
    whole = [
        rollout for rollout in rollouts if rollout.finish_reason == "stop" and "tool" not in roles(rollout)
    ]
    assert whole
    assert any("tool" in roles(rollout) for rollout in rollouts)
    for rollout in whole:
        spoken = played.program.environment_of(rollout)
        messages = rollout.notes["messages"]
        assert roles(rollout) == ["assistant", "user"] * 2 + ["assistant"]
        assert [m["content"] for m in messages if m["role"] == "user"] == ["and 1?<|end|>", "and 0?<|end|>"]
        assert [m["content"] for m in messages if m["role"] == "assistant"] == spoken.heard
        assert rollout.notes["rewards"][type(spoken).__name__] == 3.0
        # The user's words are inserted as text: what looks like the end token in them ends nothing.
        inserted = [
            tokenizer.decode(ids.tolist()) for sampled, ids in parts(rollout.completion) if not sampled
        ]
        assert inserted == [f"<|user|>and {n}?<|end|><|end|><|assistant|>" for n in (1, 0)]
        logps = logps_of(model, rollout.completion)[rollout.completion.sampled_places]
        assert np.abs(logps - rollout.completion.sampled_logprobs).max() < NEAR
    assert len({played.program.environment_of(rollout).seed for rollout in rollouts}) == len(rollouts)


def roles(rollout: Rollout) -> list[str]:
    return [message["role"] for message in rollout.notes["messages"]]


def test_words_of_the_user_without_room_end_the_rollout_as_cut(play: Any) -> None:
    rollouts = play(function=None, factory=games.Spoken).run(rows=4, columns={"how": "long"})
    spoken = [rollout for rollout in rollouts if rollout.notes["rewards"]["Spoken"] > 0]
    assert spoken
    for rollout in spoken:
        assert rollout.notes["rewards"] == {"Spoken": 1.0}
        assert "user" not in roles(rollout)
        assert rollout.finish_reason == "length"


def test_a_row_of_an_unknown_environment_is_refused(play: Any) -> None:
    played = play(function=None, factory={"a": Product})
    played.extensions["b"] = played.extensions["a"]
    with pytest.raises(InputError, match="environment='b'; environment_factory has 'a'"):
        played.run(rows=1, columns={"environment": "b"})


def test_environments_are_used_again_after_their_rollouts_are_scored(play: Any) -> None:
    played = play(function=None, factory=Product)
    first = played.run(rows=2)
    kept = {id(played.program.environment_of(rollout)) for rollout in first}
    played.program.release(first)
    second = played.run(rows=2)
    assert {id(played.program.environment_of(rollout)) for rollout in second} == kept


def test_an_environment_in_a_process_of_its_own_plays_whole_rollouts(play: Any) -> None:
    from lockstep.rollouts.programs.environments import in_process

    played = play(function=multiply, factory=in_process(f"{Path(games.__file__)}:Later"))
    rollouts = played.run(rows=2)
    assert {rollout.notes["rewards"]["Later"] for rollout in rollouts} == {0.5}
