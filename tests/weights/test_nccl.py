"""The transport from GPU to GPU, without a GPU: what it refuses, who gets weights, where NCCL may listen."""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Listener
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from forked import Program
from test_transports import Worker, arrived_whole, over_groups, weights

from lockstep.errors import EngineLost, InputError
from lockstep.learn.methods.grpo import GRPOConfig
from lockstep.weights.wire import groups as devices
from lockstep.weights.wire.groups import (
    FROM_SENDER,
    DeviceChannel,
    Meeting,
    connect,
    gloo_group,
    nccl_environment,
    prove,
    ready_key,
)
from lockstep.weights.wire.network import NCCL, GlooTransport, check_gpus, identity_of
from lockstep.weights.wire.transport import choose_transport

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
    with pytest.raises(
        InputError, match=r"the trainer and the server at http://a:8000 use the same GPU \(GPU-2\)"
    ):
        check_gpus("GPU-2", apart)
    with pytest.raises(
        InputError, match="the server at http://a:8000 and the server at http://c:8000 use the same GPU"
    ):
        check_gpus("GPU-0", [*apart, OnGpus("http://c:8000", "GPU-1")])
    with pytest.raises(
        InputError, match="the server at http://d:8000 computes without an NVIDIA GPU; use auto"
    ):
        check_gpus("GPU-0", [*apart, OnGpus("http://d:8000", "")])


class Impostor(Worker):
    """Knows the secret when it connects over gloo, and another one in the second group."""

    def __init__(self, secret: str | None) -> None:
        super().__init__()
        self.got = torch.full((4 * 1500,), 7, dtype=torch.uint8)
        self._secret = secret

    def update_weights(self, info: dict[str, Any]) -> None:
        limit = timedelta(seconds=20)
        store = dist.TCPStore(
            info["host"], info["port"], is_master=False, timeout=limit, wait_for_workers=False
        )
        store.set(ready_key(info["rank"]), "")
        meeting = Meeting(store, info["secret"], info["rank"], info["size"], info["host"], 2.0, lambda: None)
        agreed = meeting.signed("group/")
        agreed.set(f"worker{info['rank']}", b"new")
        assert agreed.get("all") == b"new"
        self.control = connect(meeting)
        group = gloo_group(meeting.signed("device/"), meeting)
        with suppress(RuntimeError):
            secret = self._secret or info["secret"]
            prove(group, secret, info["rank"], info["size"], torch.device("cpu"))
        counts = torch.zeros(8, dtype=torch.uint8)
        with suppress(RuntimeError):
            for data in (counts, self.got):
                group.broadcast([data], FROM_SENDER).wait()


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


