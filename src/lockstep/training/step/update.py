"""Forward, proof and backward of one micro-batch.

The input comes from `training/step/generation.py`. The results are gradients on the policy, and sums that the trainer checks
and logs. Of the sequences without a gradient (advantage or weight zero), those that are drawn are scored without gradient,
only to be verified; the others are left aside. If a pass before the first step has scored them, they are not scored
again, and those scores are counted and logged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel

from lockstep.algorithms.router_balance import Routing
from lockstep.errors import foreign_errors
from lockstep.report.phases import PhaseClock
from lockstep.rollouts.across_ranks.ranks import Ranks
from lockstep.shards.model import sharded
from lockstep.to_device import on_host
from lockstep.tokens.arrays import cut, reals
from lockstep.training.batch.pack import Pack, pack_rows, pack_sequences
from lockstep.training.batch.sequence import TrainingSequence
from lockstep.training.config.online_config import OnlineConfig
from lockstep.training.forward.filters.id_rules import IdRules
from lockstep.training.forward.passes import in_passes
from lockstep.training.forward.scoring import TokenScores, route_pack, score_pack
from lockstep.training.methods.objective import Objective, Scores, TokenBatch
from lockstep.training.step.distributed import sum_gradients
from lockstep.training.step.drawn_rows import DrawnRows, hidden_states
from lockstep.training.step.loss_gradient import LossGradient
from lockstep.training.step.router_loss import RouterLoss
from lockstep.training.step.step_proofs import NO_PROOFS, StepProofs
from lockstep.training.step.update_sums import UpdateSums, measure, measure_scored
from lockstep.watch.kept_sets import KeptSetProof, KeptSetStats
from lockstep.watch.settings import SettingsProof


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
        before_steps: bool = False,
        routing: bool = False,
    ) -> TokenScores:
        """Scores of a pack, with the run's precision and sampling distribution.

        Args:
            rows: collects drawn tokens of the pack.
            before_steps: as in `DrawnRows.add`. Then the sums for bets are computed too, where the pack has a drawn sequence.
            routing: whether to sum up how routers distribute the positions over experts.
        """
        with self.autocast(), hidden_states(self.model) as seen:
            compute = partial(
                score_pack,
                self.model,
                pack,
                config.temperature,
                config.logits_chunk_size,
                entropy_gradient=entropy_gradient,
                fp32_head=config.cast_lm_head_to_fp32,
                critic=self.critic,
                rules=self.rules,
                draws=before_steps and any(s.drawn for s in pack.sequences),
                routing=routing,
            )
            shards = sharded(self.model)
            scores = compute() if shards is None else in_passes(shards, compute)
        if rows is not None:
            rows.add(pack, scores.logps.detach(), seen[-1], before_steps=before_steps)
        return scores

    def route(self, pack: Pack) -> Routing:
        """How the routers distribute a pack's positions over experts, with the run's precision and without gradient."""
        with self.autocast():
            return route_pack(self.model, pack)

    def learning(self) -> AbstractContextManager[None]:
        """A context for the forward of one pack and its backward. Where the model is sharded, all ranks do this together."""
        shards = sharded(self.model)
        return nullcontext() if shards is None else shards.learning()

    @contextmanager
    def casts_kept(self) -> Iterator[None]:
        """A context in which autocast casts each weight once for all packs. Outside of forwards it computes without autocast.

        The weights must not change meanwhile, and the first forward must have a gradient if any has one. With gradient
        checkpointing it changes nothing, because the casts would stay in memory until the end of the micro-batch. With a sharded
        model it changes nothing either, because a gathered weight is new in every forward.
        """
        if self.model.is_gradient_checkpointing or sharded(self.model) is not None:
            yield
            return
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
        shards = sharded(self.model)
        with nullcontext() if shards is None or not len(rows) else shards.whole_head():
            return rows.check(self.model, fp32_head=fp32_head, single=single)


@foreign_errors("the trainer could not learn from a micro-batch")
def learn(
    policy: Policy,
    sequences: Sequence[TrainingSequence],
    objective: Objective,
    clock: PhaseClock,
    sums: UpdateSums,
    proofs: StepProofs = NO_PROOFS,
    router: RouterLoss | None = None,
) -> float:
    """Accumulate the gradients of a micro-batch, and add its figures to `sums`.

    Args:
        proofs: of what the sequences must bring into the loss.
        router: the auxiliary loss of the step; None: there is none.

    Returns:
        The micro-batch's part of the step's loss.

    Raises:
        ProofError: a sequence brings something else, the forward gives other log-probs than a plain one, or the gradient of a
            log-prob is not what the method's formula gives.
    """
    with policy.casts_kept():
        return _learn(policy, sequences, objective, clock, sums, proofs, router)


def _learn(
    policy: Policy,
    sequences: Sequence[TrainingSequence],
    objective: Objective,
    clock: PhaseClock,
    sums: UpdateSums,
    proofs: StepProofs,
    router: RouterLoss | None,
) -> float:
    config = objective.config
    moving: list[TrainingSequence] = []
    still: list[TrainingSequence] = []
    for s in sequences:
        (moving if objective.has_gradient(s) else still).append(s)
    before, rows = sums.loss, policy.drawn_rows()
    repeated: list[TokenBatch] = []
    learned: list[tuple[TokenBatch, TokenScores]] = []
    losses: list[torch.Tensor] = []
    flow = LossGradient(objective)
    with clock.phase("forward_backward"):
        for pack in (pack for own in proofs.cuts(moving) for pack in policy.packs(own, config)):
            with policy.learning():
                scores = policy.score(
                    pack,
                    config,
                    rows,
                    entropy_gradient=objective.entropy_gradient,
                    before_steps=not _scored_before(pack),
                    routing=router is not None,
                )
                batch = TokenBatch.of(pack, scores)
                flow.watch(batch)
                with proofs.watched(pack, scores):
                    loss = objective.loss(batch, sums.tally)
                    if router is not None and scores.routing is not None:
                        loss = loss + router.share(scores.routing, sums.tally)
                    policy.backward(loss)
                # The host reads while the device computes the backward. The optimizer steps after that.
                proofs.check_loss(batch)
            losses.append(loss.detach())
            learned.append((batch, scores))
            if proofs.repeats(batch):
                repeated.append(batch)
        flow.check()
        for loss in on_host(losses):
            sums.loss += loss.item()
        measure(learned, sums)
    with clock.phase("verify"), torch.no_grad():
        proofs.check_aside(still)
        sums.aside += sum(s.length for s in still if s.aside)
        verified = [s for s in still if s.entropies is None and not s.aside]
        stands_for = _share(still, verified)
        scored: list[tuple[TokenBatch, TokenScores]] = []
        for pack in policy.packs(verified, config):
            scores = policy.score(pack, config, rows, before_steps=True)
            batch = TokenBatch.of(pack, scores)
            proofs.check_tokens(batch)
            scored.append((batch, scores))
        measure(scored, sums, stands_for)
        # A wrong temperature is named as such before the forward as a whole is compared.
        found = policy.check_rows(rows, config)
        sums.kept_sets = sums.kept_sets + found
        if found.measured:
            sums.tally.mean("sampling/kept_mass", found.mass, found.measured)
        for batch in repeated:
            proofs.check_forward(policy.model, batch)
        measure_scored([s for s in still if s.entropies is not None], sums)
    return sums.loss - before


def _scored_before(pack: Pack) -> bool:
    """Whether a pass before the generation's first step has scored the pack. That pass has measured the draws."""
    return pack.sequences[0].entropies is not None


