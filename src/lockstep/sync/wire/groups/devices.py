"""Broadcasts bytes from the trainer's GPU to the GPUs of the workers over NCCL, without a copy in main memory.

The ranks of a push meet over gloo first (`meeting.py`). NCCL has no time limit for a rank that is gone. Therefore this process asks
again and again whether an operation has ended, and aborts the group if the push has failed. A push makes a new group, so a push
that failed leaves nothing to repair.

On a CPU the same class broadcasts over a second group of gloo. The tests use it there. The parts that run only with NCCL are
`_nccl_group`, `nccl_environment`, and the GPU's branch of `settle`. They have not been run on a GPU yet.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta

import torch
import torch.distributed as dist

from lockstep.engines.http.server_calls import is_local
from lockstep.report.waits import waiting
from lockstep.sync.wire.groups.channel import GlooChannel, InFlight
from lockstep.sync.wire.groups.meeting import CHECK_EVERY, Meeting, gloo_group, in_background
from lockstep.sync.wire.groups.proof import prove

_INTERFACE = "NCCL_SOCKET_IFNAME"
# Keys of the second group begin with this word, because both groups use the same store.
_PREFIX = "device/"
_POLL_EVERY = 0.0002


class DeviceChannel(GlooChannel):
    """Broadcasts from device to device: over NCCL on GPUs, over gloo on CPUs. Every rank of the push makes one.

    Args:
        control: the group over gloo in which the ranks of the push have met.
        device: this rank's device. No two ranks may have the same GPU.
        environment: a context in which NCCL's variables are the same as those of the other ranks.

    Raises:
        RuntimeError: a rank did not take part, or does not know the secret of the push.
    """

    def __init__(
        self,
        control: dist.ProcessGroup,
        meeting: Meeting,
        device: torch.device,
        environment: AbstractContextManager[object] | None = None,
    ) -> None:
        self.device = device
        self._control = GlooChannel(control, meeting)
        self._is_ended = False
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
        super().__init__(made[0], meeting)

    def settle(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def close(self) -> None:
        # A rank may still pass on what it has received when its own operation has ended. So no rank leaves before all have received
        # everything.
        try:
            self._control.meet()
        finally:
            self.give_up()

    def give_up(self) -> None:
        if not self._is_ended:
            self._abandon(InFlight())

    def _abandon(self, in_flight: InFlight) -> None:
        self._is_ended = True
        super()._abandon(in_flight)

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
