"""Chooses how the bytes of a push reach the servers: through shared memory or over gloo.

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
from lockstep.sync.wire.gloo import GlooTransport
from lockstep.sync.wire.shared_memory import SharedMemoryFull, SharedMemoryTransport, shares_memory

_logger = logging.getLogger(__name__)

TRANSPORTS = ("auto", "shared_memory", "gloo")


def choose_transport(
    name: str,
    servers: Sequence[WeightReceiverCalls],
    host: str,
    port: int,
    timeout: float,
    *,
    deltas: bool = True,
) -> WeightTransport:
    """The transport that was asked for, or the fastest one that every server supports.

    Args:
        name: one of `TRANSPORTS`.
        host: this machine's address, as the servers reach it. Gloo listens on it and on no other.
        port: port that gloo listens on; 0 means a free port.
        timeout: seconds that any step of a push may take.
        deltas: as in `GlooTransport`.

    Raises:
        InputError: the name is unknown, or a server cannot use the transport.
    """
    if name not in TRANSPORTS:
        raise InputError(f"vllm_weight_transport={name!r}; it must be one of {', '.join(TRANSPORTS)}")
    make_gloo = partial(_make_gloo, servers, host, port, timeout, deltas)
    if name != "gloo" and all(shares_memory(server) for server in servers):
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
    remote = [server.url for server in servers if not is_local(urlsplit(server.url).hostname or "")]
    if remote and is_local(host):
        raise InputError(
            f"the server at {remote[0]} cannot reach this machine at {host}: set vllm_group_host to this machine's address "
            "as that server reaches it"
        )
    return GlooTransport(host, port, timeout, deltas=deltas)


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
