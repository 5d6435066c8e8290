"""Forward, proof and backward of one micro-batch.

The input is a prepared generation. The results are gradients on the policy, and sums that the trainer checks and logs.
Of the sequences without a gradient (advantage or weight zero), those that are drawn are scored without gradient, only
to be verified; the others are left aside. If a pass before the first step has scored them, they are not scored again,
and those scores are counted and logged.
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
from lockstep.models.adapters import causal_model
from lockstep.report.phases import PhaseClock
from lockstep.rollouts.across_ranks.ranks import Ranks
from lockstep.shards.model import sharded
from lockstep.to_device import on_host
from lockstep.tokens.arrays import cut, reals
from lockstep.training.batch.pack import Pack, pack_rows, pack_sequences
from lockstep.training.batch.sequence import TrainingSequence
from lockstep.training.config.online_config import OnlineConfig
from lockstep.training.events import Evidence, LossWatch
from lockstep.training.forward.filters.id_rules import IdRules
from lockstep.training.forward.passes import in_passes
from lockstep.training.forward.scoring import TokenScores, route_pack, score_pack
from lockstep.training.methods.objective import Objective, Scores, TokenBatch
from lockstep.training.step.distributed import sum_gradients
from lockstep.training.step.router_loss import RouterLoss
from lockstep.training.step.update_sums import UpdateSums, measure, measure_scored


@dataclass(frozen=True, slots=True)
class Policy:
    """A model, and how it computes.

    Attributes:
        critic: value head on the model's hidden states; None if the method has none.
        plain_rows: whether the model cannot attend within a tree (`training/forward/scoring.py`).
        rules: the run's sampling settings; None: only the temperature is set.
    """

    model: PreTrainedModel
    autocast: Callable[[], AbstractContextManager]
    backward: Callable[[torch.Tensor], None]
    critic: torch.nn.Module | None = None
    plain_rows: bool = False
    rules: IdRules | None = None

    def packs(self, sequences: Sequence[TrainingSequence], config: OnlineConfig) -> Iterator[Pack]:
        """Sequences in packs, on the model's device."""
        cut = pack_rows if self.plain_rows else pack_sequences
        for pack in cut(sequences, config.token_budget):
            yield pack.to(self.model.device)

    def score(
        self,
        pack: Pack,
        config: OnlineConfig,
        evidence: Evidence | None = None,
        *,
        entropy_gradient: bool = False,
        before_steps: bool = False,
        routing: bool = False,
    ) -> TokenScores:
        """Scores of a pack, with the run's precision and sampling distribution.

        Args:
            evidence: keeps rows of logits of the pack.
            before_steps: as in `Evidence.rows`. Then the sums for bets are computed too, where the pack has a drawn sequence.
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
        if evidence is not None:
            evidence.rows(pack, scores.logps.detach(), seen[-1], before_steps=before_steps)
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


@contextmanager
def hidden_states(model: PreTrainedModel) -> Iterator[list[torch.Tensor]]:
    """A context that collects the last hidden states of each forward of the model."""
    found: list[torch.Tensor] = []
    handle = causal_model(model).base_model.register_forward_hook(
        lambda module, given, output: found.append(output.last_hidden_state.detach())
    )
    try:
        yield found
    finally:
        handle.remove()


@foreign_errors("the trainer could not learn from a micro-batch")
def learn(
    policy: Policy,
    sequences: Sequence[TrainingSequence],
    objective: Objective,
    clock: PhaseClock,
    sums: UpdateSums,
    watch: LossWatch,
    router: RouterLoss | None = None,
    part: int = 0,
) -> float:
    """Accumulate the gradients of a micro-batch, and add its figures to `sums`.

    Args:
        router: the auxiliary loss of the step; None: there is none.
        part: index of the micro-batch within its generation, over all ranks.

    Returns:
        The micro-batch's part of the step's loss.

    Raises:
        ProofError: a sequence brings something else, the forward gives other log-probs than a plain one, or the gradient of a
            log-prob is not what the method's formula gives.
    """
    with policy.casts_kept():
        return _learn(policy, sequences, objective, clock, sums, watch, router, part)


def _learn(
    policy: Policy,
    sequences: Sequence[TrainingSequence],
    objective: Objective,
    clock: PhaseClock,
    sums: UpdateSums,
    watch: LossWatch,
    router: RouterLoss | None,
    part: int,
) -> float:
    config, before = objective.config, sums.loss
    moving: list[TrainingSequence] = []
    still: list[TrainingSequence] = []
    for s in sequences:
        (moving if objective.has_gradient(s) else still).append(s)
    learned: list[tuple[TokenBatch, TokenScores]] = []
    losses: list[torch.Tensor] = []
    with clock.phase("forward_backward"):
        for pack in (pack for own in watch.part(part, sequences, moving) for pack in policy.packs(own, config)):
            with policy.learning():
                scores = policy.score(
                    pack,
                    config,
                    sums.evidence,
                    entropy_gradient=objective.entropy_gradient,
                    before_steps=not _scored_before(pack),
                    routing=router is not None,
                )
                batch = TokenBatch.of(pack, scores)
                with watch.backward(batch, scores):
                    loss = objective.loss(batch, sums.tally)
                    if router is not None and scores.routing is not None:
                        loss = loss + router.share(scores.routing, sums.tally)
                    policy.backward(loss)
                # The host reads while the device computes the backward. The optimizer steps after that.
                watch.forward(batch, learned=True)
            losses.append(loss.detach())
            learned.append((batch, scores))
        watch.learned()
        for loss in on_host(losses):
            sums.loss += loss.item()
        measure(learned, sums)
    with clock.phase("verify"), torch.no_grad():
        watch.aside(still)
        sums.aside += sum(s.length for s in still if s.aside)
        verified = [s for s in still if s.entropies is None and not s.aside]
        stands_for = _share(still, verified)
        scored: list[tuple[TokenBatch, TokenScores]] = []
        for pack in policy.packs(verified, config):
            scores = policy.score(pack, config, sums.evidence, before_steps=True)
            batch = TokenBatch.of(pack, scores)
            watch.forward(batch, learned=False)
            scored.append((batch, scores))
        measure(scored, sums, stands_for)
        watch.compared(policy, sums.evidence)
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
        watch: LossWatch,
        router: RouterLoss | None = None,
    ) -> None:
        self._objective, self._clock, self._ranks, self._watch = objective, clock, ranks, watch
        self._router = router
        self._sums = UpdateSums(watch.evidence())
        self._failure: Exception | None = None

    def learn(self, policy: Policy, sequences: Sequence[TrainingSequence], part: int = 0) -> float:
        """Learn from a micro-batch. With several ranks an error is raised at the end of the step, on every rank.

        Returns:
            The micro-batch's part of the step's loss.
        """
        if self._failure is not None:
            return 0.0
        try:
            return learn(policy, sequences, self._objective, self._clock, self._sums, self._watch, self._router, part)
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

    def finish(self, trained: Sequence[torch.nn.Parameter]) -> UpdateSums:
        """Do everything between the last backward and the optimizer. Every rank must call this.

        Args:
            trained: the trained parameters. Their gradients become those of the whole step.

        Returns:
            The sums over all ranks.

        Raises:
            ProofError: what the watch finds in the sums, or on any rank.
            LockstepError: a rank could not learn from its part.
        """

        def offer() -> dict[str, Any]:
            if self._failure is not None:
                raise self._failure
            self._watch.summing()
            return self._sums.data()

        def work(parts: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
            total = UpdateSums.of(parts, self._watch.evidence())
            self._watch.summed(total)
            return [total.data()] * len(parts)

        total = UpdateSums.of([self._ranks.call("step", offer, work)], self._watch.evidence())
        for parameter in trained:
            # If all rewards agree, the gradient is zero. AdamW still updates with a zero gradient; with None it would not.
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        sum_gradients(trained, self._ranks)
        self._watch.accumulated()
        return total
