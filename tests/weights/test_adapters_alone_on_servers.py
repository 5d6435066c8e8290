"""Adapters alone on a real server: proven like merged weights, beside running requests and other runs' adapters."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from conftest import needs_vllm
from servers import KEY, Asked, Server, connect, serve
from test_adapters import adapted, move
from tiny import make_model, save

from lockstep import connection
from lockstep.contract.protocol import Completion, GenerationRequest, RequestKey
from lockstep.contract.sampling import Sampling
from lockstep.engines.servers.server import VLLMServer
from lockstep.errors import EngineLost, InputError, ProofError
from lockstep.extras.lora_alone.adapter_proof import AdapterPush
from lockstep.models.arithmetic import Precision
from lockstep.server.keys import KEY_VARIABLE
from lockstep.watch.push import ProvenPusher
from lockstep.weights.push import push_weights

pytestmark = [pytest.mark.vllm, needs_vllm]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("served")
    save(make_model(), folder)
    with serve(
        str(folder), folder, "--enable_lora", "--max_lora_rank", "8", "--max_cpu_loras", "4"
    ) as running:
        yield running


@pytest.fixture(scope="module")
def split_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("split")
    save(make_model(), folder)
    words = ("--enable_lora", "--max_lora_rank", "8", "--tensor_parallel_size", "2")
    with serve(str(folder), folder, *words) as running:
        yield running


def pusher(model: torch.nn.Module, engine: VLLMServer) -> ProvenPusher:
    return ProvenPusher(model, engine, torch.float32, Precision(None), extension=AdapterPush)  # type: ignore[arg-type]


def asked(name: str, tokens: int = 8) -> GenerationRequest:
    return GenerationRequest(
        RequestKey(name, 0), [5, 6, 7], Sampling(max_tokens=tokens, min_tokens=tokens), 1
    )


def sampled(engine: VLLMServer, name: str = "p") -> Completion:
    (found,) = engine.generate([asked(name)]).values()
    return found


@pytest.mark.parametrize("transport", ["shared_memory", "gloo"])
def test_each_push_is_proven_and_only_the_last_adapter_stays(server: Server, transport: str) -> None:
    engine, model = connect(server.url, transport=transport), adapted()
    pushing = pusher(model, engine)
    sizes = []
    try:
        for version in range(4):
            proof = pushing.push(version, canary=True, every_module=version == 2)
            assert proof.canary is not None
            assert proof.canary.mean_abs < 1e-5
            assert proof.probe.worst[1] < 1e-4
            sizes.append(proof.push.bytes)
            assert set(sampled(engine).weight_versions.tolist()) == {version}
            assert len(engine.adapters.held()[0]) == 1
            move(model, version)
        # The base travels at most once: another test may have pushed it before.
        assert len(set(sizes[1:])) == 1
        assert sizes[1] < 40_000
        with pytest.raises(ProofError, match="gap"):
            pushing.score_canary(4)
    finally:
        engine.close()


def test_two_runs_share_a_server_and_neither_touches_the_others_adapter(server: Server) -> None:
    one, other = connect(server.url), connect(server.url)
    mine, theirs = adapted(), adapted(seed=4)
    pushing, second = pusher(mine, one), pusher(theirs, other)
    try:
        pushing.push(0, canary=True)
        assert second.push(0, canary=True).push.bytes < 40_000, "the base was sent again"
        move(mine, 3)
        pushing.push(1, canary=True)
        assert second.score_canary(0).mean_abs < 1e-5
        assert pushing.score_canary(1).mean_abs < 1e-5
        assert {name.partition("/")[0] for name in one.adapters.held()[0]} == {one.session, other.session}
        stranger = connect(server.url)
        with pytest.raises(InputError, match=r"holds adapters of 2 other runs"):
            pusher(adapted(make_model(seed=3)), stranger).push(0)
        stranger.close()
        assert second.score_canary(0).mean_abs < 1e-5
    finally:
        for engine in (one, other):
            engine.close()


def test_a_push_of_whole_weights_is_refused_while_other_runs_have_adapters(server: Server) -> None:
    one, whole = connect(server.url), connect(server.url)
    pushing = pusher(adapted(), one)
    try:
        pushing.push(0)
        with pytest.raises(InputError, match=r"holds 1 adapters of other runs .* use another server"):
            push_weights(make_model(), whole, 0)
        assert pushing.score_canary(0).mean_abs < 1e-5
        assert sampled(one).weight_versions.tolist() == [0] * 8
    finally:
        one.close()
    # The run has ended and has taken its adapter with it.
    push_weights(make_model(seed=5), whole, 1)
    assert set(sampled(whole).weight_versions.tolist()) == {1}
    whole.close()


def test_two_runs_that_begin_together_agree_on_one_base(server: Server) -> None:
    engines = [connect(server.url) for _ in range(3)]
    models = [adapted(make_model(seed=6), seed=number) for number in range(3)]
    pushing = [pusher(model, engine) for model, engine in zip(models, engines, strict=True)]
    try:
        with ThreadPoolExecutor(3) as pool:
            sent = [proof.push.bytes for proof in pool.map(lambda one: one.push(0), pushing)]
        assert sorted(size > 400_000 for size in sent) == [False, False, True]
        assert all(one.score_canary(0).mean_abs < 1e-5 for one in pushing)
    finally:
        for engine in engines:
            engine.close()


def test_a_request_that_was_given_up_does_not_end_the_server_when_its_adapter_is_removed(
    server: Server,
) -> None:
    engine, model = connect(server.url), adapted()
    pushing = pusher(model, engine)
    try:
        pushing.push(0)
        running = Asked(engine, [asked(f"long{i}", 400) for i in range(8)])
        before, deadline = server.sampled_tokens(), time.monotonic() + 60
        # Each request has a thread. One that begins later would be counted again after the counts are cleared.
        while server.sampled_tokens() < before + 5 or engine.adapters.running.total() < 8:
            assert time.monotonic() < deadline
        # As if the server had not noticed yet that nobody waits for the answers.
        engine.adapters.running.clear()
        pushing.push(1)
        assert len(engine.adapters.held()[0]) == 1
        running.give_up()
        assert pushing.push(2, canary=True).canary is not None
        assert set(sampled(engine).weight_versions.tolist()) == {2}
    finally:
        engine.close()


def test_a_request_that_runs_during_a_push_ends_with_the_adapter_that_it_began_with(server: Server) -> None:
    engine, model = connect(server.url), adapted()
    pushing = pusher(model, engine)
    try:
        pushing.push(0)
        alone = next(iter(engine.generate([asked("long", 400)]).values()))
        running = Asked(engine, [asked("long", 400)])
        before, deadline = server.sampled_tokens(), time.monotonic() + 60
        while server.sampled_tokens() < before + 5:
            assert time.monotonic() < deadline
        move(model, 1)
        pushing.push(1)
        assert server.running_requests() == 1, "the long request has ended before the push: nothing was shown"
        assert set(sampled(engine).weight_versions.tolist()) == {1}
        assert len(engine.adapters.held()[0]) == 2
        (ended,) = running.result().values()
        assert set(ended.weight_versions.tolist()) == {0}
        assert ended.token_ids.tolist() == alone.token_ids.tolist()
        assert float(abs(ended.logprobs - alone.logprobs).max()) < 1e-4
        pushing.push(2)
        assert len(engine.adapters.held()[0]) == 1
    finally:
        engine.close()


def test_a_server_without_room_names_the_setting(server: Server) -> None:
    engines = [connect(server.url) for _ in range(5)]
    try:
        for engine in engines[:4]:
            pusher(adapted(), engine).push(0)
        with pytest.raises(
            InputError, match=r"no room for another one: start it with a larger --max_cpu_loras"
        ):
            pusher(adapted(), engines[4]).push(0)
    finally:
        for engine in engines:
            engine.close()


def test_a_resumed_run_removes_the_adapters_of_its_earlier_session(server: Server) -> None:
    first = connect(server.url, run="run")
    pusher(adapted(), first).push(3)
    again = connect(server.url, run="run")
    try:
        pusher(adapted(), again).push(3)
        (names,) = again.adapters.held()
        assert [name.split("/")[1] for name in names] == [again.session]
    finally:
        again.close()
        first.close()


def test_a_trainer_of_ones_own_sends_the_adapter_alone_too(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    with pytest.raises(InputError, match="letters and digits"):
        connection.connect(server.url, enable_lora=True, run="a/b")
    own, model = connection.connect(server.url, timeout=120, enable_lora=True, run="own"), adapted()
    try:
        own.update_weights(model, 1)
        move(model, 2)
        assert own.update_weights(model, 2).bytes < 40_000
        probe, canary = own.verify()
        assert probe.worst[1] < 1e-4
        assert canary.mean_abs < 1e-5
        (names,) = own.engine.adapters.held()
        assert [name.partition("/")[0] for name in names] == ["own"]
    finally:
        own.close()


def test_a_restarted_server_gets_base_and_adapter_again(server: Server) -> None:
    engine, model = connect(server.url), adapted()
    pushing = pusher(model, engine)
    try:
        before = pushing.push(0).push
        server.restart()
        with pytest.raises(EngineLost) as lost:
            sampled(engine)
        lost.value.recover()
        after = pushing.push(0, canary=True)
        assert after.canary is not None
        assert after.canary.mean_abs < 1e-5
        assert after.push.bytes > 400_000
        assert before.digest == after.push.digest
    finally:
        engine.close()


def test_an_adapter_that_is_too_large_for_the_server_is_refused(server: Server) -> None:
    engine = connect(server.url)
    try:
        with pytest.raises(
            InputError, match=r"rank 16, and the engine takes at most 8: start it with --max_lora_rank 16"
        ):
            pusher(adapted(r=16), engine)
    finally:
        engine.close()


@pytest.mark.long
@pytest.mark.parametrize("transport", ["shared_memory", "gloo"])
def test_workers_that_share_a_model_share_the_adapter(transport: str, split_server: Server) -> None:
    engine, model = (
        connect(split_server.url, transport=transport),
        adapted(make_model(), rank_pattern={"q_proj": 2}),
    )
    pushing = pusher(model, engine)
    try:
        for version in range(2):
            proof = pushing.push(version, canary=True, every_module=True)
            assert proof.canary is not None
            assert proof.canary.mean_abs < 1e-5
            assert not proof.probe.unreached
            move(model, version)
    finally:
        engine.close()
