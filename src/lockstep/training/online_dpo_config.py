"""The configuration of Online DPO, under TRL's names.

Comes from: `training/config.py`. Goes to: `training/online_dpo.py`, and the command line.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import get_args

from lockstep.algorithms.preference_loss import PreferenceLossType
from lockstep.errors import InputError
from lockstep.training.config import OnlineConfig
from lockstep.training.trl_fields import doc


@dataclass
class OnlineDPOConfig(OnlineConfig):
    """Configuration of `OnlineDPOTrainer`. `per_device_train_batch_size` counts prompts, as in TRL.

    Raises:
        InputError: fields contradict each other, or ask for something that is not supported yet.
    """

    learning_rate: float = field(default=5e-7, metadata=doc("Initial learning rate of AdamW."))
    temperature: float = field(default=0.9, metadata=doc("Sampling temperature; the trainer scores the same."))
    reward_model_path: str | None = field(default=None, metadata=doc("Reward model, where no reward_funcs are given."))
    max_new_tokens: int = field(default=64, metadata=doc("Most tokens of a completion."))
    max_length: int = field(
        default=512, metadata=doc("Most tokens of prompt and completion; longer prompts are refused.")
    )
    missing_eos_penalty: float | None = field(
        default=None, metadata=doc("Taken off the reward of a completion that was cut at the length limit.")
    )
    beta: list[float] = field(
        default_factory=lambda: [0.1], metadata=doc("Strength of the tie to the reference; several: one an epoch.")
    )
    loss_type: PreferenceLossType = field(default="sigmoid", metadata=doc("DPO's loss, or IPO's."))
    vllm_gpu_memory_utilization: float = field(default=0.55, metadata=doc("Share of a GPU's memory for vLLM."))

    @property
    def group_size(self) -> int:
        return 2

    @property
    def completion_limit(self) -> int:
        return self.max_new_tokens

    @property
    def context_limit(self) -> int | None:
        return min(self.max_length, self.vllm_max_model_length or self.max_length)

    @property
    def completions_per_micro_batch(self) -> int:
        return 2 * self.per_device_train_batch_size

    def beta_of(self, epoch: int) -> float:
        """The epoch's beta; the last one given where there are fewer than epochs."""
        return self.beta[min(epoch, len(self.beta) - 1)]

    def size_generation(self) -> None:
        self.beta = [float(b) for b in (self.beta if isinstance(self.beta, list | tuple) else [self.beta])]
        if not self.beta or min(self.beta) <= 0:
            raise InputError(f"beta={self.beta}; every beta must be above 0")
        if self.loss_type not in get_args(PreferenceLossType):
            raise InputError(f"loss_type={self.loss_type!r}; it must be sigmoid or ipo")
        if not 1 <= self.max_new_tokens < self.max_length:
            raise InputError(
                f"max_new_tokens={self.max_new_tokens} leaves no room for a prompt in max_length={self.max_length}"
            )
        for name in ("mode", "clip_min", "clip_max"):
            given = f"vllm_importance_sampling_{name}"
            if getattr(self, given) != getattr(OnlineConfig, given):
                raise InputError(
                    f"{given}={getattr(self, given)!r}: Online DPO's loss has no such weights; leave it out"
                )
