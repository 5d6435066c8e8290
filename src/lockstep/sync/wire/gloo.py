"""Both ends of the gloo transport: weights to servers on other machines over TCP, with torch.distributed.

Every push makes new connections. The trainer listens on the address that it was given and on no other. Each server's worker
connects, and all connections close when the push is over. So a server that died or restarted between two pushes leaves
nothing to repair. Tensors are sent directly from the trainer's memory. They are cut into half-chunks, so that a server can
receive one while it loads the other. A server holds at most one chunk, or one tensor if that is larger. Only bytes are sent:
nothing is unpickled. Both ends prove that they know the secret of the push before the first weight is sent (`gloo_proof.py`).

If one server fails, the push ends for all of them: the trainer writes a key into the store, and every worker looks for this key
while it waits. Gloo itself would wait until its time limit.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from datetime import timedelta
from itertools import islice
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist

from lockstep.engines.http.transport import WeightReceiverCalls, check_pending, finish_all, worker_ranks
from lockstep.errors import EngineLost, InputError
from lockstep.sync.changes import may_be_base, meta_tensors, pieces
from lockstep.sync.wire.chunks import ALIGNMENT, CHUNK_BYTES, Named, aligned, buffer_bytes, chunks, layout, views
from lockstep.sync.wire.deltas import Piece, arrived_pieces, available_bytes, count_of, piece_bytes, raw_bytes
from lockstep.sync.wire.gloo_proof import SignedStore, authenticate, new_secret

_logger = logging.getLogger(__name__)
InFlight = deque[tuple[dist.Work, torch.Tensor]]

NAME = "gloo"
_SENDER = 0
# If the store has this key, the push has failed.
_PUSH_FAILED = "ended"
_POLL_EVERY, _CHECK_EVERY = 0.002, 0.5


class GlooTransport:
    """The trainer's end of the transport.

    Args:
        host: this machine's address, as the servers reach it.
        port: port that the servers connect to; 0 means a free port.
        timeout: seconds that a whole push may take.
        deltas: whether to send only the changed elements of tensors in half precision. The trainer and every worker then keep a
            copy of the weights in main memory, if there is room for it.

    Raises:
        InputError: this machine cannot listen on that address and port.
    """

    def __init__(self, host: str, port: int, timeout: float, *, deltas: bool = True) -> None:
        self._host, self._port, self._timeout = host, port, timeout
        self._wants_deltas = deltas
        # Whether there is room for the copies; None: no push was made yet.
        self._deltas: bool | None = None
        _listen(host, port).close()

    def send(self, tensors: Iterable[Named], servers: Sequence[WeightReceiverCalls], base: str = "") -> None:
        deltas = may_be_base(tensors) and self._sends_deltas(tensors, servers)
        pool = ThreadPoolExecutor(len(servers), thread_name_prefix="lockstep-push")
        listener = _listen(self._host, self._port)
        ranks = worker_ranks(servers, 1)
        port, size, secret = listener.getsockname()[1], ranks[-1], new_secret()
        try:
            placed = [layout(part)[0] for part in chunks(meta_tensors(tensors), CHUNK_BYTES // 2)]
            connection = {
                "transport": NAME,
                "host": self._host,
                "port": port,
                "size": size,
                "timeout": self._timeout,
                "secret": secret,
                "base": base,
                "keeps": deltas,
            }
            pending = [
                pool.submit(server.update_weights, {**connection, "rank": rank, "chunks": placed})
                for rank, server in zip(ranks, servers, strict=False)
            ]
            try:
                chunked = _sent_bytes(pieces(tensors, deltas=deltas), [len(places) for places in placed])
                self._broadcast(listener, size, secret, chunked, pending)
            except EngineLost:
                # This is the error of the first server that failed. The other servers fail because of it.
                wait(pending)
                raise
            except RuntimeError:
                # If a server failed, its own error says more than the broken connection. `finish_all` raises it.
                finish_all(pending)
                raise
            finish_all(pending)
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
        store = _store(self._host, listener.getsockname()[1], self._timeout, listener.detach())

        def check() -> None:
            check_pending(pending)

        try:
            self._wait_for_workers(store, size, pending)
            group = _connect(store, secret, _SENDER, size, self._host, self._timeout, check)
            _broadcast_parts(group, raw, check)
        except BaseException:
            store.set(_PUSH_FAILED, "")
            raise

    def _wait_for_workers(self, store: dist.Store, size: int, pending: Sequence[Future[None]]) -> None:
        """Wait until every worker has connected, or raise as soon as a server reports an error."""
        deadline = time.monotonic() + self._timeout
        while not store.check([_ready_key(rank) for rank in range(1, size)]):
            check_pending(pending)
            if time.monotonic() > deadline:
                raise RuntimeError(f"not every server connected to {self._host} within {self._timeout:.0f} s")
            time.sleep(_POLL_EVERY)


class Receiver:
    """A worker's end of the transport. It receives the next chunk while one is loaded, and keeps its buffer between pushes."""

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def receive(
        self, info: Mapping[str, Any], parts: Sequence[Sequence[Sequence[object]]]
    ) -> Generator[list[Piece], None, None]:
        """Yield the chunks of one push in order. Each chunk is valid until the next one is requested. Tensors that the trainer has
        left out are not in them.

        Args:
            info: the trainer's connection data, with this worker's own rank.
            parts: the tensors that each chunk may hold (`chunks.TensorPlace`).

        Raises:
            RuntimeError: the trainer did not connect, or its connection was lost.
        """
        host, port, timeout, secret = info["host"], info["port"], info["timeout"], info["secret"]
        store = dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout), wait_for_workers=False)

        def check() -> None:
            if store.check([_PUSH_FAILED]):
                raise RuntimeError("another server failed during this push, so the trainer ended it")

        store.set(_ready_key(info["rank"]), "")
        address = _own_address(host, port, timeout)
        group = _connect(store, secret, info["rank"], info["size"], address, timeout, check)
        places = self._places([buffer_bytes(part) for part in parts])

        def receive_chunk(number: int) -> list[Piece]:
            start, end = places[number]
            targets = views(self._buffer[start:end], parts[number])
            counts_tensor = torch.empty(len(targets), dtype=torch.int64)
            try:
                _broadcast_parts(group, [counts_tensor.view(torch.uint8)], check)
                counts = counts_tensor.tolist()
                raw = (
                    tensor.flatten().view(torch.uint8)[: piece_bytes(count, tensor)]
                    for count, (_, tensor) in zip(counts, targets, strict=True)
                )
                _broadcast_parts(group, raw, check)
            except BaseException:
                # Gloo may still write into this memory.
                self._buffer = torch.empty(0, dtype=torch.uint8)
                raise
            return arrived_pieces(counts, targets)

        # Leaving this block waits for the running receive, so that nothing is written into the buffer afterwards.
        with ThreadPoolExecutor(1, thread_name_prefix="lockstep-receive") as pool:
            next_chunk: Future[list[Piece]] | None = None
            for number in range(len(parts)):
                arrived = receive_chunk(number) if next_chunk is None else next_chunk.result()
                is_disjoint = number + 1 < len(parts) and _are_disjoint(places[number], places[number + 1])
                next_chunk = pool.submit(receive_chunk, number + 1) if is_disjoint else None
                yield arrived

    def _places(self, sizes: Sequence[int]) -> list[tuple[int, int]]:
        """(start, end) of each chunk in the buffer: the two ends of the buffer in turn. Large chunks may overlap."""
        largest = max(sizes, default=0)
        needed = max(largest, min(2 * aligned(largest), CHUNK_BYTES))
        if self._buffer.numel() < needed:
            self._buffer = torch.empty(0, dtype=torch.uint8)
            self._buffer = torch.empty(needed, dtype=torch.uint8)
        upper_starts = [(self._buffer.numel() - size) // ALIGNMENT * ALIGNMENT for size in sizes]
        starts = [upper_starts[number] if number % 2 else 0 for number in range(len(sizes))]
        return [(start, start + size) for start, size in zip(starts, sizes, strict=True)]


def _copies_fit(tensors: Iterable[Named], servers: Sequence[WeightReceiverCalls]) -> bool:
    """Whether copies of the weights are of use, and fit into half of the free memory of each machine.

    In float32 nearly every element changes in each step. Then the changes have as many bytes as the weights, and copies are of no
    use. The workers of a server may share one machine, so their copies are added up.
    """
    sizes = [(tensor.nbytes, tensor.itemsize) for _, tensor in tensors]
    needed = sum(size for size, _ in sizes)
    if 2 * sum(size for size, width in sizes if width <= 2) < needed:
        return False
    without_room = [s.url for s in servers if 2 * needed * s.world_size > s.available_bytes]
    without_room += ["this machine"] if 2 * needed > available_bytes() else []
    if without_room:
        _logger.warning(
            f"every push sends whole tensors: {without_room[0]} has too little main memory for a copy of the weights "
            f"({needed / 1e9:.1f} GB per worker)"
        )
    return not without_room


def _sent_bytes(incoming: Iterator[Piece], lengths: Sequence[int]) -> Iterator[torch.Tensor]:
    """The bytes of a push in the order in which they are sent: for each chunk its counts, then its pieces."""
    for length in lengths:
        chunk = list(islice(incoming, length))
        yield torch.tensor([count_of(piece) for _, piece in chunk], dtype=torch.int64).view(torch.uint8)
        while chunk:
            yield raw_bytes(chunk.pop(0)[1])
    # Read to the end, because an update describes its last tensors only then.
    assert next(incoming, None) is None


def _are_disjoint(one: tuple[int, int], other: tuple[int, int]) -> bool:
    return one[1] <= other[0] or other[1] <= one[0]


def _broadcast_parts(group: dist.ProcessGroup, parts: Iterable[torch.Tensor], check: Callable[[], None]) -> None:
    """Broadcast bytes from the sender to every rank, in order, with two broadcasts in flight at a time.

    Gloo cannot end a broadcast early, and some workers never read it, for example a stopped process of a dead server. Therefore, if
    this function raises, a thread keeps the connections and the memory until the broadcasts end.

    Args:
        check: called twice per second while this process waits for a broadcast. It raises if the push has failed.
    """
    in_flight: InFlight = deque()
    try:
        for data in parts:
            if data.numel():
                in_flight.append((group.broadcast([data], _FROM_SENDER), data))
            if len(in_flight) == _IN_FLIGHT:
                _wait(in_flight[0][0], check)
                in_flight.popleft()
        while in_flight:
            _wait(in_flight[0][0], check)
            in_flight.popleft()
    except BaseException:
        Thread(target=_wait_for_gloo, args=(in_flight, group), daemon=True, name="lockstep-broadcast").start()
        raise


def _wait(work: dist.Work, check: Callable[[], None]) -> None:
    while True:
        try:
            work.wait(timedelta(seconds=_CHECK_EVERY))
            return
        except RuntimeError:
            if work.is_completed():
                work.wait()
                return
        check()


def _wait_for_gloo(in_flight: InFlight, group: dist.ProcessGroup) -> None:
    """Wait until gloo no longer uses the memory. `group` is an argument only to keep its connections until then."""
    for work, _ in in_flight:
        with contextlib.suppress(RuntimeError):
            work.wait()


_IN_FLIGHT = 2
_FROM_SENDER = dist.BroadcastOptions()
_FROM_SENDER.rootRank = _SENDER


def _connect(
    store: dist.Store, secret: str, rank: int, size: int, host: str, timeout: float, check: Callable[[], None]
) -> dist.ProcessGroup:
    """Connect to all other ranks, and exchange proofs with each of them.

    Gloo cannot stop this early. Therefore a thread does it. If the push fails, the thread goes on until gloo's time limit.

    Args:
        check: called twice per second until the thread is ready. It raises if the push has failed.
    """
    connected: Future[dist.ProcessGroup] = Future()
    signed = SignedStore(store, secret, timeout)

    def connect() -> None:
        try:
            group = _group(signed, rank, size, host, timeout)
            authenticate(group, secret, rank, size)
            connected.set_result(group)
        except BaseException as error:  # noqa: BLE001 - it is raised where the result is read
            connected.set_exception(error)

    Thread(target=connect, daemon=True, name="lockstep-meeting").start()
    try:
        while not wait([connected], _CHECK_EVERY).done:
            check()
    except BaseException:
        signed.end()
        raise
    return connected.result()


def _group(store: dist.Store, rank: int, size: int, host: str, timeout: float) -> dist.ProcessGroup:
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    # By default gloo would use whichever address this machine's host name resolves to.
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
    options._timeout = timedelta(seconds=timeout)
    return dist.ProcessGroupGloo(store, rank, size, options)  # type: ignore[return-value]


def _store(host: str, port: int, timeout: float, listener: int) -> dist.TCPStore:
    # The store gets our socket, because its own would listen on every address of this machine.
    return dist.TCPStore(
        host,
        port,
        is_master=True,
        timeout=timedelta(seconds=timeout),
        wait_for_workers=False,
        master_listen_fd=listener,
    )


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    with contextlib.ExitStack() as undo:
        undo.callback(listener.close)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
        except (OSError, OverflowError) as error:
            raise InputError(
                f"vllm_group_host={host!r}, vllm_group_port={port}: cannot listen there ({error}); give an address of this machine "
                "and a free port"
            ) from error
        listener.listen()
        undo.pop_all()
    return listener


def _own_address(host: str, port: int, timeout: float) -> str:
    """This machine's address on the route to the trainer."""
    with socket.create_connection((host, port), timeout=timeout) as connection:
        return str(connection.getsockname()[0])


def _ready_key(rank: int) -> str:
    return f"here/{rank}"
