"""Online DPO (arXiv 2402.04792): two completions a prompt, the better one preferred, and the policy moved towards it.

A pair is the rollout group of its prompt, and stays one from the engine to the loss. A pair of equal rewards, or with a missing
one, prefers neither: it teaches nothing and keeps its place in the mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from datasets import Dataset

from lockstep.algorithms.preference_loss import choose, preference_loss
from lockstep.errors import InputError
from lockstep.rollouts.group import RolloutGroup
from lockstep.training.objective import Objective, TokenBatch
from lockstep.training.online import OnlineTrainer
from lockstep.training.online_dpo_config import OnlineDPOConfig
from lockstep.training.packing import TrainingSequence
from lockstep.training.rehearsal import rehearse_judge
from lockstep.training.setup import Scorer, judge_scorer
from lockstep.training.tally import Tally


class OnlineDPOObjective(Objective[OnlineDPOConfig]):
    """A preference within each group of two. A sequence's advantages say which it is: 1 chosen, −1 rejected, 0 neither."""

    uses_reference = True

    def __init__(self, config: OnlineDPOConfig) -> None:
        super().__init__(config)
        self._noted: dict[str, float] = {}

    def advise(self, groups: Sequence[RolloutGroup], sequences: Sequence[TrainingSequence]) -> list[TrainingSequence]:
        odd = [group.prompt.prompt_id for group in groups if len(group.rollouts) != 2]
        if odd:
            raise ValueError(f"the group of prompt {odd[0]} is no pair")
        rewards = torch.tensor([[self._reward(r) for r in group.rollouts] for group in groups])
        better = choose(rewards[:, 0], rewards[:, 1])
        signs = torch.zeros(len(groups), 2)
        decided = better >= 0
        signs[decided] = -1.0
        signs[decided, better[decided]] = 1.0
        by_name = {
            str(rollout.completion.key): (group.prompt.prompt_id, sign)
            for group, pair in zip(groups, signs.tolist(), strict=True)
            for rollout, sign in zip(group.rollouts, pair, strict=True)
        }
        margins = (rewards[:, 0] - rewards[:, 1]).abs()[decided]
        stopped = [r.completion.finish_reason == "stop" for group in groups for r in group.rollouts]
        self._noted = {
            "objective/scores": float(rewards.nanmean()),
            "objective/scores_margin": float(margins.mean()) if len(margins) else 0.0,
            "val/contain_eos_token": sum(stopped) / len(stopped),
            "pairs/undecided": float((~decided).float().mean()),
        }
        return [replace(s, unit=by_name[s.name][0], advantages=(by_name[s.name][1],) * s.length) for s in sequences]

    def _reward(self, rollout: Any) -> float:
        penalty = self.config.missing_eos_penalty
        cut = rollout.completion.finish_reason == "length"
        return rollout.reward - penalty if penalty is not None and cut else rollout.reward

    def sequence_weights(self, lengths: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
        return torch.full((len(lengths),), 2.0 / len(lengths))

    def loss(self, batch: TokenBatch, tally: Tally) -> torch.Tensor:
        beta = self.config.beta_of(self.epoch)
        ref_logps = batch.pack.column("ref_logps")
        policy, reference = batch.segments.sums(batch.logps), batch.segments.sums(ref_logps)
        chosen, rejected = _pairs(batch.sequences)
        losses = preference_loss(
            policy[chosen], policy[rejected], reference[chosen], reference[rejected], beta, self.config.loss_type
        )
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
        return (losses * weights[chosen]).sum()

    def finish_step(self, tally: Tally) -> dict[str, float]:
        penalty = tally.figures().get("objective/non_score_reward", 0.0)
        rlhf = {"objective/rlhf_reward": self._noted["objective/scores"] + penalty}
        return self._noted | rlhf | {"beta": self.config.beta_of(self.epoch)}


def _pairs(sequences: Sequence[TrainingSequence]) -> tuple[list[int], list[int]]:
    """Indices of the chosen sequences and of their rejected partners, found by the pair that both belong to."""
    sides: tuple[dict[str, int], dict[str, int]] = ({}, {})
    for index, sequence in enumerate(sequences):
        if sequence.unit is None:
            raise ValueError(f"sequence {sequence.name} belongs to no pair")
        sides[0 if sequence.advantages[0] > 0 else 1][sequence.unit] = index
    chosen, rejected = sides
    if chosen.keys() != rejected.keys() or len(chosen) + len(rejected) != len(sequences):
        raise ValueError("a pack holds half a pair")
    return list(chosen.values()), [rejected[unit] for unit in chosen]


class OnlineDPOTrainer(OnlineTrainer):
    """Online Direct Preference Optimization with an engine that provably holds the policy's weights.

    Args:
        ref_model: the model that the policy is tied to; by default a copy of it as it is at the start.
        judge: a pairwise judge instead of reward functions (`lockstep.rollouts.judges`).

    The other arguments, and errors: `lockstep.training.online.OnlineTrainer`. Their order is TRL's.
    """

    config_class = OnlineDPOConfig
    method = "Online DPO"
    objective_class = OnlineDPOObjective

    def __init__(
        self,
        model: Any,
        ref_model: Any = None,
        reward_funcs: Any = None,
        args: OnlineDPOConfig | None = None,
        data_collator: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        reward_processing_classes: Any = None,
        peft_config: Any = None,
        compute_metrics: Any = None,
        callbacks: Any = None,
        optimizers: tuple[Any, Any] = (None, None),
        preprocess_logits_for_metrics: Any = None,
        *,
        judge: Any = None,
        engine: Any = None,
        quantization_config: Any = None,
    ) -> None:
        self._judge = judge
        super().__init__(
            model,
            reward_funcs,
            args,
            train_dataset,
            eval_dataset,
            processing_class,
            reward_processing_classes,
            callbacks,
            optimizers,
            peft_config=peft_config,
            engine=engine,
            quantization_config=quantization_config,
            ref_model=ref_model,
            data_collator=data_collator,
            compute_metrics=compute_metrics,
            preprocess_logits_for_metrics=preprocess_logits_for_metrics,
        )

    def rehearse(self, reward_funcs: Any, dataset: Dataset) -> None:
        if self._judge is None:
            super().rehearse(reward_funcs, dataset)
        else:
            rehearse_judge(self._judge, dataset, self.config)

    def scorer(self, reward_funcs: Any, processing_classes: Any) -> Scorer:
        given = {"judge": self._judge, "reward_funcs": reward_funcs, "reward_model_path": self.config.reward_model_path}
        names = [name for name, value in given.items() if value is not None]
        if len(names) > 1:
            raise InputError(f"{' and '.join(names)} all say which completion is better; give one of them")
        if self._judge is None:
            return super().scorer(reward_funcs or self.config.reward_model_path, processing_classes)
        if processing_classes is not None or self.config.reward_weights is not None:
            raise InputError("reward_weights and reward_processing_classes are of reward functions; a judge has none")
        if self.config.missing_eos_penalty is not None:
            raise InputError(
                "missing_eos_penalty is taken off a reward, and a judge gives none; leave one of the two out"
            )
        return judge_scorer(self._judge)
