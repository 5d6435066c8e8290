"""Proofs of the way from answer to loss: turns hold what was answered, and a loss has what was sampled.

Each rollout has a seal from the moment at which the engine's last answer was in (`rollouts/group.py`). The ids that a
model reads are taken from the pack itself: from its nodes and from who sees whom.

Proof `learned`.
Shows: the ids, places, contexts and log-probs in the tensors of every loss are those of the engine's answer, by a
digest that each rollout carries from its last answer through other ranks and reward functions (exact); its text and
its row are those with which it was sealed; every micro-batch learns from its own completions, once; the old log-probs
are those that the scoring pass recorded, or those of the loss's own forward where there was none (exact).
Does not show: that the answer itself belongs to its prompt (`gap`), and its text to its ids (`rows`); kept ids; what
a user's objective takes from elsewhere.
When: every micro-batch of every step, before its loss.

One `Record` per rollout is compared with the rollout's branches when its program has ended. The gap proves log-probs up
to rounding; this proof is exact.

Proof `turns`.
Shows: in each rollout, every answer of the engine is in exactly one branch: behind the ids and pictures that the
engine was sent, marked as sampled, with its log-probs and versions; nothing else is marked as sampled (exact, by
digests).
Does not show: that the inserted ids are the right ones.
When: every rollout of the driver.

A model reads placeholders as parts of pictures. A sampled one would shift every picture behind it.

Proof `placeholder`.
Shows: no sampled id is the placeholder of a picture, which every request of a run with pictures bans
(docs/internals/images.md).
Does not show: that other banned ids were not sampled (the gap shows this).
When: every generation of a run with pictures.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from lockstep.contract.protocol import Completion, GenerationRequest
from lockstep.devices import on_host
from lockstep.errors import ProofError
from lockstep.learn.methods.objective import Scores, TokenBatch
from lockstep.learn.sequence import TrainingSequence
from lockstep.rollouts.group import Rollout, RolloutGroup, row_of, words_of
from lockstep.tokens.arrays import Ids, digest_of

Ints = npt.NDArray[np.int64]
Reals = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Sampled:
    """What was sampled in one branch.

    Attributes:
        rollout: prompt id and sample.
        ids: digest of ids and positions (`tokens_of` in `rollouts/group.py`).
        logps: digest of the engine's log-probs.
        old_logps: digest of the policy's log-probs before the generation's first step; None: nothing scored it then.
    """

    rollout: tuple[str, int]
    ids: str
    logps: str
    old_logps: str | None


@dataclass(frozen=True, slots=True)
class Entering:
    """A pack as it enters a loss, on the host. Its N tokens are those of its sequences, one after the other.

    Attributes:
        names, lengths: of the sequences; length in sampled tokens.
        input_ids, position_ids, ends, predictors, targets: as in `learn/pack.py`. No positions: they are not compared.
        behaviour, old_logps: (N,) as the loss uses them.
        logps: (N,) of the forward itself.
    """

    names: Sequence[str]
    lengths: Sequence[int]
    input_ids: Ints
    position_ids: Ints | None
    ends: Ints | None
    predictors: Ints
    targets: Ints
    behaviour: Reals
    old_logps: Reals
    logps: Reals

    def digests(self) -> Iterator[tuple[str, str]]:
        """For each sequence, the digests of its ids and of its behaviour log-probs."""
        stops, roots = np.cumsum(self.lengths), self._roots()
        for name, stop, length in zip(self.names, stops.tolist(), self.lengths, strict=True):
            own = slice(stop - length, stop)
            nodes = self._seen_by(int(self.predictors[own][-1]), roots)
            path, predictors = self.input_ids.reshape(-1)[nodes], self.predictors[own]
            if self.position_ids is None:
                places, predicted = np.arange(len(nodes), dtype=np.int64), np.searchsorted(nodes, predictors)
            else:
                depths = self.position_ids.reshape(-1)
                places, predicted = depths[nodes], depths[predictors]
            yield (
                digest_of(name, path, places, predicted, self.targets[own]),
                digest_of(name, self.behaviour[own]),
            )

    def _roots(self) -> Ints:
        """The first node of each tree. Nodes are in depth-first order, and a node sees no later tree."""
        roots: list[int] = []
        if self.ends is not None:
            start = 0
            while start < len(self.ends):
                roots.append(start)
                start = int(self.ends[start])
        return np.array(roots, dtype=np.int64)

    def _seen_by(self, node: int, roots: Ints) -> Ints:
        """The nodes whose ids a node sees, itself included, in order."""
        if self.ends is None:
            width = self.input_ids.shape[-1]
            return np.arange(node - node % width, node + 1)
        # Nodes are in depth-first order, so the tree of a node begins at the last root before it.
        first = int(roots[np.searchsorted(roots, node, side="right") - 1])
        return first + np.flatnonzero(self.ends[first : node + 1] > node)


class SampledTokens:
    """What every micro-batch of a generation must learn from.

    Args:
        sampled: every branch with sampled tokens, by name.
        micro_batches: names of the branches of each one, over all ranks.
        own_forward: whether the old log-probs are those of the loss's own forward: no step was made before it.
    """

    def __init__(
        self, sampled: Mapping[str, Sampled], micro_batches: Sequence[Sequence[str]], *, own_forward: bool
    ) -> None:
        self._sampled, self._micro_batches = dict(sampled), [sorted(names) for names in micro_batches]
        self._own_forward = own_forward

    def check_micro_batch(self, index: int, names: Iterable[str]) -> None:
        """Check that a micro-batch of the generation learns from its own completions, each of them once."""
        found, due = sorted(names), self._micro_batches[index]
        if found != due:
            strange = sorted({*found} ^ {*due}) or [name for name in due if found.count(name) != 1]
            raise _wrong(
                f"micro-batch {index} learns from {len(found)} completions, and {len(due)} were sampled for it; "
                f"{strange[0] if strange else 'a completion'} is in only one of the two"
            )

    def check(self, entering: Entering) -> None:
        """Compare a pack with what was sampled: ids, their places, the engine's log-probs and the old log-probs."""
        own = self._own_forward and _equal(entering.old_logps, entering.logps)
        starts = np.cumsum(entering.lengths) - entering.lengths
        found = zip(entering.names, starts.tolist(), entering.lengths, entering.digests(), strict=True)
        for name, start, length, (ids, logps) in found:
            due = self._due(name)
            self._same(due, ids == due.ids, "ids, or the ids before them,")
            self._same(due, logps == due.logps, "log-probs of the engine")
            old = entering.old_logps[start : start + length]
            right = own if self._own_forward else digest_of(name, old) == due.old_logps
            self._same(due, right, "old log-probs")

    def check_aside(self, name: str, ids: str, logps: str, old_logps: Any) -> None:
        """Compare the digests and (N,) old log-probs, if any, of a completion that needs no forward in this step."""
        due = self._due(name)
        self._same(due, ids == due.ids, "ids, or the ids before them,")
        self._same(due, logps == due.logps, "log-probs of the engine")
        if due.old_logps is not None:
            same = old_logps is not None and digest_of(name, old_logps) == due.old_logps
            self._same(due, same, "old log-probs")

    def _due(self, name: str) -> Sampled:
        if name not in self._sampled:
            raise _wrong(f"{name} enters the loss and was not sampled in this generation")
        return self._sampled[name]

    @staticmethod
    def _same(due: Sampled, same: bool, what: str) -> None:
        if not same:
            prompt, sample = due.rollout
            raise _wrong(
                f"the {what} of rollout {sample} of prompt {prompt} are others in the loss than were recorded"
            )


