"""One generation: from scored groups to micro-batches, with the forwards that come before its first step."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from lockstep.config.run import OnlineConfig
from lockstep.contract.protocol import Completion
from lockstep.errors import InputError
from lockstep.learn.events import Evidence, LossWatch
from lockstep.learn.methods.objective import Objective, Scores
from lockstep.learn.policy_and_reference import Reference
from lockstep.learn.ranks import share_of
from lockstep.learn.sequence import TrainingSequence, joined_branches, rollouts_of, split_branches
from lockstep.learn.update import Policy
from lockstep.report.phases import PhaseClock
from lockstep.rollouts.group import RolloutGroup
from lockstep.rollouts.ranks import Ranks
from lockstep.tokens.arrays import cut, flags, joined, reals

_KINDS = ("logps", "entropies", "values")


@dataclass(frozen=True, slots=True)
class AllScores:
    """Results of a forward without gradient for whole sequences, by request name."""

    logps: Scores
    entropies: Scores
    values: Scores
    evidence: Evidence

    def beside(self, sequence: TrainingSequence) -> TrainingSequence:
        """A sequence with its scores, as the scores of the policy before the generation's first step."""
        name = sequence.name
        return sequence.but(
            old_logps=self.logps[name], entropies=self.entropies[name], values=self.values.get(name)
        )

    def data(self) -> dict[str, Any]:
        """The whole content, as JSON types and arrays. The scores of each kind are one array."""
        found: dict[str, Any] = {"evidence": self.evidence.data()}
        for kind in _KINDS:
            scores: Scores = getattr(self, kind)
            values = joined([*scores.values()]) if scores else reals([])
            found[kind] = {"names": [*scores], "lengths": [*map(len, scores.values())], "values": values}
        return found

    @classmethod
    def merged(cls, parts: Sequence[dict[str, Any]], evidence: Evidence) -> AllScores:
        """The scores of all ranks, from the `data` of each rank. `evidence` is empty."""
        scores: dict[str, Scores] = {kind: {} for kind in _KINDS}
        for whole in parts:
            evidence.add(whole["evidence"])
            for kind, found in scores.items():
                own = whole[kind]
                found.update(zip(own["names"], cut(own["values"], own["lengths"]), strict=True))
        return cls(**scores, evidence=evidence)


@torch.no_grad()
def score_all(
    policy: Policy,
    sequences: Sequence[TrainingSequence],
    config: OnlineConfig,
    evidence: Evidence,
    *,
    measure: bool = True,
) -> AllScores:
    """Log-probs, entropies and values of sequences, without gradient.

    Args:
        evidence: empty; what the proofs keep.
        measure: whether to measure the gap to the engine's log-probs, and the draws. False for weights that the engine
            did not sample with: those of a reference model, or of a policy that has moved since.

    Raises:
        ProofError: a log-prob of the policy is not finite, or a proof of drawn tokens fails.
        InputError: a log-prob is not finite, and it is not measured.
    """
    found: dict[str, Scores] = {kind: {} for kind in _KINDS}
    for pack in policy.packs(sequences, config):
        scores = policy.score(pack, config, evidence, before_steps=measure)
        lengths = [s.length for s in pack.sequences]
        if measure:
            own = [(pack.sequences, scores)]
            evidence.tokens(pack.sequences, pack.column("behaviour_logps"), scores.logps, scores=own)
        elif not bool(torch.isfinite(scores.logps).all()):
            raise InputError(
                "the reference model, or the policy after an optimizer step, gives a sampled token no "
                "finite log-prob; look at its weights and dtype, and at grad_norm"
            )
        for kind, by_name in found.items():
            if (values := getattr(scores, kind)) is not None:
                parts = cut(reals(values.cpu().numpy()), lengths)
                by_name.update((s.name, part) for s, part in zip(pack.sequences, parts, strict=True))
    evidence.rows_compared(policy)
    return AllScores(**found, evidence=evidence)


# One rollout in `_ONE_IN` is verified whatever its reward is; more of them in small generations, so that the verified
# rollouts of a generation may have `_AT_LEAST` tokens on average.
_ONE_IN, _AT_LEAST = 8, 128
# The rollouts of a few generations are verified in one of them, up to this many tokens, because a forward over few
# tokens must still read all weights.
TOGETHER = 1024


