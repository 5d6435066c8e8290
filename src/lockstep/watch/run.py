"""The watch of a run: which proofs each event makes. The order of the events is that of `learn/events.py`.

| event | proofs |
|-------|--------|
| `pushing` | `ranks`, `shards`, `live`, `reference` (frozen weights); before the first push all of the engine (`watch/engine.py`) |
| `scored` | `rewards` |
| `taken` | `prompts`, `rows`, `scores` |
| `referenced` | `reference` (its log-probs), `reference_outputs` |
| `prepared` | `learned` (texts and rows); `gap` and `draws`, if a pass before the first step has scored the tokens |
| `beginning` | `hooks`, `model_gradient` (a drawn sum), `accumulation` (no gradient is left), `update` (nothing was frozen) |
| `micro_batch`, `forward`, `aside` | `learned`, `advantages` |
| `backward`, `learned` | `loss_gradient` |
| `compared` | `temperature`, `kept_ids`, `forward` (a drawn completion) |
| `summing` | `hooks` |
| `summed` | `gap`, `draws`, `kept_ids` (the mean), `forward` (all tokens that were scored twice) |
| `accumulated` | `accumulation`, `update` (every tensor has a gradient), `model_gradient` (a drawn part of the step) |
| `clipped` | `clipping` (the norm) |
| `stepping` | `shards`, `clipping`, `learning_rate` |
| `stepped` | `update`, `reference` (frozen weights) |
| `moving_reference` | `reference_outputs` (a reference that follows) |
| `saving` | `checkpoint` (nothing has changed since the last step) |
| `evaluated` | `evaluation`, `rows`, `gap`, `draws`, `kept_ids` |

What the engine is asked and answers is proven by `watch/engine.py`.
"""  # noqa: E501

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from transformers import TrainerState

from lockstep.learn.events import Evidence
from lockstep.learn.generation import AllScores, Generation, branches_of
from lockstep.learn.methods.objective import Objective, Scores, TokenBatch
from lockstep.learn.ranks import share_of
from lockstep.learn.scoring import TokenScores
from lockstep.learn.sequence import TrainingSequence
from lockstep.learn.update import Policy, StepSums
from lockstep.report.phases import PhaseClock
from lockstep.rollouts.group import Prompt, RolloutGroup
from lockstep.rollouts.ranks import Ranks
from lockstep.rollouts.rewards import Scorer
from lockstep.watch.advantages import AdvantageProof, advantage_proof, check_batch, check_still
from lockstep.watch.custody import SampledTokens, check_aside, check_entering, sampled_tokens
from lockstep.watch.engine import EngineWatch
from lockstep.watch.evidence import DrawnRows, TokenEvidence, kept
from lockstep.watch.forward import HeldHooks, PlainForward, check_repeated, drawn_forward, standing
from lockstep.watch.gap import check_count
from lockstep.watch.given_rows import GivenRows
from lockstep.watch.kept_sets import KeptSetProof
from lockstep.watch.loss_gradient import LossGradient
from lockstep.watch.model_gradient import Checked, ModelGradient
from lockstep.watch.ranks import check_same_weights, check_shards
from lockstep.watch.reference import FrozenWeights, ReferenceOutputs, check_drawn_scores, check_follows
from lockstep.watch.rewards import AskedAgain, check_evaluated, check_rows
from lockstep.watch.settings import SettingsProof
from lockstep.watch.tolerances import own_limit
from lockstep.watch.update import UpdateProof
from lockstep.weights.push import check_same_parameters