@pytest.fixture
def groups_made(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rank of each second group that is made, in order. A group of NCCL would be made at these places."""
    made: list[int] = []

    class Counted(DeviceChannel):
        def __init__(self, meeting: Meeting, *rest: Any) -> None:
            made.append(meeting.rank)
            super().__init__(meeting, *rest)

    monkeypatch.setattr(devices, "DeviceChannel", Counted)
    return made


def named(url: str, *failing: int) -> Worker:
    worker = Worker(*failing)
    worker.url = url
    return worker


def restarted(worker: Worker) -> Worker:
    """The worker of the same server after a restart: another process, which has no group."""
    worker.receiver.close()
    return named(worker.url)


def send(transport: GlooTransport, workers: Sequence[Worker], seed: int) -> None:
    sent = weights(seed)
    transport.send(sent, workers)
    assert all(arrived_whole(worker, sent) for worker in workers)


def push_threads() -> set[threading.Thread]:
    """The threads of pushes that are still there; those of other tests too."""
    return {t for t in threading.enumerate() if t.name.startswith(("lockstep-broadcast", "lockstep-meeting"))}


def test_pushes_of_a_run_use_one_group(groups_made: list[int]) -> None:
    transport, workers = over_groups(NCCL), [named("http://a"), named("http://b")]
    for seed in range(3):
        send(transport, workers, seed)
    assert sorted(groups_made) == [0, 1, 2]
    transport.close()


def test_a_server_that_was_started_again_gets_a_new_group_without_a_failed_push(
    groups_made: list[int],
) -> None:
    transport, workers = over_groups(NCCL), [named("http://a"), named("http://b")]
    send(transport, workers, 0)
    workers[1] = restarted(workers[1])
    for seed in (1, 2):
        send(transport, workers, seed)
    assert sorted(groups_made) == [0, 0, 1, 1, 2, 2]
    transport.close()


def test_other_servers_get_a_new_group(groups_made: list[int]) -> None:
    transport, workers = over_groups(NCCL), [named("http://a"), named("http://b")]
    send(transport, workers[:1], 0)
    send(transport, workers, 1)
    send(transport, workers[::-1], 2)
    assert sorted(groups_made) == [0, 0, 0, 1, 1, 1, 2, 2]
    transport.close()


@pytest.mark.parametrize("servers", [1, 2])
def test_a_push_that_failed_ends_its_group_and_the_next_makes_a_new_one(
    groups_made: list[int], servers: int
) -> None:
    """With two servers the other one has had all of the failed push, and still has its group."""
    transport = over_groups(NCCL)
    workers = [named(f"http://{number}") for number in range(servers)]
    send(transport, workers, 0)
    workers[-1]._fails_at = workers[-1].calls + 1
    with pytest.raises(EngineLost, match="the worker is gone"):
        transport.send(weights(1), workers)
    workers[-1]._fails_at = None
    for seed in (2, 3):
        send(transport, workers, seed)
    assert len(groups_made) == 2 * (1 + servers)
    transport.close()


def test_two_trainers_in_turn_make_a_group_each_time_and_every_push_arrives(groups_made: list[int]) -> None:
    one, other, worker = over_groups(NCCL), over_groups(NCCL), Worker()
    for seed in range(2):
        send(one, [worker], seed)
        send(other, [worker], 10 + seed)
    assert len(groups_made) == 8
    one.close()
    other.close()


class OtherProcess(Worker):
    """A server whose worker is a process of its own (`worker_process.py`)."""

    url = "http://other"

    def __init__(self, folder: Path, *words: str) -> None:
        super().__init__()
        socket_file = str(folder / "socket")
        with (
            Listener(socket_file, "AF_UNIX") as listener,
            (folder / "output").open("a+", encoding="utf-8") as output,
        ):
            command = [
                sys.executable,
                str(Path(__file__).with_name("worker_process.py")),
                socket_file,
                *words,
            ]
            self.program = Program(command, stdout=output, stderr=output)
            self._calls = listener.accept()

    def update_weights(self, info: dict[str, Any]) -> None:
        try:
            self._calls.send_bytes(json.dumps(info).encode())
            answer = json.loads(self._calls.recv_bytes())
        except (EOFError, OSError) as error:
            raise EngineLost("the server is gone", lambda: None) from error
        if "error" in answer:
            raise EngineLost(answer["error"], lambda: None)
        self.found = {name: torch.tensor(values) for name, values in answer["found"].items()}

    def kill(self) -> None:
        self.program.kill()
        self.program.wait(60)
        self._calls.close()


def test_a_server_that_is_killed_between_pushes_or_in_one_gets_a_new_group_when_it_is_back(
    groups_made: list[int], tmp_path: Path
) -> None:
    transport, other, killed = over_groups(NCCL), named("http://a"), OtherProcess(tmp_path)
    send(transport, [other, killed], 0)
    killed.kill()
    with pytest.raises(EngineLost, match="the server is gone"):
        transport.send(weights(1), [other, killed])
    dying = OtherProcess(tmp_path, "dies")
    with pytest.raises(EngineLost, match="the server is gone"):
        transport.send(weights(2), [other, dying])
    dying.kill()
    back = OtherProcess(tmp_path)
    before = len(groups_made)
    for seed in (3, 4):
        send(transport, [other, back], seed)
    # Of the trainer and of the worker in this process.
    assert sorted(groups_made[before:]) == [0, 1]
    transport.close()
    back.kill()


class Noting(Worker):
    """Notes the port at which the ranks of a push met."""

    def update_weights(self, info: dict[str, Any]) -> None:
        self.port = info["port"]
        super().update_weights(info)


def test_the_port_at_which_ranks_meet_closes_with_the_push_and_at_the_end_no_thread_is_left() -> None:
    before, transport, worker = push_threads(), over_groups(NCCL), Noting()
    send(transport, [worker], 0)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", worker.port))
    transport.close()
    worker.receiver.close()
    assert push_threads() <= before


def test_the_end_of_a_run_waits_a_bounded_time_for_its_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of a group hangs as NCCL's may. Gloo's does not."""
    before, transport, worker, released = push_threads(), over_groups(NCCL), Worker(), threading.Event()
    send(transport, [worker], 0)
    monkeypatch.setattr(devices, "END_LIMIT", 0.1)
    monkeypatch.setattr(dist.ProcessGroupGloo, "abort", lambda group: released.wait())
    transport.close()
    assert [thread.name for thread in push_threads() - before] == ["lockstep-broadcast"]
    released.set()


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
