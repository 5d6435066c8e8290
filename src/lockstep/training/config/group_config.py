"""Fields of methods that sample groups: number of completions, sizes of a generation, clipping, and the reference model.

They extend `training/config/online_config.py`. The configs of GRPO, RLOO, REINFORCE++ and PPO extend them.
"""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.errors import InputError
from lockstep.training.config.online_config import OnlineConfig
from lockstep.training.config.option import COUNT, SHARE, Bounds, option


@dataclass
class GroupConfig(OnlineConfig):
    """Fields shared by the methods that sample groups.

    `per_device_train_batch_size` counts completions, as in TRL. One generation makes `per_device_train_batch_size ×
    steps_per_generation` completions per process, from `… ÷ num_generations` prompts.

    Raises:
        InputError: fields contradict each other, or ask for something that is not supported yet.
    """

    num_generations: int = option(8, "Completions per prompt (the size of a group).", group="method", common=True)
    num_generations_eval: int | None = option(
        None, "Completions per prompt in evaluation; default: num_generations.", group="sampling", bounds=COUNT
    )
    max_completion_length: int = option(
        512, "Largest number of tokens of a completion.", group="sampling", common=True, bounds=COUNT
    )
    generation_batch_size: int | None = option(
        None, "Completions per generation, over all ranks.", group="method", bounds=COUNT
    )
    steps_per_generation: int | None = option(
        None, "Micro-batches per generation; default: gradient_accumulation_steps.", group="method", bounds=COUNT
    )
    num_iterations: int = option(1, "Passes over each generation (μ in the GRPO paper).", group="method", bounds=COUNT)
    epsilon: float = option(
        0.2, "Lower clip of the ratio: 1 − epsilon.", group="method", bounds=Bounds(0, infinite=True)
    )
    epsilon_high: float | None = option(
        None, "Upper clip: 1 + epsilon_high; default: epsilon.", group="method", bounds=Bounds(0, infinite=True)
    )
    beta: float = option(
        0.0,
        "Weight of the KL to the reference model; 0: no reference model.",
        group="method",
        common=True,
        bounds=Bounds(0),
    )
    mask_truncated_completions: bool = option(
        False, "Leave completions cut at the length limit out of the loss (not out of the proof).", group="method"
    )
    no_positive_resampling: float | None = option(
        None,
        "Mean reward of a group from which its prompt is left out of later passes over the data; unset: none is left out.",
        group="method",
    )
    sync_ref_model: bool = option(False, "Let the reference model follow the policy (TR-DPO).", group="method")
    ref_model_mixup_alpha: float = option(
        0.6, "Share of the policy in the reference at a sync.", group="method", bounds=SHARE
    )
    ref_model_sync_steps: int = option(512, "Optimizer steps between two syncs.", group="method", bounds=COUNT)

    @property
    def group_size(self) -> int:
        return self.num_generations

    @property
    def group_size_eval(self) -> int:
        return self.num_generations_eval or self.num_generations

    @property
    def least_group(self) -> int:
        """Smallest number of completions per prompt that the method needs."""
        return 2

    @property
    def completion_limit(self) -> int:
        return self.max_completion_length

    @property
    def parts_per_generation(self) -> int:
        assert self.steps_per_generation is not None
        return self.steps_per_generation

    @property
    def passes(self) -> int:
        return self.num_iterations

    @property
    def clip_high(self) -> float:
        """Upper clip of the ratio."""
        return self.epsilon if self.epsilon_high is None else self.epsilon_high

    def size_generation(self) -> None:
        """Set and check the sizes of a generation.

        Raises:
            InputError: the sizes contradict each other.
        """
        if self.epsilon_high is None:
            self.epsilon_high = self.epsilon
        if self.sync_ref_model and not self.beta:
            raise InputError("sync_ref_model has no reference model to sync: beta is 0")
        if self.num_generations < self.least_group:
            raise InputError(
                f"num_generations={self.num_generations}; an advantage needs at least {self.least_group} completions per prompt"
            )
        batch = self.per_device_train_batch_size * self.world_size
        if self.generation_batch_size is not None:
            if self.generation_batch_size % batch:
                raise InputError(
                    f"generation_batch_size={self.generation_batch_size} is not a multiple of "
                    f"per_device_train_batch_size × processes = {batch}"
                )
            steps = self.generation_batch_size // batch
            if self.steps_per_generation not in (None, steps):
                raise InputError(
                    f"generation_batch_size={self.generation_batch_size} means steps_per_generation={steps}, but it is given "
                    f"as {self.steps_per_generation}; give one of the two"
                )
            self.steps_per_generation = steps
        elif self.steps_per_generation is None:
            self.steps_per_generation = self.gradient_accumulation_steps
        assert self.steps_per_generation is not None
        self.generation_batch_size = batch * self.steps_per_generation
        if self.generation_batch_size % self.num_generations:
            raise InputError(
                f"one generation makes {self.generation_batch_size} completions ({batch} × "
                f"steps_per_generation={self.steps_per_generation}), not a multiple of num_generations={self.num_generations}"
            )
        if self.steps_per_generation % self.gradient_accumulation_steps:
            raise InputError(
                f"steps_per_generation={self.steps_per_generation} is not a multiple of gradient_accumulation_steps="
                f"{self.gradient_accumulation_steps}: an optimizer step would span two generations"
            )