@dataclass(frozen=True, slots=True)
class Generation:
    """Scored groups and the sequences to learn from.

    Attributes:
        version: weight version that the engine held when the generation was taken.
        groups: the rollouts, by prompt.
        micro_batches: lists of sequences, in the order of groups, samples and branches. The micro-batches of one
            optimizer step are adjacent, and within a step so are those of one rank.
    """

    version: int
    groups: tuple[RolloutGroup, ...]
    micro_batches: tuple[tuple[TrainingSequence, ...], ...]

    @property
    def completions(self) -> list[Completion]:
        """Every branch of every rollout, as the engine answered it."""
        return branches_of(self.groups)

    @property
    def sampled_tokens(self) -> int:
        """Number of tokens that the engine sampled, counted in its answers and not in the training sequences."""
        return sum(len(c.sampled_versions) for c in self.completions)

    @property
    def aside_tokens(self) -> int:
        """How many of them are left aside: they have no gradient, and are not picked."""
        return sum(len(c.sampled_versions) for c in self._aside())

    @property
    def fresh_tokens(self) -> int:
        """Number of tokens that were sampled by the weights of `version`."""
        return self._fresh(self.completions)

    @property
    def due_tokens(self) -> int:
        """How many of these the parity gap must cover: all that are not left aside."""
        return self.fresh_tokens - self._fresh(self._aside())

    def _fresh(self, completions: Sequence[Completion]) -> int:
        return sum(int(np.count_nonzero(c.sampled_versions == self.version)) for c in completions)

    def _aside(self) -> list[Completion]:
        names = {s.name for batch in self.micro_batches for s in batch if s.aside}
        return [c for c in self.completions if str(c.key) in names] if names else []

    @property
    def prompt_ids(self) -> tuple[str, ...]:
        return tuple(group.prompt.prompt_id for group in self.groups)

    def step(self, index: int, size: int) -> list[TrainingSequence]:
        """Sequences of one optimizer step. `size` is the step's number of micro-batches over all ranks."""
        return [s for batch in self.micro_batches[index * size : (index + 1) * size] for s in batch]

    def of_rank(self, index: int, size: int, ranks: Ranks) -> Sequence[Sequence[TrainingSequence]]:
        """The micro-batches of one optimizer step on this rank. `size` is their number."""
        first = size * (ranks.count * index + ranks.rank)
        return self.micro_batches[first : first + size]

    def with_step(self, index: int, size: int, sequences: Sequence[TrainingSequence]) -> Generation:
        """A copy in which the sequences of one optimizer step are replaced by others with the same names."""
        by_name = {s.name: s for s in sequences}
        batches, first, end = self.micro_batches, index * size, (index + 1) * size
        others = tuple(tuple(by_name[s.name] for s in batch) for batch in batches[first:end])
        return replace(self, micro_batches=batches[:first] + others + batches[end:])

    def changed(self, change: Callable[[TrainingSequence], TrainingSequence]) -> Generation:
        """A copy in which each sequence is replaced by `change(sequence)`."""
        batches = tuple(tuple(change(s) for s in batch) for batch in self.micro_batches)
        return replace(self, micro_batches=batches)


