"""Groups of processes for a push: how they meet, prove the secret to each other, and broadcast bytes from the trainer.

`GlooChannel` sends from main memory to main memory. `DeviceChannel` sends from GPU to GPU over NCCL, without a copy in
main memory; `KeptChannel` keeps its group from push to push. A push that failed ends its group, and the next push
makes a new one, so nothing is left to repair. On a CPU `DeviceChannel` uses a second group of gloo, and the tests use
it there. `_nccl_group`, `nccl_environment`, and the GPU's branch of `settle` have not been run on a GPU yet.

The trainer listens, the workers connect, and gloo connects each two of them. Every wait ends when `check` raises, for
example because a server has failed. NCCL has no time limit for a rank that is gone: this process asks again and again
whether an operation has ended, and aborts the group if the push has failed.

torch's store and the connections of gloo and NCCL have no authentication: any program that reaches the port can write
into the store, or connect before a server does. Therefore the trainer makes a secret per push. The servers get it in
the call that announces the push. Every address in the store is signed with the secret. Before the first weight is
sent, both ends of each connection of gloo, and all ranks of a group of NCCL, prove that they know the secret. The
weights are not encrypted.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from threading import Thread
from typing import Self, TypeVar

import torch
import torch.distributed as dist

from lockstep.bounded_http import is_local
from lockstep.errors import InputError
from lockstep.progress import waiting

_DIGEST_BYTES = 32
_LOOK_EVERY = 0.002
_UNKNOWN_PROGRAM = (
    "another program took part in this push, so no weights were sent. Only the trainer and its servers should reach "
    "vllm_group_host and its ports: between machines use a tunnel or a private network"
)


def new_secret() -> str:
    """A secret for one push."""
    return secrets.token_hex(_DIGEST_BYTES)


class SignedStore(dist.Store):
    """A view of a store in which every value is signed. `get` refuses a value that another program wrote.

    It polls the store for `timeout` seconds, because a torch store that waits for a value blocks all other threads.
    Several groups can use one store, each with its `prefix`.
    """

    def __init__(self, store: dist.Store, secret: str, timeout: float, prefix: str = "") -> None:
        super().__init__()
        self._store, self._secret, self._timeout, self._prefix = store, secret, timeout, prefix
        self._ended = False

    def end(self) -> None:
        """Make every wait for a value raise an error, now and later."""
        self._ended = True

    def set(self, key: str, value: str | bytes) -> None:
        """Write a value with its signature."""
        data, key = value.encode() if isinstance(value, str) else bytes(value), self._prefix + key
        self._store.set(key, (_proof(self._secret, key, data) + data).hex())

    def get(self, key: str) -> bytes:
        """Wait for a value, and return it without its signature."""
        self.wait([key])
        key = self._prefix + key
        try:
            found = bytes.fromhex(self._store.get(key).decode())
        except ValueError:
            found = b""
        signature, data = found[:_DIGEST_BYTES], found[_DIGEST_BYTES:]
        if not hmac.compare_digest(signature, _proof(self._secret, key, data)):
            raise RuntimeError(_UNKNOWN_PROGRAM)
        return data

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys have a value."""
        limit, keys = (
            self._timeout if timeout is None else timeout.total_seconds(),
            [self._prefix + key for key in keys],
        )
        deadline = time.monotonic() + limit
        while self._ended or not self._store.check(keys):
            if self._ended:
                raise RuntimeError("the push has ended")
            if time.monotonic() > deadline:
                raise RuntimeError(f"a worker did not connect within {limit:.0f} s")
            time.sleep(_LOOK_EVERY)


def authenticate(group: dist.ProcessGroup, secret: str, rank: int, size: int) -> None:
    """Exchange proofs over the connection between each two ranks. Every rank calls."""
    others = [other for other in range(size) if other != rank]
    found = {other: torch.zeros(_DIGEST_BYTES, dtype=torch.uint8) for other in others}
    own = {
        other: torch.tensor(list(_proof(secret, _direction(rank, other))), dtype=torch.uint8)
        for other in others
    }
    work = [group.send([own[other]], other, 0) for other in others]
    work += [group.recv([found[other]], other, 0) for other in others]
    for each in work:
        each.wait()
    for other in others:
        if not hmac.compare_digest(bytes(found[other].tolist()), _proof(secret, _direction(other, rank))):
            raise RuntimeError(_UNKNOWN_PROGRAM)


def prove(group: dist.ProcessGroup, secret: str, rank: int, size: int, device: torch.device) -> None:
    """Give every rank of a group a proof of this rank, in one operation on the group's device. Every rank calls.

    It is for groups that cannot send from one rank to another without a further connection.
    """
    own = torch.tensor(list(_proof(secret, f"rank {rank} of a device")), dtype=torch.uint8, device=device)
    found = [torch.zeros_like(own) for _ in range(size)]
    group.allgather([found], [own]).wait()
    for other, proof in enumerate(found):
        if not hmac.compare_digest(_proof(secret, f"rank {other} of a device"), bytes(proof.tolist())):
            raise RuntimeError(_UNKNOWN_PROGRAM)


