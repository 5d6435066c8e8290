"""Proof that what is learned is what was sampled: the tensors of a loss hold the ids and log-probs of the engine's answers.

Each rollout has a seal from the moment at which the engine's last answer was in (`rollouts/seal.py`). The ids that a
model reads are taken from the pack itself: from its nodes and from who sees whom.

Proof `learned`.
Shows: the ids, places, contexts and log-probs in the tensors of every loss are those of the engine's answer, by a
digest that each rollout carries from its last answer through other ranks and reward functions (exact); its text and
its row are those with which it was sealed; every micro-batch learns from its own completions, once; the old log-probs
are those that the scoring pass recorded, or those of the loss's own forward where there was none (exact).
Does not show: that the answer itself belongs to its prompt (`gap`), and its text to its ids (`rows`); kept ids; what
a user's objective takes from elsewhere.
When: every micro-batch of every step, before its loss.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from lockstep.errors import ProofError
from lockstep.rollouts.group import RolloutGroup
from lockstep.rollouts.seal import row_of, words_of
from lockstep.to_device import on_host
from lockstep.tokens.digest import digest_of
from lockstep.training.batch.sequence import TrainingSequence
from lockstep.training.methods.objective import Scores, TokenBatch

Ints = npt.NDArray[np.int64]
Reals = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Sampled:
    """What was sampled in one branch.

    Attributes:
        rollout: prompt id and sample.
        ids: digest of ids and positions (`tokens_of` in `rollouts/seal.py`).
        logps: digest of the engine's log-probs.
        old_logps: digest of the log-probs that the policy gave before the generation's first step; None: nothing scored it then.
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
        input_ids, position_ids, ends, predictors, targets: as in `training/batch/pack.py`. No positions: they are not compared.
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
        parts: names of the branches of each micro-batch, over all ranks.
        own_forward: whether the old log-probs of a loss are those of its own forward, because the policy does not change before it.
    """

    def __init__(self, sampled: Mapping[str, Sampled], parts: Sequence[Sequence[str]], *, own_forward: bool) -> None:
        self._sampled, self._parts = dict(sampled), [sorted(part) for part in parts]
        self._own_forward = own_forward

    def check_part(self, part: int, names: Iterable[str]) -> None:
        """Check that a micro-batch learns from its own completions, and from each of them once.

        Args:
            part: index of the micro-batch within the generation.

        Raises:
            ProofError: it has other completions.
        """
        found, due = sorted(names), self._parts[part]
        if found != due:
            strange = sorted({*found} ^ {*due}) or [name for name in due if found.count(name) != 1]
            raise _wrong(
                f"micro-batch {part} learns from {len(found)} completions, and {len(due)} were sampled for it; "
                f"{strange[0] if strange else 'a completion'} is in only one of the two",
            )

    def check(self, entering: Entering) -> None:
        """Compare a pack with what was sampled.

        Raises:
            ProofError: the ids, their places, the engine's log-probs or the old log-probs are others.
        """
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
        """Compare a completion that needs no forward in this step.

        Args:
            ids, logps: digests, as in `Sampled`.
            old_logps: (N,) log-probs from before the first step; None: there are none.

        Raises:
            ProofError: the ids, their places, the engine's log-probs or the old log-probs are others.
        """
        due = self._due(name)
        self._same(due, ids == due.ids, "ids, or the ids before them,")
        self._same(due, logps == due.logps, "log-probs of the engine")
        if due.old_logps is not None:
            self._same(due, old_logps is not None and digest_of(name, old_logps) == due.old_logps, "old log-probs")

    def _due(self, name: str) -> Sampled:
        if name not in self._sampled:
            raise _wrong(f"{name} enters the loss and was not sampled in this generation")
        return self._sampled[name]

    @staticmethod
    def _same(due: Sampled, same: bool, what: str) -> None:
        if not same:
            prompt, sample = due.rollout
            raise _wrong(f"the {what} of rollout {sample} of prompt {prompt} are others in the loss than were recorded")


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
        "let nothing change groups or sequences after they were sampled; otherwise this is a defect of Lockstep: report it",
    )


def sampled_tokens(
    groups: Sequence[RolloutGroup], old_logps: Scores | None, size: int, *, own_forward: bool
) -> SampledTokens:
    """The proof of a generation, from the seals of its scored rollouts.

    Args:
        old_logps: log-probs of the policy before the first step, by name of the branch; None: nothing was scored then.
        size: completions per micro-batch.
        own_forward: as in `SampledTokens`.

    Raises:
        ProofError: a rollout has no seal, or its text or its row is not the one that it was sealed with.
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
    parts = [[name for own in names[start : start + size] for name in own] for start in range(0, len(names), size)]
    return SampledTokens(sampled, parts, own_forward=own_forward)


def check_entering(proof: SampledTokens, batch: TokenBatch) -> None:
    """Compare a pack just before its loss.

    Raises:
        ProofError: the ids, their places, the engine's log-probs or the old log-probs are others.
    """
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
            position_ids=positions if pack.pictures is None else None,
            ends=None if pack.ends is None else pack.ends.numpy(),
            predictors=predictors,
            targets=targets,
            behaviour=behaviour,
            old_logps=old_logps,
            logps=own_logps,
        )
    )


def check_aside(proof: SampledTokens, sequences: Sequence[TrainingSequence]) -> None:
    """Compare sequences that were scored before the first step and have no gradient.

    Raises:
        ProofError: the ids, their places, the engine's log-probs or the old log-probs are others.
    """
    for s in sequences:
        places = np.arange(len(s.path), dtype=np.int64)
        ids = digest_of(s.name, s.path, places, s.predictors, s.sampled_ids)
        proof.check_aside(s.name, ids, digest_of(s.name, s.behaviour_logps), s.old_logps)
