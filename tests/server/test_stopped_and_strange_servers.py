"""Servers that hang, and servers that are not what the run assumes: one clear error in time, and nothing lost."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from conftest import VLLM
from servers import KEY, Server, connect, free_port
from tiny import make_model
from training import equal, make_trainer, train

from lockstep.engines.protocol import GenerationRequest, RequestKey, Sampling
from lockstep.errors import EngineLost, InputError, LockstepError, ProofError
from lockstep.server.keys import KEY_VARIABLE
from lockstep.sync.push import push_weights

pytestmark = VLLM

REQUESTS = [GenerationRequest(RequestKey(f"p{i}", 0), (7, 8, 9 + i), Sampling(12), 50 + i) for i in range(4)]


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, KEY)


@pytest.fixture(params=["api", "core"])
def stopped(request: pytest.FixtureRequest) -> str:
    return request.param


def test_a_stopped_server_is_lost_in_time_and_found_again_when_it_goes_on(server: Server, stopped: str) -> None:
    engine = connect(server.url, timeout=6.0)
    push_weights(make_model(), engine, 1)
    plain = engine.generate(REQUESTS)
    server.kill(stopped, signal.SIGSTOP)
    try:
        start = time.monotonic()
        with pytest.raises(EngineLost, match="within 6 s") as lost:
            engine.generate(REQUESTS)
        with pytest.raises(LockstepError, match="within 6 s"):
            lost.value.recover()
        assert time.monotonic() - start < 30
    finally:
        server.kill(stopped, signal.SIGCONT)
    engine.recover()
    push_weights(make_model(), engine, 2)
    again = engine.generate(REQUESTS)
    assert {k: c.token_ids for k, c in again.items()} == {k: c.token_ids for k, c in plain.items()}
    engine.close()


def test_a_run_that_lost_its_server_resumes_from_its_checkpoint_to_the_same_weights(
    server: Server, untied_dir: str, tmp_path: Path
) -> None:
    common = {"save_strategy": "steps", "save_steps": 1, "logging_steps": 1, "vllm_server_timeout": 8.0}
    expected = train(make_trainer(untied_dir, tmp_path / "whole", server.url, **common))

    def stop_in_the_third_step(completions: list, trainer_state: object, **columns: object) -> list[float]:
        if trainer_state.global_step == 1:  # type: ignore[attr-defined]
            server.kill("core", signal.SIGSTOP)
        return even_share(columns["completion_ids"])

    broken = make_trainer(untied_dir, tmp_path / "broken", server.url, reward=stop_in_the_third_step, **common)
    try:
        with pytest.raises(LockstepError, match="within 8 s"):
            train(broken)
    finally:
        server.kill("core", signal.SIGCONT)
    resumed = make_trainer(untied_dir, tmp_path / "broken", server.url, **common)
    found = train(resumed, resume_from_checkpoint=str(tmp_path / "broken" / "checkpoint-2"))
    assert equal(found, expected)


def even_share(completion_ids: object) -> list[float]:
    return [sum(i % 2 == 0 for i in ids) / len(ids) for ids in completion_ids]  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def by_hand(tied_dir: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """vLLM's server as someone started it: another model, dtype and log-probs than the run assumes, and no guard."""
    port = free_port()
    folder = tmp_path_factory.mktemp("by_hand")
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", tied_dir, "--port", str(port)]
    command += ["--host", "127.0.0.1", "--dtype", "bfloat16", "--max-model-len", "256", "--enforce-eager"]
    command += ["--enable-scale-out", "--worker-extension-cls", "lockstep.sync.vllm_worker.LockstepWorker"]
    command += ["--weight-transfer-config", '{"backend": "lockstep"}', "--kv-cache-memory-bytes", str(64 << 20)]
    with (folder / "log").open("w") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=out, env={**os.environ, "VLLM_SERVER_DEV_MODE": "1"}, start_new_session=True
        )
    server = Server(f"http://127.0.0.1:{port}", process, folder / "log")  # type: ignore[arg-type]
    try:
        server.await_health()
        yield server.url
    finally:
        process.terminate()
        process.wait(40)


@pytest.mark.long
def test_the_handshake_names_everything_that_differs_at_once(by_hand: str, untied_dir: str, tmp_path: Path) -> None:
    with pytest.raises(ProofError) as refused:
        make_trainer(untied_dir, tmp_path, by_hand)
    assert refused.value.check == "handshake"
    for name in ("architecture", "dtype", "logprobs_mode", "tie_word_embeddings"):
        assert name in refused.value.found, name
    assert "lockstep serve" in refused.value.fix


def test_a_vocabulary_of_another_size_is_refused(server: Server, tmp_path: Path) -> None:
    engine = connect(server.url)
    from lockstep.connection import Connection

    model = make_model()
    model.resize_token_embeddings(400)
    with pytest.raises(ProofError, match="vocab_size is 384 in the engine, training assumes 400"):
        Connection(engine).update_weights(model, 1)
    engine.close()


def test_a_server_that_takes_weights_otherwise_is_told_how_to_start(
    untied_dir: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The trainer's own check on what the worker says of itself; the worker is a real one in every other test.
    from lockstep.engines.server_calls import ServerCalls

    state = {"backend": "nccl", "world_size": 1, "copies": 1, "settings": {}, "updating": False, "instance": "x"}
    monkeypatch.setattr(ServerCalls, "workers", lambda self, method, *args: [state])
    monkeypatch.setattr(ServerCalls, "ailment", lambda self, limit: None)
    with pytest.raises(InputError, match=r"'nccl'.*--weight-transfer-config"):
        connect("http://127.0.0.1:9")


@pytest.mark.long
def test_a_hand_started_server_with_the_right_arguments_serves_training(
    by_hand: str, tied_dir: str, tmp_path: Path
) -> None:
    engine = connect(by_hand, key="no-guard-no-matter-which")
    model = make_model("llama", tied=True).to(torch.bfloat16)
    push_weights(model, engine, 1)
    assert engine.generate(REQUESTS).keys() == {r.key for r in REQUESTS}
    engine.close()
