"""Broadcasts bytes from the trainer to the workers of a push, within a time limit and until the push fails.

`GlooChannel` sends from main memory to main memory.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterable
from datetime import timedelta
from threading import Thread
from typing import Self

import torch
import torch.distributed as dist

from lockstep.report.waits import waiting
from lockstep.sync.wire.groups.meeting import CHECK_EVERY, Meeting

InFlight = deque[tuple[dist.Work, torch.Tensor]]

SENDER = 0
FROM_SENDER = dist.BroadcastOptions()
FROM_SENDER.rootRank = SENDER
_MOST_IN_FLIGHT = 2


class GlooChannel:
    """Broadcasts over gloo. It is a context, which ends the channel.

    Gloo cannot end a broadcast early, and some workers never read it, for example a stopped process of a dead server. Therefore, if
    a method raises, a thread keeps the connections and the memory until the broadcasts end.

    Args:
        group: a group whose ranks have proven that they know the secret of the push.
        meeting: this rank's part in the push. Its `check` is called twice per second while this process waits.

    Attributes:
        device: where the bytes must be.
    """

    device = torch.device("cpu")

    def __init__(self, group: dist.ProcessGroup, meeting: Meeting) -> None:
        self._group, self._check, self._timeout = group, meeting.check, meeting.timeout

    def broadcast(self, parts: Iterable[torch.Tensor]) -> None:
        """Broadcast tensors of bytes to every rank, in order, with two broadcasts in flight at a time. Every rank calls."""
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
