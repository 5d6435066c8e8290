"""Online DPO (arXiv 2402.04792): two completions per prompt. One is preferred, and the policy is moved towards it.

A pair is the rollout group of its prompt, and stays together from the engine to the loss. If both rewards are equal
or one is missing, no completion is preferred. The pair then has no gradient, but the mean still counts it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from lockstep.algorithms.losses import PreferenceLossType, choose, preference_loss
from lockstep.config.documented import documented
from lockstep.config.option import COUNT, Bounds, option
from lockstep.config.run import OnlineConfig
from lockstep.errors import InputError
from lockstep.learn.methods.objective import Objective, Tally, TokenBatch
from lockstep.learn.sequence import TrainingSequence
from lockstep.rollouts.group import RolloutGroup
from lockstep.tokens.arrays import filled


@documented
@dataclass
class OnlineDPOConfig(OnlineConfig):
    """Configuration of `OnlineDPOTrainer`. `per_device_train_batch_size` counts prompts, as in TRL.

    Raises:
        InputError: fields contradict each other, or ask for something that is not supported yet.
    """

    learning_rate: float = option(5e-7, "Initial learning rate of AdamW.")
    temperature: float = option(0.9, "Sampling temperature; the trainer scores the same.")
    reward_model_path: str | None = option(
        None, "Reward model, if no reward_funcs are given.", group="reward", common=True
    )
    max_new_tokens: int = option(
        64, "Largest number of tokens of a completion.", group="sampling", common=True, bounds=COUNT
    )
    max_length: int = option(
        512,
        "Largest number of tokens of prompt and completion; longer prompts are refused.",
        group="sampling",
        bounds=COUNT,
    )
    missing_eos_penalty: float | None = option(
        None, "Subtracted from the reward of a completion that was cut at the length limit.", group="reward"
    )
    beta: list[float] = option(
        [0.1],
        "Strength of the pull towards the reference model; several values: one per epoch.",
        group="method",
        common=True,
        bounds=Bounds(0),
        also=("float",),
    )
    loss_type: PreferenceLossType = option("sigmoid", "DPO's loss, or IPO's.", group="method", common=True)
    vllm_gpu_memory_utilization: float = option(0.55, "Share of a GPU's memory for vLLM.")

    @property
    def weights_tokens(self) -> bool:
        return False

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
        """The epoch's beta. If there are fewer betas than epochs, the last one is used for the rest."""
        return self.beta[min(epoch, len(self.beta) - 1)]

    def size_generation(self) -> None:
        self.beta = [float(b) for b in (self.beta if isinstance(self.beta, list | tuple) else [self.beta])]
        if not self.beta or min(self.beta) <= 0:
            raise InputError(f"beta={self.beta}; every beta must be above 0")
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


