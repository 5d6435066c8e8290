"""The transports between a trainer and workers that the test starts: the right data arrives, within the stated memory.

On a CPU, the transport from GPU to GPU broadcasts over a second group of gloo instead of NCCL. Everything else of it
runs here.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from typing import Any

import pytest
import torch
from torch.distributed import TCPStore

from lockstep.errors import EngineLost, InputError
from lockstep.weights.wire import cuda_ipc, shared_memory
from lockstep.weights.wire import network as gloo
from lockstep.weights.wire import stream as chunks_module
from lockstep.weights.wire import transport as transport_module
from lockstep.weights.wire.cuda_ipc import CudaIPCTransport
from lockstep.weights.wire.groups import Meeting, connect, ready_key
from lockstep.weights.wire.network import GLOO, NCCL, GlooTransport, NCCLTransport, Receiver
from lockstep.weights.wire.shared_memory import Segment, SharedMemoryTransport
from lockstep.weights.wire.stream import Named, chunks
from lockstep.weights.wire.transport import choose_transport

CHUNK = 4096
# One tensor is larger than a chunk, one is larger than half a chunk, and many share a chunk.
SIZES = [700, 1500, 3, 0, 12, 350, 350, 350, 600, 64, 200, 200, 200, 200]


class Worker:
    """A server's worker that loads slowly, and checks whether the data changes while it loads."""

    url = "http://127.0.0.1:1"
    world_size = 1
    available_bytes = 1 << 40

    def __init__(self, fails_at: int | None = None) -> None:
        self.found: dict[str, torch.Tensor] = {}
        self.receiver = Receiver()
        self.segment: Segment | None = None
        self.calls = 0
        self._fails_at = fails_at

    def init_transfer(self, info: dict[str, Any]) -> None:
        self.segment = cuda_ipc.open_segment(
            info["segment"], info["bytes"], info.get("buffer"), torch.device("cpu")
        )

    def update_weights(self, info: dict[str, Any]) -> None:
        if info["transport"] in (GLOO, NCCL):
            coming = self.receiver.receive(info, info["chunks"])
        else:
            assert self.segment is not None
            coming = self.segment.pieces(
                info["chunks"],
                push=info["push"],
                worker=info["rank"],
                workers=info["size"],
                timeout=info["timeout"],
            )
        with closing(coming):
            for arrived in coming:
                self.take(arrived)

    def workers(self, method: str, *args: str) -> list[Any]:
        raise NotImplementedError

    def take(self, arrived: Sequence[Named]) -> None:
        self.calls += 1
        if self.calls == self._fails_at:
            raise EngineLost("the worker is gone", lambda: None)
        before = [tensor.clone() for _, tensor in arrived]
        time.sleep(0.01)
        assert all(torch.equal(a, b) for a, (_, b) in zip(before, arrived, strict=True)), (
            "overwritten while it was loaded"
        )
        self.found |= {name: tensor.clone() for name, tensor in arrived}


def weights(seed: int) -> list[Named]:
    noise = torch.Generator().manual_seed(seed)
    return [(f"t{i}", torch.randn(size, generator=noise)) for i, size in enumerate(SIZES)]


def arrived_whole(worker: Worker, sent: Iterable[Named]) -> bool:
    return all(torch.equal(worker.found[name], tensor) for name, tensor in sent)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    def small(tensors: Iterable[Named], limit: int = CHUNK) -> Any:
        return chunks(tensors, limit)

    monkeypatch.setattr(cuda_ipc, "mapped", cuda_ipc.mapped)
    monkeypatch.setattr(shared_memory, "chunks", small)
    monkeypatch.setattr(gloo.stream, "chunks", small)
    monkeypatch.setattr(gloo, "CHUNK_BYTES", CHUNK)


def over_groups(name: str, limit: float = 20.0) -> GlooTransport:
    """A transport that connects the ranks of each push by torch.distributed."""
    if name == GLOO:
        return GlooTransport("127.0.0.1", 0, limit)
    return NCCLTransport("127.0.0.1", 0, limit, torch.device("cpu"))


