"""Chooses how the bytes of a push reach the servers: through a GPU's or shared memory, over gloo or over NCCL.

A transport moves bytes and reports what it placed where. The version, the acknowledgement and the comparison are the
same for all transports.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Protocol
from urllib.parse import urlsplit

import torch

from lockstep.bounded_http import is_local
from lockstep.errors import InputError
from lockstep.weights.wire import cuda_ipc
from lockstep.weights.wire.cuda_ipc import CudaIPCTransport
from lockstep.weights.wire.network import (
    GLOO,
    NCCL,
    GlooTransport,
    NCCLTransport,
    check_gpus,
    identity_of,
    own_gpu,
)
from lockstep.weights.wire.shared_memory import NoRoom, SharedMemoryTransport, shares_memory
from lockstep.weights.wire.stream import Named, WeightReceiverCalls

_logger = logging.getLogger(__name__)

TRANSPORTS = ("auto", "shared_memory", cuda_ipc.NAME, GLOO, NCCL)


class WeightTransport(Protocol):
    """Sends the bytes of a push to all servers at the same time."""

    def send(self, tensors: Iterable[Named], servers: Sequence[WeightReceiverCalls], base: str = "") -> None:
        """Send the tensors of an update. Returns when every server has loaded them.

        After a failure, all agreements with the servers are void.

        Args:
            base: digest of the weights that the engine must already hold; empty: the tensors are all weights of the
                model.

        Raises:
            EngineLost: a server did not take part until the end.
        """

    def forget(self) -> None:
        """Drop all agreements with the servers. The next `send` makes new ones."""

    def close(self) -> None:
        """Release memory and connections."""


def check_transport(name: str) -> None:
    """Check a transport before servers are asked: its name is known, and this process has the GPU that it needs."""
    if name not in TRANSPORTS:
        raise InputError(f"vllm_weight_transport={name!r}; it must be one of {', '.join(TRANSPORTS)}")
    if name in (NCCL, cuda_ipc.NAME):
        own_gpu(name)


def choose_transport(
    name: str,
    servers: Sequence[WeightReceiverCalls],
    host: str,
    port: int,
    timeout: float,
    *,
    deltas: bool = True,
) -> WeightTransport:
    """The transport that was asked for, or with `auto` the fastest one that every server supports.

    `auto` does not choose NCCL.

    Args:
        name: one of `TRANSPORTS`.
        host: this machine's address, as the servers reach it. The trainer listens on it and on no other.
        port: port that the trainer listens on; 0 means a free port.
        timeout: seconds that any step of a push may take.
        deltas: whether gloo sends only the changed elements of tensors in half precision.
    """
    check_transport(name)
    if name == NCCL:
        gpu = own_gpu(name)
        check_gpus(identity_of(gpu), servers)
        _check_host(servers, host)
        return NCCLTransport(host, port, timeout, gpu)
    make_gloo = partial(_make_gloo, servers, host, port, timeout, deltas)
    if name != GLOO and all(shares_memory(server) for server in servers):
        if name == cuda_ipc.NAME:
            gpu = own_gpu(name)
            cuda_ipc.check_shared(servers, gpu)
            return CudaIPCTransport(timeout, gpu)
        shared = SharedMemoryTransport(timeout)
        if name == "shared_memory":
            return shared
        shared_or_gloo = WhileItFits(shared, make_gloo, "over gloo")
        if (shared_gpu := _shared_gpu(servers)) is None:
            return shared_or_gloo
        return WhileItFits(
            CudaIPCTransport(timeout, shared_gpu), lambda: shared_or_gloo, "through shared memory"
        )
    if name in ("auto", GLOO):
        return make_gloo()
    raise InputError(
        f"vllm_weight_transport={name}, but a server does not see this machine's shared memory (another machine or "
        "container); use gloo"
    )


def _make_gloo(
    servers: Sequence[WeightReceiverCalls], host: str, port: int, timeout: float, deltas: bool
) -> GlooTransport:
    _check_host(servers, host)
    return GlooTransport(host, port, timeout, deltas=deltas)


def _check_host(servers: Sequence[WeightReceiverCalls], host: str) -> None:
    remote = [server.url for server in servers if not is_local(urlsplit(server.url).hostname or "")]
    if remote and is_local(host):
        raise InputError(
            f"the server at {remote[0]} cannot reach this machine at {host}: set vllm_group_host to this "
            "machine's address as that server reaches it"
        )


def _shared_gpu(servers: Sequence[WeightReceiverCalls]) -> torch.device | None:
    """The GPU of this process, if all servers compute on it and can map its memory."""
    if not torch.cuda.is_available():
        return None
    gpu = own_gpu(cuda_ipc.NAME)
    if problem := cuda_ipc.why_not(servers, gpu):
        _logger.info(f"weights go through main memory: {problem}")
        return None
    return gpu


class WhileItFits:
    """`auto` on one machine: a transport through memory, until it cannot be had (64 MiB in a Docker container).

    Args:
        first: tried first.
        other: makes the transport that is used instead.
        how: says how the other one sends weights.
    """

    def __init__(self, first: SharedMemoryTransport, other: Callable[[], WeightTransport], how: str) -> None:
        self.used: WeightTransport = first
        self._other, self._how = other, how

    def send(self, tensors: Iterable[Named], servers: Sequence[WeightReceiverCalls], base: str = "") -> None:
        try:
            self.used.send(tensors, servers, base)
        except NoRoom as error:
            self.used.close()
            self.used = self._other()
            _logger.warning(f"{error}. Until then the weights are sent {self._how}, which is slower")
            self.used.send(tensors, servers, base)

    def forget(self) -> None:
        self.used.forget()

    def close(self) -> None:
        self.used.close()
