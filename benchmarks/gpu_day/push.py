"""The part `push` of `make gpu-day`: weights go from this process to a second one, each with a GPU of its own.

NCCL accepts no two processes on one GPU. With one GPU, only a group of one process is made, which broadcasts to itself. In a
rehearsal on a CPU, gloo takes the place of NCCL.
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
from lockstep.engines.tensor_specs import digest_of_all, tensor_specs
from lockstep.sync.source import PlainSource
from lockstep.sync.wire.gloo import GLOO, NCCL, GlooTransport, Receiver
from lockstep.sync.wire.groups.devices import DeviceChannel
from lockstep.sync.wire.groups.meeting import Meeting, listen, open_store
from lockstep.sync.wire.groups.proof import new_secret
from lockstep.sync.wire.nccl import NCCLTransport

_HOST = "127.0.0.1"
# Seconds that one push, or the start of the second process, may take.
_LIMIT = 90.0


def push(sizes: Sizes) -> Iterator[Row]:
    """Seconds of a group of one process, of digests, and of pushes to a second process."""
    where, model = device(), make_model(sizes).to(torch.bfloat16)
    tensors = list(PlainSource(model.to(where)))
    size = sum(tensor.nbytes for _, tensor in tensors)
    yield from _alone(tensors, where, size, sizes.repeats)
    other = torch.device("cuda", 1) if where.type == "cuda" else where
    if where.type == "cuda" and torch.cuda.device_count() < 2:
        yield {"way": "to a second process", "what": "not measured: this needs two GPUs, and this machine has one"}
        return
    where = torch.device("cuda", 0) if where.type == "cuda" else where
    makers: dict[str, Callable[[], GlooTransport]] = {
        NCCL: lambda: NCCLTransport(_HOST, 0, _LIMIT, where),
        GLOO: lambda: GlooTransport(_HOST, 0, _LIMIT, deltas=False),
    }
    with _second_process(str(other)) as receiver:
        for name, make in makers.items():
            row: Row = {
                "way": name,
                "what": "a push to a second process",
                "devices": f"{where} to {other}",
                "MB": size / 1e6,
            }
            with refusals(row) as failed:
                transport, seconds = make(), []
                for _ in range(sizes.repeats + 1):
                    synchronize()
                    start = time.perf_counter()
                    transport.send(tensors, [receiver])
                    seconds.append(time.perf_counter() - start)
                # The first push loads libraries.
                row |= _rate(statistics.median(seconds[1:]), size)
                row["digests"] = "equal" if receiver.digest() == digest_of_all(tensor_specs(tensors)) else "DIFFERENT"
                row["passed"] = row["digests"] == "equal"
            yield row | failed


def _alone(tensors: list[tuple[str, torch.Tensor]], where: torch.device, size: int, repeats: int) -> Iterator[Row]:
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
    yield {"way": "digests of the weights", "devices": str(where), "MB": size / 1e6, **_rate(figures["seconds"], size)}


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
        raise NotImplementedError

    def update_weights(self, info: dict[str, Any]) -> None:
        self._ask(info)

    def workers(self, method: str, *args: str) -> list[Any]:
        raise NotImplementedError

    def digest(self) -> str:
        """Digest of the weights that have arrived."""
        return self._ask({})

    def _ask(self, words: dict[str, Any]) -> str:
        self._pipe.send_bytes(json.dumps(words).encode())
        if not self._pipe.poll(_LIMIT):
            raise RuntimeError(f"the second process did not answer within {_LIMIT:.0f} s")
        answer = json.loads(self._pipe.recv_bytes())
        if "failed" in answer:
            raise RuntimeError(answer["failed"])
        return answer["digest"]


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


def _receive(pipe: Connection, where: str) -> None:
    """What the second process does: it copies the tensors of each push into memory of its own, as a server's engine does."""
    own = torch.device(where)
    if own.type == "cuda":
        torch.cuda.set_device(own)
    receiver, held = Receiver(own), dict[str, torch.Tensor]()
    while True:
        try:
            info = json.loads(pipe.recv_bytes())
        except EOFError:
            return
        try:
            if info:
                for arrived in receiver.receive(info, info["chunks"]):
                    held |= {name: tensor.to(own, copy=True) for name, tensor in arrived}
                answer = {"digest": ""}
            else:
                answer = {"digest": digest_of_all(tensor_specs(list(held.items())))}
        except Exception as error:  # noqa: BLE001 - the other process raises it
            answer = {"failed": f"{type(error).__name__}: {error}"}
        pipe.send_bytes(json.dumps(answer).encode())
