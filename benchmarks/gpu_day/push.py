"""The part `push` of `make gpu-day`: weights go to a second process, on the same GPU and on one of its own.

NCCL accepts no two processes on one GPU. With one GPU, only a group of one process is made, which broadcasts to
itself. In a rehearsal on a CPU, gloo takes the place of NCCL, and CUDA IPC is not measured.
"""

from __future__ import annotations

import json
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import torch

from benchmarks.gpu_day.measuring import Row, Sizes, device, make_model, measured, refusals, synchronize
from lockstep.contract.tensors import digest_of_all, tensor_specs
from lockstep.weights.source import PlainSource
from lockstep.weights.wire import cuda_ipc
from lockstep.weights.wire.cuda_ipc import CudaIPCTransport
from lockstep.weights.wire.groups import DeviceChannel, Meeting, listen, new_secret, open_store
from lockstep.weights.wire.network import GLOO, NCCL, GlooTransport, NCCLTransport, Receiver, identity_of
from lockstep.weights.wire.shared_memory import NAME as SHARED_MEMORY
from lockstep.weights.wire.shared_memory import Segment, SharedMemoryTransport

_HOST = "127.0.0.1"
# Seconds that one push, or the start of the second process, may take.
_LIMIT = 90.0


def push(sizes: Sizes) -> Iterator[Row]:
    """Seconds of a group of one process, of digests, and of pushes to a second process."""
    where, model = device(), make_model(sizes).to(torch.bfloat16)
    tensors = list(PlainSource(model.to(where)))
    size = sum(tensor.nbytes for _, tensor in tensors)
    yield from _alone(tensors, where, size, sizes.repeats)
    same: dict[str, Callable[[], Any]] = {SHARED_MEMORY: lambda: SharedMemoryTransport(_LIMIT)}
    if where.type == "cuda":
        where = torch.device("cuda", torch.cuda.current_device())
        same[cuda_ipc.NAME] = lambda: CudaIPCTransport(_LIMIT, where)
    else:
        yield {"way": cuda_ipc.NAME, "what": "not measured: this needs a GPU"}
    yield from _to_second_process(same, tensors, where, where, size, sizes.repeats)
    other = torch.device("cuda", 1) if where.type == "cuda" else where
    if where.type == "cuda" and torch.cuda.device_count() < 2:
        yield {
            "way": "to a second process",
            "what": "not measured: this needs two GPUs, and this machine has one",
        }
        return
    where = torch.device("cuda", 0) if where.type == "cuda" else where
    makers: dict[str, Callable[[], Any]] = {
        NCCL: lambda: NCCLTransport(_HOST, 0, _LIMIT, where),
        GLOO: lambda: GlooTransport(_HOST, 0, _LIMIT, deltas=False),
    }
    yield from _to_second_process(makers, tensors, where, other, size, sizes.repeats)


def _to_second_process(
    makers: dict[str, Callable[[], Any]],
    tensors: list[tuple[str, torch.Tensor]],
    where: torch.device,
    other: torch.device,
    size: int,
    repeats: int,
) -> Iterator[Row]:
    with _second_process(str(other)) as receiver:
        for name, make in makers.items():
            row: Row = {
                "way": name,
                "what": "a push to a second process",
                "devices": f"{where} to {other}",
                "MB": size / 1e6,
            }
            with refusals(row) as failed:
                if name == cuda_ipc.NAME:
                    cuda_ipc.check_shared([receiver], where)
                transport, seconds = make(), []
                for _ in range(repeats + 1):
                    synchronize()
                    start = time.perf_counter()
                    transport.send(tensors, [receiver])
                    seconds.append(time.perf_counter() - start)
                # The first push loads libraries.
                row |= _rate(statistics.median(seconds[1:]), size)
                row["digests"] = (
                    "equal" if receiver.digest() == digest_of_all(tensor_specs(tensors)) else "DIFFERENT"
                )
                row["passed"] = row["digests"] == "equal"
            yield row | failed


