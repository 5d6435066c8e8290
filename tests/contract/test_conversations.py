"""Rollouts of several turns and branches on every engine: right ids and context, and nothing left after an end."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from conftest import VLLM
from played_engine import ChangedAnswers
from servers import Server, connect
from test_engine_contract import forward_logits
from tiny import make_model, perturbed
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lockstep.contract.protocol import Completion, Engine, GenerationRequest, RequestKey, derived_seed
from lockstep.contract.sampling import Sampling
from lockstep.engines.servers.server import VLLMServer
from lockstep.engines.vllm.in_process import VLLMInProcess
from lockstep.errors import LockstepError
from lockstep.models.arithmetic import Precision
from lockstep.rollouts.ahead import GenerationsAhead
from lockstep.rollouts.conversation import Conversation, single_turn
from lockstep.rollouts.driver import Driver, Start, starts_for
from lockstep.rollouts.group import Prompt
from lockstep.tokens.chat import load_tokenizer
from lockstep.watch.custody import Record
from lockstep.watch.plain_forward import completion_logps
from lockstep.weights.push import push_weights

INSERTED = (77, 78, 79)
PROMPTS = [Prompt(f"row/{i}", (5 + i, 9, 11, 40), "text") for i in range(4)]


@pytest.fixture(autouse=True)
def pushed(request: pytest.FixtureRequest) -> PreTrainedModel:
    model = make_model()
    if "engine" in request.fixturenames:
        push_weights(model, request.getfixturevalue("engine"), 7)
    return model


@pytest.fixture(scope="module")
def tokenizer(untied_dir: str) -> PreTrainedTokenizerBase:
    return load_tokenizer(untied_dir)


@pytest.fixture
def driver(engine: Engine, tokenizer: PreTrainedTokenizerBase) -> Iterator[Driver]:
    with Driver(engine, tokenizer, Record) as made:
        yield made


def starts(tokens: int = 60) -> list[Start]:
    return starts_for(PROMPTS, Sampling(tokens), num_generations=3, run_seed=1, version=7)


async def three_turns(c: Conversation) -> None:
    """Two turns with text between them, then a third one in a branch that shares only the first turn."""
    first = await c.sample(6)
    c.insert(INSERTED)
    await c.sample(8)
    c.branch([*c.prompt.ids.tolist(), *first.token_ids.tolist(), 90, 91])
    c.insert(INSERTED[:1])
    await c.sample(5)


def assert_scored(model: PreTrainedModel, completion: Completion) -> None:
    """Sampled ids have the log-probs of a plain forward over the branch; inserted ids have none."""
    ids = torch.tensor(completion.token_ids)
    own = forward_logits(model, completion).log_softmax(-1)[torch.arange(len(ids)), ids]
    mask = (
        torch.ones(len(ids), dtype=torch.bool)
        if completion.sampled is None
        else torch.tensor(completion.sampled)
    )
    found = torch.tensor(completion.logprobs)
    assert float((found - own)[mask].abs().max()) < 1e-3
    assert not found[~mask].any()


def test_every_turn_continues_its_branch_id_for_id_and_is_scored_in_it(
    engine: Engine, driver: Driver, pushed: PreTrainedModel
) -> None:
    found = driver.run(starts(), three_turns)
    for start in starts():
        rollout = found[start.key]
        first, second = rollout.branches
        n = first.sampled.tolist().index(False) if first.sampled is not None else 0
        assert first.prompt_ids.tolist() == start.prompt.ids.tolist()
        assert first.token_ids.tolist()[n : n + 3] == list(INSERTED)
        assert second.prompt_ids.tolist() == [
            *start.prompt.ids.tolist(),
            *first.token_ids.tolist()[:n],
            90,
            91,
        ]
        assert second.token_ids[0] == INSERTED[0]
        # The same turns, asked one by one.
        seeds = [start.seed]
        seeds += [derived_seed(seeds[0], "going on")]
        seeds += [derived_seed(seeds[1], "going on")]
        turns = [
            (start.prompt.ids, 6, first.token_ids[:n]),
            (np.concatenate([first.prompt_ids, first.token_ids[: n + 3]]), 8, first.token_ids[n + 3 :]),
            (np.concatenate([second.prompt_ids, second.token_ids[:1]]), 5, second.token_ids[1:]),
        ]
        for call, (before, most, ids) in enumerate(turns):
            request = GenerationRequest(start.key._replace(call=call), before, Sampling(most), seeds[call])
            (alone,) = engine.generate([request]).values()
            assert alone.token_ids.tolist() == ids.tolist()
            assert alone.finish_reason == rollout.finish_reasons[call]
        for branch in rollout.branches:
            assert set(branch.weight_versions.tolist()) == {7}
            assert_scored(pushed, branch)
    again = driver.run(starts(), three_turns)
    assert {k: [b.token_ids.tolist() for b in r.branches] for k, r in again.items()} == {
        k: [b.token_ids.tolist() for b in r.branches] for k, r in found.items()
    }


def test_the_same_sampled_ids_give_the_same_rollouts_in_every_engine(
    driver: Driver, pushed: PreTrainedModel
) -> None:
    """Every engine takes the likeliest token here, so that all sample the ids of a plain forward of the model."""

    def likeliest(ids: list[int], most: int) -> list[int]:
        sampled: list[int] = []
        while len(sampled) < most and (not sampled or sampled[-1] != 0):
            with torch.no_grad():
                sampled.append(int(pushed(torch.tensor([[*ids, *sampled]])).logits[0, -1].argmax()))
        return sampled

    greedy = starts_for(PROMPTS, Sampling(60, top_k=1), num_generations=1, run_seed=1, version=7)
    found = driver.run(greedy, three_turns)
    for start in greedy:
        prompt = start.prompt.ids.tolist()
        first = likeliest(prompt, 6)
        second = likeliest([*prompt, *first, *INSERTED], 8)
        whole, branch = found[start.key].branches
        assert whole.token_ids.tolist() == [*first, *INSERTED, *second]
        inserted = range(len(first), len(first) + len(INSERTED))
        assert np.flatnonzero(~whole.sampled).tolist() == list(inserted)  # type: ignore[operator]
        after = [*prompt, *first, 90, 91]
        assert branch.prompt_ids.tolist() == after
        assert branch.token_ids.tolist() == [INSERTED[0], *likeliest([*after, INSERTED[0]], 5)]


def is_idle(engine: Engine, request: pytest.FixtureRequest) -> bool:
    if isinstance(engine, VLLMInProcess):
        return not engine.llm.llm_engine.has_unfinished_requests()
    return not isinstance(engine, VLLMServer) or request.getfixturevalue("server").running_requests() == 0


@pytest.mark.parametrize("how", ["error", "interrupt"])
def test_a_generation_that_ends_while_others_are_sampled_leaves_the_engine_clean(
    engine: Engine, driver: Driver, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    async def program(c: Conversation) -> None:
        await c.sample(2 if c.key.sample == 0 else 400)
        if how == "error":
            raise ValueError("no such city")

    def interrupted(completion: Completion) -> Completion:
        raise KeyboardInterrupt

    real = engine.serve
    if how == "interrupt":
        monkeypatch.setattr(engine, "serve", lambda inbox: real(ChangedAnswers(inbox, interrupted)))  # type: ignore[arg-type]
    error = KeyboardInterrupt if how == "interrupt" else LockstepError
    with pytest.raises(error, match=None if how == "interrupt" else "raised ValueError: no such city"):
        driver.run(starts(400), program)
    deadline = time.monotonic() + 60
    while not is_idle(engine, request):
        assert time.monotonic() < deadline
    monkeypatch.undo()
    assert list(driver.run(starts(), single_turn)) == [start.key for start in starts()]


def test_a_turn_that_a_program_no_longer_waits_for_is_dropped(engine: Engine, driver: Driver) -> None:
    async def program(c: Conversation) -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(c.sample(), 0.0)
        late = asyncio.ensure_future(c.sample())
        await asyncio.sleep(0)
        late.cancel()
        await asyncio.gather(late, return_exceptions=True)
        turn = await c.sample(4)
        assert len(turn.token_ids) <= 4

    for rollout in driver.run(starts(), program).values():
        assert len(rollout.token_ids) <= 4
        assert len(rollout.finish_reasons) == 1


@pytest.mark.long
@pytest.mark.parametrize("_vllm", [pytest.param(None, marks=VLLM)])
def test_a_push_may_land_in_the_middle_of_a_conversation(
    server: Server, tokenizer: PreTrainedTokenizerBase, _vllm: Any
) -> None:
    """Between two turns of some rollouts, and in a turn of others: no key or value of older weights is used."""
    engine = connect(server.url)
    first, second = make_model(), perturbed(make_model(), scale=0.5)
    push_weights(first, engine, 1)
    between, all_wait, go_on = threading.Event(), asyncio.Event(), asyncio.Event()
    waiting: set[RequestKey] = set()

    async def program(c: Conversation) -> None:
        await c.sample(30)
        c.insert(INSERTED)
        if c.key.sample == 0:
            waiting.add(c.key)
            if len(waiting) == len(PROMPTS):
                all_wait.set()
            await asyncio.wait_for(go_on.wait(), 120)
        await asyncio.wait_for(all_wait.wait(), 120)
        # The turns of the rollouts differ in length. When the shortest turn ends and the push begins, longer ones
        # still run.
        for _ in range(4):
            await c.sample(40 + 2 * c.key.sample)
            c.insert(INSERTED)
            between.set()

    with Driver(engine, tokenizer, Record) as driver:
        ahead = GenerationsAhead(driver, 120.0)
        begun = starts_for(PROMPTS, Sampling(440), num_generations=30, run_seed=1, version=1)
        ahead.begin(3, begun, program)
        assert between.wait(120)
        with ahead.held():
            push_weights(second, engine, 2)
        driver.loop.run(opened(go_on))
        found = ahead.take(3)
    completions = [rollout.completion for rollout in found.values()]
    for key in waiting:
        versions = found[key].completion.sampled_versions.tolist()
        assert versions[0] == 1
        assert versions[-1] == 2
    assert any(_changes_within_a_turn(c) for c in completions), "no turn was running when the push landed"
    for c in completions:
        assert c.weight_versions.tolist() == sorted(c.weight_versions.tolist())
        own = torch.where(
            torch.tensor(c.weight_versions) == 1,
            *(
                completion_logps(m, c.prompt_ids, c.token_ids, Sampling(1), Precision(None))
                for m in (first, second)
            ),
        )
        assert float((own - torch.tensor(c.logprobs)).abs()[torch.tensor(c.sampled_places)].max()) < 2e-3
    engine.close()


async def opened(event: asyncio.Event) -> None:
    event.set()


def _changes_within_a_turn(completion: Completion) -> bool:
    places = completion.sampled_places
    changed = np.flatnonzero(np.diff(completion.sampled_versions))
    return any(places[i + 1] == places[i] + 1 for i in changed)
