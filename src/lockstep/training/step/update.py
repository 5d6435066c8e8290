"""Forward, proof and backward of one micro-batch.

The input comes from `training/step/generation.py`. The results are gradients on the policy, and sums that the trainer checks
and logs. Of the sequences without a gradient (advantage or weight zero), those of a drawn part of the groups are scored without
gradient, only to be verified; the others are left aside. If a pass before the first step has scored them, they are not scored
again, and those scores are counted and logged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from lockstep.algorithms.corrections import effective_sample_size
from lockstep.algorithms.tally import Tally
from lockstep.errors import InputError
from lockstep.parity.decomposition import split_gap
from lockstep.parity.gap import GapStats, measure_gap
from lockstep.parity.kept_sets import KeptSetProof, KeptSetStats
from lockstep.parity.step.bets import TokenDraws
from lockstep.parity.step.draws import DrawStats, measure_draws
from lockstep.parity.step.settings import SettingsProof
from lockstep.parity.tolerances import Tolerance
from lockstep.report.phases import PhaseClock
from lockstep.rollouts.across_ranks.ranks import Ranks
from lockstep.tokens.arrays import cut, joined, reals
from lockstep.training.batch.pack import Pack, pack_rows, pack_sequences
from lockstep.training.batch.sequence import TrainingSequence, column, flat
from lockstep.training.config.online_config import OnlineConfig
from lockstep.training.forward.filters.id_rules import IdRules
from lockstep.training.forward.scoring import TokenScores, score_pack
from lockstep.training.methods.objective import Objective, Scores, TokenBatch
from lockstep.training.step.distributed import sum_gradients
from lockstep.training.step.drawn_rows import DrawnRows, hidden_states
from lockstep.training.step.loss_gradient import LossGradient
from lockstep.training.step.step_proofs import NO_PROOFS, StepProofs


@dataclass(slots=True)
class UpdateSums:
    """Sums over the tokens of an optimizer step. The sums of its parts and of its ranks can be added.

    Attributes:
        loss: the step's loss so far.
        gap: parity gap between the engine and the policy that it held, over tokens that were sampled by these same weights.
        difference: the same over all tokens, so that it includes the effect of older weights.
        repeated: difference between the log-probs before the generation's first step and those of this step's forward, over the
            tokens that have both.
        draws: of the draws proof, over the tokens of the drawn groups that went through the model in this step.
        kept_sets: of the proof of kept ids, at drawn tokens.
        aside: number of tokens that were left aside.
        tally: values to log. `_drift` is |log-prob now − at sampling time| of the policy, over the tokens that went through
            the model in this step. It is 0 if the policy has not changed since.
    """

    loss: float = 0.0
    gap: GapStats = field(default_factory=GapStats)
    difference: GapStats = field(default_factory=GapStats)
    repeated: GapStats = field(default_factory=GapStats)
    draws: DrawStats = field(default_factory=DrawStats)
    kept_sets: KeptSetStats = field(default_factory=KeptSetStats)
    aside: int = 0
    tally: Tally = field(default_factory=Tally)

    def data(self) -> dict[str, Any]:
        """The whole content, as JSON types."""
        return {
            "loss": self.loss,
            "gap": asdict(self.gap),
            "difference": asdict(self.difference),
            "repeated": asdict(self.repeated),
            "draws": asdict(self.draws),
            "kept_sets": asdict(self.kept_sets),
            "aside": self.aside,
            "tally": self.tally.data(),
        }

    @classmethod
    def of(cls, parts: Sequence[dict[str, Any]]) -> UpdateSums:
        """The sum of the `data` of several ranks."""
        total = cls()
        for data in parts:
            total.loss += data["loss"]
            total.gap = total.gap + GapStats(**data["gap"])
            total.difference = total.difference + GapStats(**data["difference"])
            total.repeated = total.repeated + GapStats(**data["repeated"])
            total.draws = total.draws + DrawStats(**data["draws"])
            total.kept_sets = total.kept_sets + KeptSetStats(**data["kept_sets"])
            total.aside += data["aside"]
            total.tally.add(data["tally"])
        return total

    def metrics(self, limit: Tolerance) -> dict[str, float]:
        """The update's metrics under TRL's names, and the parity gap with its parts."""
        figures = self.tally.figures()
        weights, squares = self.tally.total(_RATIO), self.tally.total(_SQUARES)
        older = (self.difference.sum_abs - self.gap.sum_abs) / max(self.difference.tokens, 1)
        drift = self.tally.total("_drift") / max(self.tally.count("_drift"), 1)
        # Computed from the fresh tokens alone, so that a defect in a few of them is not diluted by older tokens.
        parts = split_gap(self.gap.mean_abs, older + drift, limit)
        return {
            **figures,
            "sampling/effective_sample_size": effective_sample_size(weights, squares, int(self.tally.count(_RATIO))),
            "sampling/sampling_logp_difference/mean": self.difference.mean_abs,
            "sampling/sampling_logp_difference/max": self.difference.max_abs,
            "parity/mean_abs_gap": self.gap.mean_abs,
            "parity/max_abs_gap": self.gap.max_abs,
            "parity/k3": self.gap.k3,
            "parity/checked_tokens": self.gap.tokens,
            "parity/aside_tokens": self.aside,
            "sampling/tokens": self.difference.tokens + self.aside,
            **parts.metrics(),
        }


_RATIO, _SQUARES = "sampling/importance_sampling_ratio/mean", "_squared_ratios"


@dataclass(frozen=True, slots=True)
class Policy:
    """A model, and how it computes.

    Attributes:
        critic: value head on the model's hidden states; None if the method has none.
        plain_rows: whether the model cannot attend within a tree (`training/forward/scoring.py`).
        rules: the run's sampling settings; None: only the temperature is set.
        settings: what the user has asked for; drawn log-probs of each pack are compared with it. None outside a run.
        kept_sets: compares the engine's kept ids with the run's filters; None: there are no such filters.
    """

    model: PreTrainedModel
    autocast: Callable[[], AbstractContextManager]
    backward: Callable[[torch.Tensor], None]
    critic: torch.nn.Module | None = None
    plain_rows: bool = False
    rules: IdRules | None = None
    settings: SettingsProof | None = None
    kept_sets: KeptSetProof | None = None

    def packs(self, sequences: Sequence[TrainingSequence], config: OnlineConfig) -> Iterator[Pack]:
        """Sequences in packs, on the model's device."""
        cut = pack_rows if self.plain_rows else pack_sequences
        for pack in cut(sequences, config.token_budget):
            yield pack.to(self.model.device)

    def score(
        self,
        pack: Pack,
        config: OnlineConfig,
        rows: DrawnRows | None = None,
        *,
        entropy_gradient: bool = False,
        draws: bool = True,
        before_steps: bool = False,
    ) -> TokenScores:
        """Scores of a pack, with the run's precision and sampling distribution.

        Args:
            rows: collects drawn tokens of the pack.
            before_steps: as in `DrawnRows.add`.
        """
        with self.autocast(), hidden_states(self.model) as seen:
            scores = score_pack(
                self.model,
                pack,
                config.temperature,
                config.logits_chunk_size,
                entropy_gradient=entropy_gradient,
                fp32_head=config.cast_lm_head_to_fp32,
                critic=self.critic,
                rules=self.rules,
                draws=draws,
            )
        if rows is not None:
            rows.add(pack, scores.logps.detach(), seen[-1], before_steps=before_steps)
        return scores

    @contextmanager
    def casts_kept(self) -> Iterator[None]:
        """A context in which autocast casts each weight once for all packs. Outside of forwards it computes without autocast.

        The weights must not change meanwhile, and the first forward must have a gradient if any has one.
        """
        with self.autocast(), torch.autocast(self.model.device.type, enabled=False):
            yield

    def drawn_rows(self) -> DrawnRows | None:
        """Collects drawn tokens of a micro-batch; None outside a run."""
        known = self.settings is not None or self.kept_sets is not None
        return DrawnRows(self.settings, self.kept_sets) if known else None

    def check_rows(self, rows: DrawnRows | None, config: OnlineConfig) -> KeptSetStats:
        """Check the drawn tokens of a micro-batch, while the weights are still those of its forward.

        Raises:
            ProofError: as in `DrawnRows.check`.
        """
        if rows is None:
            return KeptSetStats()
        fp32_head = config.cast_lm_head_to_fp32
        single = fp32_head or (config.precision.autocast is None and self.model.dtype == torch.float32)
        return rows.check(self.model, fp32_head=fp32_head, single=single)


