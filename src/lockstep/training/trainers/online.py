"""`OnlineTrainer`: the base of the trainers of all methods. It extends `transformers.Trainer` and has TRL's constructor.

It checks the user's arguments, loads the policy, makes the parts of the run, and connects `transformers.Trainer` to the loop in
`training/loop.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, ClassVar

import torch
from datasets import Dataset
from transformers import PreTrainedModel, PreTrainedTokenizerBase, Trainer, TrainerCallback

from lockstep.engines.protocol import Engine
from lockstep.errors import InputError
from lockstep.models.adapters import causal_model
from lockstep.report.busy import busy
from lockstep.report.phases import PhaseClock
from lockstep.rollouts.group import RolloutGroup
from lockstep.rollouts.ranks import Ranks
from lockstep.rollouts.reward_functions import Given, ProcessingClasses, entries_of, reward_scorer
from lockstep.rollouts.rewards import Scorer
from lockstep.training.config.online_config import OnlineConfig
from lockstep.training.data.prompt_order import MicroBatch, PromptLoader, make_loader, order_of
from lockstep.training.data.prompts import check_datasets, read_prompts
from lockstep.training.data.rehearsal import rehearse_functions
from lockstep.training.forward.policy import open_policy
from lockstep.training.forward.reference import Reference
from lockstep.training.forward.scoring import check_scorable
from lockstep.training.generate.metrics import evaluation_metrics
from lockstep.training.generate.source import RolloutSource
from lockstep.training.loop import TrainingLoop
from lockstep.training.methods.objective import Objective
from lockstep.training.run_files.checkpoints import guarded_save, whole_or_absent
from lockstep.training.run_files.completion_log import show_generation
from lockstep.training.run_files.method_state import MethodState
from lockstep.training.run_files.resumable import ResumableSaves
from lockstep.training.run_files.step_log import StepLog
from lockstep.training.step.distributed import leave_unwrapped
from lockstep.training.step.generation import Preparation
from lockstep.training.step.moving_share import check_steps_move
from lockstep.training.step.update import Policy
from lockstep.training.trainers.foreign_hooks import RefusesForeignHooks
from lockstep.training.trainers.setup import (
    check_reference,
    check_reference_model,
    check_router_loss,
    context_within,
    needs_plain_rows,
    refuse_arguments,
)
from lockstep.training.trainers.step_events import StepEvents

# Number of server timeouts that a rank waits for the rank with the engine. The longest wait is for a generation that is lost and
# repeated.
_LONGEST_CALL = 12


class OnlineTrainer(RefusesForeignHooks, Trainer):
    """The base of all trainers.

    Args:
        model: name, directory or hub id (see `lockstep.models.resolve`), or a loaded causal language model whose
            `config.name_or_path` the engine can load too.
        reward_funcs: one reward function or several, with TRL's convention (see `lockstep.rollouts.rewards`). A reward model, or
            its directory or hub id, may stand in place of a function (see `lockstep.rollouts.reward_functions`).
        args: the configuration; default: the method's configuration with its defaults.
        train_dataset: `datasets.Dataset` with a `prompt` column (text or messages); other columns go to the rewards.
        eval_dataset: the same for `evaluate`; it must not overlap with the training data.
        processing_class: the tokenizer; by default the model's.
        reward_processing_classes: tokenizers of the reward models, one per entry of `reward_funcs`; default: the models' own.
        callbacks, optimizers: as in `transformers.Trainer`.
        quantization_config: a `transformers.BitsAndBytesConfig` in 4 bits; with a `peft_config` this is QLoRA.
        peft_config: a `peft.LoraConfig`; the trainer then trains a new adapter instead of the model's weights.
        engine: a running engine; the trainer uses it instead of starting one, and the caller closes it.
        refused: arguments of TRL's trainers that are not supported; a value other than None is refused by name.

    Raises:
        InputError: an argument cannot be used. The error names it, where possible before a model is loaded.
        ProofError: trainer and engine do not agree; no optimizer step was taken on that data.
    """

    config_class: ClassVar[type[OnlineConfig]]
    objective_class: ClassVar[type[Objective]]
    loop_class: ClassVar[type[TrainingLoop]] = TrainingLoop
    # The method's name in reports.
    method: ClassVar[str]
    # `micro_step` already divides by the whole optimizer step; the base class must not divide again.
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
        self._train_prompts, self._eval_prompts = read_prompts(
            train_dataset, eval_dataset, tokenizer, context, args, self.ranks
        )
        longest = max(len(p.ids) for p in self._train_prompts + self._eval_prompts) + args.completion_limit
        check_scorable(causal_model(policy))
        check_router_loss(policy, args)
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
        # One more token if the model allows it: an engine scores a sequence only if one more token fits behind it.
        max_model_len = context if args.context_limit else min(longest + 1, context)
        self.source = RolloutSource(
            policy, scorer, tokenizer, args, self.clock, self.ranks, engine, self.model_path, max_model_len, longest
        )
        self.last_eval_groups: list[RolloutGroup] = []
        self.step_log = StepLog()
        self.loop = self.loop_class(
            self.objective,
            self.source,
            Preparation(self.objective, self.reference, self.clock, self.ranks),
            self._order,
            self._train_prompts,
            self._policy,
            self._trained_modules,
            lambda: self.state,
            self.ranks,
            self.clock,
            self.step_log,
        )

    def rehearse(self, reward_funcs: Any, dataset: Dataset) -> None:
        """Call the reward functions once on made-up completions, so that their errors appear before a model is loaded."""
        rehearse_functions(entries_of(reward_funcs), dataset, self.config)

    def scorer(self, reward_funcs: Any, processing_classes: Any) -> Scorer:
        """The scorer that gives rollouts their rewards."""
        config = self.config
        return reward_scorer(
            reward_funcs,
            processing_classes,
            weights=config.reward_weights,
            timeout=config.reward_timeout,
            chat_template_kwargs=config.chat_template_kwargs,
            device=config.device,
        )

    def make_critic(self, policy: PreTrainedModel) -> torch.nn.Module | None:
        """The value head; None if the method has no value head."""
        return None

    @property
    def engine(self) -> Engine:
        """The engine; only on the rank that holds it."""
        return self.source.engine

    @property
    def proofs(self) -> Any:
        """The proofs of the run; only on the rank that holds the engine."""
        return self.source.proofs

    # ---- data -------------------------------------------------------------------------------------------------------

    def get_train_dataloader(self) -> PromptLoader:
        """One item per micro-step. The order depends on seed and epoch only, and is the same on every rank."""
        return self._loader

    def _get_num_items_in_batch(self, batch_samples: list, device: torch.device) -> None:
        """None: loss weights are normalised over the step when the generation is cut, so the base class counts no tokens."""

    def floating_point_ops(self, inputs: Any) -> int:
        """0: completions share their prompt's positions, so `6 × tokens × parameters` would be wrong."""
        return 0

    def store_flos(self) -> None:
        """Nothing is stored. The base class would gather over all ranks here, but only one rank saves checkpoints."""

    # ---- weights and rollouts ---------------------------------------------------------------------------------------

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train, as the base class does. At the end, also after an error, the engine's unfinished generations are cancelled."""
        try:
            return super().train(*args, **kwargs)
        finally:
            self.source.abandon_pending()

    # ---- one micro-step ---------------------------------------------------------------------------------------------

    def training_step(self, model: torch.nn.Module, inputs: MicroBatch, num_items_in_batch: Any = None) -> torch.Tensor:
        """Learn from one part of the current generation: see `TrainingLoop.micro_step`.

        Raises:
            ProofError: trainer and engine do not agree; no optimizer step is taken.
        """
        model.train()
        loss = self.loop.micro_step(inputs)
        # The base class logs the mean over ranks, but the ranks' parts of a step add up.
        return torch.tensor(loss * self.ranks.count, device=self.args.device)

    def _clip_grad_norm(self, model: Any) -> Any:
        """Clip the gradients of policy and value head together; the base class would clip the policy only."""
        return self.accelerator.clip_grad_norm_(self.loop.trained_parameters(), self.args.max_grad_norm)

    def begin_training(self) -> None:
        """Reset the state of an earlier call of `train`, open the receipt and prove the engine. Called when training begins."""
        self.loop.begin()
        self._forget_gradients()
        self.source.start(Path(self.args.output_dir or "."), self.state.global_step)
        self.clock.take()

    def end_step(self) -> bool:
        """Clear the value head's gradients, move the reference model, and check whether prompts are left. Called after each step.

        Returns:
            Whether another generation can be made.
        """
        self._forget_gradients()
        config, reference = self.config, self._method_state.moving_reference
        if reference is not None and self.state.global_step % config.ref_model_sync_steps == 0:
            reference.follow(config.ref_model_mixup_alpha)
        used_up = self.loop.is_used_up()
        if used_up and self.ranks.owner:
            print(
                f"lockstep: training ends at step {self.state.global_step}: too few prompts are left unsolved",
                flush=True,
            )
        return not used_up

    def _forget_gradients(self) -> None:
        """Clear the value head's gradients; the base class clears the policy's only."""
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

    def _trained_modules(self) -> list[torch.nn.Module]:
        return [self._causal(), *([self.critic] if self.critic is not None else [])]

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
        # The time of an evaluation is not counted as time of a step.
        with (
            self.clock.aside(),
            busy(f"evaluating on {len(self._eval_prompts)} held-out problems", self.clock.progress),
        ):
            groups = self.loop.rollout_in_parts(self._eval_prompts, self.config.group_size_eval)
        named = evaluation_metrics(groups, self.source.metrics(groups, self.state.global_step), metric_key_prefix)
        self.last_eval_groups = groups
        self.log(dict(named))
        self.callback_handler.on_evaluate(self.args, self.state, self.control, named)
        return named

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log the figures of rollouts and proofs since the last log, and the seconds per phase, beside the base class's figures."""
        if "loss" in logs:
            logs |= self.step_log.take(self.clock)
            if self.source.losses:
                logs["engine/losses"] = self.source.losses
            logs["num_tokens"] = self.state.num_input_tokens_seen
            if self.is_world_process_zero():
                show_generation(self.loop.generation, self.config, self.state.global_step)
        super().log(logs, start_time)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        folder = Path(self.args.output_dir or ".") / f"checkpoint-{self.state.global_step}"

        def guarded(save: Callable[[], None]) -> None:
            with guarded_save(folder.parent, self.state.global_step):
                save()

        # The owner writes last, because it writes the trainer's state, and this file marks a checkpoint as complete.
        with whole_or_absent(folder) if self.ranks.owner else nullcontext(), busy(f"saving {folder.name}"):
            if self.ranks.count > 1:
                self.ranks.share("checkpoint", lambda: guarded(lambda: self._save_rng_state(str(folder))))
            self.ranks.on_owner("save", lambda: guarded(lambda: self._save_whole(model, trial, folder)))

    def _save_whole(self, model: Any, trial: Any, folder: Path) -> None:
        # Lockstep's files are written first, because the base class completes a checkpoint and may upload it at once.
        self._method_state.save(folder)
        self.source.remember_receipt(folder)
        super()._save_checkpoint(model, trial)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        self._method_state.load(Path(resume_from_checkpoint))

    def close(self) -> None:
        """Close the engine, if the trainer started it."""
        self.source.close()