class RunWatch:
    """The proofs of one run, on one rank.

    Args:
        policy: gives the policy as it is now, with what its forward needs.
        trained: gives the modules that the optimizer changes: the policy, and a critic where the method has one.
        state: gives the trainer's state; its `global_step` is the weight version.
        note: logs figures of a step.
        settings: what the user has asked for.
        given_rows: the training rows as the user gave them.

    Attributes:
        update: the proof of the optimizer steps; None while there is no optimizer.
        frozen: the proof that the reference stays as it is; None while nothing is frozen.
        reference_outputs: the proof that the reference goes on to compute what it computed at first.
        model_gradient: the proof of the model's own backward.
        hooks: the proof that no hook and no other function appears in the model's forward and backward.
        asked_again: the proof of scores, which asks reward functions again.
        expected: what the generation must bring into the loss; None: the method has no definition.
    """

    def __init__(
        self,
        objective: Objective[Any],
        engine: EngineWatch,
        scorer: Scorer,
        policy: Callable[[], Policy],
        trained: Callable[[], list[torch.nn.Module]],
        state: Callable[[], TrainerState],
        ranks: Ranks,
        clock: PhaseClock,
        note: Callable[[Mapping[str, Any]], None],
        settings: SettingsProof,
        given_rows: GivenRows,
    ) -> None:
        self._objective, self._config, self._engine = objective, objective.config, engine
        self._policy, self._trained, self._state = policy, trained, state
        self._ranks, self._clock, self._note, self._settings = ranks, clock, note, settings
        self.given_rows = given_rows
        self.update: UpdateProof | None = None
        self.frozen: FrozenWeights | None = None
        self.reference_outputs = ReferenceOutputs()
        self.hooks = HeldHooks(lambda: standing(trained(), policy().backward))
        self.model_gradient = ModelGradient(
            trained, self._config, ranks.rank, entropies=objective.entropy_gradient
        )
        self.asked_again = AskedAgain(
            scorer, engine.decode, self._config.reward_timeout, wanted=self._config.recheck_rewards
        )
        # Of the generation: what must enter the loss, from its seals and from the method's definition.
        self._generation: Generation | None = None
        self._sampled: SampledTokens | None = None
        self.expected: AdvantageProof | None = None
        # Of the step, and of the micro-batch.
        self._sequences: Sequence[TrainingSequence] = ()
        self._moved = False
        self._again: PlainForward | None = None
        self._flow = LossGradient(objective)
        self._repeated: list[TokenBatch] = []

    @property
    def _step(self) -> int:
        return self._state().global_step

    def evidence(self) -> TokenEvidence:
        sets, rules = None, self._policy().rules
        if rules is not None and rules.sampling.is_filtered:
            sets = KeptSetProof(rules.distribution, self._engine.limit, self._engine.searches_top_p)
        return TokenEvidence(DrawnRows(self._settings, sets, self._config.precision))

    # ---- a generation -----------------------------------------------------------------------------------------------

    def began(self) -> None:
        self.model_gradient.forget()
        self.hooks.note()
        self.asked_again.forget()

    def pushing(self, version: int) -> None:
        check_same_weights(self._ranks, self._trained(), version)
        check_same_parameters(self._engine.model, self._policy().model, version)
        if (frozen := self.frozen) is not None:
            with self._clock.phase("verify"):
                self._ranks.share("reference", lambda: frozen.check(version))
        self._engine.prove_first(version)

    def scored(self, groups: Sequence[RolloutGroup]) -> None:
        for rollout in (rollout for group in groups for rollout in group.rollouts):
            self._settings.check_reward(str(rollout.key), rollout.reward, list(rollout.scores.values()))

    def taken(self, groups: Sequence[RolloutGroup], prompts: Sequence[Prompt], number: int) -> None:
        # If a proof fails from here on, nothing of an earlier generation may be taken for this one.
        self._generation = self._sampled = self.expected = None
        with self._clock.phase("verify"):
            self.given_rows.check_order(prompts, number)
            for name in self.given_rows.check_ids(prompts):
                self._engine.note_unproven(
                    self._step + 1, "prompts", f"{name} has the text of a control token"
                )
        rows = {p.prompt_id: p for p in prompts}
        check_rows(groups, rows, self._engine.decode, (self._config.seed, number))
        # The rank that has asked first asks again, because functions may keep something between their calls.
        own = groups if self._ranks.count == 1 else share_of(groups, self._ranks)
        seed = (self._config.seed, number, self._ranks.rank)
        with self._clock.phase("verify"):
            (mine, *_) = self._ranks.share(
                "scores", lambda: self.asked_again.check(own, rows, self._state(), seed)
            )
        self._note(mine)

    def referenced(
        self,
        scorer: Policy,
        scores: Scores,
        sequences: Sequence[TrainingSequence],
        groups: Sequence[RolloutGroup],
        version: int,
    ) -> None:
        own, seed = share_of(sequences, self._ranks), (self._config.seed, version)
        precision = self._config.precision
        share, outputs, policy = self._ranks.share, self.reference_outputs, self._policy().model
        share("reference scores", lambda: check_drawn_scores(scorer, scores, own, groups, precision, seed))
        share("reference outputs", lambda: outputs.check(scorer, policy, self.frozen, precision))

    def prepared(
        self, generation: Generation, scored: AllScores | None, sequences: Sequence[TrainingSequence]
    ) -> None:
        config = self._config
        self._sampled = sampled_tokens(
            generation.groups,
            scored.logps if scored is not None else None,
            config.completions_per_micro_batch,
            own_forward=config.single_update,
        )
        weights = self._settings.wanted.reward_weights
        self.expected = advantage_proof(self._objective, generation.groups, sequences, weights)
        if scored is not None:
            # Where the generation is used for one step only, that step's own forward gives the receipt's line.
            evidence, record = kept(scored.evidence), not config.single_update
            self._ranks.on_owner(
                "gap", lambda: self._judge(evidence, generation, generation.version + 1, record=record)
            )

    def evaluated(
        self,
        groups: Sequence[RolloutGroup],
        prompts: Sequence[Prompt],
        scored: AllScores,
        digest: Callable[[], str],
        count: int,
    ) -> dict[str, float]:
        version, evidence = self._step, kept(scored.evidence)
        self._ranks.on_owner("evaluated rows", lambda: check_evaluated(groups, digest(), count))
        rows = {p.prompt_id: p for p in prompts}
        check_rows(groups, rows, self._engine.decode, (self._config.seed, version))
        drawn = [c for c in branches_of(groups) if str(c.key) in scored.logps and len(c.sampled_places)]
        self._ranks.on_owner(
            "evaluation",
            lambda: self._engine.proofs.check_evaluation(
                evidence.gap, evidence.draws, evidence.kept_sets, drawn, version
            ),
        )
        sampled = sum(len(c.sampled_places) for c in branches_of(groups))
        return {
            "parity/mean_abs_gap": evidence.gap.mean_abs,
            "parity/max_abs_gap": evidence.gap.max_abs,
            "parity/draws_z": evidence.draws.z,
            "parity/checked_tokens": evidence.gap.tokens,
            "parity/checked_share": evidence.gap.tokens / sampled if sampled else 1.0,
        }

    # ---- an optimizer step ------------------------------------------------------------------------------------------

    def beginning(
        self, policy: Policy, generation: Generation, step: int, *, moved: bool, plain: bool
    ) -> None:
        config, has_gradient = self._config, self._objective.has_gradient
        mine = generation.of_rank(step, config.gradient_accumulation_steps, self._ranks)
        learned = [[s for s in batch if has_gradient(s)] for batch in mine]
        self._generation, self._moved = generation, moved
        self._sequences = generation.step(step, config.gradient_accumulation_steps * self._ranks.count)
        self._again = None
        if moved or generation.fresh_tokens != generation.sampled_tokens:
            # No other proof compares every token of this step's forward.
            names = [s.name for own in learned for s in own]
            seed = config.seed, self._step, self._ranks.rank
            self._again = drawn_forward(generation.completions, names, policy, config.precision, seed)

        def check(version: int) -> Checked:
            self.hooks.check()
            return self.model_gradient.begin(policy, self._sequences, learned if plain else [], version)

        self._prove_backward(check)
        if (update := self.update) is not None:
            self._on_shards("begin", lambda: update.begin_step(self._step))

    def micro_batch(
        self, index: int, sequences: Sequence[TrainingSequence], moving: Sequence[TrainingSequence]
    ) -> list[list[TrainingSequence]]:
        self._flow, self._repeated = LossGradient(self._objective), []
        if self._sampled is not None:
            self._sampled.check_micro_batch(index, [s.name for s in sequences])
        part = self.model_gradient.part
        return [list(moving)] if part is None else part.split(moving)

    @contextmanager
    def backward(self, batch: TokenBatch, scores: TokenScores) -> Iterator[None]:
        self._flow.watch(batch)
        if (part := self.model_gradient.part) is None:
            yield
        else:
            with part.watch(batch.pack, scores):
                yield

    def forward(self, batch: TokenBatch, *, learned: bool) -> None:
        if self._sampled is not None:
            check_entering(self._sampled, batch)
        if not learned:
            return
        if self.expected is not None:
            check_batch(self.expected, batch)
        if self._again is not None and self._again.is_in(batch):
            self._repeated.append(batch)

    def learned(self) -> None:
        self._flow.check()

    def aside(self, sequences: Sequence[TrainingSequence]) -> None:
        if self.expected is not None:
            check_still(self.expected, sequences)
        if self._sampled is not None:
            # Tokens that still go through the model are checked there.
            check_aside(self._sampled, [s for s in sequences if s.entropies is not None or s.aside])

    def compared(self, policy: Policy, evidence: Evidence) -> None:
        # A wrong temperature is named as such before the forward as a whole is compared.
        evidence.rows_compared(policy)
        for batch in self._repeated:
            assert self._again is not None
            self._again.check(policy.model, batch)

    def summing(self) -> None:
        self.hooks.check()

    def summed(self, total: StepSums) -> None:
        generation, evidence = self._generation, kept(total.evidence)
        assert generation is not None
        if self._config.single_update:
            due = generation.sampled_tokens - generation.aside_tokens
            check_count(evidence.difference, due, generation.version)
            self._judge(evidence, generation, self._step + 1)
            return
        # The gap of these tokens was proven, and written down, before the generation's first step.
        if not self._moved:
            limit = own_limit(self._config.precision, self._policy().model)
            check_repeated(evidence.repeated, limit, generation.version)
        check_count(evidence.difference, sum(s.length for s in self._sequences), generation.version)

    def accumulated(self) -> None:
        if (update := self.update) is not None:
            with self._clock.phase("verify"):
                update.gradients(
                    lambda added: self._ranks.share("gradients", added),
                    learning=any(self._objective.has_gradient(s) for s in self._sequences),
                )
        if self.model_gradient.is_due(self._step):
            self._prove_backward(
                lambda version: self.model_gradient.finish(self._policy(), self._sequences, version)
            )

    def figures(self, total: StepSums) -> dict[str, float]:
        (proven, *_) = self._ranks.share("proof metrics", self._engine.metrics)
        return kept(total.evidence).figures(total.tally, total.aside, self._engine.limit) | proven

    def clipped(self, norm: float) -> None:
        if self.update is not None:
            self.update.clipped(norm)

    def stepping(self) -> None:
        check_shards(self._ranks, self._trained(), self._step)
        if (update := self.update) is not None:
            with self._clock.phase("verify"):
                self._on_shards("before", lambda: update.before(self._step))

    def stepped(self) -> None:
        with self._clock.phase("verify"):
            if (update := self.update) is not None:
                self._note(update.after(self._step, lambda part: self._ranks.share("after", part)))
                if why := update.say_unproven():
                    self._engine.note_unproven(self._step + 1, "update", why)
            if self.frozen is not None:
                self._on_shards("frozen", self.frozen.check_elements)

    def moving_reference(self, reference: torch.nn.Module) -> AbstractContextManager[None]:
        """After a step: in this context the reference follows the policy, if it is due."""
        config: Any = self._config
        share = 0.0 if self._step % config.ref_model_sync_steps else config.ref_model_mixup_alpha
        own, policy = (dict(m.named_parameters()) for m in (reference, self._policy().model))
        return check_follows(own, policy, share, (config.seed, self._step, 6))

    def saving(self) -> None:
        if (update := self.update) is not None:
            self._ranks.share("still", update.check_still)

    # ---- what several events need -----------------------------------------------------------------------------------

    def _judge(
        self, evidence: TokenEvidence, generation: Generation, step: int, *, record: bool = True
    ) -> None:
        """The gap and the draws of a whole generation, on the rank that holds the engine."""
        found = evidence.gap, evidence.draws, evidence.kept_sets, evidence.slope
        self._engine.proofs.check(*found, generation, step, record=record)

    def _prove_backward(self, check: Callable[[int], Checked]) -> None:
        """Check the model's backward on every rank, log the result, and note in the receipt what was not proven."""
        version = self._step
        with self._clock.phase("verify"):
            found = self._ranks.share("model gradient", lambda: check(version))
        self._note(found[0][0])
        for why in sorted({why for _, why in found if why}):
            self._engine.note_unproven(version + 1, "model_gradient", why)

    def _on_shards(self, name: str, prove: Callable[[], None]) -> None:
        """Prove something of this rank's shards. An error is raised on all ranks. Without shards all prove the same."""
        if self._ranks.passes is None:
            prove()
        else:
            self._ranks.share(name, prove)