def learn(
    policy: Policy,
    sequences: Sequence[TrainingSequence],
    objective: Objective,
    clock: PhaseClock,
    sums: UpdateSums,
    proofs: StepProofs = NO_PROOFS,
) -> float:
    """Accumulate the gradients of a micro-batch, and add its figures to `sums`.

    Args:
        proofs: of what the sequences must bring into the loss.

    Returns:
        The micro-batch's part of the step's loss.

    Raises:
        ProofError: a sequence brings something else, the forward gives other log-probs than a plain one, or the gradient of a
            log-prob is not what the method's formula gives.
    """
    with policy.casts_kept():
        return _learn(policy, sequences, objective, clock, sums, proofs)


def _learn(
    policy: Policy,
    sequences: Sequence[TrainingSequence],
    objective: Objective,
    clock: PhaseClock,
    sums: UpdateSums,
    proofs: StepProofs,
) -> float:
    config = objective.config
    moving = [s for s in sequences if objective.has_gradient(s)]
    still = [s for s in sequences if not objective.has_gradient(s)]
    before, rows = sums.loss, policy.drawn_rows()
    learned: list[TokenBatch] = []
    with clock.phase("forward_backward"):
        for pack in policy.packs(moving, config):
            first = not _scored_before(pack)
            scores = policy.score(
                pack,
                config,
                rows,
                entropy_gradient=objective.entropy_gradient,
                draws=first and any(s.drawn for s in pack.sequences),
                before_steps=first,
            )
            batch = TokenBatch.of(pack, scores)
            proofs.check_loss(batch)
            flow = LossGradient(objective, batch)
            loss = objective.loss(batch, sums.tally)
            sums.loss += loss.item()
            policy.backward(loss)
            flow.check()
            learned.append(batch)
            _measure(batch, scores, sums)
    with clock.phase("verify"), torch.no_grad():
        proofs.check_aside(still)
        sums.aside += sum(s.length for s in still if s.aside)
        verified = [s for s in still if s.entropies is None and not s.aside]
        stands_for = _share(still, verified)
        for pack in policy.packs(verified, config):
            scores = policy.score(pack, config, rows, before_steps=True)
            batch = TokenBatch.of(pack, scores)
            proofs.check_tokens(batch)
            _measure(batch, scores, sums, stands_for)
        # A wrong temperature is named as such before the forward as a whole is compared.
        found = policy.check_rows(rows, config)
        sums.kept_sets = sums.kept_sets + found
        if found.measured:
            sums.tally.mean("sampling/kept_mass", found.mass, found.measured)
        for batch in learned:
            proofs.check_forward(policy.model, batch)
        _measure_scored([s for s in still if s.entropies is not None], sums)
    return sums.loss - before