class OnlineDPOObjective(Objective[OnlineDPOConfig]):
    """A preference within each group of two.

    The advantage of a sequence is 1 if chosen, −1 if rejected, 0 if neither.
    """

    definition = "online_dpo"

    uses_reference = True

    def __init__(self, config: OnlineDPOConfig) -> None:
        super().__init__(config)
        self._noted: dict[str, float] = {}

    def with_advantages(
        self, groups: Sequence[RolloutGroup], sequences: Sequence[TrainingSequence]
    ) -> list[TrainingSequence]:
        odd = [group.prompt.prompt_id for group in groups if len(group.rollouts) != 2]
        if odd:
            raise ValueError(f"the group of prompt {odd[0]} is not a pair")
        rewards = torch.tensor([[self._reward(r) for r in group.rollouts] for group in groups])
        better = choose(rewards[:, 0], rewards[:, 1])
        # A rollout in which nothing was sampled makes no pair.
        better[~torch.tensor([s.length > 0 for s in sequences]).view(-1, 2).all(1)] = -1
        signs = torch.zeros(len(groups), 2)
        decided = better >= 0
        signs[decided] = -1.0
        signs[decided, better[decided]] = 1.0
        by_name = {
            str(rollout.key): (group.prompt.prompt_id, sign)
            for group, pair in zip(groups, signs.tolist(), strict=True)
            for rollout, sign in zip(group.rollouts, pair, strict=True)
        }
        margins = (rewards[:, 0] - rewards[:, 1]).abs()[decided]
        stopped = [r.finish_reason == "stop" for group in groups for r in group.rollouts]
        scored = {} if rewards.isnan().all() else {"objective/scores": float(rewards.nanmean())}
        self._noted = scored | {
            "objective/scores_margin": float(margins.mean()) if len(margins) else 0.0,
            "val/contain_eos_token": sum(stopped) / len(stopped),
            "pairs/undecided": float((~decided).float().mean()),
        }
        return [
            s.but(unit=by_name[s.name][0], advantages=filled(by_name[s.name][1], s.length)) for s in sequences
        ]

    def _reward(self, rollout: Any) -> float:
        penalty = self.config.missing_eos_penalty
        cut = rollout.finish_reason == "length"
        return rollout.reward - penalty if penalty is not None and cut else rollout.reward

    def sequence_weights(self, lengths: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
        return torch.full((len(lengths),), 2.0 / len(lengths))

    def has_gradient(self, sequence: TrainingSequence) -> bool:
        # A pair without a preference is in no part of the loss.
        return sequence.weight != 0.0 and bool(np.any(sequence.advantages))

    def loss(self, batch: TokenBatch, tally: Tally) -> torch.Tensor:
        beta = self.config.beta_of(self.epoch)
        ref_logps = batch.pack.column("ref_logps")
        # A margin of a few nats is a difference of sums of thousands. In float32 it would be rounded by more than a
        # proof allows.
        policy, reference = batch.segments.sums(batch.logps.double()), batch.segments.sums(ref_logps.double())
        chosen, rejected = _pairs(batch.rollouts)
        pairs = policy[chosen], policy[rejected], reference[chosen], reference[rejected]
        losses = preference_loss(*pairs, beta, self.config.loss_type)
        with torch.no_grad():
            gains = beta * (policy - reference)
            margins = gains[chosen] - gains[rejected]
            tally.mean("rewards/chosen", gains[chosen])
            tally.mean("rewards/rejected", gains[rejected])
            tally.mean("rewards/margins", margins)
            tally.mean("rewards/accuracies", (margins > 0).float())
            tally.mean("logps/chosen", policy[chosen])
            tally.mean("logps/rejected", policy[rejected])
            tally.mean("objective/kl", policy - reference)
            tally.mean("objective/non_score_reward", -gains)
            tally.mean("objective/entropy", -policy)
        weights = batch.segments.means(batch.weights)
        return (losses * weights[chosen]).sum().to(batch.logps.dtype)

    def finish_step(self, tally: Tally) -> dict[str, float]:
        penalty = tally.figures().get("objective/non_score_reward", 0.0)
        figures = self._noted | {"beta": self.config.beta_of(self.epoch)}
        if "objective/scores" in figures:
            figures["objective/rlhf_reward"] = figures["objective/scores"] + penalty
        return figures


def _pairs(sequences: Sequence[TrainingSequence]) -> tuple[list[int], list[int]]:
    """Indices of the chosen rollouts and of their rejected partners. Partners have the same `unit`."""
    sides: tuple[dict[str, int], dict[str, int]] = ({}, {})
    for index, sequence in enumerate(sequences):
        if sequence.unit is None:
            raise ValueError(f"sequence {sequence.name} belongs to no pair")
        sides[0 if sequence.advantages[0] > 0 else 1][sequence.unit] = index
    chosen, rejected = sides
    if chosen.keys() != rejected.keys() or len(chosen) + len(rejected) != len(sequences):
        raise ValueError("a pack holds half a pair")
    return list(chosen.values()), [rejected[unit] for unit in chosen]
