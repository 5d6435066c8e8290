"""Forward, proof and backward of one micro-batch, and the sums of an optimizer step.

Of the sequences without a gradient (advantage or weight zero), those that are picked are scored without gradient, only
to be verified; the others are left aside. If a pass before the first step has scored them, they are not scored again,
and those scores are counted and logged.

A mixture of experts has an auxiliary loss: one `RouterLoss` per step, of which each pack adds its share. It multiplies
how often an expert is chosen with how probable it is, both over all rows of the step. How often each expert is chosen
must be known before the first backward: if the step is more than one pack, a forward without gradient counts it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from lockstep.algorithms.corrections import effective_sample_size
from lockstep.config.run import OnlineConfig
from lockstep.devices import on_host
from lockstep.errors import foreign_errors
from lockstep.learn.events import Evidence, LossWatch
from lockstep.learn.experts import Routing, Shares, balance_loss
from lockstep.learn.filters import IdRules
from lockstep.learn.id_classes import Classes
from lockstep.learn.methods.objective import Objective, Scores, Tally, TokenBatch
from lockstep.learn.pack import Pack, pack_rows, pack_sequences
from lockstep.learn.ranks import sum_gradients
from lockstep.learn.scoring import TokenScores, in_passes, route_pack, score_pack
from lockstep.learn.sequence import TrainingSequence, flat
from lockstep.models.adapters import causal_model
from lockstep.report.phases import PhaseClock
from lockstep.rollouts.ranks import Ranks
from lockstep.shards.model import sharded
from lockstep.tokens.arrays import cut, reals

Reals64 = NDArray[np.float64]


@dataclass(slots=True)
class StepSums:
    """Sums over the tokens of an optimizer step. The sums of its parts and of its ranks can be added.

    Attributes:
        aside: number of tokens that were left aside.
        tally: values to log. `_drift` is |log-prob now − at sampling time| of the policy, over the tokens that went
            through the model in this step. It is 0 if the policy has not changed since.
        logps: sequences and (N,) log-probs of each pack whose tokens no pass has scored before. They stay on this rank.
    """

    evidence: Evidence
    loss: float = 0.0
    aside: int = 0
    tally: Tally = field(default_factory=Tally)
    logps: list[tuple[Sequence[TrainingSequence], torch.Tensor]] = field(default_factory=list)

    def data(self) -> dict[str, Any]:
        """The whole content but `logps`, as JSON types."""
        own = {"loss": self.loss, "aside": self.aside}
        return {"evidence": self.evidence.data(), "tally": self.tally.data(), **own}

    @classmethod
    def of(cls, parts: Sequence[dict[str, Any]], evidence: Evidence) -> StepSums:
        """The sum of the `data` of several ranks. `evidence` is empty."""
        total = cls(evidence)
        for data in parts:
            total.evidence.add(data["evidence"])
            total.loss += data["loss"]
            total.aside += data["aside"]
            total.tally.add(data["tally"])
        return total

    def metrics(self) -> dict[str, float]:
        """The update's metrics under TRL's names."""
        weights, squares = self.tally.total(_RATIO), self.tally.total(_SQUARES)
        size = effective_sample_size(weights, squares, int(self.tally.count(_RATIO)))
        return {**self.tally.figures(), "sampling/effective_sample_size": size}


_RATIO, _SQUARES = "sampling/importance_sampling_ratio/mean", "_squared_ratios"


@torch.no_grad()
def measure(packs: Sequence[tuple[TokenBatch, TokenScores]], sums: StepSums, stands_for: float = 1) -> None:
    """Log the figures that every method has, for every token that went through the model, learned from or not.

    Args:
        packs: those of a micro-batch, with their scores.
        stands_for: how many tokens each of these stands for in means: more than one, if others like it were left aside.
    """
    if not packs:
        return
    hosts = [as_float64(b.behaviour_logps, b.old_logps, b.entropies, b.logps) for b, _ in packs]
    behaviour, old_logps, entropies, logps = (np.concatenate(parts) for parts in zip(*hosts, strict=True))
    sequences = [s for batch, _ in packs for s in batch.sequences]
    sums.tally.mean("_drift", float(np.abs(logps - old_logps).sum()), len(logps))
    scored_before = sequences[0].old_logps is not None
    if not scored_before:
        sums.logps += [(batch.sequences, batch.old_logps) for batch, _ in packs]
    found = [(batch.sequences, scores) for batch, scores in packs]
    sums.evidence.tokens(sequences, behaviour, old_logps, logps if scored_before else None, found)
    _note(behaviour, old_logps, entropies, sums, stands_for)
    for batch, _ in packs:
        if batch.support is not None:
            sums.tally.mean("sampling/forced_share", (batch.support == 1).float(), weight=stands_for)


def measure_scored(sequences: Sequence[TrainingSequence], sums: StepSums) -> None:
    """Log the same figures for sequences that were scored before the first step and are not scored again."""
    if sequences:
        names = "behaviour_logps", "old_logps", "entropies"
        behaviour, old_logps, entropies = (flat(sequences, name).astype(np.float64) for name in names)
        sums.evidence.tokens(sequences, behaviour, old_logps)
        _note(behaviour, old_logps, entropies, sums)


def _note(
    behaviour: Reals64, old_logps: Reals64, entropies: Reals64, sums: StepSums, stands_for: float = 1.0
) -> None:
    tally, count = sums.tally, len(behaviour)
    ratios = np.exp(old_logps - behaviour)
    tally.mean(_RATIO, float(ratios.sum()), count, weight=stands_for)
    tally.mean(_SQUARES, float(ratios @ ratios), count, weight=stands_for)
    tally.low("sampling/importance_sampling_ratio/min", float(ratios.min()))
    tally.high("sampling/importance_sampling_ratio/max", float(ratios.max()))
    tally.mean("entropy", float(entropies.sum()), count, weight=stands_for)


def as_float64(*columns: Reals64 | NDArray[np.float32] | torch.Tensor) -> list[Reals64]:
    """(N,) values of several columns in float64, on the host. Tensors on another device are copied together."""
    tensors = iter(on_host([column for column in columns if isinstance(column, torch.Tensor)]))
    hosts = [next(tensors).double().numpy() if isinstance(c, torch.Tensor) else c for c in columns]
    return [column.astype(np.float64, copy=False) for column in hosts]


class RouterLoss:
    """The auxiliary loss of the routers of a mixture of experts, over one optimizer step.

    Args:
        coefficient: its weight in the step's loss.
        whole: the choices of the whole step, over all ranks; None: the step is one pack.
    """

    def __init__(self, coefficient: float, whole: Shares | None) -> None:
        self._coefficient, self._whole = coefficient, whole

    def share(self, routing: Routing, tally: Tally) -> torch.Tensor:
        """A pack's share of the step's loss; a scalar with gradient. The loss without its weight is logged."""
        whole = self._whole if self._whole is not None else Shares.of([routing.counts()])
        loss = balance_loss(routing, whole)
        # The counts of all packs add up to 1, so the logged mean is the sum of the shares.
        tally.later(loss, lambda value: tally.mean("aux_loss", float(value), routing.rows / whole.rows))
        return self._coefficient * loss


def router_loss(
    objective: Objective[Any], policy: Policy, batches: Sequence[Sequence[TrainingSequence]], ranks: Ranks
) -> RouterLoss | None:
    """The auxiliary loss of the step that begins; None if the run has none. Every rank calls this.

    Args:
        batches: the micro-batches of the step on this rank.
    """
    if not objective.router_coefficient:
        return None
    moving = [[s for s in batch if objective.has_gradient(s)] for batch in batches]
    packs = [pack for batch in moving for pack in policy.packs(batch, objective.config)]
    if ranks.count == 1 and len(packs) < 2:
        return RouterLoss(objective.router_coefficient, None)
    parts = ranks.share("routers", lambda: [policy.route(pack).counts() for pack in packs])
    found = [part for own in parts for part in own]
    return RouterLoss(objective.router_coefficient, Shares.of(found) if found else None)


@dataclass(frozen=True, slots=True)
class Policy:
    """A model, and how it computes.

    Attributes:
        critic: value head on the model's hidden states; None if the method has none.
        plain_rows: whether the model cannot attend within a tree (`learn/scoring.py`).
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
            before_steps: as in `Evidence.rows`. Then the sums for bets are computed too, where the pack has a picked
                sequence.
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
                draws=self._classes(config, pack) if before_steps else None,
                routing=routing,
            )
            shards = sharded(self.model)
            scores = compute() if shards is None else in_passes(shards, compute)
        if evidence is not None:
            evidence.rows(pack, scores.logps.detach(), seen[-1], before_steps=before_steps)
        return scores

    def _classes(self, config: OnlineConfig, pack: Pack) -> Classes | None:
        """The classes of ids on which the draws proof bets; None: no sequence of the pack is picked."""
        if not any(s.picked for s in pack.sequences):
            return None
        rules = self.rules
        return (
            Classes((), config.seed)
            if rules is None
            else Classes(rules.end_ids, config.seed, rules.vocabulary)
        )

    def route(self, pack: Pack) -> Routing:
        """How the routers distribute a pack's positions over experts, without gradient."""
        with self.autocast():
            return route_pack(self.model, pack)

    def learning(self) -> AbstractContextManager[None]:
        """A context for the forward of one pack and its backward. All ranks of a sharded model do this together."""
        shards = sharded(self.model)
        return nullcontext() if shards is None else shards.learning()

    @contextmanager
    def casts_kept(self) -> Iterator[None]:
        """A context in which autocast casts each weight once for all packs.

        Outside of forwards it computes without autocast. The weights must not change meanwhile, and the first forward
        must have a gradient if any has one. With gradient checkpointing it changes nothing, because the casts would
        stay in memory until the end of the micro-batch. With a sharded model it changes nothing either, because a
        gathered weight is new in every forward.
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
    sums: StepSums,
    watch: LossWatch,
    router: RouterLoss | None = None,
    index: int = 0,
) -> float:
    """Accumulate the gradients of a micro-batch, and add its figures to `sums`. Returns its share of the step's loss.

    Args:
        router: the auxiliary loss of the step; None: there is none.
        index: of the micro-batch within its generation, over all ranks.

    Raises:
        ProofError: a sequence brings something else than was sampled, the forward gives other log-probs than a plain
            one, or the gradient of a log-prob is not what the method's formula gives.
    """
    with policy.casts_kept():
        return _learn(policy, sequences, objective, clock, sums, watch, router, index)


def _learn(
    policy: Policy,
    sequences: Sequence[TrainingSequence],
    objective: Objective,
    clock: PhaseClock,
    sums: StepSums,
    watch: LossWatch,
    router: RouterLoss | None,
    index: int,
) -> float:
    config, before = objective.config, sums.loss
    moving = [s for s in sequences if objective.has_gradient(s)]
    still = [s for s in sequences if not objective.has_gradient(s)]
    learned: list[tuple[TokenBatch, TokenScores]] = []
    losses: list[torch.Tensor] = []
    with clock.phase("forward_backward"):
        # A proof may want a drawn part of them in packs of its own.
        apart = watch.micro_batch(index, sequences, moving)
        for pack in (pack for own in apart for pack in policy.packs(own, config)):
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
        self._sums = StepSums(watch.evidence())
        self._failure: Exception | None = None

    def learn(self, policy: Policy, sequences: Sequence[TrainingSequence], index: int = 0) -> float:
        """`learn` with the arguments of the step. With several ranks, `finish` raises its error, on every rank."""
        if self._failure is not None:
            return 0.0
        try:
            return learn(
                policy, sequences, self._objective, self._clock, self._sums, self._watch, self._router, index
            )
        except Exception as error:
            if self._ranks.count == 1:
                raise
            self._failure = error
            return 0.0

    def logps(self) -> Scores:
        """The log-probs that this rank's forwards gave so far, where no pass had scored the tokens before the step."""
        found: Scores = {}
        for sequences, logps in self._sums.logps:
            columns = cut(logps.float().cpu().numpy(), [s.length for s in sequences])
            found |= {s.name: reals(own) for s, own in zip(sequences, columns, strict=True)}
        return found

    def finish(self, trained: Sequence[torch.nn.Parameter]) -> StepSums:
        """Do everything between the last backward and the optimizer, on every rank. Returns the sums over all ranks.

        Args:
            trained: the trained parameters. Their gradients become those of the whole step.

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
            total = StepSums.of(parts, self._watch.evidence())
            self._watch.summed(total)
            return [total.data()] * len(parts)

        total = StepSums.of([self._ranks.call("step", offer, work)], self._watch.evidence())
        for parameter in trained:
            # If all rewards agree, the gradient is zero. AdamW updates with a zero gradient, and not with None.
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        sum_gradients(trained, self._ranks)
        self._watch.accumulated()
        return total