def _scored_before(pack: Pack) -> bool:
    """Whether a pass before the generation's first step has scored the pack. That pass has measured the draws."""
    return pack.sequences[0].entropies is not None


def _share(still: Sequence[TrainingSequence], verified: Sequence[TrainingSequence]) -> float:
    """How many tokens without a gradient, which no pass has scored, there are for each token that is verified."""
    tokens = sum(s.length for s in still if s.entropies is None)
    return tokens / max(sum(s.length for s in verified), 1)


_KINDS = ("logps", "entropies", "values")


@dataclass(frozen=True, slots=True)
class AllScores:
    """Results of a forward without gradient for whole sequences, by request name."""

    logps: Scores
    entropies: Scores
    values: Scores
    gap: GapStats
    draws: DrawStats = field(default_factory=DrawStats)
    kept_sets: KeptSetStats = field(default_factory=KeptSetStats)

    def beside(self, sequence: TrainingSequence) -> TrainingSequence:
        """A sequence with its scores, as the scores of the policy before the generation's first step."""
        name = sequence.name
        return replace(
            sequence, old_logps=self.logps[name], entropies=self.entropies[name], values=self.values.get(name)
        )

    def data(self) -> dict[str, Any]:
        """The whole content, as JSON types and arrays. The scores of each kind are one array."""
        return {
            "gap": asdict(self.gap),
            "draws": asdict(self.draws),
            "kept_sets": asdict(self.kept_sets),
            **{
                kind: {
                    "names": list(scores),
                    "lengths": [len(values) for values in scores.values()],
                    "values": joined([*scores.values()]) if scores else reals([]),
                }
                for kind, scores in zip(_KINDS, (self.logps, self.entropies, self.values), strict=True)
            },
        }

    @classmethod
    def merged(cls, parts: Sequence[dict[str, Any]]) -> AllScores:
        """The scores of all ranks, from the `data` of each rank."""
        logps, entropies, values = (
            {
                name: found
                for part in (whole[kind] for whole in parts)
                for name, found in zip(part["names"], cut(part["values"], part["lengths"]), strict=True)
            }
            for kind in _KINDS
        )
        return cls(
            logps,
            entropies,
            values,
            sum((GapStats(**part["gap"]) for part in parts), GapStats()),
            sum((DrawStats(**part["draws"]) for part in parts), DrawStats()),
            sum((KeptSetStats(**part["kept_sets"]) for part in parts), KeptSetStats()),
        )