def picked_rollouts(groups: int, size: int, tokens: int, seed: int, number: int) -> list[list[int]]:
    """The places, within each group of a generation, of the rollouts that are verified whatever their rewards are.

    The choice does not depend on what was sampled. Otherwise the draws proof could not bet on the tokens. Every rollout
    is picked with the same probability. Among a few generations in a row, all picked rollouts are in one. They are
    whole groups, because the rollouts of a group share a prompt, and a part of one more group.

    Args:
        size: rollouts of a group.
        tokens: how many tokens a rollout may have.
        seed: of the run.
        number: of the generation in the run.
    """
    count, found = groups * size, [list[int]() for _ in range(groups)]
    each = math.ceil(count / max(1, min(_ONE_IN, count // math.ceil(_AT_LEAST / tokens))))
    of = max(each, min(count, math.ceil(TOGETHER / tokens))) // each
    if np.random.default_rng((seed, number // of, 1)).integers(of) != number % of:
        return found
    draw, left = np.random.default_rng((seed, number)), each * of
    for place in draw.permutation(groups).tolist():
        found[place] = sorted(draw.choice(size, min(left, size), replace=False).tolist())
        left -= len(found[place])
    return found


def branches_of(groups: Sequence[RolloutGroup]) -> list[Completion]:
    """Every branch of every rollout, in the order of groups, samples and branches."""
    return [completion for group in groups for rollout in group.rollouts for completion in rollout.branches]


def sequences_of(groups: Sequence[RolloutGroup], version: int) -> list[TrainingSequence]:
    """One sequence per branch with sampled tokens, in the order of groups, samples and branches, without advantages.

    Args:
        version: weight version that will learn from them first.
    """
    stale = any((c.sampled_versions != version).any() for c in branches_of(groups))
    return [
        TrainingSequence(
            name=str(c.key),
            prompt_ids=c.prompt_ids,
            completion_ids=c.token_ids,
            behaviour_logps=c.sampled_logprobs,
            sampled=c.sampled,
            kept_ids=c.kept_ids,
            pictures=c.pictures,
            fresh=flags(c.sampled_versions == version) if stale else None,
            rollout=str(rollout.key) if len(rollout.branches) > 1 else None,
        )
        for group in groups
        for rollout in group.rollouts
        for c in rollout.branches
        if len(c.sampled_places)
    ]


def prepare_generation(
    groups: Sequence[RolloutGroup],
    objective: Objective,
    version: int,
    sequences: Sequence[TrainingSequence] | None = None,
    per_step: int | None = None,
) -> Generation:
    """Advantages, loss weights and micro-batches of a generation.

    Weights are normalised over each whole optimizer step, for any number of micro-batches and ranks. A rollout has one
    weight, which all of its branches share. A rollout in which nothing was sampled counts like a masked one.

    Args:
        sequences: the sequences of the groups, with the log-probs that the method needs; None: made from the groups.
        per_step: number of rollouts of an optimizer step; None: that of the config.
    """
    config, per_step = objective.config, per_step or objective.config.completions_per_step
    found = {
        own[0].rollout or own[0].name: own for own in rollouts_of(sequences or sequences_of(groups, version))
    }
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    branches = [found.get(str(rollout.key), []) for rollout in rollouts]
    wholes = [
        own[0] if len(own) == 1 else joined_branches(str(r.key), own)
        for r, own in zip(rollouts, branches, strict=True)
    ]
    advantaged = objective.with_advantages(groups, wholes)
    places = torch.tensor([place for place, group in enumerate(groups) for _ in group.rollouts])
    counted = torch.tensor([not objective.filtered(group) for group in groups])[places]
    kept = torch.tensor(
        [0 if objective.is_masked(r) else s.length for s, r in zip(advantaged, rollouts, strict=True)]
    )
    weights = torch.zeros(len(advantaged))
    for start in range(0, len(advantaged), per_step):
        step = torch.arange(start, min(start + per_step, len(advantaged)))
        step = step[counted[step]]
        if len(step):
            own = objective.sequence_weights(kept[step], places[step])
            weights[step] = torch.where(kept[step] > 0, own, 0.0)
    weighted = [s.but(weight=weight) for s, weight in zip(advantaged, weights.tolist(), strict=True)]
    split = [
        [whole] if len(own) == 1 else split_branches(whole, own)
        for whole, own in zip(weighted, branches, strict=True)
    ]
    size = config.completions_per_micro_batch
    batches = tuple(tuple(s for own in split[i : i + size] for s in own) for i in range(0, len(split), size))
    return Generation(version, tuple(groups), batches)


class Preparation:
    """Makes generations from scored groups. Every rank calls its methods."""

    def __init__(
        self,
        objective: Objective,
        reference: Reference | None,
        clock: PhaseClock,
        ranks: Ranks,
        watch: LossWatch,
    ) -> None:
        self._objective, self._reference, self._watch = objective, reference, watch
        self._config, self._clock, self._ranks = objective.config, clock, ranks

    def generation(
        self, policy: Policy, groups: Sequence[RolloutGroup], version: int
    ) -> tuple[Generation, AllScores | None, list[TrainingSequence]]:
        """A generation to learn from.

        Args:
            policy: the current policy, before the generation's first step.
            version: its weight version, which the engine holds.

        Returns:
            The generation; the scores of its tokens, None if they need not be scored yet; and its sequences before
            their advantages.

        Raises:
            ProofError: a log-prob is not finite.
            InputError: nothing was sampled.
        """
        sequences, found = self._sequences(groups, version), None
        if not sequences:
            raise InputError(
                "no token was sampled in any rollout of this generation: the programs of all rollouts ended "
                "before their first turn"
            )
        if self._objective.scores_first or not self._config.single_update:
            found = self.scores(policy, sequences)
            sequences = [found.beside(s) for s in sequences]
        if self._objective.kl_in_reward:
            logps = self.reference_logps(policy, sequences, groups, version)
            sequences = [s.but(ref_logps=logps[s.name]) for s in sequences]
        generation = prepare_generation(groups, self._objective, version, sequences)
        if self._objective.uses_reference and not self._objective.kl_in_reward:
            generation = self.with_reference(policy, generation)
        if self._config.single_update:
            generation = generation.changed(self._to_be_scored)
        if found is None:
            generation = generation.changed(self._perhaps_aside)
        return generation, found, sequences

    def _sequences(self, groups: Sequence[RolloutGroup], version: int) -> list[TrainingSequence]:
        """The sequences of a generation, in which those of the rollouts that are not picked are marked."""
        config, found = self._config, sequences_of(groups, version)
        number = version // config.optimizer_steps_per_generation
        picked = picked_rollouts(len(groups), config.group_size, config.completion_limit, config.seed, number)
        names = {
            str(branch.key)
            for group, places in zip(groups, picked, strict=True)
            for place, rollout in enumerate(group.rollouts)
            if place in places
            for branch in rollout.branches
        }
        return [s if s.name in names else s.but(picked=False) for s in found]

    def _perhaps_aside(self, sequence: TrainingSequence) -> TrainingSequence:
        if sequence.picked or self._objective.has_gradient(sequence):
            return sequence
        return sequence.but(aside=True)

    def step(
        self, policy: Policy, sequences: Sequence[TrainingSequence], *, moved: bool
    ) -> list[TrainingSequence]:
        """Sequences of one optimizer step, over all ranks, just before its first forward.

        Args:
            moved: whether the policy has changed since the generation was prepared.
        """

        def entropies(asked: Sequence[TrainingSequence]) -> Scores:
            if moved:
                # The engine has sampled with earlier weights. Nothing of this pass is compared with its answers.
                return self.scores(policy, asked, measure=False).entropies
            return {s.name: s.entropies for s in asked if s.entropies is not None}

        return self._objective.prepare_step(sequences, entropies)

    def with_reference(self, policy: Policy, generation: Generation) -> Generation:
        """The generation with the reference model's log-probs, for the sequences whose loss uses them."""
        learned = [s for batch in generation.micro_batches for s in batch if self._objective.has_gradient(s)]
        logps = self.reference_logps(policy, learned, generation.groups, generation.version)
        return generation.changed(lambda s: s.but(ref_logps=logps.get(s.name)))

    def reference_logps(
        self,
        policy: Policy,
        sequences: Sequence[TrainingSequence],
        groups: Sequence[RolloutGroup],
        version: int,
    ) -> Scores:
        """The reference model's log-probs, by name of the sequence.

        Args:
            groups: those of the sequences.
            version: weight version of the policy, which draws the completion whose log-probs are computed a second
                time.
        """
        assert self._reference is not None
        with self._clock.phase("reference"), self._reference.model() as model:
            scorer = replace(policy, model=model, critic=None)
            scores = self._score(scorer, sequences, measure=False).logps
            self._watch.referenced(scorer, scores, sequences, groups, version)
            return scores

    def _to_be_scored(self, sequence: TrainingSequence) -> TrainingSequence:
        """Drop old log-probs of a sequence with a gradient: the forward of the first step gives them."""
        return sequence.but(old_logps=None) if self._objective.has_gradient(sequence) else sequence

    def scores(
        self, policy: Policy, sequences: Sequence[TrainingSequence], *, measure: bool = True
    ) -> AllScores:
        """Scores of sequences under the current policy; `measure` as in `score_all`."""
        with self._clock.phase("verify"):
            return self._score(policy, sequences, measure=measure)

    def _score(self, policy: Policy, sequences: Sequence[TrainingSequence], *, measure: bool) -> AllScores:
        def own() -> AllScores:
            mine = share_of(sequences, self._ranks)
            return score_all(policy, mine, self._config, self._watch.evidence(), measure=measure)

        if self._ranks.count == 1:
            return own()
        return AllScores.merged(self._ranks.share("scores", lambda: own().data()), self._watch.evidence())
