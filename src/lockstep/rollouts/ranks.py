"""Communication of several trainer ranks, one of which owns the engine.

Every rank sends its part, the owner works on all parts, and each rank gets an answer: one gather and one scatter per
call. Every rank makes every call, also a rank without data, and an error on any rank is raised on all of them. Ranks
send JSON and arrays (`rollouts/wire.py`), without pickle.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from lockstep.errors import InputError, LockstepError, ProofError
from lockstep.progress import waiting
from lockstep.rollouts.wire import decode, encode
from lockstep.shards.passes import BrokenPass, Passes

T = TypeVar("T")
R = TypeVar("R")
_OWNER = 0


class Ranks:
    """The ranks of a run. There may be only one.

    Args:
        limit: seconds that a rank waits for the others in one call. It must exceed the longest work of the owner.
    """

    def __init__(self, limit: float) -> None:
        several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        self._limit = limit
        self.rank = dist.get_rank() if several else _OWNER
        self.count = dist.get_world_size() if several else 1
        self._group: dist.ProcessGroup | None = None
        if several:
            # A group of its own: a call here times out instead of mixing with the trainer's collectives.
            with waiting("every rank to begin", limit):
                self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=limit))
        # Where models are sharded: what all ranks must do together (`shards/passes.py`).
        self.passes: Passes | None = None

    def share_passes(self) -> Passes:
        """The passes of this run's sharded models. Every rank calls this; from then on, ranks that wait play along."""
        if self.passes is None:
            self.passes = Passes(self._limit)
        return self.passes

    @property
    def owner(self) -> bool:
        """Whether this rank holds the engine."""
        return self.rank == _OWNER

    def call(self, name: str, offer: Callable[[], T], work: Callable[[Sequence[T]], Sequence[R]]) -> R:
        """Do one task on all ranks together. Every rank must make this call.

        Args:
            name: the same on all ranks.
            offer: makes this rank's part (JSON types and arrays), or raises an error if the part is invalid.
            work: only the owner calls it, with the parts in the order of ranks. It returns one answer per rank, in the
                same order (JSON types and arrays; tuples arrive as lists, arrays are read-only).

        Raises:
            LockstepError: on every rank, if a part was refused, if the work failed (`InputError` and `ProofError` keep
                their type), or if a rank did not make the call within the limit.
        """
        if self._group is None:
            (answer,) = work([offer()])
            return answer
        mine = self._met(name, self._try(name, offer))
        with self._waiting(name, "every rank"):
            parts = self._gathered(mine.outcome)
        done = self._try(name, lambda: self._answers(name, parts, work)) if self.owner else mine
        done = self._met(name, done)
        with self._waiting(name, f"rank {_OWNER}, which holds the engine"):
            outcome = self._scattered(done.outcome)
        cause = done.error or mine.error
        if outcome.failure is not None:
            if cause is not None and not isinstance(cause, LockstepError):
                # An interrupt or a lack of memory keeps its type only on the rank on which it happened.
                raise cause
            raise outcome.failure.rebuilt() from cause
        return outcome.value

    def from_owner(
        self, name: str, make: Callable[[], T], pack: Callable[[T], Any], unpack: Callable[[Any], T]
    ) -> T:
        """Return on every rank the value that the owner makes. Every rank must make this call; raises as `call`.

        `pack` and `unpack` convert the value to JSON types and arrays, and back, for the other ranks.
        """
        made: list[T] = []

        def work(parts: Sequence[None]) -> list[Any]:
            made.append(make())
            # The value is packed only if there are other ranks.
            return [pack(made[0])] * len(parts) if len(parts) > 1 else [None]

        answer = self.call(name, lambda: None, work)
        return made[0] if made else unpack(answer)

    def on_owner(self, name: str, work: Callable[[], Any]) -> None:
        """Do something on the owner alone while the other ranks wait. Every rank makes this call; raises as `call`."""
        self.from_owner(name, work, lambda _: None, lambda _: None)

    def share(self, name: str, part: Callable[[], T]) -> list[T]:
        """Return the parts of all ranks on every rank, in their order: JSON types and arrays. Raises as `call`."""
        return self.call(name, part, lambda parts: [list(parts)] * len(parts))

    def _met(self, name: str, tried: _Tried) -> _Tried:
        """What this rank has tried, after it has played along until all ranks are here."""
        if self.passes is None:
            return tried
        played = self._try(name, self.passes.meet)
        return played if played.error is not None and tried.error is None else tried

    def _try(self, name: str, step: Callable[[], Any]) -> _Tried:
        try:
            return _Tried(_Outcome(name, step()), None)
        except _RefusedPart as refused:
            return _Tried(_Outcome(name, None, refused.failure), None)
        except BaseException as error:  # noqa: BLE001 - raised again by `call`, once the others have been told
            return _Tried(_Outcome(name, None, _Failure.of(error, self.rank)), error)

    def _answers(
        self, name: str, parts: Sequence[_Outcome], work: Callable[[Sequence[Any]], Sequence[Any]]
    ) -> list:
        """Run the owner's work after every part has arrived."""
        failures = [part.failure for part in parts if part.failure is not None]
        for failure in sorted(failures, key=lambda f: f.kind == "broken"):
            raise _RefusedPart(failure)
        odd = [(rank, part.name) for rank, part in enumerate(parts) if part.name != name]
        if odd:
            raise LockstepError(
                f"rank {self.rank} is at {name!r} and rank {odd[0][0]} at {odd[0][1]!r}: every rank must make "
                f"the same calls"
            )
        answers = list(work([part.value for part in parts]))
        if len(answers) != self.count:
            raise LockstepError(f"{name!r} has {len(answers)} answers for {self.count} ranks")
        return answers

    def _gathered(self, mine: _Outcome) -> list[_Outcome]:
        (frame,) = self._frames(mine.name, [mine])
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.count)]
        dist.all_gather(sizes, torch.tensor([len(frame)]), group=self._group)
        width = int(max(sizes))
        parts = [torch.empty(width, dtype=torch.uint8) for _ in range(self.count)] if self.owner else None
        dist.gather(_padded(frame, width), parts, dst=_OWNER, group=self._group)
        return [_Outcome.read(part[: int(size)]) for part, size in zip(parts or (), sizes, strict=False)]

    def _scattered(self, done: _Outcome) -> _Outcome:
        frames = self._frames(done.name, self._outcomes(done)) if self.owner else []
        # An answer that all ranks share is broadcast; then all sizes but the first are 0.
        sizes = torch.tensor([len(frame) for frame in frames] + [0] * (self.count - len(frames)))
        dist.broadcast(sizes, _OWNER, group=self._group)
        width = int(sizes.max())
        if not int(sizes[1:].sum()):
            mine = _padded(frames[0], width) if self.owner else torch.empty(width, dtype=torch.uint8)
            dist.broadcast(mine, _OWNER, group=self._group)
            return _Outcome.read(mine)
        mine = torch.empty(width, dtype=torch.uint8)
        answers = [_padded(frame, width) for frame in frames] if self.owner else None
        dist.scatter(mine, answers, src=_OWNER, group=self._group)
        return _Outcome.read(mine[: int(sizes[self.rank])])

    def _outcomes(self, done: _Outcome) -> list[_Outcome]:
        """One outcome per rank, or a single outcome for all ranks."""
        values = [None] * self.count if done.failure else done.value
        if all(value is values[0] for value in values):
            return [_Outcome(done.name, values[0], done.failure)]
        return [_Outcome(done.name, value) for value in values]

    def _frames(self, name: str, outcomes: Sequence[_Outcome]) -> list[bytearray]:
        """The frame of each outcome, or of the failure to encode it, so that every rank gets an answer."""
        try:
            return [outcome.frame() for outcome in outcomes]
        except (TypeError, ValueError) as error:
            return [_Outcome(name, None, _Failure.of(error, self.rank)).frame()]

    @contextmanager
    def _waiting(self, name: str, whom: str) -> Iterator[None]:
        try:
            with waiting(f"{whom} at {name!r}", self._limit, verb=f"rank {self.rank} waits for "):
                yield
        except LockstepError:
            raise
        except RuntimeError as error:
            # gloo has no separate error type for a peer that is late or gone.
            said = str(error).partition(". This is typically")[0].strip()[-160:]
            raise LockstepError(
                f"rank {self.rank} waited at {name!r} for {whom}, which is gone or did not come within "
                f"{self._limit:.0f} s ({said}); look at the other ranks' output, and check that all ranks make "
                "the same calls (a loop over tools must not end earlier on some ranks)"
            ) from error