def _alone(
    tensors: list[tuple[str, torch.Tensor]], where: torch.device, size: int, repeats: int
) -> Iterator[Row]:
    """A group whose only rank is this process."""
    row: Row = {"way": NCCL, "devices": str(where), "what": "make and end a group of one process"}
    with refusals(row) as failed:
        _, figures = measured(lambda: _channel_of_one(where).close(), repeats)
        row["seconds"] = figures["seconds"]
    yield row | failed
    row = {"way": NCCL, "devices": str(where), "what": "broadcast the weights to itself", "MB": size / 1e6}
    with refusals(row) as failed:
        parts = [tensor.contiguous().flatten().view(torch.uint8) for _, tensor in tensors]
        with _channel_of_one(where) as channel:
            _, figures = measured(lambda: channel.broadcast(parts), repeats)
        row |= _rate(figures["seconds"], size)
    yield row | failed
    _, figures = measured(lambda: tensor_specs(tensors), repeats)
    yield {
        "way": "digests of the weights",
        "devices": str(where),
        "MB": size / 1e6,
        **_rate(figures["seconds"], size),
    }


def _channel_of_one(where: torch.device) -> DeviceChannel:
    listener = listen(_HOST, 0)
    port = listener.getsockname()[1]
    store = open_store(_HOST, port, _LIMIT, listener.detach())
    meeting = Meeting(store, new_secret(), 0, 1, _HOST, _LIMIT, lambda: None)
    return DeviceChannel(meeting, where)


def _rate(seconds: float, size: int) -> Row:
    return {"seconds": seconds, "GB/s": size / seconds / 1e9}


class _SecondProcess:
    """The trainer's view of the second process: the calls that a transport makes to a server."""

    url = "the second process"
    world_size = 1
    available_bytes = 1 << 40

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def init_transfer(self, info: dict[str, Any]) -> None:
        self._ask("init_transfer", info)

    def update_weights(self, info: dict[str, Any]) -> None:
        self._ask("update_weights", info)

    def workers(self, method: str, *args: str) -> list[Any]:
        return [self._ask(method, *args)]

    def digest(self) -> str:
        """Digest of the weights that have arrived."""
        return self._ask("digest")

    def _ask(self, method: str, *given: Any) -> Any:
        self._pipe.send_bytes(json.dumps([method, given]).encode())
        if not self._pipe.poll(_LIMIT):
            raise RuntimeError(f"the second process did not answer within {_LIMIT:.0f} s")
        answer = json.loads(self._pipe.recv_bytes())
        if "failed" in answer:
            raise RuntimeError(answer["failed"])
        return answer["is"]


@contextmanager
def _second_process(where: str) -> Iterator[_SecondProcess]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_receive, args=(theirs, where), daemon=True)
    process.start()
    theirs.close()
    try:
        yield _SecondProcess(ours)
    finally:
        ours.close()
        process.join(20)
        process.kill()


class _Worker:
    """The second process. It copies the tensors of each push into memory of its own, as a server's engine does."""

    def __init__(self, own: torch.device) -> None:
        self._own, self._receiver = own, Receiver(own)
        self._segment: Segment | None = None
        self._held: dict[str, torch.Tensor] = {}

    def init_transfer(self, info: dict[str, Any]) -> None:
        self._segment = cuda_ipc.open_segment(info["segment"], info["bytes"], info.get("buffer"), self._own)

    def update_weights(self, info: dict[str, Any]) -> None:
        if info["transport"] in (GLOO, NCCL):
            incoming = self._receiver.receive(info, info["chunks"])
        else:
            assert self._segment is not None
            names = {"push": "push", "worker": "rank", "workers": "size", "timeout": "timeout"}
            incoming = self._segment.pieces(
                info["chunks"], **{name: info[key] for name, key in names.items()}
            )
        for arrived in incoming:
            self._held |= {name: tensor.to(self._own, copy=True) for name, tensor in arrived}

    def lockstep_device(self) -> dict[str, str]:
        return {"gpu": identity_of(self._own)}

    def lockstep_maps(self, handle: str) -> dict[str, str]:
        return cuda_ipc.read_test_buffer(json.loads(handle), self._own)

    def digest(self) -> str:
        return digest_of_all(tensor_specs(list(self._held.items())))


def _receive(pipe: Connection, where: str) -> None:
    """What the second process does: it answers the calls of the first one."""
    own = torch.device(where)
    if own.type == "cuda":
        torch.cuda.set_device(own)
    worker = _Worker(own)
    while True:
        try:
            method, given = json.loads(pipe.recv_bytes())
        except EOFError:
            return
        try:
            answer = {"is": getattr(worker, method)(*given)}
        except Exception as error:  # noqa: BLE001 - the other process raises it
            answer = {"failed": f"{type(error).__name__}: {error}"}
        pipe.send_bytes(json.dumps(answer).encode())
