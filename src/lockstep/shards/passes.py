"""What all ranks must do together on sharded models, although each rank has other work.

A forward of a sharded model gathers its layers from all ranks. So every rank must run it, but ranks have different
numbers of packs, and some forwards are the work of one rank alone, such as the canary. Before each such act the ranks
therefore vote: each names the act that it wants to do next, the highest one is done by all, and who did not want it
plays it: a forward of one token without weight, or its part of a gather. A rank that has nothing left to do, also
because it failed, votes for nothing and plays along until all ranks vote for nothing. A vote is one number per rank,
over gloo.

The acts of a model are registered. `meet` is called before ranks exchange data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from lockstep.errors import LockstepError
from lockstep.progress import waiting

# A number above every act: a rank failed in the middle of one.
_BROKEN = 2**62
_OF_GLOO = ("gloo", "Connection closed", "Connection reset", "pair closure")
# Seconds that a rank waits for another one inside an act. The longest wait is for the forward and backward of one
# layer of a pack.
PASS_LIMIT = 600.0


class BrokenPass(LockstepError):
    """Another rank failed in the middle of an act, or did not come. That rank raises the cause."""


class Passes:
    """The acts of this run's ranks.

    Args:
        limit: seconds that a rank waits for the vote of another one. It must exceed the longest work of the owner.
    """

    def __init__(self, limit: float) -> None:
        self.rank, self.count = dist.get_rank(), dist.get_world_size()
        self._limit = limit
        # Over gloo, for votes and for the plans of checkpoints.
        with waiting("every rank to begin", limit, verb=f"rank {self.rank} waits for "):
            self.control = dist.new_group(backend="gloo", timeout=timedelta(seconds=limit))
            # The sharded models' own group, with the limit of one act.
            self.group = dist.new_group(timeout=timedelta(seconds=PASS_LIMIT))
        self._plays: list[Callable[[], object]] = []
        self._failed = self._broken = False
        # How many acts of other ranks this rank has played.
        self.played = 0

    def register(self, play: Callable[[], object]) -> int:
        """A new act, in the same order on every rank; `play` takes part without own work.

        Returns its number. Of two acts the higher one is done first.
        """
        self._plays.append(play)
        return len(self._plays)

    def meet(self) -> None:
        """Play along in the acts of the other ranks until no rank has one left. Every rank calls."""
        while (act := self._vote(0)) not in (0, _BROKEN):
            self._play(act)

    @contextmanager
    def act(self, number: int) -> Iterator[None]:
        """A context in which this rank does an act. The other ranks do it too, or play it."""
        while (chosen := self._vote(number)) != number:
            if chosen == _BROKEN:
                raise BrokenPass(
                    "another rank failed in the middle of a forward or backward of the sharded model"
                )
            self._play(chosen)
        with self._whole():
            yield

    def _play(self, act: int) -> None:
        self.played += 1
        with self._whole():
            self._plays[act - 1]()

    @contextmanager
    def _whole(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            if self.count > 1:
                self._failed = True
            if isinstance(error, RuntimeError) and _is_of_another_rank(error):
                raise BrokenPass(
                    f"rank {self.rank} waited in a forward or backward of the sharded model for a rank that "
                    f"failed or did not come within {PASS_LIMIT:.0f} s ({str(error)[:160]})"
                ) from error
            raise

    def _vote(self, act: int) -> int:
        if self.count == 1:
            return act
        if self._broken:
            return _BROKEN
        ballot = torch.tensor([_BROKEN if self._failed else act])
        try:
            what = "every rank, before its next forward of the sharded model"
            with waiting(what, self._limit, verb=f"rank {self.rank} waits for "):
                dist.all_reduce(ballot, op=dist.ReduceOp.MAX, group=self.control)
        except RuntimeError as error:
            self._broken = True
            raise LockstepError(
                f"rank {self.rank} waited for every rank, before its next forward of the sharded model, and "
                f"one is gone or did not come within {self._limit:.0f} s ({str(error)[:160]}); look at the "
                "other ranks' output"
            ) from error
        self._broken = int(ballot) == _BROKEN
        return int(ballot)


def _is_of_another_rank(error: RuntimeError) -> bool:
    # gloo has no error type of its own.
    return isinstance(error, dist.DistError) or any(word in str(error) for word in _OF_GLOO)
