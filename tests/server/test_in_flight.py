"""Updates in the middle of running requests, on a real server."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from by_the_book import kept_set
from conftest import VLLM
from servers import Server, begin, connect
from tiny import make_model, perturbed
from transformers import PreTrainedModel

from lockstep.contract.protocol import Completion, GenerationRequest, RequestKey
from lockstep.contract.sampling import Sampling
from lockstep.engines.servers.server import VLLMServer
from lockstep.models.arithmetic import Precision
from lockstep.watch.plain_forward import completion_logps
from lockstep.weights.push import push_weights

pytestmark = [*VLLM, pytest.mark.long]


BOTH = pytest.mark.parametrize("engine", ["shared_memory", "gloo"], indirect=True)


@pytest.fixture
def engine(server: Server, request: pytest.FixtureRequest) -> Iterator[VLLMServer]:
    made = connect(server.url, transport=getattr(request, "param", "shared_memory"))
    yield made
    made.close()


def long_requests(count: int, tokens: int) -> list[GenerationRequest]:
    rng = random.Random(5)
    prompt = tuple(rng.randrange(4, 300) for _ in range(70))
    return [
        GenerationRequest(RequestKey(f"p{i % 3}", i), (*prompt, 5 + i % 3), Sampling(tokens), 100 + i)
        for i in range(count)
    ]


def gap_by_version(models: dict[int, PreTrainedModel], found: list[Completion]) -> float:
    """The largest difference of a token's log-prob and a plain forward's with the weights of its version."""
    worst = 0.0
    for c in found:
        versions = torch.tensor(c.weight_versions)
        for version in versions.unique().tolist():
            own = completion_logps(models[version], c.prompt_ids, c.token_ids, Sampling(1), Precision(None))
            distance = (own - torch.tensor(c.logprobs)).abs()[versions == version]
            worst = max([worst, *distance.tolist()])
    return worst


def pushed_into(
    server: Server, engine: VLLMServer, asked: list[GenerationRequest]
) -> tuple[dict[int, PreTrainedModel], list[Completion]]:
    """The model of each version, and completions of which some were running when a push landed.

    A slow machine may have answered every request before the push. Then the requests are asked again, and another
    push follows.
    """
    models = {1: make_model()}
    push_weights(models[1], engine, 1)
    for version in range(2, 12):
        models[version] = perturbed(models[version - 1], scale=0.5)
        answers: dict[RequestKey, Completion] = {}
        worker = begin(server, lambda answers=answers: answers.update(engine.generate(asked)))  # type: ignore[misc]
        push_weights(models[version], engine, version)
        worker.join(200)
        found = list(answers.values())
        assert {c.key for c in found} == {request.key for request in asked}
        if crossing(found):
            return models, found
    raise AssertionError("no request was running when an update landed, in ten attempts")


def crossing(found: list[Completion]) -> list[Completion]:
    """The completions with tokens of two versions."""
    return [c for c in found if len(set(c.weight_versions.tolist())) == 2]


@BOTH
def test_tokens_of_running_requests_carry_the_version_that_sampled_each(
    server: Server, engine: VLLMServer
) -> None:
    # Enough steps for half a second or more on any machine.
    models, found = pushed_into(server, engine, long_requests(50, 400))
    across, last = crossing(found), max(models)
    assert all(set(c.weight_versions.tolist()) == {last - 1, last} for c in across)
    assert all(list(c.weight_versions) == sorted(c.weight_versions) for c in found)
    # Log-probs that are right for each token's own weights also show that no key or value of older weights was used
    # (fault W6).
    assert gap_by_version(models, found) < 1e-3
    assert gap_by_version({last - 1: models[last], last: models[last - 1]}, across) > 0.1
    # The next request with the same prefix finds nothing that older weights computed.
    after = list(engine.generate(long_requests(3, 8)).values())
    assert gap_by_version(models, after) < 1e-3
    assert {version for c in after for version in c.weight_versions.tolist()} == {last}


def test_requests_wait_while_an_update_is_open_and_are_not_answered_by_half_of_it(
    server: Server, engine: VLLMServer
) -> None:
    model = make_model()
    push_weights(model, engine, 1)
    # Requests of one length end together. Then a pause between two waves of them would cross none.
    asked = [replace(r, sampling=Sampling(140 + 2 * i)) for i, r in enumerate(long_requests(150, 400))]
    answers: dict[RequestKey, Completion] = {}
    worker = begin(server, lambda: answers.update(engine.generate(asked)))
    engine.begin_update()
    engine.pauses.wait()
    # The loop that answers this call also computes tokens, so that an unpaused server would sample tokens between two
    # calls.
    turns = [(engine.servers.all[0].workers("lockstep_state"), server.sampled_tokens())[1] for _ in range(20)]
    assert turns[0] == turns[-1]
    assert worker.is_alive()
    moved = perturbed(model, scale=0.5)
    push_weights(moved, engine, 2)
    worker.join(100)
    assert answers.keys() == {request.key for request in asked}
    assert any(set(c.weight_versions) == {1, 2} for c in answers.values())
    assert gap_by_version({1: model, 2: moved}, list(answers.values())) < 1e-3


def test_kept_ids_of_running_requests_are_those_of_the_version_that_sampled_each_token(
    server: Server, engine: VLLMServer
) -> None:
    sampling = Sampling(400, top_p=0.8)
    models, found = pushed_into(
        server, engine, [replace(request, sampling=sampling) for request in long_requests(80, 400)]
    )
    for c in crossing(found)[:3]:
        assert c.kept_ids is not None
        ids = torch.tensor([[*c.prompt_ids.tolist(), *c.token_ids.tolist()]])
        with torch.no_grad():
            logits = {
                version: models[version](ids).logits[0, len(c.prompt_ids) - 1 : -1]
                for version in set(c.weight_versions.tolist())
            }
        for place, version in enumerate(c.weight_versions.tolist()):
            kept = set(c.kept_ids.part(place, place + 1).ids.tolist())
            scores = logits[version][place].double()
            assert kept_set(scores, sampling, -1e-4) <= kept <= kept_set(scores, sampling, 1e-4)
