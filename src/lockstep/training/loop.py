"""The training loop: push, sample, score, learn, prove, step, log. Read this file first.

One generation goes like this. The policy's weights are pushed to the engine. The engine samples completions of a few prompts.
Reward functions score them, and the method turns rewards into advantages. The policy learns from a generation in one or several
optimizer steps, each cut into micro-batches. Before the optimizer changes the policy, the parity gap between the engine's and the
policy's log-probs is checked over every sampled token.

`transformers.Trainer` drives the loop. It calls `micro_step` once per micro-batch and runs the optimizer after the last micro-batch
of each step; `training/trainers/online.py` connects the two. On several ranks, one rank holds the engine, all ranks get the same
groups, and each rank learns from its own micro-batches.

| stage  | here                | done by |
|--------|---------------------|---------|
| push   | `rollout`           | `parity/proven_push.py`: send the weights, probe the engine's modules |
| sample | `rollout`           | `training/generate/source.py`, `rollouts/collect.py`, the engine |
| score  | `rollout`           | `rollouts/rewards.py`: reward functions, on each rank its share |
| prepare| `_next_generation`  | `training/step/generation.py`: advantages, weights, micro-batches |
| learn  | `micro_step`        | `training/step/update.py`: forward, loss and backward of one micro-batch |
| prove  | `_finish_step`      | `parity/gap.py`, through `training/generate/proofs.py` |
| step   | `transformers.Trainer` | clips the gradients and calls the optimizer |
| log    | `_finish_step`      | `training/run_files/step_log.py` |
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from transformers import TrainerState

from lockstep.errors import InputError
from lockstep.parity.gap import check_count
from lockstep.report.phases import PhaseClock
from lockstep.rollouts.group import Prompt, RolloutGroup
from lockstep.rollouts.ranks import Ranks
from lockstep.training.data.prompt_order import MicroBatch, PromptOrder, generations_from
from lockstep.training.generate.source import RolloutSource
from lockstep.training.methods.objective import Objective
from lockstep.training.run_files.step_log import StepLog
from lockstep.training.step.distributed import check_same_weights
from lockstep.training.step.generation import Generation, Preparation
from lockstep.training.step.update import OptimizerStep, Policy, UpdateSums

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

    Attributes:
        generation: the generation that is being learned from; None before the first.
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
    ) -> None:
        self.objective, self.config = objective, objective.config
        self.source, self.preparation = source, preparation
        self.order, self.prompts = order, prompts
        self.policy, self.trained, self._state = policy, trained, state
        self.ranks, self.clock, self.log = ranks, clock, log
        self.generation: Generation | None = None
        self._step = OptimizerStep(objective, clock, ranks)

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
            self.generation = self._next_generation(batch.prompts)
        generation = self.generation
        if generation is None or generation.prompt_ids != tuple(p.prompt_id for p in batch.prompts):
            raise InputError("training was resumed inside a generation; resume from a checkpoint that Lockstep wrote")
        per_step = self.config.gradient_accumulation_steps
        step, place = divmod(batch.part % self.config.parts_per_generation, per_step)
        if place == 0:
            generation = self._begin_step(generation, step, policy_changed=batch.part > 0)
        mine = self._batches_per_step * step + per_step * self.ranks.rank + place
        loss = self._step.learn(self.policy(), generation.micro_batches[mine])
        if place + 1 == per_step:
            self._finish_step(generation, step)
        return loss

    # ---- one generation: push, sample, score, prepare ---------------------------------------------------------------

    def _next_generation(self, prompts: Sequence[Prompt]) -> Generation:
        version, number = self._state().global_step, self.generation_number
        groups = self.rollout(prompts, self.config.group_size, self._generations_ahead())

        self.objective.epoch = int(self._state().epoch or 0)
        generation, gap = self.preparation.generation(self.policy(), groups, version)

        self._count_tokens(groups, generation)
        self.order.note(number, groups)
        self.log.note(self.source.metrics(groups, version) | self.order.metrics())
        if gap is not None:
            # This generation was scored before its first step. Where it is used for one step only, that step's own forward
            # gives the receipt's line.
            record = not self.config.single_update
            self.ranks.on_owner("gap", lambda: self.source.prove(gap, generation, version + 1, record=record))
        return generation

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
        state, source = self._state(), self.source
        version = state.global_step
        check_same_weights(self.ranks, self.trained(), version)
        source.prove_first(version)
        if self.config.overlap_rewards:
            return source.sample_and_score(prompts, num_generations, state)

        def push_and_sample() -> list[RolloutGroup]:
            source.push(version)
            if ahead:
                return source.sample_ahead(ahead, num_generations, version)
            return source.sample(prompts, num_generations, version)

        groups = source.on_every_rank(push_and_sample, prompts)
        return source.score(groups, state)

    def rollout_in_parts(self, prompts: Sequence[Prompt], num_generations: int) -> list[RolloutGroup]:
        """`rollout` of many prompts, a part at a time, as an evaluation needs it."""
        size = max(_EVALUATION_PART // num_generations, 1)
        parts = [prompts[start : start + size] for start in range(0, len(prompts), size)]
        return [group for part in parts for group in self.rollout(part, num_generations)]

    # ---- one optimizer step: learn, prove, log ----------------------------------------------------------------------

    def _begin_step(self, generation: Generation, step: int, *, policy_changed: bool) -> Generation:
        self._step = OptimizerStep(self.objective, self.clock, self.ranks)
        sequences = generation.step(step, self._batches_per_step)
        prepared = self.preparation.step(self.policy(), sequences, moved=policy_changed)
        self.generation = generation.with_step(step, self._batches_per_step, prepared)
        return self.generation

    def _finish_step(self, generation: Generation, step: int) -> None:
        """Add up the step over all ranks and prove it. The optimizer runs after this, or an error was raised."""

        def prove(total: UpdateSums) -> None:
            if self.config.single_update:
                check_count(total.difference, generation.sampled_tokens, generation.version)
                self.source.prove(total.gap, generation, self._state().global_step + 1)
            else:
                # The gap of these tokens was proven, and written down, before the generation's first step.
                tokens = sum(s.length for s in generation.step(step, self._batches_per_step))
                check_count(total.difference, tokens, generation.version)

        total = self._step.finish(prove, self.trained_parameters())
        self.log.note(total.metrics(self.source.limit) | self.objective.finish_step(total.tally))

    def trained_parameters(self) -> list[torch.nn.Parameter]:
        """Every parameter that the optimizer changes."""
        return [p for module in self.trained() for p in module.parameters() if p.requires_grad]

    # ---- where the run is -------------------------------------------------------------------------------------------

    @property
    def generation_number(self) -> int:
        """How many generations are complete."""
        return self._state().global_step // self.config.steps_a_generation

    @property
    def _batches_per_step(self) -> int:
        """Micro-batches of one optimizer step, over all ranks."""
        return self.config.gradient_accumulation_steps * self.ranks.count

    def _generations_ahead(self) -> list[tuple[int, list[Prompt]]]:
        """The generation at hand and those that the engine samples ahead of it; empty where it samples none ahead."""
        if not self.config.generations_ahead:
            return []
        last = (self._state().max_steps - 1) // self.config.steps_a_generation
        first = self.generation_number
        last = min(first + self.config.generations_ahead, last)
        return list(generations_from(self.order, self.prompts, first, last))

    def _count_tokens(self, groups: Sequence[RolloutGroup], generation: Generation) -> None:
        """Add a generation's tokens to the trainer's state, which checkpoints keep."""
        prompt_tokens = sum(len(g.prompt.ids) * len(g.rollouts) for g in groups)
        self._state().num_input_tokens_seen += generation.sampled_tokens + prompt_tokens

    def begin(self) -> None:
        """Forget what an earlier call of `train` left."""
        self.generation = None
        if self._state().global_step == 0:
            self.order.forget()
        self.log.clear()

    def is_used_up(self) -> bool:
        """Whether too few unsolved prompts are left for another generation."""
        return self.order.used_up(self.generation_number)
