"""Servers that hang or differ from what the run assumes: one clear error in time, and nothing is lost."""

from __future__ import annotations

import signal
from contextlib import ExitStack
from pathlib import Path

import pytest
from conftest import VLLM
from server_runs import equal, make_trainer, train
from servers import Server, connect, impatient
from tiny import make_model

from lockstep.contract.protocol import GenerationRequest, RequestKey
from lockstep.contract.sampling import Sampling
from lockstep.errors import EngineLost, InputError, LockstepError, ProofError
from lockstep.weights.push import push_weights

pytestmark = [*VLLM, pytest.mark.long, pytest.mark.usefixtures("server_key")]

REQUESTS = [GenerationRequest(RequestKey(f"p{i}", 0), (7, 8, 9 + i), Sampling(12), 50 + i) for i in range(4)]


@pytest.fixture(params=["api", "core"])
def stopped(request: pytest.FixtureRequest) -> str:
    return request.param


def test_a_stopped_server_is_lost_in_time_and_found_again_when_it_goes_on(
    server: Server, stopped: str
) -> None:
    engine = connect(server.url)
    push_weights(make_model(), engine, 1)
    plain = engine.generate(REQUESTS)
    server.kill(stopped, signal.SIGSTOP)
    try:
        with impatient(engine, 2.0):
            with pytest.raises(EngineLost, match="within 2 s") as lost:
                engine.generate(REQUESTS)
            with pytest.raises(LockstepError, match="within 2 s"):
                lost.value.recover()
    finally:
        server.kill(stopped, signal.SIGCONT)
    engine.recover()
    push_weights(make_model(), engine, 2)
    again = engine.generate(REQUESTS)
    assert {k: c.token_ids.tolist() for k, c in again.items()} == {
        k: c.token_ids.tolist() for k, c in plain.items()
    }
    engine.close()


def test_a_run_that_lost_its_server_resumes_from_its_checkpoint_to_the_same_weights(
    server: Server, untied_dir: str, tmp_path: Path
) -> None:
    common = {"save_strategy": "steps", "save_steps": 1, "logging_steps": 1}
    expected = train(make_trainer(untied_dir, tmp_path / "whole", server.url, **common))

    def stop_in_the_third_step(completions: list, trainer_state: object, **columns: object) -> list[float]:
        if trainer_state.global_step == 1:  # type: ignore[attr-defined]
            server.kill("core", signal.SIGSTOP)
            short.enter_context(impatient(broken.engine, 2.0))
        return even_share(columns["completion_ids"])

    broken = make_trainer(
        untied_dir, tmp_path / "broken", server.url, reward=stop_in_the_third_step, **common
    )
    try:
        with ExitStack() as short, pytest.raises(LockstepError, match="within 2 s"):
            train(broken)
    finally:
        server.kill("core", signal.SIGCONT)
    resumed = make_trainer(untied_dir, tmp_path / "broken", server.url, **common, resume_with_changes=True)
    found = train(resumed, resume_from_checkpoint=str(tmp_path / "broken" / "checkpoint-2"))
    assert equal(found, expected)


def even_share(completion_ids: object) -> list[float]:
    return [sum(i % 2 == 0 for i in ids) / len(ids) for ids in completion_ids]  # type: ignore[attr-defined]


def test_a_vocabulary_of_another_size_is_refused(server: Server, tmp_path: Path) -> None:
    engine = connect(server.url)
    from lockstep.connection import Connection

    model = make_model()
    model.resize_token_embeddings(400)
    with pytest.raises(ProofError, match="vocab_size is 384 in the engine, training assumes 400"):
        Connection(engine).update_weights(model, 1)
    engine.close()


def test_a_server_with_another_weight_transfer_is_refused_with_the_command_to_start_it(
    untied_dir: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # This tests the trainer's check of the worker's report. In every other test the worker is a real one.
    from lockstep.engines.servers.calls import ServerCalls

    state = {
        "backend": "nccl",
        "world_size": 1,
        "copies": 1,
        "settings": {},
        "updating": False,
        "instance": "x",
    }
    monkeypatch.setattr(ServerCalls, "workers", lambda self, method, *args: [state])
    monkeypatch.setattr(ServerCalls, "health_problem", lambda self, limit: None)
    with pytest.raises(InputError, match=r"'nccl'.*--weight-transfer-config"):
        connect("http://127.0.0.1:9")
