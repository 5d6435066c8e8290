"""Pushes to real servers contain only the changed elements.

A server that has lost the earlier weights is sent all weights.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import peft
import pytest
import torch
from conftest import VLLM
from servers import Server, connect, serve
from tiny import make_model
from transformers import PreTrainedModel

from lockstep.engines.servers.server import VLLMServer
from lockstep.errors import EngineLost
from lockstep.watch.modules import ModuleProbe, check_probe
from lockstep.weights.push import LAST_PUSHES, SyncRecord, push_weights

pytestmark = VLLM
TRANSPORTS = ["shared_memory", "gloo"]


@pytest.fixture(scope="module")
def bf16_server(untied_dir: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serve(untied_dir, tmp_path_factory.mktemp("changes"), dtype="bfloat16") as running:
        yield running


def proven(model: PreTrainedModel, engine: VLLMServer, version: int) -> SyncRecord:
    """A push, and the comparison of every module that the server runs."""
    record = push_weights(model, engine, version)
    check_probe(ModuleProbe(model, engine, torch.bfloat16).measure(version, every=True), version)
    return record


def moved(model: PreTrainedModel, start: int) -> PreTrainedModel:
    """One element in 50 gets another value."""
    with torch.no_grad():
        for p in model.parameters():
            p.view(-1)[start::50] *= 1.5
    return model


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_server_computes_with_what_changed(bf16_server: Server, transport: str) -> None:
    engine, model = connect(bf16_server.url, transport=transport), make_model()
    whole = proven(model, engine, 0)
    assert whole.sent_bytes == whole.bytes
    assert proven(model, engine, 1).sent_bytes == 0
    for version in range(2, 5):
        record = proven(moved(model, version), engine, version)
        assert record.in_full == ""
        assert record.changed == (pytest.approx(1 / 50, rel=0.1) if transport == "gloo" else None)
        assert (
            record.sent_bytes < record.bytes / 20
            if transport == "gloo"
            else record.sent_bytes == record.bytes
        )
    # The k of q, k and v, which vLLM fuses; then a tensor alone; then frozen layers.
    for name, most in {
        "model.layers.1.self_attn.k_proj.weight": 0.11,
        "lm_head.weight": 0.25,
        "model.norm.weight": 0.01,
    }.items():
        with torch.no_grad():
            model.get_parameter(name)[0] += 0.5
        record = proven(model, engine, version := version + 1)
        assert 0 < record.sent_bytes < most * record.bytes
    engine.close()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_adapters_are_sent_merged_where_they_changed_the_weights(bf16_server: Server, transport: str) -> None:
    engine = connect(bf16_server.url, transport=transport)
    model = peft.get_peft_model(make_model(), peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"]))
    proven(model, engine, 0)
    for version in (1, 2):
        with torch.no_grad():
            for name, p in model.named_parameters():
                if "lora_B" in name and "layers.1." in name:
                    p += torch.randn(p.shape, generator=torch.Generator().manual_seed(version)) / 5
        record = proven(model, engine, version)
        assert 0 < record.sent_bytes < record.bytes / 2
        assert record.in_full == ""
    engine.close()


def test_another_trainers_push_is_followed_by_a_whole_one(
    bf16_server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    """With shared memory, the other trainer's push ends this trainer's segment, and so loses the server."""
    engine, other = (connect(bf16_server.url, transport="gloo") for _ in range(2))
    model = make_model()
    push_weights(model, engine, 0)
    push_weights(make_model(seed=4), other, 0)
    with caplog.at_level(logging.WARNING, "lockstep"):
        record = proven(moved(model, 3), engine, 1)
    assert record.sent_bytes == record.bytes
    assert "does not hold the version that was pushed last" in caplog.text
    assert proven(moved(model, 5), engine, 2).in_full == ""
    engine.close()
    other.close()


def test_changes_for_another_base_are_found_by_the_digest_and_followed_by_a_whole_push(
    bf16_server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    """The trainer's copy is ahead of the server's: the server writes the next changes into older weights."""
    engine, model = connect(bf16_server.url, transport="gloo"), make_model()
    push_weights(model, engine, 0)
    copies = LAST_PUSHES[engine].copies
    copies["model.layers.0.mlp.up_proj.weight"][3] *= 2
    model.get_parameter("model.layers.0.mlp.up_proj.weight").data[3] *= 2
    with caplog.at_level(logging.WARNING, "lockstep"):
        record = proven(moved(model, 3), engine, 1)
    assert "the bytes of 1 of" in record.in_full
    assert "model.layers.0.mlp.up_proj.weight" in caplog.text
    assert record.sent_bytes == record.bytes
    engine.close()


# A server of its own, of two workers.
@pytest.mark.long
def test_every_worker_of_a_split_model_puts_the_same_tensors_together(
    untied_dir: str, tmp_path: Path
) -> None:
    with serve(untied_dir, tmp_path, "--tensor_parallel_size", "2", dtype="bfloat16") as server:
        engine, model = connect(server.url, transport="gloo"), make_model()
        proven(model, engine, 0)
        for version in (1, 2):
            record = proven(moved(model, version), engine, version)
            assert record.in_full == ""
            assert 0 < record.sent_bytes < record.bytes / 20
        engine.close()


@pytest.mark.long
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_server_that_was_killed_between_two_pushes_is_sent_everything(
    bf16_server: Server, transport: str
) -> None:
    engine, model = connect(bf16_server.url, transport=transport), make_model()
    proven(model, engine, 0)
    assert proven(moved(model, 1), engine, 1).in_full == ""
    bf16_server.restart()
    with pytest.raises(EngineLost) as lost:
        push_weights(moved(model, 2), engine, 2)
    lost.value.recover()
    record = proven(model, engine, 3)
    assert record.sent_bytes == record.bytes
    assert proven(moved(model, 3), engine, 4).in_full == ""
    engine.close()
