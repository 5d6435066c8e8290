"""Broadcasts bytes from the trainer's GPU to the GPUs of the workers over NCCL, without a copy in main memory.

The ranks of a group meet over gloo first (`meeting.py`). NCCL has no time limit for a rank that is gone. Therefore this process
asks again and again whether an operation has ended, and aborts the group if the push has failed. `KeptChannel` keeps a group from
push to push. A push that failed ends its group, and the next push makes a new one, so nothing is left to repair.

On a CPU the same classes broadcast over a second group of gloo. The tests use it there. The parts that run only with NCCL are
`_nccl_group`, `nccl_environment`, and the GPU's branch of `settle`. They have not been run on a GPU yet.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from threading import Thread

import torch
import torch.distributed as dist

from lockstep.bounded_http import is_local
from lockstep.report.waits import waiting
from lockstep.sync.wire.groups.channel import SENDER, GlooChannel, InFlight
from lockstep.sync.wire.groups.meeting import CHECK_EVERY, Meeting, connect, gloo_group, in_background
from lockstep.sync.wire.groups.proof import SignedStore, prove

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

    It is a context for one push. If the push fails, the channel ends. Otherwise it can be used for the next push (`go_on`).

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
        # After a failed push this does not wait: a thread ends the group when NCCL has stopped using the memory in flight.
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
                    raise RuntimeError(f"a broadcast from device to device did not end within {self._timeout:.0f} s")
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

    The trainer gives each group a name, which it sends with every push. In each push the ranks say over the store whether they
    still have the group of this name. If one has not, because it was started again or has served another trainer since, all make a
    new one.

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
        """The channel of a push. Every rank calls, with the same name.

        Raises:
            RuntimeError: a rank did not take part, or does not know the secret of the push.
        """
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

    NCCL reads the variable once per process, when it connects for the first time. Therefore it is left alone if the user has set
    it, or if this process has other groups that may need another interface.
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
