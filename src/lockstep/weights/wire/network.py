"""Weights to servers by torch.distributed: over TCP to other machines (gloo), and from GPU to GPU (NCCL).

Every push makes new connections; only a group of NCCL stays (`groups.py`). The trainer listens on the address that it
was given and on no other. Each server's worker connects, and these connections close when the push is over. So a
server that died or restarted between two pushes leaves nothing to repair. Tensors are sent directly from the trainer's
memory. They are cut into half-chunks, so that a server can receive one while it loads the other. A server holds at
most one chunk, or one tensor if that is larger. Only bytes are sent: nothing is unpickled. Both ends prove that they
know the secret of the push before the first weight is sent.

If one server fails, the push ends for all of them: the trainer writes a key into the store, and every worker looks for
this key while it waits. Gloo itself would wait until its time limit, and NCCL without end.

NCCL has not been run on a GPU yet. vLLM 0.32.0 has a transfer engine for it too. It is not used: its workers unpickle
what they find in the trainer's store (`StatelessProcessGroup.broadcast_obj`), and that store has no authentication.
Its other way to meet, a given NCCL id, has no trainer's end in vLLM. In both ways its waits have no limit.
"""

from __future__ import annotations

import logging
import secrets
import socket
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist

from lockstep.contract.tensors import push_key
from lockstep.devices import sent
from lockstep.errors import EngineLost, InputError
from lockstep.progress import waiting
from lockstep.weights.source import may_be_base, meta_tensors, pieces
from lockstep.weights.wire import groups, stream
from lockstep.weights.wire.groups import DeviceChannel, GlooChannel, KeptChannel, Meeting
from lockstep.weights.wire.stream import CHUNK_BYTES, Named, Piece, WeightReceiverCalls

_logger = logging.getLogger(__name__)

GLOO, NCCL = "gloo", "nccl"
_CPU = torch.device("cpu")
# If the store has this key, the push has failed.
_PUSH_FAILED = "ended"
_POLL_EVERY = 0.002


