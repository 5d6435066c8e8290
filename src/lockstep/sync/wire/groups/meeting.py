"""How the trainer and the workers of one push meet: the trainer listens, the workers connect, and gloo connects each two of them.

Both ends prove that they know the secret of the push (`proof.py`). Every wait ends when `check` raises, for example
because a server has failed.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass
from datetime import timedelta
from threading import Thread
from typing import TypeVar

import torch.distributed as dist

from lockstep.errors import InputError
from lockstep.report.waits import waiting
from lockstep.sync.wire.groups.proof import SignedStore, authenticate

T = TypeVar("T")

# Seconds between two calls of `check`.
CHECK_EVERY = 0.5


@dataclass(frozen=True)
class Meeting:
    """One rank's part in a push.

    Attributes:
        store: the trainer's store. It has no authentication.
        secret: the secret of the push.
        rank, size: this rank, and the number of ranks. The trainer is rank 0.
        host: this machine's address, as the other ranks reach it.
        timeout: seconds that a wait may take.
        check: called twice per second in every wait. It raises if the push has failed.
    """

    store: dist.Store
    secret: str
    rank: int
    size: int
    host: str
    timeout: float
    check: Callable[[], None]

    def signed(self, prefix: str = "") -> SignedStore:
        """A view of the store whose values are signed, and whose keys begin with `prefix`."""
        return SignedStore(self.store, self.secret, self.timeout, prefix)


def connect(meeting: Meeting) -> dist.ProcessGroup:
    """Connect to all other ranks over gloo, and exchange proofs with each of them.

    Gloo cannot stop this early. If the push fails, a thread goes on until gloo's time limit.
    """
    signed = meeting.signed()

    def connected() -> dist.ProcessGroup:
        group = gloo_group(signed, meeting)
        authenticate(group, meeting.secret, meeting.rank, meeting.size)
        return group

    return in_background(connected, meeting, signed.end)


def in_background(work: Callable[[], T], meeting: Meeting, give_up: Callable[[], None]) -> T:
    """The result of `work`, which a thread does. It connects the ranks of a push.

    Args:
        meeting: its `check` is called twice per second until the thread is ready.
        give_up: called if `check` raises. The thread may go on.
    """
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:  # noqa: BLE001 - it is raised where the result is read
            done.set_exception(error)

    Thread(target=run, daemon=True, name="lockstep-meeting").start()
    try:
        with waiting("the other ranks of a push of weights to connect", meeting.timeout):
            while not wait([done], CHECK_EVERY).done:
                meeting.check()
    except BaseException:
        give_up()
        raise
    return done.result()


def gloo_group(store: dist.Store, meeting: Meeting) -> dist.ProcessGroup:
    """A group over gloo that listens on this machine's address."""
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    # By default gloo would use whichever address this machine's host name resolves to.
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=meeting.host)]
    options._timeout = timedelta(seconds=meeting.timeout)
    return dist.ProcessGroupGloo(store, meeting.rank, meeting.size, options)  # type: ignore[return-value]


def open_store(host: str, port: int, timeout: float, listener: int) -> dist.TCPStore:
    """The trainer's store.

    Args:
        listener: file descriptor of a socket that listens. The store closes it.
    """
    # The store gets our socket, because its own would listen on every address of this machine.
    return dist.TCPStore(
        host,
        port,
        is_master=True,
        timeout=timedelta(seconds=timeout),
        wait_for_workers=False,
        master_listen_fd=listener,
    )


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens on this address and on no other.

    Raises:
        InputError: this machine cannot listen there.
    """
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


def own_address(host: str, port: int, timeout: float) -> str:
    """This machine's address on the route to the trainer."""
    with socket.create_connection((host, port), timeout=timeout) as connection:
        return str(connection.getsockname()[0])


def ready_key(rank: int) -> str:
    """The key that a worker writes into the store when it has connected."""
    return f"here/{rank}"
