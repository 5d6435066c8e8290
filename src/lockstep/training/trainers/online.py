"""The loop that every online method shares, on `transformers.Trainer`, with TRL's constructor.

The loop is the base class's. A micro-step takes its part of the current generation; part 0 first brings the engine to the
policy's weights, samples, scores, and cuts the generation into micro-batches. The last micro-step of an optimizer step
checks the parity gap over every sampled token, so no step is taken on tokens that the policy scores differently. What is learned
from the tokens is the method's (`training/methods/objective.py`).

On several ranks one holds the engine; all read the same prompts, get the same groups, and learn from their own micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, ClassVar

import torch
from datasets import Dataset
from transformers import PreTrainedModel, PreTrainedTokenizerBase, Trainer, TrainerCallback

from lockstep.engines.protocol import Engine
from lockstep.errors import InputError
from lockstep.models.adapters import causal_model
from lockstep.parity.gap import check_count
from lockstep.report.phases import PhaseClock
from lockstep.rollouts.group import Prompt, RolloutGroup
from lockstep.rollouts.ranks import Ranks
from lockstep.rollouts.reward_functions import Given, ProcessingClasses, entries_of
from lockstep.training.config.online_config import OnlineConfig
from lockstep.training.data.prompt_order import MicroBatch, PromptLoader, generations_from, make_loader, order_of
from lockstep.training.data.prompts import check_datasets, read_prompts
from lockstep.training.data.rehearsal import rehearse_functions
from lockstep.training.forward.policy import open_policy
from lockstep.training.forward.reference import Reference
from lockstep.training.forward.scoring import check_scorable
from lockstep.training.generate.metrics import evaluation_metrics
from lockstep.training.generate.scorer import Scorer, reward_scorer
from lockstep.training.generate.source import RolloutSource
from lockstep.training.methods.objective import Objective
from lockstep.training.run_files.checkpoints import guarded_save, whole_or_absent
from lockstep.training.run_files.completion_log import show_generation
from lockstep.training.run_files.method_state import MethodState
from lockstep.training.run_files.step_log import StepLog
from lockstep.training.step.distributed import check_same_weights, leave_unwrapped, read_alike
from lockstep.training.step.generation import Generation
from lockstep.training.step.moving_share import check_steps_move
from lockstep.training.step.optimizer_step import OptimizerStep
from lockstep.training.step.preparation import Preparation
from lockstep.training.step.update import Policy, UpdateSums
from lockstep.training.trainers.resumable import ResumableSaves
from lockstep.training.trainers.setup import (
    check_reference,
    check_reference_model,
    context_within,
    needs_plain_rows,
    refuse_arguments,
)
from lockstep.training.trainers.step_events import StepEvents

# A rank waits for the owner's longest piece of work: a generation that is lost and repeated.
_LONGEST_CALL = 12


class OnlineTrainer(Trainer):
    """What the trainers have in common.

    Args:
        model: name, directory or hub id (see `lockstep.models.resolve`), or a loaded causal language model whose
            `config.name_or_path` the engine can load too.
        reward_funcs: one reward function or several, with TRL's convention (see `lockstep.rollouts.rewards`); a reward model, or
            the directory or hub id of one, is one too (see `lockstep.rollouts.reward_functions`).
        args: the configuration; by default the method's own.
        train_dataset: `datasets.Dataset` with a `prompt` column (text or messages); other columns go to the rewards.
        eval_dataset: the same, for `evaluate`; must not overlap with the training data.
        processing_class: the tokenizer; by default the model's.
        reward_processing_classes: tokenizers of the reward models, one an entry of `reward_funcs`; by default the models' own.
        callbacks, optimizers: as in `transformers.Trainer`.
        quantization_config: a `transformers.BitsAndBytesConfig` in 4 bits, beside a `peft_config`: QLoRA.
        peft_config: a `peft.LoraConfig`: trains a new adapter of the model instead of its weights.
        engine: a running engine to use instead of starting one; it stays the caller's to close.
        refused: arguments of TRL's that are not supported; any value but None is refused by name.

    Raises:
        InputError: bad input, named, where possible before a model is loaded.
        ProofError: trainer and engine do not agree; no optimizer step was taken on the data in question.
    """

    config_class: ClassVar[type[OnlineConfig]]
    objective_class: ClassVar[type[Objective]]
    # Its name in reports.
    method: ClassVar[str]
    # The loss of a micro-batch is already its share of the whole optimizer step's.
    loss_is_scaled_for_ga = True

    def __init__(
        self,
        model: str | PreTrainedModel,
        reward_funcs: Given | list[Given] | None = None,
        args: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        reward_processing_classes: ProcessingClasses = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[torch.optim.Optimizer | None, Any] = (None, None),
        quantization_config: Any = None,
        peft_config: Any = None,
        *,
        engine: Engine | None = None,
        ref_model: PreTrainedModel | None = None,
        **refused: Any,
    ) -> None:
        refuse_arguments(refused)
        args = args if args is not None else self.config_class()
        if not isinstance(args, self.config_class):
            raise InputError(
                f"args is a {type(args).__name__}; {type(self).__name__} needs a {self.config_class.__name__}"
            )
        self.config: Any = args
        check_reference(model, ref_model, args, peft_config)
        self.ranks = Ranks(_LONGEST_CALL * args.vllm_server_timeout * (args.generations_ahead + 1))
        self.ranks.share("data", lambda: check_datasets(train_dataset, eval_dataset))
        if args.rehearse_rewards:
            self.ranks.on_owner("rehearsal", lambda: self.rehearse(reward_funcs, train_dataset))
        scorer = self.scorer(reward_funcs, reward_processing_classes)

        opened = open_policy(model, processing_class, peft_config, args, quantization_config)
        policy, tokenizer, self.model_path = opened.model, opened.tokenizer, opened.path
        if optimizers[0] is None:
            check_steps_move(policy, args)

        self.objective: Objective = self.objective_class(args)
        self.reference = Reference(policy, ref_model) if self.objective.uses_reference else None
        self.critic = self.make_critic(policy)
        follows = getattr(args, "sync_ref_model", False) and self.reference is not None
        context = context_within(policy, args.context_limit)
        self._train_prompts, self._eval_prompts = read_alike(
            self.ranks, lambda: read_prompts(train_dataset, eval_dataset, tokenizer, context, args)
        )
        longest = max(len(p.ids) for p in self._train_prompts + self._eval_prompts) + args.completion_limit
        check_scorable(causal_model(policy))
        if ref_model is not None:
            check_reference_model(policy, ref_model)
        self._plain_rows = needs_plain_rows([policy, *([ref_model] if ref_model is not None else [])], longest)
        self._order = order_of(self._train_prompts, args)
        self._loader = make_loader(self._train_prompts, self._order, args)
        self._method_state = MethodState(self.objective, self.reference if follows else None, self.critic, self._order)

        super().__init__(
            model=policy,
            args=args,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=tokenizer,
            callbacks=callbacks,
            optimizers=optimizers,
        )
        leave_unwrapped(self.accelerator)
        self.clock = PhaseClock()
        self.add_callback(StepEvents(self))
        self.add_callback(ResumableSaves(args, owner=self.ranks.owner))
        for part in (self.reference, self.critic):
            if part is not None:
                part.to(self.args.device)
        # One more, where the model has it: an engine scores a sequence anew only with room for a token behind it.
        max_model_len = context if args.context_limit else min(longest + 1, context)
        self.source = RolloutSource(
            policy, scorer, tokenizer, args, self.clock, self.ranks, engine, self.model_path, max_model_len, longest
        )
        self.last_eval_groups: list[RolloutGroup] = []
        self._generation: Generation | None = None
        self._preparation = Preparation(self.objective, self.reference, self.clock, self.ranks)
        self._step = OptimizerStep(self.objective, self.clock, self.ranks)
        self.step_log = StepLog()

    def rehearse(self, reward_funcs: Any, dataset: Dataset) -> None:
        """Call what will give rollouts their rewards once, on made-up ones."""
        rehearse_functions(entries_of(reward_funcs), dataset, self.config)

    def scorer(self, reward_funcs: Any, processing_classes: Any) -> Scorer:
        """What gives rollouts their rewards."""
        return reward_scorer(reward_funcs, processing_classes, self.config)

    def make_critic(self, policy: PreTrainedModel) -> torch.nn.Module | None:
        """A value head, for methods that have one."""
        return None

    @property
    def engine(self) -> Engine:
        """The engine that samples; on the rank that holds it."""
        return self.source.engine

    @property
    def proofs(self) -> Any:
        """The proofs of the run; on the rank that holds the engine."""
        return self.source.proofs

    # ---- data -------------------------------------------------------------------------------------------------------

    def get_train_dataloader(self) -> PromptLoader:
        """One item a micro-step; the order is a function of seed and epoch alone, and the same on every rank."""
        return self._loader

    def _get_num_items_in_batch(self, batch_samples: list, device: torch.device) -> None:
        """None: weights are normalised over the step when the generation is cut, not by the base class's token count."""

    def floating_point_ops(self, inputs: Any) -> int:
        """Not counted: a shared-prefix forward does not do `6 × tokens × parameters` operations."""
        return 0

    def store_flos(self) -> None:
        """Nothing to store. (The base class gathers the count of all ranks, and only one of them saves.)"""

    # ---- weights and rollouts ---------------------------------------------------------------------------------------

    def sync_weights(self) -> None:
        """Push the policy's weights to the engine, as version `global_step`; called on every rank."""
        self.source.sync(self.state.global_step)

    def rollout(
        self, prompts: Sequence[Prompt], num_generations: int, upcoming: Sequence[tuple[int, Sequence[Prompt]]] = ()
    ) -> list[RolloutGroup]:
        """Sample and score completions of prompts; called on every rank.

        Args:
            upcoming: see `RolloutSource.rollout`; without, the policy as it is now samples every token.

        Raises:
            ProofError: trainer and engine do not agree.
            LockstepError: the engine was lost and did not come back in time.
        """
        trained = [self._causal(), *([self.critic] if self.critic is not None else [])]
        check_same_weights(self.ranks, trained, self.state.global_step)
        return self.source.rollout(prompts, num_generations, self.state, upcoming)

    def _upcoming(self) -> list[tuple[int, list[Prompt]]]:
        """The generation at hand, and those to be sampled ahead of it, where there are any."""
        if not self.config.generations_ahead:
            return []
        last = (self.state.max_steps - 1) // self.config.steps_a_generation
        first = self._generation_number
        last = min(first + self.config.generations_ahead, last)
        return list(generations_from(self._order, self._train_prompts, first, last))

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """As the base class's; however it ends, nothing is left under way in the engine."""
        try:
            return super().train(*args, **kwargs)
        finally:
            self.source.abandon_pending()

    # ---- one micro-step ---------------------------------------------------------------------------------------------

    def training_step(self, model: torch.nn.Module, inputs: MicroBatch, num_items_in_batch: Any = None) -> torch.Tensor:
        """Learn from one part of the current generation.

        Raises:
            ProofError: the parity gap of the optimizer step that would follow is over its limit.
        """
        model.train()
        if inputs.part == 0:
            self._generation = self._generate(inputs.prompts)
        generation = self._generation
        if generation is None or generation.prompt_ids != tuple(p.prompt_id for p in inputs.prompts):
            raise InputError("training was resumed inside a generation; resume from a checkpoint that Lockstep wrote")
        step, place = divmod(inputs.part % self.config.parts_per_generation, self.config.gradient_accumulation_steps)
        if place == 0:
            generation = self._begin_step(generation, step, moved=inputs.part > 0)
        own = self._step_size * step + self.config.gradient_accumulation_steps * self.ranks.rank + place
        loss = self._step.learn(self._policy(), generation.micro_batches[own])
        if place + 1 == self.config.gradient_accumulation_steps:
            self._finish_step(generation, step)
        # The base class logs the mean over ranks; the parts of a step add up.
        return torch.tensor(loss * self.ranks.count, device=self.args.device)

    @property
    def _generation_number(self) -> int:
        """Generations that are complete: the place of the one at hand."""
        return self.state.global_step // self.config.steps_a_generation

    @property
    def _step_size(self) -> int:
        """Micro-batches of an optimizer step, over all ranks."""
        return self.config.gradient_accumulation_steps * self.ranks.count

    def _generate(self, prompts: tuple[Prompt, ...]) -> Generation:
        version, number = self.state.global_step, self._generation_number
        groups = self.rollout(prompts, self.config.group_size, self._upcoming())
        self.objective.epoch = int(self.state.epoch or 0)
        generation, gap = self._preparation.generation(self._policy(), groups, version)
        # Kept in the trainer's state, and so in checkpoints.
        prompts_seen = sum(len(g.prompt.ids) * len(g.rollouts) for g in groups)
        self.state.num_input_tokens_seen += generation.sampled_tokens + prompts_seen
        self._order.note(number, groups)
        self.step_log.note(self.source.metrics(groups, version) | self._order.metrics())
        if gap is not None:
            # Where each generation is for one step, that step's own forward is what the receipt's line is of.
            record = not self.config.single_update
            self.ranks.on_owner("gap", lambda: self.source.prove(gap, generation, version + 1, record=record))
        return generation

    def _begin_step(self, generation: Generation, step: int, *, moved: bool) -> Generation:
        self._step = OptimizerStep(self.objective, self.clock, self.ranks)
        sequences = generation.step(step, self._step_size)
        prepared = self._preparation.step(self._policy(), sequences, moved=moved)
        self._generation = generation.with_step(step, self._step_size, prepared)
        return self._generation

    def _finish_step(self, generation: Generation, step: int) -> None:
        """The proof, the gradients of all ranks, and the step's numbers."""

        def prove(total: UpdateSums) -> None:
            if self.config.single_update:
                check_count(total.difference, generation.sampled_tokens, generation.version)
                self.source.prove(total.gap, generation, self.state.global_step + 1)
            else:
                # The gap of these tokens was proven, and written down, before the policy moved.
                tokens = sum(s.length for s in generation.step(step, self._step_size))
                check_count(total.difference, tokens, generation.version)

        total = self._step.finish(prove, self._trained())
        self.step_log.note(total.metrics(self.source.limit) | self.objective.finish_step(total.tally))

    def _trained(self) -> list[torch.nn.Parameter]:
        parts = [self._policy_model(), *([self.critic] if self.critic is not None else [])]
        return [p for part in parts for p in part.parameters() if p.requires_grad]

    def _clip_grad_norm(self, model: Any) -> Any:
        """The base class clips its model; a value head is clipped with it."""
        return self.accelerator.clip_grad_norm_(self._trained(), self.args.max_grad_norm)

    def begin_training(self) -> None:
        """Forget what an earlier, perhaps interrupted, call of `train` left, and open the receipt. Called by the loop."""
        self._generation = None
        if self.state.global_step == 0:
            self._order.forget()
        self.step_log.clear()
        self._forget_gradients()
        self.source.start(Path(self.args.output_dir or "."), self.state.global_step)
        self.clock.take()

    def end_step(self) -> bool:
        """What follows an optimizer step. Called by the loop.

        Returns:
            Whether anything is left to learn from.
        """
        self._forget_gradients()
        config, reference = self.config, self._method_state.moving_reference
        if reference is not None and self.state.global_step % config.ref_model_sync_steps == 0:
            reference.follow(config.ref_model_mixup_alpha)
        left = not self._order.used_up(self._generation_number)
        if not left and self.ranks.owner:
            print(
                f"lockstep: training ends at step {self.state.global_step}: too few prompts are left unsolved",
                flush=True,
            )
        return left

    def _forget_gradients(self) -> None:
        """The value head's: the base class clears those of its model alone."""
        if self.critic is not None:
            self.critic.zero_grad()

    def _policy(self) -> Policy:
        return Policy(
            self._causal(), self.accelerator.autocast, self.accelerator.backward, self.critic, self._plain_rows
        )

    def _policy_model(self) -> PreTrainedModel:
        return self.accelerator.unwrap_model(self.model)

    def _causal(self) -> PreTrainedModel:
        return causal_model(self._policy_model())

    # ---- evaluation, logs, checkpoints ------------------------------------------------------------------------------

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Mean reward on the evaluation prompts, sampled as in training.

        Returns:
            `eval_reward`, `eval_reward_ci95` (half-width, over problems), `eval_samples`, `eval_problems` and the rollout metrics.
        """
        if eval_dataset is not None or not self._eval_prompts:
            raise InputError("give the evaluation set as eval_dataset when the trainer is made")
        # An evaluation's time is not charged to a step.
        with self.clock.aside():
            groups = self.source.rollout_in_parts(self._eval_prompts, self.config.group_size_eval, self.state)
        named = evaluation_metrics(groups, self.source.metrics(groups, self.state.global_step), metric_key_prefix)
        self.last_eval_groups = groups
        self.log(dict(named))
        self.callback_handler.on_evaluate(self.args, self.state, self.control, named)
        return named

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add the rollouts' and the proof's numbers since the last log, and seconds by phase, to what the base class logs."""
        if "loss" in logs:
            logs |= self.step_log.take(self.clock)
            if self.source.losses:
                logs["engine/losses"] = self.source.losses
            logs["num_tokens"] = self.state.num_input_tokens_seen
            if self.is_world_process_zero():
                show_generation(self._generation, self.config, self.state.global_step)
        super().log(logs, start_time)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        folder = Path(self.args.output_dir or ".") / f"checkpoint-{self.state.global_step}"

        def guarded(save: Callable[[], None]) -> None:
            with guarded_save(folder.parent, self.state.global_step):
                save()

        # The owner writes last, since the trainer's state makes a checkpoint whole.
        with whole_or_absent(folder) if self.ranks.owner else nullcontext():
            if self.ranks.count > 1:
                self.ranks.share("checkpoint", lambda: guarded(lambda: self._save_rng_state(str(folder))))
            self.ranks.on_owner("save", lambda: guarded(lambda: self._save_whole(model, trial, folder)))

    def _save_whole(self, model: Any, trial: Any, folder: Path) -> None:
        # Ours first: the base class completes a checkpoint, and may send it away at once.
        self._method_state.save(folder)
        self.source.remember_receipt(folder)
        super()._save_checkpoint(model, trial)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        self._method_state.load(Path(resume_from_checkpoint))

    def close(self) -> None:
        """Release the engine, if the trainer started it."""
        self.source.close()
