"""A real server behind a proxy that cuts, delays, doubles, truncates and exchanges its answers.

There are two outcomes. Either a proof refuses the answer and names the fault. Or the engine is lost and recovered,
and then gives the same tokens as without the fault. No single call is ever repeated.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from conftest import VLLM
from faulty_proxy import GENERATE, FaultyProxy, faulty_proxy
from servers import Server, connect, impatient
from tiny import make_model

from lockstep.contract.protocol import GenerationRequest, RequestKey
from lockstep.contract.sampling import Sampling
from lockstep.engines.servers.server import VLLMServer
from lockstep.errors import EngineLost, InputError, LockstepError, ProofError
from lockstep.watch.modules import ModuleProbe, check_probe
from lockstep.weights.push import push_weights

pytestmark = [*VLLM, pytest.mark.long]

REQUESTS = [GenerationRequest(RequestKey(f"p{i}", 0), (7, 8, 9 + i), Sampling(12), 50 + i) for i in range(4)]

# Seconds that a call with a fault may take. A late answer comes after it.
LIMIT = 3.0


@pytest.fixture(scope="module")
def proxy(server: Server) -> Iterator[FaultyProxy]:
    with faulty_proxy(server.url) as made:
        made.late = LIMIT + 1
        yield made


@pytest.fixture
def engine(proxy: FaultyProxy) -> Iterator[VLLMServer]:
    proxy.rule = lambda path: None
    made = connect(proxy.url)
    push_weights(make_model(), made, 1)
    yield made
    proxy.rule = lambda path: None
    made.close()


def tokens(engine: VLLMServer) -> dict[RequestKey, tuple[int, ...]]:
    return {key: c.token_ids.tolist() for key, c in engine.generate(REQUESTS).items()}


@pytest.mark.parametrize(
    "fault", ["cut", "500", "503", "late", "body_twice", "truncated", "empty", "first_weights"]
)
def test_after_a_broken_answer_the_engine_is_lost_and_recovery_gives_the_same_tokens(
    fault: str, engine: VLLMServer, proxy: FaultyProxy
) -> None:
    plain = tokens(engine)
    calls = proxy.calls[GENERATE]
    proxy.once(fault)
    with impatient(engine, LIMIT), pytest.raises(EngineLost) as lost:
        engine.generate(REQUESTS)
    assert proxy.calls[GENERATE] <= calls + len(REQUESTS), "a call was repeated"
    lost.value.recover()
    with pytest.raises(ProofError, match="no committed weights"):
        engine.generate(REQUESTS)
    push_weights(make_model(), engine, 2)
    assert tokens(engine) == plain


@pytest.mark.parametrize(("fault", "proof"), [("token_lost", "logprobs"), ("logprob_missing", "logprobs")])
def test_a_false_answer_is_refused_with_the_name_of_the_proof(
    fault: str, proof: str, engine: VLLMServer, proxy: FaultyProxy
) -> None:
    proxy.once(fault)
    with pytest.raises(ProofError) as refused:
        engine.generate(REQUESTS)
    assert refused.value.check == proof


def test_a_prompt_that_is_changed_on_its_way_is_not_answered(engine: VLLMServer, proxy: FaultyProxy) -> None:
    plain = tokens(engine)
    proxy.once("prompt_changed")
    # The server takes the changed call for one that no trainer has signed.
    with pytest.raises(EngineLost, match=GENERATE) as lost:
        engine.generate(REQUESTS)
    lost.value.recover()
    push_weights(make_model(), engine, 3)
    assert tokens(engine) == plain


def test_exchanged_answers_are_refused(engine: VLLMServer, proxy: FaultyProxy) -> None:
    left = ["exchanged", "exchanged"]
    proxy.rule = lambda path: left.pop() if left and path == GENERATE else None
    with pytest.raises(ProofError) as refused:
        engine.generate(REQUESTS)
    assert refused.value.check == "keys"


def test_a_request_that_the_server_got_twice_is_answered_once(engine: VLLMServer, proxy: FaultyProxy) -> None:
    plain = tokens(engine)
    proxy.once("asked_twice")
    assert tokens(engine) == plain


PATHS = (
    "/pause",
    "/start_weight_update",
    "/update_weights",
    "/finish_weight_update",
    "/reset_prefix_cache",
    "/update_weight_version",
    "/resume",
    "/collective_rpc",
    "/init_weight_transfer_engine",
)
# On every path: an answer that breaks off, and a call that fails. On the two paths whose answers are used: one that
# cannot be read.
FAULTS: list[Any] = [(fault, path) for fault in ("cut", "500") for path in PATHS]
FAULTS += [("truncated", path) for path in ("/update_weights", "/collective_rpc")]


@pytest.mark.parametrize(("fault", "path"), FAULTS)
def test_a_push_that_loses_a_call_is_not_repeated_by_itself_and_a_new_one_is_whole(
    path: str, fault: str, engine: VLLMServer, proxy: FaultyProxy
) -> None:
    model = make_model(seed=3)
    engine.transport.forget()  # type: ignore[union-attr]
    before = dict(proxy.calls)
    proxy.once(fault, path)
    try:
        push_weights(model, engine, 2)
    except EngineLost as lost:
        assert engine.version is None
        lost.recover()
    assert proxy.faults
    if path != "/collective_rpc":
        assert proxy.calls[path] == before.get(path, 0) + 1, "a call that is not idempotent was repeated"
    push_weights(model, engine, 3)
    record = ModuleProbe(model, engine, torch.float32).measure(1, every=True)
    check_probe(record, 3)


# The transport's own limit is longer than the test's: it is never waited for.
@pytest.mark.timeout(300)
@pytest.mark.parametrize("fault", ["cut", "500"])
def test_a_push_over_gloo_that_loses_its_call_is_given_up_at_once_and_a_new_one_is_whole(
    fault: str, proxy: FaultyProxy
) -> None:
    proxy.rule = lambda path: None
    engine, model = connect(proxy.url, timeout=600.0, transport="gloo"), make_model(seed=3)
    push_weights(model, engine, 1)
    proxy.once(fault, "/update_weights")
    with pytest.raises(EngineLost) as lost:
        push_weights(model, engine, 2)
    lost.value.recover()
    push_weights(model, engine, 3)
    check_probe(ModuleProbe(model, engine, torch.float32).measure(1, every=True), 3)
    engine.close()


def test_close_ends_a_waiting_call_and_may_be_called_twice(proxy: FaultyProxy) -> None:
    proxy.rule = lambda path: None
    engine = connect(proxy.url, timeout=60.0)
    push_weights(make_model(), engine, 1)
    proxy.rule, faults = lambda path: "late", proxy.faults
    ended: list[Exception] = []

    def ask() -> None:
        try:
            engine.generate(REQUESTS)
        except LockstepError as error:
            ended.append(error)

    waiting = threading.Thread(target=ask)
    waiting.start()
    proxy.wait_until(lambda: proxy.faults > faults)
    engine.close()
    engine.close()
    # Less than the time limit of the call.
    waiting.join(30)
    assert not waiting.is_alive()
    assert "closed" in str(ended[0])
    with pytest.raises(LockstepError):
        engine.generate(REQUESTS)


def test_a_server_that_stays_away_is_waited_for_no_longer_than_the_limit(
    engine: VLLMServer, proxy: FaultyProxy
) -> None:
    proxy.rule = lambda path: "503"
    with impatient(engine, LIMIT):
        with pytest.raises(EngineLost) as lost:
            engine.generate(REQUESTS)
        with pytest.raises(LockstepError, match="within 3 s"):
            lost.value.recover()


def test_one_server_under_two_urls_is_refused(server: Server, proxy: FaultyProxy) -> None:
    proxy.rule = lambda path: None
    with pytest.raises(InputError, match="same server"):
        connect(server.url, proxy.url)


def test_scores_by_weights_that_nobody_here_pushed_are_refused(server: Server, engine: VLLMServer) -> None:
    assert engine.score({"a": (7, 8, 9)})
    other = connect(server.url)
    try:
        push_weights(make_model(seed=9), other, 1)
        with pytest.raises(ProofError, match="did not push"):
            engine.score({"a": (7, 8, 9)})
    finally:
        other.close()


def test_a_wrong_key_is_refused_at_once(server: Server) -> None:
    with pytest.raises(InputError, match="does not accept the key"):
        connect(server.url, key="another-key-of-some-length")


def test_another_trainers_weights_are_noticed(server: Server, engine: VLLMServer) -> None:
    other = connect(server.url)
    try:
        push_weights(make_model(seed=9), other, 1)
        with pytest.raises(ProofError, match="did not push"):
            engine.generate(REQUESTS)
    finally:
        other.close()
