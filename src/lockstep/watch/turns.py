"""The turns proof: a rollout holds exactly what the engine was asked and has answered.

There is one `Record` per rollout. When the program has ended, the record is compared with the rollout's branches. The
gap proves log-probs up to rounding; this proof is exact.

Proof `turns`.
Shows: in each rollout, every answer of the engine is in exactly one branch: behind the ids and pictures that the
engine was sent, marked as sampled, with its log-probs and versions; nothing else is marked as sampled (exact, by
digests).
Does not show: that the inserted ids are the right ones.
When: every rollout of the driver.
"""

from __future__ import annotations

from hashlib import blake2b

import numpy as np

from lockstep.contract.protocol import Completion, GenerationRequest
from lockstep.errors import ProofError
from lockstep.rollouts.group import Rollout
from lockstep.tokens.arrays import Ids


class Record:
    """The answers of one rollout, by a digest of the ids and the digests of the pictures after which each was sampled."""

    def __init__(self) -> None:
        self._answers: dict[tuple[bytes, tuple[str, ...]], list[Completion]] = {}
        self._cuts = False

    def note(self, request: GenerationRequest, answer: Completion) -> None:
        """Keep an answer, just before the conversation takes it."""
        self._cuts |= bool(request.sampling.stop)
        if len(answer.token_ids):
            seen = request.pictures.digests if request.pictures is not None else ()
            self._answers.setdefault((_digest(request.prompt_ids), seen), []).append(answer)

    def check(self, rollout: Rollout) -> None:
        """Check that every answer is in exactly one branch: behind the ids and pictures that the engine was sent, marked as
        sampled, with its log-probs and versions; and that nothing else is marked as sampled.

        Raises:
            ProofError: it is not.
        """
        left = {context: list(answers) for context, answers in self._answers.items()}
        for branch in rollout.branches:
            self._take(branch, left)
        missing = [answer for answers in left.values() for answer in answers]
        if missing:
            raise _unlike(f"the answer to {missing[0].key} is in no branch of the rollout")

    def _take(self, branch: Completion, left: dict[tuple[bytes, tuple[str, ...]], list[Completion]]) -> None:
        """Take the answers of a branch from those that are left."""
        place, count = 0, len(branch.token_ids)
        sampled = np.ones(count, np.bool_) if branch.sampled is None else branch.sampled
        state = blake2b(branch.prompt_ids.tobytes(), digest_size=16)
        while place < count:
            end = place
            if sampled[place]:
                shown = branch.pictures
                seen = shown.digests_before(len(branch.prompt_ids) + place) if shown is not None else ()
                answers = left.get((state.digest(), seen), [])
                found = max(answers, key=lambda a: _shared(a, branch, sampled, place), default=None)
                if found is None:
                    raise _unlike(
                        f"id {place} of branch {branch.key} is marked as sampled, and the engine was not asked to continue the "
                        "ids before it with the pictures in them"
                    )
                length = _shared(found, branch, sampled, place)
                if self._cuts:
                    length = self._cut(branch, state, seen, place, length)
                if not length or (length < len(found.token_ids) and not self._cuts):
                    raise _unlike(
                        f"branch {branch.key} differs from the answer to {found.key} from its id {place + length} on: in an id, "
                        "its log-prob, its version or its mark"
                    )
                answers.remove(found)
                end += length
            else:
                while end < count and not sampled[end]:
                    end += 1
            state.update(branch.token_ids[place:end].tobytes())
            place = end

    def _cut(self, branch: Completion, state: blake2b, seen: tuple[str, ...], place: int, length: int) -> int:
        """The length of a turn that may be cut behind a stop string: the next turn may begin before the end of the answer."""
        ahead = state.copy()
        for count in range(1, length):
            ahead.update(branch.token_ids[place + count - 1 : place + count].tobytes())
            if (ahead.digest(), seen) in self._answers:
                return count
        return length


def _shared(answer: Completion, branch: Completion, sampled: np.ndarray, place: int) -> int:
    """How many tokens of an answer stand in a branch from a place on, marked as sampled."""
    length = min(len(answer.token_ids), len(branch.token_ids) - place)
    own, theirs = slice(place, place + length), slice(length)
    same = (
        sampled[own]
        & (branch.token_ids[own] == answer.token_ids[theirs])
        & (branch.logprobs[own] == answer.logprobs[theirs])
        & (branch.weight_versions[own] == answer.weight_versions[theirs])
    )
    return length if same.all() else int(np.argmin(same))


def _digest(ids: Ids) -> bytes:
    return blake2b(ids.tobytes(), digest_size=16).digest()


def _unlike(found: str) -> ProofError:
    return ProofError(
        "turns",
        found,
        "the rollout was put together from other ids than the engine was sent and has answered",
        "this is a defect of Lockstep: report it with this message",
    )