class GlooTransport:
    """The trainer's end of the transport. `NCCLTransport` is the same with another channel.

    Args:
        host: this machine's address, as the servers reach it.
        port: port that the servers connect to; 0 means a free port.
        timeout: seconds that a whole push may take.
        deltas: whether to send only the changed elements of tensors in half precision. The trainer and every worker
            then keep a copy of the weights in main memory, if there is room for it.

    Raises:
        InputError: this machine cannot listen on that address and port.
    """

    _name = GLOO
    # Where the bytes are when they are sent.
    _device = _CPU
    # Name of the group that stays between pushes; empty: none does.
    _group = ""

    def __init__(self, host: str, port: int, timeout: float, *, deltas: bool = True) -> None:
        self._host, self._port, self._timeout = host, port, timeout
        self._wants_deltas = deltas
        # Whether there is room for the copies; None: no push was made yet.
        self._deltas: bool | None = None
        groups.listen(host, port).close()

    def send(self, tensors: Iterable[Named], servers: Sequence[WeightReceiverCalls], base: str = "") -> None:
        deltas = may_be_base(tensors) and self._sends_deltas(tensors, servers)
        to_host = self._device.type == "cpu"
        key = None if to_host else push_key()
        pool = ThreadPoolExecutor(len(servers), thread_name_prefix="lockstep-push")
        listener = groups.listen(self._host, self._port)
        ranks = stream.worker_ranks(servers, 1)
        port, size, secret = listener.getsockname()[1], ranks[-1], groups.new_secret()
        try:
            placed = [
                stream.layout(part)[0] for part in stream.chunks(meta_tensors(tensors), CHUNK_BYTES // 2)
            ]
            connection = {
                "transport": self._name,
                "host": self._host,
                "port": port,
                "size": size,
                "timeout": self._timeout,
                "secret": secret,
                "base": base,
                "keeps": deltas,
                "group": self._group,
                "digest_key": "" if key is None else f"{key:x}",
            }
            pending = [
                pool.submit(server.update_weights, {**connection, "rank": rank, "chunks": placed})
                for rank, server in zip(ranks, servers, strict=False)
            ]
            try:
                lengths = [len(places) for places in placed]
                chunked = _sent_bytes(pieces(tensors, deltas=deltas, to_host=to_host), lengths, self._device)
                self._broadcast(listener, size, secret, chunked, pending)
            except EngineLost:
                # This is the error of the first server that failed. The other servers fail because of it.
                wait(pending)
                raise
            except RuntimeError:
                # If a server failed, its own error says more than the broken connection. `finish_all` raises it.
                stream.finish_all(pending)
                raise
            stream.finish_all(pending)
        finally:
            pool.shutdown(wait=False)

    def _sends_deltas(self, tensors: Iterable[Named], servers: Sequence[WeightReceiverCalls]) -> bool:
        if self._deltas is None:
            self._deltas = self._wants_deltas and _copies_fit(meta_tensors(tensors), servers)
        return self._deltas

    def forget(self) -> None:
        """Let the next push check again whether there is room for copies, because it may go to other servers."""
        self._deltas = None

    def close(self) -> None:
        """Does nothing, because no connection is kept between pushes."""

    def _broadcast(
        self,
        listener: socket.socket,
        size: int,
        secret: str,
        raw: Iterable[torch.Tensor],
        pending: Sequence[Future[None]],
    ) -> None:
        # `detach` hands the file descriptor over to the store, which will close it.
        store = groups.open_store(self._host, listener.getsockname()[1], self._timeout, listener.detach())

        def check() -> None:
            stream.check_pending(pending)

        try:
            self._wait_for_workers(store, size, pending)
            with self._channel(
                Meeting(store, secret, groups.SENDER, size, self._host, self._timeout, check)
            ) as channel:
                channel.broadcast(raw)
        except BaseException:
            store.set(_PUSH_FAILED, "")
            raise

    def _channel(self, meeting: Meeting) -> GlooChannel:
        return GlooChannel(groups.connect(meeting), meeting)

    def _wait_for_workers(self, store: dist.Store, size: int, pending: Sequence[Future[None]]) -> None:
        """Wait until every worker has connected, or raise as soon as a server reports an error."""
        deadline = time.monotonic() + self._timeout
        with waiting(f"the servers to connect to {self._host} for the weights", self._timeout):
            while not store.check([groups.ready_key(rank) for rank in range(1, size)]):
                stream.check_pending(pending)
                if time.monotonic() > deadline:
                    raise RuntimeError(
                        f"not every server connected to {self._host} within {self._timeout:.0f} s"
                    )
                time.sleep(_POLL_EVERY)


class Receiver:
    """A worker's end of both transports. It receives the next chunk while one is loaded, and keeps its buffer.

    Args:
        device: the worker's device. Over NCCL tensors arrive there, over gloo in main memory.
        environment: makes the context of `KeptChannel`.
    """

    def __init__(
        self,
        device: torch.device = _CPU,
        environment: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        self._kept = KeptChannel(device, environment)
        self.buffer = torch.empty(0, dtype=torch.uint8)

    def receive(
        self, info: Mapping[str, Any], parts: Sequence[Sequence[Sequence[object]]]
    ) -> Generator[list[Piece], None, None]:
        """Yield the chunks of one push in order, without the tensors that the trainer has left out.

        Each chunk is valid until the next one is requested.

        Args:
            info: the trainer's connection data, with this worker's own rank.
            parts: the tensors that each chunk may hold (`chunks.TensorPlace`).

        Raises:
            RuntimeError: the trainer did not connect, or its connection was lost.
        """
        host, port, timeout, secret = info["host"], info["port"], info["timeout"], info["secret"]
        with waiting(f"the trainer at {host}:{port}, which sends weights", timeout):
            store = dist.TCPStore(
                host, port, is_master=False, timeout=timedelta(seconds=timeout), wait_for_workers=False
            )

        def check() -> None:
            if store.check([_PUSH_FAILED]):
                raise RuntimeError("another server failed during this push, so the trainer ended it")

        store.set(groups.ready_key(info["rank"]), "")
        address = groups.own_address(host, port, timeout)
        channel = self._channel(
            info, Meeting(store, secret, info["rank"], info["size"], address, timeout, check)
        )
        places = self._places([stream.buffer_bytes(part) for part in parts], channel.device)

        def receive_chunk(number: int) -> list[Piece]:
            start, end = places[number]
            targets = stream.views(self.buffer[start:end], parts[number])
            counts_tensor = torch.empty(len(targets), dtype=torch.int64, device=channel.device)
            try:
                channel.broadcast([counts_tensor.view(torch.uint8)])
                counts = counts_tensor.tolist()
                raw = (
                    tensor.flatten().view(torch.uint8)[: stream.piece_bytes(count, tensor)]
                    for count, (_, tensor) in zip(counts, targets, strict=True)
                )
                channel.broadcast(raw)
            except BaseException:
                # The channel may still write into this memory.
                self.buffer = torch.empty(0, dtype=torch.uint8)
                raise
            return stream.arrived_pieces(counts, targets)

        # Leaving the inner block waits for the running receive, so that nothing is written into the buffer afterwards.
        with channel, ThreadPoolExecutor(1, thread_name_prefix="lockstep-receive") as pool:
            next_chunk: Future[list[Piece]] | None = None
            for number in range(len(parts)):
                arrived = receive_chunk(number) if next_chunk is None else next_chunk.result()
                is_disjoint = number + 1 < len(parts) and _are_disjoint(places[number], places[number + 1])
                next_chunk = pool.submit(receive_chunk, number + 1) if is_disjoint else None
                yield arrived
                channel.settle()

    def close(self) -> None:
        """End what was kept between pushes."""
        self._kept.close()

    def _channel(self, info: Mapping[str, Any], meeting: Meeting) -> GlooChannel:
        if info["transport"] == NCCL:
            return self._kept.join(meeting, info["group"])
        return GlooChannel(groups.connect(meeting), meeting)

    def _places(self, sizes: Sequence[int], device: torch.device) -> list[tuple[int, int]]:
        """(start, end) of each chunk in the buffer: the two ends of the buffer in turn. Large chunks may overlap."""
        largest = max(sizes, default=0)
        needed = max(largest, min(2 * stream.aligned(largest), CHUNK_BYTES))
        if self.buffer.numel() < needed or self.buffer.device != device:
            self.buffer = torch.empty(0, dtype=torch.uint8)
            self.buffer = torch.empty(needed, dtype=torch.uint8, device=device)
        upper_starts = [(self.buffer.numel() - size) // stream.ALIGNMENT * stream.ALIGNMENT for size in sizes]
        starts = [upper_starts[number] if number % 2 else 0 for number in range(len(sizes))]
        return [(start, start + size) for start, size in zip(starts, sizes, strict=True)]


def _copies_fit(tensors: Iterable[Named], servers: Sequence[WeightReceiverCalls]) -> bool:
    """Whether copies of the weights are of use, and fit into half of the free memory of each machine.

    In float32 nearly every element changes in each step. Then the changes have as many bytes as the weights, and
    copies are of no use. The workers of a server may share one machine, so their copies are added up.
    """
    sizes = [(tensor.nbytes, tensor.itemsize) for _, tensor in tensors]
    needed = sum(size for size, _ in sizes)
    if 2 * sum(size for size, width in sizes if width <= 2) < needed:
        return False
    without_room = [s.url for s in servers if 2 * needed * s.world_size > s.available_bytes]
    without_room += ["this machine"] if 2 * needed > stream.available_bytes() else []
    if without_room:
        _logger.warning(
            f"every push sends whole tensors: {without_room[0]} has too little main memory for a copy of the weights "
            f"({needed / 1e9:.1f} GB per worker)"
        )
    return not without_room


def _sent_bytes(
    incoming: Iterator[Piece], lengths: Sequence[int], device: torch.device
) -> Iterator[torch.Tensor]:
    """The bytes of a push on a device, in the order of sending: for each chunk its counts, then its pieces."""
    for length in lengths:
        chunk = list(islice(incoming, length))
        yield sent(
            torch.tensor([stream.count_of(piece) for _, piece in chunk], dtype=torch.int64), device
        ).view(torch.uint8)
        while chunk:
            yield stream.raw_bytes(chunk.pop(0)[1], device)
    # Read to the end, because an update describes its last tensors only then.
    assert next(incoming, None) is None


def _are_disjoint(one: tuple[int, int], other: tuple[int, int]) -> bool:
    return one[1] <= other[0] or other[1] <= one[0]


class NCCLTransport(GlooTransport):
    """Sends whole tensors from device to device. Tensors of parts of the model in which nothing changed are left out.

    Changed elements alone are not sent: finding them needs a copy in main memory, and takes longer than sending
    everything over NCCL (docs/internals/plan.md).

    The group of the trainer and the workers stays for the run. It is made again for other servers, for one that was
    started again, and after a push that failed.

    Args:
        host: this machine's address, as the servers reach it.
        port: port that the servers connect to; 0 means a free port.
        timeout: seconds that a whole push may take.
        device: the trainer's device. On a CPU, gloo takes the place of NCCL.
    """

    _name = NCCL

    def __init__(self, host: str, port: int, timeout: float, device: torch.device) -> None:
        super().__init__(host, port, timeout, deltas=False)
        self._device = device
        self._kept = KeptChannel(device)
        # The workers of the kept group. Other workers, or the same in another order, get a group of another name.
        self._members: list[tuple[str, int]] = []

    def send(self, tensors: Iterable[Named], servers: Sequence[WeightReceiverCalls], base: str = "") -> None:
        members = [(server.url, server.world_size) for server in servers]
        if members != self._members:
            self._members, self._group = members, secrets.token_hex(16)
        super().send(tensors, servers, base)

    def forget(self) -> None:
        super().forget()
        self._kept.close()

    def close(self) -> None:
        """End the group. The workers end theirs when another trainer comes, or when their server ends."""
        self._kept.close()

    def _channel(self, meeting: Meeting) -> DeviceChannel:
        return self._kept.join(meeting, self._group)


def own_gpu(transport: str) -> torch.device:
    """The GPU of this process, for a transport between GPUs."""
    if not torch.cuda.is_available():
        raise InputError(
            f"vllm_weight_transport={transport}, but this process has no NVIDIA GPU; use auto, shared_memory or gloo"
        )
    if transport == NCCL and not dist.is_nccl_available():
        raise InputError(
            "vllm_weight_transport=nccl, but this PyTorch was built without NCCL; use auto, shared_memory or gloo"
        )
    return torch.device("cuda", torch.cuda.current_device())


def identity_of(device: torch.device) -> str:
    """The UUID of a GPU, which is the same in every process; empty for another device."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""


def check_gpus(own: str, servers: Sequence[WeightReceiverCalls]) -> None:
    """Check that the trainer (`own` is its GPU's UUID) and each worker have a GPU of their own, as NCCL demands."""
    users = {own: "the trainer"}
    for server in servers:
        for found in server.workers("lockstep_device"):
            gpu, user = found["gpu"], f"the server at {server.url}"
            if not gpu:
                raise InputError(
                    f"vllm_weight_transport=nccl, but {user} computes without an NVIDIA GPU; use auto, "
                    f"shared_memory or gloo"
                )
            if gpu in users:
                raise InputError(
                    f"vllm_weight_transport=nccl, but {users[gpu]} and {user} use the same GPU ({gpu}), which "
                    f"NCCL refuses: give "
                    "each a GPU of its own (CUDA_VISIBLE_DEVICES), or use shared_memory"
                )
            users[gpu] = user
