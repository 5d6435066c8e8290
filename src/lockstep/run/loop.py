"""The training loop: push, sample, score, learn, prove, step, log. Read this file first.

One generation goes like this. The policy's weights are pushed to the engine. The engine samples completions of a few prompts.
Reward functions score them, and the method turns rewards into advantages. The policy learns from a generation in one or several
optimizer steps, each cut into micro-batches. Before the optimizer changes the policy, the parity gap between the engine's and the
policy's log-probs is checked over every sampled token.

`transformers.Trainer` drives the loop. It calls `micro_step` once per micro-batch and runs the optimizer after the last micro-batch
of each step; `run/trainers/online.py` connects the two. On several ranks, one rank holds the engine, all ranks get the same
groups, and each rank learns from its own micro-batches.

| stage  | here                | done by |
|--------|---------------------|---------|
| push   | `rollout`           | `watch/push.py`: send the weights, probe the engine's modules |
| sample | `rollout`           | `training/generate/source.py`, `rollouts/driver.py`, the engine |
| score  | `rollout`           | `rollouts/scores/rewards.py`: reward functions, on each rank its share |
| prove  | `_next_generation`  | `rows.py` and `asked_again.py` in `training/generate/proofs/`: rows, texts and scores |
| prepare| `_next_generation`  | `training/step/generation.py`: advantages, weights, micro-batches |
| prove  | `_begin_step`, `_finish_step` | `training/step/model_gradient.py`: the model's own backward, at every tenth step |
| learn  | `micro_step`        | `training/step/update.py`: forward, loss and backward of one micro-batch |
| prove  | `micro_step`        | `training/step/step_proofs.py`: what enters the loss, and what flows back from it |
| prove  | `_finish_step`      | `watch/gap.py`, through `training/generate/proofs/proofs.py` |
| step   | `transformers.Trainer` | clips the gradients and calls the optimizer |
| prove  | `before_update`, `after_update` | `watch/update.py`: compare the step with its definition |
| log    | `_finish_step`      | `run/files/step_log.py` |

`run/evaluation.py` makes an evaluation: it samples, scores and proves like a generation, and learns nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from transformers import TrainerState

from lockstep.errors import InputError
from lockstep.report.phases import PhaseClock
from lockstep.rollouts.across_ranks.ranks import Ranks
from lockstep.rollouts.group import Prompt, RolloutGroup
from lockstep.run.files.step_log import StepLog
from lockstep.sync.live import check_same_parameters
from lockstep.training.batch.sequence import TrainingSequence
from lockstep.training.data.prompt_order import MicroBatch, PromptOrder, generations_from
from lockstep.training.generate.proofs.rows import check_rows
from lockstep.training.generate.source import RolloutSource
from lockstep.training.generate.unscored import UnscoredGenerations
from lockstep.training.methods.objective import Objective, Scores
from lockstep.training.step.distributed import check_same_weights, check_shards, share_of
from lockstep.training.step.generation import Generation, Preparation
from lockstep.training.step.learned import sampled_tokens
from lockstep.training.step.model_gradient import Checked, ModelGradient
from lockstep.training.step.router_loss import RouterLoss, router_loss
from lockstep.training.step.step_proofs import PlainForward, StepProofs, drawn_forward
from lockstep.training.step.update import OptimizerStep, Policy
from lockstep.training.step.update_sums import UpdateSums
from lockstep.watch.custody import SampledTokens
from lockstep.watch.forward import check_repeated
from lockstep.watch.gap import check_count
from lockstep.watch.hooks import HeldHooks, standing
from lockstep.watch.reference import FrozenWeights
from lockstep.watch.settings import SettingsProof
from lockstep.watch.update import UpdateProof

# Completions that an evaluation asks an engine for in one call, because one call has a time limit.
_EVALUATION_PART = 2048


class TrainingLoop:
    """Generations and the optimizer steps on them.

    Args:
        objective: the method: advantages, weights and loss.
        source: the engine with its proofs, and the rewards.
        preparation: turns scored groups into a generation.
        order: which prompts each generation gets.
        prompts: all training prompts, in the order of the data set.
        policy: gives the policy as it is now, with what its forward needs.
        trained: gives the modules that the optimizer changes: the policy, and a critic where the method has one.
        state: gives the trainer's state; its `global_step` is the weight version.
        settings: what the user has asked for.

    Attributes:
        generation: the generation that is being learned from; None before the first.
        update_proof: the proof of the optimizer steps; None while there is no optimizer.
        frozen: the proof that the reference stays as it is; None while nothing is frozen.
        model_gradient: the proof of the model's own backward.
        hooks: the proof that no hook and no other function appears in the model's forward and backward.
    """

    def __init__(
        self,
        objective: Objective,
        source: RolloutSource,
        preparation: Preparation,
        order: PromptOrder,
        prompts: Sequence[Prompt],
        policy: Callable[[], Policy],
        trained: Callable[[], list[torch.nn.Module]],
        state: Callable[[], TrainerState],
        ranks: Ranks,
        clock: PhaseClock,
        log: StepLog,
        settings: SettingsProof,
    ) -> None:
        self.objective, self.config = objective, objective.config
        self.source, self.preparation = source, preparation
        self.order, self.prompts = order, prompts
        self.policy, self.trained, self.state = policy, trained, state
        self.ranks, self.clock, self.log, self.settings = ranks, clock, log, settings
        self.generation: Generation | None = None
        self._step, self._policy_changed = OptimizerStep(objective, clock, ranks), False
        self._sampled: SampledTokens | None = None
        self._unscored = UnscoredGenerations(self.config.max_unscored_generations, source.alarms, owner=ranks.owner)
        self.update_proof: UpdateProof | None = None
        self.frozen: FrozenWeights | None = None
        self.hooks = HeldHooks(lambda: standing(trained(), policy().backward))
        self.model_gradient = ModelGradient(trained, self.config, ranks.rank, entropies=objective.entropy_gradient)

    # ---- one micro-batch --------------------------------------------------------------------------------------------

    def micro_step(self, batch: MicroBatch) -> float:
        """Learn from one micro-batch of this rank; the first one of a generation samples the generation.

        Returns:
            This micro-batch's part of the optimizer step's loss.

        Raises:
            ProofError: trainer and engine do not agree; the optimizer step that would follow must not be taken.
            InputError: the run was resumed in the middle of a generation.
        """
        if batch.part == 0:
            self._next_generation(batch.prompts)
        generation = self.generation
        if generation is None or generation.prompt_ids != tuple(p.prompt_id for p in batch.prompts):
            raise InputError(
                f"the checkpoint of step {self.state().global_step} is inside a generation of "
                f"{self.config.optimizer_steps_per_generation} steps: no run can go on from it; rename it to go on from the one "
                "before"
            )
        per_step = self.config.gradient_accumulation_steps
        step, place = divmod(batch.part % self.config.parts_per_generation, per_step)
        if place == 0:
            generation = self._begin_step(generation, step, policy_changed=batch.part > 0)
        mine = self._batches_per_step * step + per_step * self.ranks.rank + place
        loss = self._step.learn(self.policy(), generation.micro_batches[mine], mine)
        if place + 1 == per_step:
            self._finish_step(generation, step)
        return loss

    # ---- one generation: push, sample, score, prepare ---------------------------------------------------------------

    def _next_generation(self, prompts: Sequence[Prompt]) -> Generation:
        version, number = self.state().global_step, self.generation_number
        # If a proof fails from here on, nothing of an earlier generation may be taken for this one.
        self.generation, self._step = None, OptimizerStep(self.objective, self.clock, self.ranks)
        groups = self.rollout(prompts, self.config.group_size, self._generations_ahead())
        rows = {p.prompt_id: p for p in prompts}
        check_rows(groups, rows, self.source.decode, (self.config.seed, number))
        self._ask_again(groups, rows, number)

        self.objective.epoch = int(self.state().epoch or 0)
        generation, scored = self.preparation.generation(self.policy(), groups, version)
        self.generation = generation
        self._sampled = sampled_tokens(
            groups,
            scored.logps if scored is not None else None,
            self.config.completions_per_micro_batch,
            own_forward=self.config.single_update,
        )
        self._count_tokens(generation)
        self.order.note(number, groups)
        self.log.note(self.source.metrics(groups, version) | self._unscored.note(groups) | self.order.metrics())
        if scored is not None:
            # This generation was scored before its first step. Where it is used for one step only, that step's own forward
            # gives the receipt's line.
            record = not self.config.single_update
            self.ranks.on_owner(
                "gap",
                lambda: self.source.generation_proofs.check(
                    scored.gap, scored.draws, scored.kept_sets, generation, version + 1, record=record
                ),
            )
        return generation

    def policy_logps(self) -> Scores:
        """The policy's log-probs of the current generation before its first step, by name of the branch.

        If no pass has scored the generation before its first step, those of branches that another rank has learned from, or that
        were left aside, are missing.
        """
        if self.generation is None:
            return {}
        scored = {
            s.name: s.old_logps for batch in self.generation.micro_batches for s in batch if s.old_logps is not None
        }
        return {**self._step.logps(), **scored}

    def _ask_again(self, groups: Sequence[RolloutGroup], rows: Mapping[str, Prompt], number: int) -> None:
        # The rank that has asked first asks again, because functions may keep something between their calls.
        own = groups if self.ranks.count == 1 else share_of(groups, self.ranks)
        seed = (self.config.seed, number, self.ranks.rank)
        with self.clock.phase("verify"):
            (mine, *_) = self.ranks.share(
                "scores", lambda: self.source.asked_again.check(own, rows, self.state(), seed)
            )
        self.log.note(mine)

    def rollout(
        self, prompts: Sequence[Prompt], num_generations: int, ahead: Sequence[tuple[int, Sequence[Prompt]]] = ()
    ) -> list[RolloutGroup]:
        """Push the policy's weights, sample completions and score them. Every rank calls.

        Args:
            num_generations: completions per prompt.
            ahead: generations by number, with their prompts, that the engine is to work on from now on; the first is this one.
                Its tokens may be up to `max_staleness` versions old. Empty: the policy as it is now samples every token.

        Raises:
            ProofError: trainer and engine do not agree.
            LockstepError: the engine was lost and did not come back in time.
        """
        state, source = self.state(), self.source
        version = state.global_step
        check_same_weights(self.ranks, self.trained(), version)
        check_same_parameters(self.source.policy, self.policy().model, version)
        if (frozen := self.frozen) is not None:
            with self.clock.phase("verify"):
                self.ranks.share("reference", lambda: frozen.check(version))
        source.prove_first(version)
        if self.config.overlap_rewards:
            return self._with_right_rewards(source.sample_and_score(prompts, num_generations, state))

        def push_and_sample() -> list[RolloutGroup]:
            source.push(version)
            if ahead:
                return source.sample_ahead(ahead, num_generations, version)
            return source.sample(prompts, num_generations, version)

        groups = source.on_every_rank(push_and_sample, prompts)
        return self._with_right_rewards(source.score(groups, state))

    def _with_right_rewards(self, groups: list[RolloutGroup]) -> list[RolloutGroup]:
        """The groups, whose rewards are the sums of their scores with the user's weights."""
        for rollout in (rollout for group in groups for rollout in group.rollouts):
            self.settings.check_reward(str(rollout.key), rollout.reward, list(rollout.scores.values()))
        return groups

    def rollout_in_parts(self, prompts: Sequence[Prompt], num_generations: int) -> list[RolloutGroup]:
        """`rollout` of many prompts, a part at a time, as an evaluation needs it."""
        size = max(_EVALUATION_PART // num_generations, 1)
        parts = [prompts[start : start + size] for start in range(0, len(prompts), size)]
        return [group for part in parts for group in self.rollout(part, num_generations)]

    # ---- one optimizer step: learn, prove, log ----------------------------------------------------------------------

    def _begin_step(self, generation: Generation, step: int, *, policy_changed: bool) -> Generation:
        sequences = generation.step(step, self._batches_per_step)
        again = self._forward_to_repeat(generation, step, policy_changed=policy_changed)
        prepared = self.preparation.step(self.policy(), sequences, moved=policy_changed)
        self.generation = generation.with_step(step, self._batches_per_step, prepared)
        router = self._router_loss(self.generation, step)
        # The loss of routers has a gradient that does not go through scores.
        learned = [] if router is not None else self._learned(self.generation, step)
        self._prove_backward(lambda version: self._begin_backward(prepared, learned, version))
        proofs = StepProofs(generation.expected, self._sampled, again, self.model_gradient.part)
        self._step = OptimizerStep(self.objective, self.clock, self.ranks, proofs, router)
        self._policy_changed = policy_changed
        if self.update_proof is not None:
            proof = self.update_proof
            self._on_shards("begin", lambda: proof.begin_step(self.state().global_step))
        return self.generation

    def _router_loss(self, generation: Generation, step: int) -> RouterLoss | None:
        with self.clock.phase("forward_backward"):
            return router_loss(self.objective, self.policy(), self._own_batches(generation, step), self.ranks)

    def _own_batches(self, generation: Generation, step: int) -> Sequence[Sequence[TrainingSequence]]:
        """The micro-batches of a step on this rank."""
        first = self._batches_per_step * step + self.config.gradient_accumulation_steps * self.ranks.rank
        return generation.micro_batches[first : first + self.config.gradient_accumulation_steps]

    def _learned(self, generation: Generation, step: int) -> list[list[TrainingSequence]]:
        """The sequences with a gradient, in the micro-batches of a step on this rank."""
        return [[s for s in batch if self.objective.has_gradient(s)] for batch in self._own_batches(generation, step)]

    def _begin_backward(
        self, sequences: Sequence[TrainingSequence], learned: Sequence[Sequence[TrainingSequence]], version: int
    ) -> Checked:
        self.hooks.check()
        return self.model_gradient.begin(self.policy(), sequences, learned, version)

    def _prove_backward(self, check: Callable[[int], Checked]) -> None:
        """Check the model's backward on every rank, log what was found, and write into the receipt what could not be proven."""
        version = self.state().global_step
        with self.clock.phase("verify"):
            found = self.ranks.share("model gradient", lambda: check(version))
        self.log.note(found[0][0])
        for why in sorted({why for _, why in found if why}):
            self.source.note_unproven(version + 1, "model_gradient", why)

    def _finish_step(self, generation: Generation, step: int) -> None:
        """Add up the step over all ranks and prove it. The optimizer runs after this, or an error was raised."""

        def prove(total: UpdateSums) -> None:
            if self.config.single_update:
                scored = generation.sampled_tokens - generation.aside_tokens
                check_count(total.difference, scored, generation.version)
                self.source.generation_proofs.check(
                    total.gap, total.draws, total.kept_sets, generation, self.state().global_step + 1
                )
            else:
                # The gap of these tokens was proven, and written down, before the generation's first step.
                if not self._policy_changed:
                    own_limit = self.config.precision.own_limit(self.policy().model)
                    check_repeated(total.repeated, own_limit, generation.version)
                tokens = sum(s.length for s in generation.step(step, self._batches_per_step))
                check_count(total.difference, tokens, generation.version)

        total = self._step.finish(prove, self.trained_parameters(), self.hooks.check)
        if self.update_proof is not None:
            sequences = generation.step(step, self._batches_per_step)
            with self.clock.phase("verify"):
                self.update_proof.gradients(
                    lambda added: self.ranks.share("gradients", added),
                    learning=any(self.objective.has_gradient(s) for s in sequences),
                )
        if self.model_gradient.is_due(self.state().global_step):
            sequences = generation.step(step, self._batches_per_step)
            self._prove_backward(lambda version: self.model_gradient.finish(self.policy(), sequences, version))
        (proven, *_) = self.ranks.share("proof metrics", self.source.proof_metrics)
        figures = total.metrics(self.source.limit) | proven
        self.log.note(figures | self.objective.finish_step(total.tally))

    def _forward_to_repeat(self, generation: Generation, step: int, *, policy_changed: bool) -> PlainForward | None:
        """The proof of this step's forward on this rank, where no other proof compares every token of it."""
        if not policy_changed and generation.fresh_tokens == generation.sampled_tokens:
            return None
        mine = self._own_batches(generation, step)
        names = [s.name for batch in mine for s in batch if self.objective.has_gradient(s)]
        seed = self.config.seed, self.state().global_step, self.ranks.rank
        return drawn_forward(generation.completions, names, self.policy(), self.config.precision, seed)

    def trained_parameters(self) -> list[torch.nn.Parameter]:
        """Every parameter that the optimizer changes."""
        return [p for module in self.trained() for p in module.parameters() if p.requires_grad]

    def note_clip(self, norm: float) -> None:
        """Prove the norm by which the gradients were clipped."""
        if self.update_proof is not None:
            self.update_proof.clipped(norm)

    def before_update(self) -> None:
        """Prove what the optimizer is about to use."""
        check_shards(self.ranks, self.trained(), self.state().global_step)
        if self.update_proof is not None:
            proof = self.update_proof
            with self.clock.phase("verify"):
                self._on_shards("before", lambda: proof.before(self.state().global_step))

    def after_update(self) -> None:
        """Prove what the optimizer has made of the weights."""
        with self.clock.phase("verify"):
            if self.update_proof is not None:
                self.log.note(
                    self.update_proof.after(self.state().global_step, lambda part: self.ranks.share("after", part))
                )
            if self.frozen is not None:
                self._on_shards("frozen", self.frozen.check_elements)

    def _on_shards(self, name: str, prove: Callable[[], None]) -> None:
        """Prove something of this rank's shards. An error on one rank is raised on all. Without shards all ranks prove the same."""
        if self.ranks.passes is None:
            prove()
        else:
            self.ranks.share(name, prove)

    # ---- where the run is -------------------------------------------------------------------------------------------

    @property
    def generation_number(self) -> int:
        """How many generations are complete."""
        return self.state().global_step // self.config.optimizer_steps_per_generation

    @property
    def _batches_per_step(self) -> int:
        """Micro-batches of one optimizer step, over all ranks."""
        return self.config.gradient_accumulation_steps * self.ranks.count

    def _generations_ahead(self) -> list[tuple[int, list[Prompt]]]:
        """The current generation and the later ones that the engine already samples; empty where it samples none ahead."""
        if not self.config.generations_ahead:
            return []
        last = (self.state().max_steps - 1) // self.config.optimizer_steps_per_generation
        first = self.generation_number
        last = min(first + self.config.generations_ahead, last)
        return list(generations_from(self.order, self.prompts, first, last))

    def _count_tokens(self, generation: Generation) -> None:
        """Add a generation's tokens to the trainer's state, which checkpoints keep."""
        prompt_tokens = sum(len(c.prompt_ids) for c in generation.completions)
        self.state().num_input_tokens_seen += generation.sampled_tokens + prompt_tokens

    def begin(self) -> None:
        """Forget what an earlier call of `train` left."""
        self.generation = None
        self.model_gradient.forget()
        self.hooks.note()
        self.source.asked_again.forget()
        if self.state().global_step == 0:
            self.order.forget()
        self.log.clear()

    def is_used_up(self) -> bool:
        """Whether too few unsolved prompts are left for another generation."""
        return self.order.used_up(self.generation_number)
