"""The training loop: push, sample, score, learn, step, log. Read this file first.

One generation goes like this. The policy's weights are pushed to the engine. The engine samples completions of a few
prompts. Reward functions score them, and the method turns rewards into advantages. The policy learns from a
generation in one or several optimizer steps, each cut into micro-batches.

`transformers.Trainer` calls `micro_step` once per micro-batch, and the optimizer after the last one of each step. On
several ranks, one rank holds the engine, all get the same groups, and each learns from its own micro-batches.

| stage  | here                | done by |
|--------|---------------------|---------|
| read   | before training     | `run/data/prompts.py`: rows become prompts of ids |
| push   | `rollout`           | `run/source.py`, `weights/push.py` |
| sample | `rollout`           | `run/source.py`, `rollouts/driver.py`, the engine |
| score  | `rollout`           | `rollouts/rewards.py`: reward functions, on each rank its share |
| prepare| `_next_generation`  | `learn/generation.py`: advantages, weights, micro-batches |
| learn  | `micro_step`        | `learn/update.py`: forward, loss and backward of one micro-batch |
| step   | `transformers.Trainer` | clips the gradients and calls the optimizer |
| log    | `_finish_step`      | `run/files/logs.py` |

Each stage tells the watch what has happened (`learn/events.py`). Before the optimizer changes the policy, the watch
has proven every token, weight and gradient of the step (`watch/run.py`). An evaluation samples and scores alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from transformers import TrainerState

from lockstep.errors import InputError
from lockstep.learn.events import Watch
from lockstep.learn.generation import Generation, Preparation
from lockstep.learn.methods.objective import Objective, Scores
from lockstep.learn.update import OptimizerStep, Policy, router_loss
from lockstep.report.phases import PhaseClock
from lockstep.rollouts.group import Prompt, RolloutGroup
from lockstep.rollouts.ranks import Ranks
from lockstep.run.data.prompts import MicroBatch, PromptOrder, generations_from
from lockstep.run.files.logs import StepLog
from lockstep.run.metrics import UnscoredGenerations
from lockstep.run.source import RolloutSource

# Completions that an evaluation asks an engine for in one call, because one call has a time limit.
_EVALUATION_PART = 2048


class TrainingLoop:
    """Generations and the optimizer steps on them.

    Args:
        objective: the method: advantages, weights and loss.
        source: the engine, and the rewards.
        preparation: turns scored groups into a generation.
        order: which prompts each generation gets.
        prompts: all training prompts, in the order of the data set.
        policy: gives the policy as it is now, with what its forward needs.
        trained: gives the modules that the optimizer changes: the policy, and a critic where the method has one.
        state: gives the trainer's state; its `global_step` is the weight version.
        watch: proves every event.

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
        watch: Watch,
    ) -> None:
        self.objective, self.config = objective, objective.config
        self.source, self.preparation = source, preparation
        self.order, self.prompts = order, prompts
        self.policy, self.trained, self.state = policy, trained, state
        self.ranks, self.clock, self.log, self.watch = ranks, clock, log, watch
        self.generation: Generation | None = None
        self._step: OptimizerStep | None = None
        most = self.config.max_unscored_generations
        self._unscored = UnscoredGenerations(most, source.alarms, owner=ranks.owner)

    # ---- one micro-batch --------------------------------------------------------------------------------------------

    def micro_step(self, batch: MicroBatch) -> float:
        """Learn from one micro-batch of this rank. Returns its part of the optimizer step's loss.

        The first micro-batch of a generation samples the generation.

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
                f"{self.config.optimizer_steps_per_generation} steps: no run can go on from it; rename it "
                "to go on from the one before"
            )
        per_step = self.config.gradient_accumulation_steps
        step, place = divmod(batch.part % self.config.parts_per_generation, per_step)
        if place == 0:
            generation = self._begin_step(generation, step, moved=batch.part > 0)
        mine = self._batches_per_step * step + per_step * self.ranks.rank + place
        assert self._step is not None
        loss = self._step.learn(self.policy(), generation.micro_batches[mine], mine)
        if place + 1 == per_step:
            self._finish_step(self._step)
        return loss

    # ---- one generation: push, sample, score, prepare ---------------------------------------------------------------

    def _next_generation(self, prompts: Sequence[Prompt]) -> Generation:
        version, number = self.state().global_step, self.generation_number
        # If an error is raised from here on, nothing of an earlier generation may be taken for this one.
        self.generation = self._step = None
        groups = self.rollout(prompts, self.config.group_size, self._generations_ahead())
        self.watch.taken(groups, prompts, number)
        self.objective.epoch = int(self.state().epoch or 0)
        generation, scored, sequences = self.preparation.generation(self.policy(), groups, version)
        self.generation = generation
        self._count_tokens(generation)
        self.order.note(number, groups)
        metrics = self.source.metrics(groups, version)
        self.log.note(metrics | self._unscored.note(groups) | self.order.metrics())
        self.watch.prepared(generation, scored, sequences)
        return generation

    def policy_logps(self) -> Scores:
        """The policy's log-probs of the current generation before its first step, by name of the branch.

        Those of branches that no pass of this rank has scored are missing.
        """
        if self.generation is None:
            return {}
        learned = self._step.logps() if self._step is not None else {}
        sequences = [s for batch in self.generation.micro_batches for s in batch]
        return {**learned, **{s.name: s.old_logps for s in sequences if s.old_logps is not None}}

    def rollout(
        self,
        prompts: Sequence[Prompt],
        num_generations: int,
        ahead: Sequence[tuple[int, Sequence[Prompt]]] = (),
    ) -> list[RolloutGroup]:
        """Push the policy's weights, sample completions and score them. Every rank calls.

        Args:
            num_generations: completions per prompt.
            ahead: generations by number, with their prompts, that the engine is to work on from now on; the first is
                this one. Its tokens may be up to `max_staleness` versions old. Empty: the policy as it is now samples
                every token.

        Raises:
            ProofError: trainer and engine do not agree.
            LockstepError: the engine was lost and did not come back in time.
        """
        state, source = self.state(), self.source
        version = state.global_step
        self.watch.pushing(version)

        def push_and_sample() -> list[RolloutGroup]:
            source.push(version)
            if ahead:
                return source.sample_ahead(ahead, num_generations, version)
            return source.sample(prompts, num_generations, version)

        groups = source.score(source.on_every_rank(push_and_sample, prompts), state)
        self.watch.scored(groups)
        return groups

    def rollout_in_parts(
        self, prompts: Sequence[Prompt], num_generations: int, completions: int = _EVALUATION_PART
    ) -> Iterator[RolloutGroup]:
        """`rollout` of many prompts, a part of so many completions at a time, as an evaluation needs it."""
        size = max(completions // num_generations, 1)
        for start in range(0, len(prompts), size):
            yield from self.rollout(prompts[start : start + size], num_generations)

    # ---- one optimizer step: learn, log ------------------------------------------------------------------------------

    def _begin_step(self, generation: Generation, step: int, *, moved: bool) -> Generation:
        sequences = generation.step(step, self._batches_per_step)
        prepared = self.preparation.step(self.policy(), sequences, moved=moved)
        generation = self.generation = generation.with_step(step, self._batches_per_step, prepared)
        with self.clock.phase("forward_backward"):
            own = generation.of_rank(step, self.config.gradient_accumulation_steps, self.ranks)
            router = router_loss(self.objective, self.policy(), own, self.ranks)
        self.watch.beginning(self.policy(), generation, step, moved=moved, plain=router is None)
        self._step = OptimizerStep(self.objective, self.clock, self.ranks, self.watch, router)
        return generation

    def _finish_step(self, step: OptimizerStep) -> None:
        """Add up the step over all ranks. The optimizer runs after this, or an error was raised."""
        total = step.finish(self.trained_parameters())
        self.log.note(total.metrics() | self.watch.figures(total) | self.objective.finish_step(total.tally))

    def trained_parameters(self) -> list[torch.nn.Parameter]:
        """Every parameter that the optimizer changes."""
        return [p for module in self.trained() for p in module.parameters() if p.requires_grad]

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
        """The current generation and the later ones that the engine samples; empty if it samples none ahead."""
        if not self.config.generations_ahead:
            return []
        first = self.generation_number
        final = (self.state().max_steps - 1) // self.config.optimizer_steps_per_generation
        last = min(first + self.config.generations_ahead, final)
        return list(generations_from(self.order, self.prompts, first, last))

    def _count_tokens(self, generation: Generation) -> None:
        """Add a generation's tokens to the trainer's state, which checkpoints keep."""
        prompt_tokens = sum(len(c.prompt_ids) for c in generation.completions)
        self.state().num_input_tokens_seen += generation.sampled_tokens + prompt_tokens

    def begin(self) -> None:
        """Forget what an earlier call of `train` left."""
        self.generation = None
        self.watch.began()
        if self.state().global_step == 0:
            self.order.forget()
        self.log.clear()

    def is_used_up(self) -> bool:
        """Whether too few unsolved prompts are left for another generation."""
        return self.order.used_up(self.generation_number)
