"""GRPO (arXiv 2402.03300) on `transformers.Trainer`, with TRL's constructor.

The loop is the base class's. A micro-step takes its part of the current generation; part 0 first brings the engine to the
policy's weights, samples, scores, and cuts the generation into micro-batches. The last micro-step of an optimizer step
checks the parity gap over every sampled token, so no step is taken on tokens that the policy scores differently.

Departures from the paper and from TRL, with reasons: docs/migrating-from-trl.md.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase, Trainer, TrainerCallback

from lockstep.engines.protocol import Engine
from lockstep.errors import InputError
from lockstep.models.adapters import with_adapter
from lockstep.models.policy import load_policy, switch_off_dropout
from lockstep.models.resolve import resolve_model
from lockstep.parity.gap import GapStats, check_count
from lockstep.rollouts.collect import collect
from lockstep.rollouts.group import Prompt, RolloutGroup
from lockstep.rollouts.rewards import RewardFunction, score_groups
from lockstep.sync.adapters import weights_of
from lockstep.tokens.tokenizer import fit_vocabulary, guard_tokenizer, load_tokenizer
from lockstep.training.checkpoints import guarded_save
from lockstep.training.config import GRPOConfig
from lockstep.training.engine import shake_hands, start_engine
from lockstep.training.generation import Generation, prepare_generation, sampling_of
from lockstep.training.phases import PhaseClock
from lockstep.training.prompts import (
    GenerationBatches,
    MicroBatch,
    PromptLoader,
    check_dataset,
    load_prompts,
    prompt_loader,
)
from lockstep.training.proofs import Proofs
from lockstep.training.recovery import Recovery
from lockstep.training.rollout_metrics import mean_with_interval, rollout_metrics
from lockstep.training.scoring import check_scorable
from lockstep.training.update import Policy, UpdateSums, learn, score_all

# Completions that an evaluation asks an engine for in one call.
_EVALUATION_PART = 2048


class GRPOTrainer(Trainer):
    """Group Relative Policy Optimization with an engine that provably holds the policy's weights.

    Args:
        model: name, directory or hub id (see `lockstep.models.resolve`), or a loaded causal language model whose
            `config.name_or_path` the engine can load too.
        reward_funcs: one reward function or several, with TRL's convention (see `lockstep.rollouts.rewards`).
        args: the configuration.
        train_dataset: `datasets.Dataset` with a `prompt` column (text or messages); other columns go to the rewards.
        eval_dataset: the same, for `evaluate`; must not overlap with the training data.
        processing_class: the tokenizer; by default the model's.
        callbacks, optimizers: as in `transformers.Trainer`.
        peft_config: a `peft.LoraConfig`: trains a new adapter of the model instead of its weights.
        engine: a running engine to use instead of starting one; it stays the caller's to close.

    Raises:
        InputError: bad input, named, where possible before a model is loaded.
        ProofError: trainer and engine do not agree; no optimizer step was taken on the data in question.
    """

    # The loss of a micro-batch is already its share of the whole optimizer step's.
    loss_is_scaled_for_ga = True

    def __init__(
        self,
        model: str | PreTrainedModel,
        reward_funcs: RewardFunction | list[RewardFunction],
        args: GRPOConfig | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[torch.optim.Optimizer | None, Any] = (None, None),
        peft_config: Any = None,
        *,
        engine: Engine | None = None,
    ) -> None:
        args = args if args is not None else GRPOConfig()
        self.reward_funcs, self.reward_weights = _check_rewards(reward_funcs, args)
        check_dataset(train_dataset, "train")
        if eval_dataset is not None:
            check_dataset(eval_dataset, "eval")

        name = model if isinstance(model, str) else model.config.name_or_path
        self.model_path = resolve_model(name)
        tokenizer = (
            guard_tokenizer(processing_class) if processing_class is not None else load_tokenizer(self.model_path)
        )
        policy = load_policy(self.model_path, args.model_init_kwargs) if isinstance(model, str) else model  # type: ignore[arg-type]
        fit_vocabulary(policy, tokenizer)
        policy = with_adapter(policy, peft_config, seed=args.seed)
        switch_off_dropout(policy)
        # Here, so that an adapter which no engine could be given is refused before one is started.
        weights_of(policy)

        context = args.vllm_max_model_length or policy.config.get_text_config().max_position_embeddings
        load = _prompt_reader(tokenizer, context - args.max_completion_length, args)
        self._train_prompts = load(train_dataset, "train")
        self._eval_prompts = load(eval_dataset, "eval") if eval_dataset is not None else []
        longest = max(len(p.ids) for p in self._train_prompts + self._eval_prompts) + args.max_completion_length
        check_scorable(policy, longest)
        batches = GenerationBatches(
            len(self._train_prompts),
            args.prompts_per_generation,
            args.micro_batches_per_generation,
            shuffle=args.shuffle_dataset,
            seed=args.data_seed if args.data_seed is not None else args.seed,
        )
        self._loader = prompt_loader(self._train_prompts, batches)

        super().__init__(
            model=policy,
            args=args,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=tokenizer,
            callbacks=callbacks,
            optimizers=optimizers,
        )
        self.config: GRPOConfig = args
        self.clock = PhaseClock()
        self.add_callback(_StepEvents(self))
        self._owns_engine = engine is None
        # One more, where the model has it: an engine scores a sequence anew only with room for a token behind it.
        max_model_len = args.vllm_max_model_length or min(longest + 1, context)
        self.engine = engine or start_engine(args, self.model_path, tokenizer, max_model_len)
        # bf16 autocast, or the dtype that the weights were loaded in.
        compute_dtype = torch.bfloat16 if args.bf16 else policy.dtype
        try:
            shake_hands(self.engine, policy, self.model_path, args.engine_torch_dtype, longest)
            self.proofs = Proofs(policy, self.engine, args, compute_dtype, self.clock)
            self.recovery = Recovery(self.proofs.distrust)
        except BaseException:
            self.close()
            raise
        self.last_eval_groups: list[RolloutGroup] = []
        self._generation: Generation | None = None
        self._sums = UpdateSums()
        self._logged: dict[str, list[float]] = {}

    # ---- data -------------------------------------------------------------------------------------------------------

    def get_train_dataloader(self) -> PromptLoader:
        """One item a micro-step; the order is a function of seed and epoch alone."""
        return self._loader

    def _get_num_items_in_batch(self, batch_samples: list, device: torch.device) -> None:
        """None: weights are normalised over the step when the generation is cut, not by the base class's token count."""

    def floating_point_ops(self, inputs: Any) -> int:
        """Not counted: a shared-prefix forward does not do `6 × tokens × parameters` operations."""
        return 0

    # ---- weights and rollouts ---------------------------------------------------------------------------------------

    def sync_weights(self) -> None:
        """Push the policy's weights to the engine, as version `global_step`.

        Always, even where the version would not change: a version does not see weights that were set by hand, and the reset of
        caches makes every generation start alike, in a run that goes on too.
        """
        self.proofs.sync(self.state.global_step)

    def rollout(self, prompts: list[Prompt] | tuple[Prompt, ...], num_generations: int) -> list[RolloutGroup]:
        """Sample and score completions of prompts with the policy as it is now.

        Raises:
            ProofError: trainer and engine do not agree.
            LockstepError: the engine was lost and did not come back in time.
        """
        groups = self.recovery.run(lambda: self._sample(prompts, num_generations))
        with self.clock.phase("rewards"):
            return score_groups(
                groups,
                self.reward_funcs,
                self.reward_weights,
                trainer_state=self.state,
                timeout=self.config.reward_timeout,
            )

    def _sample(self, prompts: list[Prompt] | tuple[Prompt, ...], num_generations: int) -> list[RolloutGroup]:
        self.sync_weights()
        config = self.config
        with self.clock.phase("generate"):
            groups = collect(
                prompts,
                self.engine,
                self.processing_class,
                sampling_of(config),
                num_generations=num_generations,
                run_seed=config.seed,
                version=self.state.global_step,
            )
        self.proofs.check_groups(groups)
        return groups

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
        config = self.config
        assert config.steps_per_generation is not None
        sequences = generation.micro_batches[inputs.part % config.steps_per_generation]
        if inputs.part % config.gradient_accumulation_steps == 0:
            self._sums = UpdateSums()
        loss = learn(self._policy(), sequences, config, self.clock, self._sums)
        if (inputs.part + 1) % config.gradient_accumulation_steps == 0:
            self._finish_step(generation, inputs.part)
        return torch.tensor(loss, device=self.args.device)

    def _generate(self, prompts: tuple[Prompt, ...]) -> Generation:
        groups = self.rollout(prompts, self.config.num_generations)
        generation = prepare_generation(groups, self.config, self.state.global_step)
        # Kept in the trainer's state, and so in checkpoints.
        prompts_seen = sum(len(g.prompt.ids) * len(g.rollouts) for g in groups)
        self.state.num_input_tokens_seen += generation.sampled_tokens + prompts_seen
        self._note(rollout_metrics(groups))
        if self.config.single_update:
            return generation
        # The policy will move under these rollouts: prove and keep its log-probs before it does.
        with self.clock.phase("verify"):
            sequences = [s for batch in generation.micro_batches for s in batch]
            old_logps, gap = score_all(self._policy(), sequences, self.config)
        self.proofs.check_gap(gap, generation.sampled_tokens, generation.completions, generation.version)
        self._write_receipt(gap, generation)
        return generation.with_old_logps(old_logps)

    def _finish_step(self, generation: Generation, part: int) -> None:
        """Everything between the last backward and the optimizer: the proof, and the step's numbers."""
        sums = self._sums
        if self.config.single_update:
            self.proofs.check_gap(sums.gap, generation.sampled_tokens, generation.completions, generation.version)
            self._write_receipt(sums.gap, generation)
        else:
            # The gap of these tokens was proven, and written down, before the policy moved.
            accumulated = self.config.gradient_accumulation_steps
            check_count(sums.gap, generation.tokens_of_step(part, accumulated), generation.version)
        for parameter in self._policy_model().parameters():
            # A step whose groups all agree has gradient zero, which still moves AdamW; None would not.
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        self._note(sums.metrics(self.proofs.limit))

    def _write_receipt(self, gap: GapStats, generation: Generation) -> None:
        self.proofs.write(gap, generation.sampled_tokens, self.state.global_step + 1, generation.version)

    def begin_training(self) -> None:
        """Forget what an earlier, perhaps interrupted, call of `train` left, and open the receipt. Called by the loop."""
        self._generation = None
        self._logged.clear()
        self.recovery.run(lambda: self.proofs.start(Path(self.args.output_dir), self.state.global_step))
        self.clock.take()

    def _policy(self) -> Policy:
        return Policy(self._policy_model(), self.accelerator.autocast, self.accelerator.backward)

    def _policy_model(self) -> PreTrainedModel:
        return self.accelerator.unwrap_model(self.model)

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
        samples = self.config.num_generations_eval or self.config.num_generations
        # An evaluation's time is not charged to a step.
        with self.clock.aside():
            groups = self._evaluate_prompts(samples)
        mean, half_width = mean_with_interval(groups)
        metrics = {
            **rollout_metrics(groups),
            "reward": mean,
            "reward_ci95": half_width,
            "problems": len(groups),
            "samples": len(groups) * samples,
        }
        named = {f"{metric_key_prefix}_{name}": float(value) for name, value in metrics.items()}
        self.last_eval_groups = groups
        self.log(dict(named))
        self.callback_handler.on_evaluate(self.args, self.state, self.control, named)
        return named

    def _evaluate_prompts(self, samples: int) -> list[RolloutGroup]:
        # In parts, since one call to an engine has a time limit.
        size = max(_EVALUATION_PART // samples, 1)
        parts = range(0, len(self._eval_prompts), size)
        return [group for start in parts for group in self.rollout(self._eval_prompts[start : start + size], samples)]

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add the rollouts' and the proof's numbers since the last log, and seconds by phase, to what the base class logs."""
        if "loss" in logs:
            logs |= {name: sum(values) / len(values) for name, values in self._logged.items()}
            # A count, like the seconds: all since the last log.
            logs["parity/checked_tokens"] = sum(self._logged.get("parity/checked_tokens", ()))
            if self.recovery.losses:
                logs["engine/losses"] = self.recovery.losses
            logs["num_tokens"] = self.state.num_input_tokens_seen
            logs |= {f"time/{name}": seconds for name, seconds in self.clock.take().items()}
            self._logged.clear()
        super().log(logs, start_time)

    def _note(self, metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            self._logged.setdefault(name, []).append(value)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        with guarded_save(self.args.output_dir or ".", self.state.global_step):
            super()._save_checkpoint(model, trial)
            self.proofs.remember_receipt(Path(self.args.output_dir or ".") / f"checkpoint-{self.state.global_step}")

    def close(self) -> None:
        """Release the engine, if the trainer started it."""
        if self._owns_engine:
            self.engine.close()


class _StepEvents(TrainerCallback):
    """What the trainer must do at events of the base class's loop."""

    def __init__(self, trainer: GRPOTrainer) -> None:
        self._trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._trainer.begin_training()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._trainer.clock.start("optimizer")

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._trainer.clock.stop("optimizer")


def _check_rewards(
    reward_funcs: RewardFunction | list[RewardFunction], args: GRPOConfig
) -> tuple[list[RewardFunction], list[float]]:
    functions = list(reward_funcs) if isinstance(reward_funcs, list | tuple) else [reward_funcs]
    if not functions:
        raise InputError("no reward function given")
    for function in functions:
        if not callable(function) or isinstance(function, torch.nn.Module):
            raise InputError(
                f"reward function {function!r:.80} is no Python function; reward models are not supported yet"
            )
    weights = list(args.reward_weights) if args.reward_weights is not None else [1.0] * len(functions)
    if len(weights) != len(functions):
        raise InputError(f"reward_weights has {len(weights)} entries for {len(functions)} reward functions")
    return functions, weights


def _prompt_reader(
    tokenizer: PreTrainedTokenizerBase, room: int, args: GRPOConfig
) -> Callable[[Any, str], list[Prompt]]:
    def load(dataset: Any, name: str) -> list[Prompt]:
        return load_prompts(
            dataset,
            name,
            tokenizer,
            max_prompt_length=room,
            chat_template_kwargs=args.chat_template_kwargs,  # type: ignore[arg-type]
        )

    return load