def _padded(frame: bytearray, width: int) -> torch.Tensor:
    found, missing = torch.frombuffer(frame, dtype=torch.uint8), width - len(frame)
    return torch.cat([found, torch.zeros(missing, dtype=torch.uint8)]) if missing else found


@dataclass(frozen=True, slots=True)
class _Failure:
    """An error that other processes can make again: `fields` are its arguments, the message first."""

    rank: int
    kind: str
    fields: tuple[str, ...]

    @classmethod
    def of(cls, error: BaseException, rank: int) -> _Failure:
        if isinstance(error, ProofError):
            return cls(rank, "proof", error.fields())
        if isinstance(error, LockstepError):
            kinds = {InputError: "input", BrokenPass: "broken"}
            kind = next((name for of, name in kinds.items() if isinstance(error, of)), "other")
            return cls(rank, kind, (str(error),))
        return cls(rank, "other", (f"{type(error).__name__}: {str(error).strip()[:600]}",))

    def rebuilt(self) -> LockstepError:
        message, rest = f"rank {self.rank}: {self.fields[0]}", self.fields[1:]
        if self.kind == "proof":
            return ProofError.of_fields(message, *rest)
        return InputError(message) if self.kind == "input" else LockstepError(message)


class _RefusedPart(LockstepError):
    """A rank refused its part. The failure is passed on unchanged."""

    def __init__(self, failure: _Failure) -> None:
        self.failure = failure
        super().__init__(failure.fields[0])


@dataclass(frozen=True, slots=True)
class _Outcome:
    """What a rank sends: a value, or the failure that prevented it."""

    name: str
    value: Any
    failure: _Failure | None = None

    def frame(self) -> bytearray:
        """The bytes of the outcome; TypeError or ValueError if something in the value cannot be sent."""
        failure = self.failure
        return encode({"name": self.name, "value": self.value, "failure": failure and asdict(failure)})

    @classmethod
    def read(cls, frame: torch.Tensor) -> _Outcome:
        found = decode(frame.numpy())
        if failure := found["failure"]:
            failure = _Failure(failure["rank"], failure["kind"], tuple(failure["fields"]))
        return cls(found["name"], found["value"], failure)


@dataclass(frozen=True, slots=True)
class _Tried:
    """An outcome, and the error behind its failure if the error happened on this rank."""

    outcome: _Outcome
    error: BaseException | None