def _direction(sender: int, receiver: int) -> str:
    return f"rank {sender} to rank {receiver}"


def _proof(secret: str, subject: str, data: bytes = b"") -> bytes:
    return hmac.digest(secret.encode(), subject.encode() + b"\0" + data, "sha256")


T = TypeVar("T")

# Seconds between two calls of `check`.
CHECK_EVERY = 0.5


@dataclass(frozen=True)
class Meeting:
    """One rank's part in a push.

    Attributes:
        store: the trainer's store. It has no authentication.
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
    """The result of `work`, which connects the ranks of a push in a thread.

    If the meeting's `check` raises meanwhile, `give_up` is called, and the thread may go on.
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
    """The trainer's store. It closes `listener`, the file descriptor of a socket that listens."""
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
    """A socket that listens on this address and on no other."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    with contextlib.ExitStack() as undo:
        undo.callback(listener.close)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
        except (OSError, OverflowError) as error:
            raise InputError(
                f"vllm_group_host={host!r}, vllm_group_port={port}: cannot listen there ({error}); give an "
                "address of this machine and a free port"
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


InFlight = deque[tuple[dist.Work, torch.Tensor]]

SENDER = 0
FROM_SENDER = dist.BroadcastOptions()
FROM_SENDER.rootRank = SENDER
_MOST_IN_FLIGHT = 2


class GlooChannel:
    """Broadcasts over gloo among ranks that have proven that they know the secret. As a context, it ends the channel.

    Gloo cannot end a broadcast early, and some workers never read it, for example a stopped process of a dead server.
    Therefore, if a method raises, a thread keeps the connections and the memory until the broadcasts end.

    Attributes:
        device: where the bytes must be.
    """

    device = torch.device("cpu")

    def __init__(self, group: dist.ProcessGroup, meeting: Meeting) -> None:
        self._group, self._check, self._timeout = group, meeting.check, meeting.timeout

    def broadcast(self, parts: Iterable[torch.Tensor]) -> None:
        """Broadcast tensors of bytes to every rank, in order, two at a time. Every rank calls."""
        in_flight: InFlight = deque()
        try:
            for data in parts:
                if data.numel():
                    in_flight.append((self._group.broadcast([data], FROM_SENDER), data))
                if len(in_flight) == _MOST_IN_FLIGHT:
                    self._wait(in_flight[0][0])
                    in_flight.popleft()
            while in_flight:
                self._wait(in_flight[0][0])
                in_flight.popleft()
        except BaseException:
            self._abandon(in_flight)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self.give_up()

    def settle(self) -> None:
        """Wait until work that this thread has given to the device no longer reads what has arrived."""

    def close(self) -> None:
        """End the channel after its last broadcast. Every rank calls."""

    def give_up(self) -> None:
        """End the channel of a push that has failed."""

    def _wait(self, work: dist.Work) -> None:
        # The group ends the wait at its time limit.
        with waiting("the other ranks of a push to take weights", self._timeout):
            while True:
                try:
                    work.wait(timedelta(seconds=CHECK_EVERY))
                    return
                except RuntimeError:
                    if work.is_completed():
                        work.wait()
                        return
                self._check()

    def _abandon(self, in_flight: InFlight) -> Thread:
        ending = Thread(target=self._end, args=(in_flight,), daemon=True, name="lockstep-broadcast")
        ending.start()
        return ending

    def _end(self, in_flight: InFlight) -> None:
        """Return when nothing uses the memory in flight any more."""
        for work, _ in in_flight:
            with contextlib.suppress(RuntimeError):
                work.wait()


_INTERFACE = "NCCL_SOCKET_IFNAME"
# Keys of the second group begin with this word, because both groups use the same store.
_PREFIX = "device/"
# The keys by which the ranks of a push agree on the group: of each worker, with its rank, and of the trainer, for all.
_AGREED, _OF_WORKER, _OF_ALL = "group/", "worker", "all"
_KEPT, _NEW = b"kept", b"new"
_POLL_EVERY = 0.0002
# Seconds that a process waits for the end of a group that it no longer needs.
END_LIMIT = 10.0


class DeviceChannel(GlooChannel):
    """Broadcasts from device to device: over NCCL on GPUs, over gloo on CPUs. Every rank of a group makes one.

    It is a context for one push. If the push fails, the channel ends. Otherwise it can be used for the next push
    (`go_on`).

    Args:
        meeting: this rank's part in the first push.
        device: this rank's device. No two ranks may have the same GPU.
        environment: a context in which NCCL's variables are the same as those of the other ranks.

    Raises:
        RuntimeError: a rank did not take part, or does not know the secret of the push.
    """

    def __init__(
        self,
        meeting: Meeting,
        device: torch.device,
        environment: AbstractContextManager[object] | None = None,
    ) -> None:
        self.device = device
        self.is_ended = False
        # It is in use until every rank has answered in the second group.
        control = connect(meeting)
        signed = meeting.signed(_PREFIX)
        made: list[dist.ProcessGroup] = []
        is_gpu = device.type == "cuda"

        def connected() -> None:
            with environment or nullcontext(), nccl_environment(meeting.host) if is_gpu else nullcontext():
                made.append((_nccl_group if is_gpu else gloo_group)(signed, meeting))
                # This is the group's first operation. NCCL connects the ranks in it.
                prove(made[0], meeting.secret, meeting.rank, meeting.size, device)

        try:
            in_background(connected, meeting, signed.end)
        except BaseException:
            if made:
                super().__init__(made[0], meeting)
                self.give_up()
            raise
        finally:
            del control
        super().__init__(made[0], meeting)

    def go_on(self, meeting: Meeting) -> None:
        """Use the group for another push of the same ranks."""
        self._check, self._timeout = meeting.check, meeting.timeout

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None:
            self.give_up()

    def settle(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def close(self) -> None:
        """End the group, and wait a few seconds for its end. Call it when every rank has received everything."""
        # No wait after a failed push: a thread ends the group when NCCL no longer uses the memory in flight.
        if not self.is_ended:
            self.give_up()
            with waiting("a group of devices to end", END_LIMIT):
                self._thread.join(END_LIMIT)

    def give_up(self) -> None:
        if not self.is_ended:
            self._abandon(InFlight())

    def _abandon(self, in_flight: InFlight) -> Thread:
        self.is_ended = True
        self._thread = super()._abandon(in_flight)
        return self._thread

    def _wait(self, work: dist.Work) -> None:
        began = asked = time.monotonic()
        with waiting("the other ranks of a push to take weights on their devices", self._timeout):
            while not work.is_completed():
                now = time.monotonic()
                if now - began > self._timeout:
                    raise RuntimeError(
                        f"a broadcast from device to device did not end within {self._timeout:.0f} s"
                    )
                if now - asked > CHECK_EVERY:
                    self._check()
                    asked = now
                time.sleep(_POLL_EVERY)
        # Raises the operation's error.
        work.wait()

    def _end(self, in_flight: InFlight) -> None:
        # Until NCCL has ended its operations, they may write into the memory in flight.
        self._group.abort()
        super()._end(in_flight)


class KeptChannel:
    """One rank's channel from device to device, kept for the pushes of a run. The trainer and each worker have one.

    The trainer gives each group a name, which it sends with every push. In each push the ranks say over the store
    whether they still have the group of this name. If one has not, because it was started again or has served another
    trainer since, all make a new one.

    Args:
        device: this rank's device. No two ranks may have the same GPU.
        environment: makes a context in which NCCL's variables are the same as those of the other ranks.
    """

    def __init__(
        self, device: torch.device, environment: Callable[[], AbstractContextManager[object]] = nullcontext
    ) -> None:
        self._device, self._environment = device, environment
        self._channel: DeviceChannel | None = None
        self._name = ""

    def join(self, meeting: Meeting, name: str) -> DeviceChannel:
        """The channel of a push. Every rank calls, with the same name."""
        signed = meeting.signed(_AGREED)
        # An operation over a group that one rank has not would not end.
        if in_background(lambda: self._agree(signed, meeting, name), meeting, signed.end) == _KEPT:
            assert self._channel is not None
            self._channel.go_on(meeting)
            return self._channel
        self.close()
        self._channel, self._name = DeviceChannel(meeting, self._device, self._environment()), name
        return self._channel

    def _agree(self, signed: SignedStore, meeting: Meeting, name: str) -> bytes:
        has_group = self._channel is not None and self._name == name and not self._channel.is_ended
        own = _KEPT if has_group else _NEW
        if meeting.rank != SENDER:
            signed.set(f"{_OF_WORKER}{meeting.rank}", own)
            return signed.get(_OF_ALL)
        found = [own, *(signed.get(f"{_OF_WORKER}{rank}") for rank in range(1, meeting.size))]
        agreed = _KEPT if set(found) == {_KEPT} else _NEW
        signed.set(_OF_ALL, agreed)
        return agreed

    def close(self) -> None:
        """End the group, if there is one."""
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()


def _nccl_group(store: dist.Store, meeting: Meeting) -> dist.ProcessGroup:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=meeting.timeout)
    # With this variable torch starts no watchdog. A watchdog would end the process when an operation fails or is late.
    with _variables({"TORCH_NCCL_BLOCKING_WAIT": "1", "TORCH_NCCL_ENABLE_MONITORING": "0"}):
        return dist.ProcessGroupNCCL(store, meeting.rank, meeting.size, options)  # type: ignore[return-value]


def nccl_environment(host: str) -> AbstractContextManager[None]:
    """A context in which NCCL listens on the loopback interface only, if `host` is an address of it.

    NCCL reads the variable once per process, when it connects for the first time. Therefore it is left alone if the
    user has set it, or if this process has other groups that may need another interface.
    """
    is_one_of_several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    if not is_local(host) or is_one_of_several or _INTERFACE in os.environ:
        return nullcontext()
    return _variables({_INTERFACE: "=lo"})


@contextlib.contextmanager
def _variables(given: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in given}
    os.environ.update(given)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