def _equal(one: Reals, other: Reals) -> bool:
    """Whether two arrays are equal. A NaN equals a NaN, which is looked for only if there is a difference."""
    return np.array_equal(one, other) or np.array_equal(one, other, equal_nan=True)


def words_error(prompt: str, sample: int, found: str) -> ProofError:
    """The error for a rollout whose text, row or seal is not that of its sampling."""
    return _wrong(f"rollout {sample} of prompt {prompt} {found}")


def _wrong(found: str) -> ProofError:
    return ProofError(
        "learned",
        found,
        "rollouts, their ids, texts or log-probs were exchanged or changed between the engine's answer and the loss",
        "let nothing change groups or sequences after they were sampled; otherwise this is a defect of "
        "Lockstep: report it",
    )


def sampled_tokens(
    groups: Sequence[RolloutGroup], old_logps: Scores | None, size: int, *, own_forward: bool
) -> SampledTokens:
    """The proof of a generation, from the seals of its scored rollouts; raises `ProofError` if a seal does not fit.

    Args:
        old_logps: log-probs of the policy before the first step, by name of the branch; None: nothing was scored then.
        size: completions per micro-batch.
    """
    sampled: dict[str, Sampled] = {}
    names: list[list[str]] = []
    for group in groups:
        row = row_of(group.prompt)
        for rollout in group.rollouts:
            prompt, sample = rollout.key.prompt_id, rollout.key.sample
            if rollout.seal is None:
                raise words_error(prompt, sample, "was not sampled by this run: it has no seal")
            if rollout.seal.words != words_of(rollout.key, rollout.text, row):
                raise words_error(
                    prompt,
                    sample,
                    "was scored with another text or row than its own, or a reward function has changed its row",
                )
            for name, (ids, logps) in rollout.seal.tokens.items():
                old = None if old_logps is None else digest_of(name, old_logps[name])
                sampled[name] = Sampled((prompt, sample), ids, logps, old)
            names.append(list(rollout.seal.tokens))
    batches = [list(chain(*names[start : start + size])) for start in range(0, len(names), size)]
    return SampledTokens(sampled, batches, own_forward=own_forward)