@torch.no_grad()
def score_all(
    policy: Policy, sequences: Sequence[TrainingSequence], config: OnlineConfig, *, measure: bool = True
) -> AllScores:
    """Score sequences.

    Args:
        measure: whether to measure the gap to the engine's log-probs, and the draws. False for a reference model, which the
            engine does not hold.

    Raises:
        ProofError: a log-prob of the policy is not finite, or a proof of drawn tokens fails.
        InputError: a log-prob of a reference model is not finite.
    """
    logps: Scores = {}
    entropies: Scores = {}
    critic_values: Scores = {}
    gap, draws, rows = GapStats(), DrawStats(), policy.drawn_rows()
    for pack in policy.packs(sequences, config):
        bets = measure and any(s.drawn for s in pack.sequences)
        scores = policy.score(pack, config, rows, draws=bets, before_steps=measure)
        lengths = [s.length for s in pack.sequences]
        if measure:
            gap = gap + _measured(pack.sequences, pack.column("behaviour_logps"), scores.logps)[0]
            draws = draws + _drawn(pack.sequences, scores)
        elif not bool(torch.isfinite(scores.logps).all()):
            raise InputError(
                "the reference model gives a sampled token no finite log-prob; look at its weights and dtype"
            )
        for by_name, values in (
            (logps, scores.logps),
            (entropies, scores.entropies),
            (critic_values, scores.values),
        ):
            if values is not None:
                parts = cut(reals(values.cpu().numpy()), lengths)
                by_name.update((s.name, part) for s, part in zip(pack.sequences, parts, strict=True))
    return AllScores(logps, entropies, critic_values, gap, draws, policy.check_rows(rows, config))


def _measured(
    sequences: Sequence[TrainingSequence], behaviour: torch.Tensor, policy: torch.Tensor
) -> tuple[GapStats, GapStats]:
    """The parity gap, over tokens that these same weights sampled, and the difference over all tokens.

    Args:
        behaviour: (N,) the engine's log-probs.
        policy: (N,) log-probs under the weights that the engine held in its last call.

    Raises:
        ProofError: a log-prob is not finite.
    """
    names = [s.name for s in sequences]
    every = measure_gap(behaviour, policy, names, [s.length for s in sequences])
    if sequences[0].fresh is None:
        return every, every
    fresh = column(sequences, "fresh", torch.bool)
    counts = [int(part.sum()) for part in fresh.split([s.length for s in sequences])]
    fresh = fresh.to(policy.device)
    return measure_gap(behaviour[fresh], policy[fresh], names, counts), every


@torch.no_grad()
def _drawn(sequences: Sequence[TrainingSequence], scores: TokenScores) -> DrawStats:
    """Statistics of the draws proof over the drawn groups; none if the forward gave no sums for it.

    Which tokens are bet on must not depend on the tokens. A rollout learns because of its reward, so the groups that are not drawn
    are left out also where they went through the model.
    """
    if scores.draws is None:
        return DrawStats()
    columns = scores.logps, scores.entropies, scores.draws.variances, scores.draws.below, scores.draws.upto
    values = torch.stack([c.double() for c in columns]).cpu().numpy()
    drawn = [s for s in sequences if s.drawn]
    if len(drawn) < len(sequences):
        values = values[:, np.repeat([s.drawn for s in sequences], [s.length for s in sequences])]
    fresh = None if sequences[0].fresh is None else flat(drawn, "fresh")
    return measure_draws(TokenDraws(*values), column(drawn, "behaviour_logps"), [s.length for s in drawn], fresh)