class OneBuffer(CudaIPCTransport):
    """The buffer is memory of this process. `tests/pretend_cuda/ipc.py` has two processes, and handles."""

    def shared_buffer(self, size: int, servers: int) -> tuple[torch.Tensor | None, list[dict[str, Any]]]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(cuda_ipc, "exported", lambda buffer: [])
            found = super().shared_buffer(size, servers)
        cuda_ipc.mapped = lambda handle, device: self.buffer  # type: ignore[assignment]
        return found


GROUPS = [GLOO, NCCL]
TRANSPORTS: dict[str, Callable[[], Any]] = {
    "cuda_ipc": lambda: OneBuffer(20.0, torch.device("cpu")),
    "shared_memory": lambda: SharedMemoryTransport(20.0),
    GLOO: lambda: over_groups(GLOO),
    NCCL: lambda: over_groups(NCCL),
}


@pytest.mark.parametrize("name", TRANSPORTS)
@pytest.mark.parametrize("servers", [1, 2])
def test_nothing_is_overwritten_before_every_worker_has_loaded_it(name: str, servers: int) -> None:
    transport, workers = TRANSPORTS[name](), [Worker() for _ in range(servers)]
    for seed in range(2):
        sent = weights(seed)
        transport.send(sent, workers)
        assert all(arrived_whole(worker, sent) for worker in workers)
    transport.close()


@pytest.mark.parametrize("name", TRANSPORTS)
@pytest.mark.parametrize("fails_at", [1, 3])
def test_a_push_after_one_that_failed_arrives_whole(name: str, fails_at: int) -> None:
    transport, worker = TRANSPORTS[name](), Worker(fails_at)
    with pytest.raises((EngineLost, RuntimeError), match="the worker is gone"):
        transport.send(weights(0), [worker])
    transport.forget()
    sent = weights(1)
    transport.send(sent, [worker])
    assert arrived_whole(worker, sent)
    transport.close()


class DeadServersWorker(Worker):
    """A worker that lives on and reads nothing more after its server died: it was stopped."""

    def update_weights(self, info: dict[str, Any]) -> None:
        self.coming = self.receiver.receive(info, info["chunks"])
        next(self.coming)
        raise EngineLost("the server is gone", lambda: None)


@pytest.mark.parametrize("name", GROUPS)
def test_a_push_ends_with_its_server_even_if_a_worker_stays_connected(name: str) -> None:
    """The tensors are larger than what the sockets hold, so that gloo waits for a reader."""
    transport, worker = over_groups(name), DeadServersWorker()
    began = time.monotonic()
    with pytest.raises(EngineLost, match="the server is gone"):
        transport.send([(f"t{i}", torch.zeros(8_000_000)) for i in range(8)], [worker])
    assert time.monotonic() - began < 10
    worker.coming.close()
    live, sent = Worker(), weights(1)
    transport.send(sent, [live])
    assert arrived_whole(live, sent)


class Killed(Worker):
    """The worker of a server that is killed at some point of a push."""

    def __init__(self, stage: str) -> None:
        super().__init__()
        self._stage = stage

    def update_weights(self, info: dict[str, Any]) -> None:
        if self._stage == "connected":
            store = TCPStore(info["host"], info["port"], is_master=False, wait_for_workers=False)
            store.set(ready_key(info["rank"]), "")
        if self._stage == "met":
            # It does not take part in the second group.
            store = TCPStore(info["host"], info["port"], is_master=False, wait_for_workers=False)
            store.set(ready_key(info["rank"]), "")
            meeting = Meeting(
                store, info["secret"], info["rank"], info["size"], info["host"], 60.0, lambda: None
            )
            meeting.signed("group/").set(f"worker{info['rank']}", b"new")
            self.control = connect(meeting)
        if self._stage == "receiving":
            self.coming = self.receiver.receive(info, info["chunks"])
            next(self.coming)
        raise EngineLost("the server is gone", lambda: None)