def check_entering(proof: SampledTokens, batch: TokenBatch) -> None:
    """Compare a pack just before its loss."""
    pack = batch.pack
    logps = batch.behaviour_logps, batch.old_logps, batch.logps
    ids = pack.input_ids, pack.predictors, pack.targets, pack.position_ids
    input_ids, predictors, targets, positions, behaviour, old_logps, own_logps = (
        tensor.numpy() for tensor in on_host((*ids, *logps))
    )
    proof.check(
        Entering(
            names=[s.name for s in batch.sequences],
            lengths=[s.length for s in batch.sequences],
            input_ids=input_ids,
            # The positions of a picture's parts are not places in the sequence; the gap proves them.
            position_ids=None if pack.pictures else positions,
            ends=None if pack.ends is None else pack.ends.numpy(),
            predictors=predictors,
            targets=targets,
            behaviour=behaviour,
            old_logps=old_logps,
            logps=own_logps,
        )
    )


def check_aside(proof: SampledTokens, sequences: Sequence[TrainingSequence]) -> None:
    """Compare sequences that were scored before the first step and have no gradient."""
    for s in sequences:
        places = np.arange(len(s.path), dtype=np.int64)
        ids = digest_of(s.name, s.path, places, s.predictors, s.sampled_ids)
        proof.check_aside(s.name, ids, digest_of(s.name, s.behaviour_logps), s.old_logps)


class Record:
    """The answers of one rollout, by a digest of the ids and the digests of the pictures before each."""

    def __init__(self) -> None:
        self._answers: dict[tuple[bytes, tuple[str, ...]], list[Completion]] = {}
        self._cuts = False

    def note(self, request: GenerationRequest, answer: Completion) -> None:
        """Keep an answer, just before the conversation takes it."""
        self._cuts |= bool(request.sampling.stop)
        if len(answer.token_ids):
            seen = request.pictures.digests
            self._answers.setdefault((_digest(request.prompt_ids), seen), []).append(answer)

    def check(self, rollout: Rollout) -> None:
        """Check that every answer is in exactly one branch, and that nothing else is marked as sampled.

        It stands behind the ids and pictures that the engine was sent, with its marks, log-probs and versions.
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
                seen = branch.pictures.digests_before(len(branch.prompt_ids) + place)
                answers = left.get((state.digest(), seen), [])
                found = max(answers, key=lambda a: _shared(a, branch, sampled, place), default=None)
                if found is None:
                    raise _unlike(
                        f"id {place} of branch {branch.key} is marked as sampled, and the engine was not "
                        "asked to continue the ids before it with the pictures in them"
                    )
                length = _shared(found, branch, sampled, place)
                if self._cuts:
                    length = self._cut(branch, state, seen, place, length)
                if not length or (length < len(found.token_ids) and not self._cuts):
                    raise _unlike(
                        f"branch {branch.key} differs from the answer to {found.key} from its id "
                        f"{place + length} on: in an id, its log-prob, its version or its mark"
                    )
                answers.remove(found)
                end += length
            else:
                while end < count and not sampled[end]:
                    end += 1
            state.update(branch.token_ids[place:end].tobytes())
            place = end

    def _cut(self, branch: Completion, state: blake2b, seen: tuple[str, ...], place: int, length: int) -> int:
        """The length of a turn that a stop string may have cut: the next may begin before the end of the answer."""
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


def check_placeholders(completions: Iterable[Completion], banned: Sequence[int]) -> None:
    """Check that no placeholder of a picture was sampled. Inserted ids may show pictures."""
    if not banned:
        return
    for completion in completions:
        ids = completion.token_ids[completion.sampled_places]
        if (found := np.isin(ids, banned)).any():
            raise ProofError(
                "placeholder",
                f"completion {completion.key} has id {ids[found][0]}, the placeholder of pictures, which "
                f"every request bans",
                "the engine samples without the bans of its requests, and may have put a picture in the place "
                "of the token",
                "remove logits processors and sampling settings of your own from the engine; otherwise report "
                "this message",
            )