@torch.no_grad()
def _measure(batch: TokenBatch, scores: TokenScores, sums: UpdateSums, stands_for: float = 1.0) -> None:
    """Log the figures that every method has, for every token that went through the model, learned from or not.

    Args:
        stands_for: how many tokens each of these stands for in means: more than one, if others like it were left aside.
    """
    sums.tally.mean("_drift", (batch.logps - batch.old_logps).abs())
    if batch.sequences[0].old_logps is not None:
        names, lengths = [s.name for s in batch.sequences], [s.length for s in batch.sequences]
        sums.repeated = sums.repeated + measure_gap(batch.old_logps, batch.logps, names, lengths)
    if batch.support is not None:
        sums.tally.mean("sampling/forced_share", (batch.support == 1).float(), weight=stands_for)
    _note(batch.sequences, batch.behaviour_logps, batch.old_logps, batch.entropies, sums, stands_for)
    sums.draws = sums.draws + _drawn(batch.sequences, scores)


def _measure_scored(sequences: Sequence[TrainingSequence], sums: UpdateSums) -> None:
    """Log the same figures for sequences that were scored before the first step and are not scored again."""
    if sequences:
        behaviour, old_logps, entropies = (
            column(sequences, name) for name in ("behaviour_logps", "old_logps", "entropies")
        )
        _note(sequences, behaviour, old_logps, entropies, sums)


def _note(
    sequences: Sequence[TrainingSequence],
    behaviour: torch.Tensor,
    old_logps: torch.Tensor,
    entropies: torch.Tensor,
    sums: UpdateSums,
    stands_for: float = 1.0,
) -> None:
    tally = sums.tally
    gap, difference = _measured(sequences, behaviour, old_logps)
    sums.gap, sums.difference = sums.gap + gap, sums.difference + difference
    ratios = torch.exp(old_logps - behaviour)
    tally.mean(_RATIO, ratios, weight=stands_for)
    tally.mean(_SQUARES, ratios.square(), weight=stands_for)
    tally.low("sampling/importance_sampling_ratio/min", ratios)
    tally.high("sampling/importance_sampling_ratio/max", ratios)
    tally.mean("entropy", entropies, weight=stands_for)


class OptimizerStep:
    """An optimizer step while its micro-batches are processed."""

    def __init__(
        self, objective: Objective[Any], clock: PhaseClock, ranks: Ranks, proofs: StepProofs = NO_PROOFS
    ) -> None:
        self._objective, self._clock, self._ranks, self._proofs = objective, clock, ranks, proofs
        self._sums = UpdateSums()
        self._failure: Exception | None = None

    def learn(self, policy: Policy, sequences: Sequence[TrainingSequence], part: int = 0) -> float:
        """Learn from a micro-batch. With several ranks an error is raised at the end of the step, on every rank.

        Args:
            part: index of the micro-batch within its generation, over all ranks.

        Returns:
            The micro-batch's part of the step's loss.
        """
        if self._failure is not None:
            return 0.0
        try:
            self._proofs.check_part(part, sequences)
            return learn(policy, sequences, self._objective, self._clock, self._sums, self._proofs)
        except Exception as error:
            if self._ranks.count == 1:
                raise
            self._failure = error
            return 0.0

    def finish(self, prove: Callable[[UpdateSums], None], trained: Sequence[torch.nn.Parameter]) -> UpdateSums:
        """Do everything between the last backward and the optimizer. Every rank must call this.

        Args:
            prove: raises if the step's sums fail a proof. It runs on the rank that holds the engine.
            trained: the trained parameters. Their gradients become those of the whole step.

        Returns:
            The sums over all ranks.

        Raises:
            ProofError: as raised by `prove`.
            LockstepError: a rank could not learn from its part.
        """

        def offer() -> dict[str, Any]:
            if self._failure is not None:
                raise self._failure
            return self._sums.data()

        def work(parts: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
            total = UpdateSums.of(parts)
            prove(total)
            return [total.data()] * len(parts)

        total = UpdateSums.of([self._ranks.call("step", offer, work)])
        for parameter in trained:
            # If all rewards agree, the gradient is zero. AdamW still updates with a zero gradient; with None it would not.
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        sum_gradients(trained, self._ranks)
        return total
