"""Chooses how the bytes of a push reach the servers: through shared memory, over gloo or over NCCL.

`engines/http/vllm_server.py` drives a transport. A transport moves bytes and reports what it placed where. The version, the
acknowledgement and the comparison are the same for all transports (`sync/push.py`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from urllib.parse import urlsplit

from lockstep.engines.http.server_calls import is_local
from lockstep.engines.http.transport import WeightReceiverCalls, WeightTransport
from lockstep.errors import InputError
from lockstep.sync.wire.chunks import Named
from lockstep.sync.wire.gloo import GLOO, NCCL, GlooTransport
from lockstep.sync.wire.nccl import NCCLTransport, check_gpus, identity_of, own_gpu
from lockstep.sync.wire.shared_memory import SharedMemoryFull, SharedMemoryTransport, shares_memory

_logger = logging.getLogger(__name__)

TRANSPORTS = ("auto", "shared_memory", GLOO, NCCL)


def check_transport(name: str) -> None:
    """Check a transport before servers are asked.

    Raises:
        InputError: the name is unknown, or it is `nccl` and this process has no GPU.
    """
    if name not in TRANSPORTS:
        raise InputError(f"vllm_weight_transport={name!r}; it must be one of {', '.join(TRANSPORTS)}")
    if name == NCCL:
        own_gpu()


def choose_transport(
    name: str,
    servers: Sequence[WeightReceiverCalls],
    host: str,
    port: int,
    timeout: float,
    *,
    deltas: bool = True,
) -> WeightTransport:
    """The transport that was asked for, or with `auto` the fastest one that every server supports. `auto` does not choose NCCL.

    Args:
        name: one of `TRANSPORTS`.
        host: this machine's address, as the servers reach it. The trainer listens on it and on no other.
        port: port that the trainer listens on; 0 means a free port.
        timeout: seconds that any step of a push may take.
        deltas: as in `GlooTransport`.

    Raises:
        InputError: the name is unknown, or a server cannot use the transport.
    """
    check_transport(name)
    if name == NCCL:
        gpu = own_gpu()
        check_gpus(identity_of(gpu), servers)
        _check_host(servers, host)
        return NCCLTransport(host, port, timeout, gpu)
    make_gloo = partial(_make_gloo, servers, host, port, timeout, deltas)
    if name != GLOO and all(shares_memory(server) for server in servers):
        shared = SharedMemoryTransport(timeout)
        return shared if name == "shared_memory" else SharedMemoryOrGloo(shared, make_gloo)
    if name != "shared_memory":
        return make_gloo()
    raise InputError(
        "vllm_weight_transport=shared_memory, but a server does not see this machine's shared memory (another machine or "
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
            f"the server at {remote[0]} cannot reach this machine at {host}: set vllm_group_host to this machine's address "
            "as that server reaches it"
        )


class SharedMemoryOrGloo:
    """`auto` on one machine: shared memory, until it turns out to be too small (64 MiB in a Docker container); then gloo.

    Args:
        shared: tried first.
        other: makes the transport that is used instead.
    """

    def __init__(self, shared: SharedMemoryTransport, other: Callable[[], WeightTransport]) -> None:
        self._used: WeightTransport = shared
        self._other = other

    def send(self, tensors: Iterable[Named], servers: Sequence[WeightReceiverCalls], base: str = "") -> None:
        try:
            self._used.send(tensors, servers, base)
        except SharedMemoryFull as error:
            self._used.close()
            self._used = self._other()
            _logger.warning(f"{error}. Until then the weights are sent over gloo, which is slower")
            self._used.send(tensors, servers, base)

    def forget(self) -> None:
        self._used.forget()

    def close(self) -> None:
        self._used.close()