@pytest.mark.parametrize(
    ("name", "stage"),
    [
        (GLOO, "called"),
        (GLOO, "connected"),
        (GLOO, "receiving"),
        (NCCL, "connected"),
        (NCCL, "met"),
        (NCCL, "receiving"),
    ],
)
def test_a_push_ends_on_all_servers_when_one_of_them_dies(name: str, stage: str) -> None:
    """Gloo alone would wait for the dead one until the time limit, and NCCL without end, on every machine."""
    transport, dead, other = over_groups(name, 60.0), Killed(stage), Worker()
    began = time.monotonic()
    with pytest.raises(EngineLost, match="the server is gone"):
        transport.send([(f"t{i}", torch.zeros(8_000_000)) for i in range(8)], [other, dead])
    assert time.monotonic() - began < 20
    sent = weights(1)
    transport.send(sent, [other])
    assert arrived_whole(other, sent)


def test_shared_memory_is_two_chunks_and_a_worker_of_it_has_no_memory_of_its_own() -> None:
    transport, worker = SharedMemoryTransport(20.0), Worker()
    largest_tensor = 4 * max(SIZES)
    transport.send(weights(0), [worker])
    assert worker.segment is not None
    # The counters of the turns; in each slot, the counts of its chunk.
    counters = counts = chunks_module.ALIGNMENT
    assert worker.segment.memory.numel() <= counters + 2 * (
        counts + chunks_module.aligned(max(CHUNK, largest_tensor))
    )
    assert worker.receiver.buffer.numel() == 0


def test_cuda_ipc_has_one_slot_and_the_same_buffer_after_a_failure() -> None:
    """A process that was killed never gives back what it had mapped, so a new buffer each time would fill the GPU."""
    transport, worker = OneBuffer(20.0, torch.device("cpu")), Worker()
    transport.send(weights(0), [worker])
    assert transport.buffer is not None
    kept = transport.buffer.data_ptr()
    counts = chunks_module.ALIGNMENT
    assert transport.buffer.numel() <= counts + chunks_module.aligned(max(CHUNK, 4 * max(SIZES)))
    assert worker.segment is not None
    assert worker.segment.memory.numel() <= chunks_module.ALIGNMENT
    transport.forget()
    transport.send(weights(1), [worker])
    assert transport.buffer.data_ptr() == kept
    assert arrived_whole(worker, weights(1))


@pytest.mark.parametrize("sizes", [SIZES, [size for size in SIZES if size <= 600], [100] * 30, [3]])
@pytest.mark.parametrize("name", GROUPS)
def test_a_worker_holds_one_chunk_or_one_larger_tensor_and_keeps_it(sizes: list[int], name: str) -> None:
    worker, transport = Worker(), over_groups(name)
    sent = [(f"t{i}", torch.randn(size)) for i, size in enumerate(sizes)]
    transport.send(sent, [worker])
    kept = worker.receiver.buffer.data_ptr()
    transport.send(sent, [worker])
    assert arrived_whole(worker, sent)
    assert worker.receiver.buffer.numel() <= max(CHUNK, 4 * max(sizes))
    assert worker.receiver.buffer.data_ptr() == kept


@pytest.fixture
def full_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shared memory that is too small for a segment, as in a container."""

    def allocate(handle: int, offset: int, size: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", allocate)
    monkeypatch.setattr(transport_module, "shares_memory", lambda server: True)


def test_auto_goes_over_to_gloo_and_says_so_when_shared_memory_is_too_small(
    full_memory: None, capsys: pytest.CaptureFixture[str]
) -> None:
    worker = Worker()
    transport = choose_transport("auto", [worker], "127.0.0.1", 0, 20.0)
    for seed in range(2):
        transport.send(weights(seed), [worker])
        assert arrived_whole(worker, weights(seed))
    transport.close()
    said = capsys.readouterr().out
    assert said.count("lockstep: shared memory has no room for") == 1
    assert "over gloo" in said


def test_shared_memory_that_was_asked_for_and_is_too_small_is_refused(full_memory: None) -> None:
    transport = choose_transport("shared_memory", [Worker()], "127.0.0.1", 0, 20.0)
    with pytest.raises(InputError, match="set vllm_weight_transport to gloo"):
        transport.send(weights(0), [Worker()])
