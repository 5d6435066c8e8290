"""The transport from GPU to GPU, on a machine without a GPU: what it refuses, who gets weights, and where NCCL may listen."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_transports import Worker, arrived_whole, over_groups, weights

from lockstep.errors import InputError
from lockstep.sync.wire.gloo import NCCL
from lockstep.sync.wire.groups.channel import FROM_SENDER, GlooChannel
from lockstep.sync.wire.groups.devices import nccl_environment
from lockstep.sync.wire.groups.meeting import Meeting, connect, gloo_group, ready_key
from lockstep.sync.wire.groups.proof import prove
from lockstep.sync.wire.nccl import check_gpus, identity_of
from lockstep.sync.wire.transport import choose_transport
from lockstep.training.methods.grpo_config import GRPOConfig

INTERFACE = "NCCL_SOCKET_IFNAME"
without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")


class OnGpus(Worker):
    """A server whose workers compute on GPUs with these UUIDs."""

    def __init__(self, url: str, *gpus: str) -> None:
        super().__init__()
        self.url, self._gpus = url, gpus

    def workers(self, method: str, *args: str) -> list[Any]:
        assert method == "lockstep_device"
        return [{"gpu": gpu} for gpu in self._gpus]


@without_gpu
def test_a_trainer_without_a_gpu_is_refused_before_it_asks_a_server() -> None:
    with pytest.raises(InputError, match="this process has no NVIDIA GPU; use auto"):
        choose_transport(NCCL, [OnGpus("http://a:8000", "GPU-1")], "127.0.0.1", 0, 20.0)
    with pytest.raises(InputError, match="this process has no NVIDIA GPU; use auto"):
        GRPOConfig(output_dir="unused", vllm_mode="server", vllm_weight_transport=NCCL)
    assert identity_of(torch.device("cpu")) == ""


def test_processes_need_a_gpu_each() -> None:
    apart = [OnGpus("http://a:8000", "GPU-1", "GPU-2"), OnGpus("http://b:8000", "GPU-3")]
    check_gpus("GPU-0", apart)
    with pytest.raises(InputError, match=r"the trainer and the server at http://a:8000 use the same GPU \(GPU-2\)"):
        check_gpus("GPU-2", apart)
    with pytest.raises(
        InputError, match="the server at http://a:8000 and the server at http://c:8000 use the same GPU"
    ):
        check_gpus("GPU-0", [*apart, OnGpus("http://c:8000", "GPU-1")])
    with pytest.raises(InputError, match="the server at http://d:8000 computes without an NVIDIA GPU; use auto"):
        check_gpus("GPU-0", [*apart, OnGpus("http://d:8000", "")])


class Impostor(Worker):
    """Knows the secret when it connects over gloo, and another one in the second group."""

    def __init__(self, secret: str | None) -> None:
        super().__init__()
        self.got = torch.full((4 * 1500,), 7, dtype=torch.uint8)
        self._secret = secret

    def update_weights(self, info: dict[str, Any]) -> None:
        limit = timedelta(seconds=20)
        store = dist.TCPStore(info["host"], info["port"], is_master=False, timeout=limit, wait_for_workers=False)
        store.set(ready_key(info["rank"]), "")
        meeting = Meeting(store, info["secret"], info["rank"], info["size"], info["host"], 2.0, lambda: None)
        self.control = connect(meeting)
        group = gloo_group(meeting.signed("device/"), meeting)
        with suppress(RuntimeError):
            secret = self._secret or info["secret"]
            prove(group, secret, info["rank"], info["size"], torch.device("cpu"))
        counts = torch.zeros(8, dtype=torch.uint8)
        with suppress(RuntimeError):
            for data in (counts, self.got):
                group.broadcast([data], FROM_SENDER).wait()
            GlooChannel(self.control, meeting).meet()


def test_a_program_without_the_secret_in_the_second_group_gets_no_weights() -> None:
    sent, impostor = [("t", torch.zeros(1500))], Impostor("another")
    transport = over_groups(NCCL)
    with pytest.raises(RuntimeError, match="another program took part in this push, so no weights were sent"):
        transport.send(sent, [impostor])
    assert impostor.got.eq(7).all()
    worker = Worker()
    transport.send(sent, [worker])
    assert arrived_whole(worker, sent)


def test_an_impostor_with_the_secret_would_get_weights() -> None:
    """Otherwise the test above would show nothing."""
    knowing = Impostor(None)
    over_groups(NCCL).send([("t", torch.zeros(1500))], [knowing])
    assert knowing.got.eq(0).all()


class Slow(Worker):
    """Loads the last chunk slowly. Notes when its part of the push ends."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._seconds = seconds
        self.end = 0.0

    def update_weights(self, info: dict[str, Any]) -> None:
        super().update_weights(info)
        self.end = time.monotonic()

    def _load(self, arrived: Any) -> None:
        super()._load(arrived)
        time.sleep(self._seconds)
        self.loaded = time.monotonic()


def test_no_rank_leaves_before_all_ranks_have_received_everything() -> None:
    """A rank may still pass on data over NCCL when its own operation has ended."""
    fast, slow = Slow(0.0), Slow(0.3)
    over_groups(NCCL).send(weights(0), [fast, slow])
    assert fast.end >= slow.loaded


@pytest.mark.parametrize(
    ("host", "chosen", "processes", "expected"),
    [
        ("127.0.0.1", None, 1, "=lo"),
        ("localhost", None, 1, "=lo"),
        ("10.0.0.1", None, 1, None),
        ("127.0.0.1", "eth1", 1, "eth1"),
        ("127.0.0.1", None, 2, None),
    ],
)
def test_nccl_listens_on_loopback_unless_it_is_told_otherwise(
    monkeypatch: pytest.MonkeyPatch, host: str, chosen: str | None, processes: int, expected: str | None
) -> None:
    monkeypatch.delenv(INTERFACE, raising=False)
    if chosen:
        monkeypatch.setenv(INTERFACE, chosen)
    monkeypatch.setattr(dist, "is_initialized", lambda: processes > 1)
    monkeypatch.setattr(dist, "get_world_size", lambda: processes)
    with suppress(ZeroDivisionError), nccl_environment(host):
        assert os.environ.get(INTERFACE) == expected
        raise ZeroDivisionError
    assert os.environ.get(INTERFACE) == chosen