def _share(still: Sequence[TrainingSequence], verified: Sequence[TrainingSequence]) -> float:
    """How many tokens without a gradient, which no pass has scored, there are for each token that is verified."""
    tokens = sum(s.length for s in still if s.entropies is None)
    return tokens / max(sum(s.length for s in verified), 1)


class OptimizerStep:
    """An optimizer step while its micro-batches are processed. The arguments are those of `learn`."""

    def __init__(
        self,
        objective: Objective[Any],
        clock: PhaseClock,
        ranks: Ranks,
        proofs: StepProofs = NO_PROOFS,
        router: RouterLoss | None = None,
    ) -> None:
        self._objective, self._clock, self._ranks, self._proofs = objective, clock, ranks, proofs
        self._router = router
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
            return learn(policy, sequences, self._objective, self._clock, self._sums, self._proofs, self._router)
        except Exception as error:
            if self._ranks.count == 1:
                raise
            self._failure = error
            return 0.0

    def logps(self) -> Scores:
        """The log-probs that this rank's forwards gave so far, where no pass had scored the tokens before the step."""
        return {
            s.name: reals(part)
            for sequences, logps in self._sums.logps
            for s, part in zip(sequences, cut(logps.float().cpu().numpy(), [s.length for s in sequences]), strict=True)
        }

    def finish(
        self,
        prove: Callable[[UpdateSums], None],
        trained: Sequence[torch.nn.Parameter],
        check: Callable[[], None] = lambda: None,
    ) -> UpdateSums:
        """Do everything between the last backward and the optimizer. Every rank must call this.

        Args:
            prove: raises if the step's sums fail a proof. It runs on the rank that holds the engine.
            trained: the trained parameters. Their gradients become those of the whole step.
            check: raises if something is wrong on this rank.

        Returns:
            The sums over all ranks.

        Raises:
            ProofError: as raised by `prove`, or by `check` on any rank.
            LockstepError: a rank could not learn from its part.
        """

        def offer() -> dict[str, Any]:
            if self._failure is not None:
                raise self._failure
            check()
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
