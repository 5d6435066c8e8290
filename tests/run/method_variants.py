"""Every method with every option that changes its loss, each with its plain reference."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import reference_methods as plain
import torch
from drawn import ReferenceLoss
from draws import PROFILE
from reference_methods import Drawn
from subjects import Subject

from lockstep import GRPOConfig, OnlineDPOConfig, PPOConfig, ReinforcePPConfig, RLOOConfig
from lockstep.learn.methods.grpo import GRPOObjective
from lockstep.learn.methods.objective import Objective
from lockstep.learn.methods.online_dpo import OnlineDPOObjective
from lockstep.learn.methods.ppo import PPOObjective
from lockstep.learn.methods.reinforce_pp import ReinforcePPObjective
from lockstep.learn.methods.rloo import RLOOObjective

CLASSES: dict[str, tuple[type, type[Objective]]] = {
    "GRPO": (GRPOConfig, GRPOObjective),
    "RLOO": (RLOOConfig, RLOOObjective),
    "OnlineDPO": (OnlineDPOConfig, OnlineDPOObjective),
    "ReinforcePP": (ReinforcePPConfig, ReinforcePPObjective),
    "PPO": (PPOConfig, PPOObjective),
}


@dataclass(frozen=True)
class Variant:
    """A method, and the fields that differ from its defaults."""

    method: str
    fields: dict[str, Any] = field(default_factory=dict)

    @property
    def config(self) -> type:
        return CLASSES[self.method][0]

    @property
    def objective(self) -> type[Objective]:
        return CLASSES[self.method][1]

    def reference(self, run: Any) -> ReferenceLoss:
        """The plain loss of a step with a configuration."""

        def loss(subject: Subject, drawn: Drawn, step: slice) -> torch.Tensor:
            model = subject.exact_model
            if self.method == "PPO":
                return plain.ppo(model, subject.exact_critic, drawn, step, run)
            if self.method == "OnlineDPO":
                return plain.online_dpo(model, drawn, step, run, run.beta[0])
            losses = {"GRPO": plain.grpo, "RLOO": plain.rloo, "ReinforcePP": plain.reinforce_pp}
            return losses[self.method](model, drawn, step, run)

        return loss


def fit(variant: Variant, shape: dict[str, Any]) -> dict[str, Any]:
    """Change the shape to one that the method accepts: pairs need one step per generation and whole pairs."""
    if variant.method != "OnlineDPO":
        return shape
    micro = shape["micro"]
    while len(shape["rewards"]) % micro:
        micro -= 1
    return shape | {"steps": 1, "moved": False, "micro": micro}


GRPO: dict[str, dict[str, Any]] = {
    "dapo": {},
    "grpo, KL": {"loss_type": "grpo", "beta": 0.3, "mask_truncated_completions": True},
    "dr_grpo, plain KL": {
        "loss_type": "dr_grpo",
        "beta": 0.3,
        "use_bias_correction_kl": False,
        "scale_rewards": "none",
    },
    "bnpo, entropy": {"loss_type": "bnpo", "entropy_coef": 0.2, "mask_truncated_completions": True},
    "dapo, KL, entropy, quantile": {"beta": 0.1, "entropy_coef": 0.2, "top_entropy_quantile": 0.4},
    "quantile, masked": {
        "top_entropy_quantile": 0.3,
        "mask_truncated_completions": True,
        "scale_rewards": "batch",
    },
    "dual clip": {"delta": 1.5, "epsilon_high": 0.4, "vllm_importance_sampling_mode": "sequence_mask"},
    "GSPO": {"importance_sampling_level": "sequence", "loss_type": "grpo", "beta": 0.2},
    "LUSPO": {
        "importance_sampling_level": "sequence",
        "loss_type": "luspo",
        "mask_truncated_completions": True,
    },
    "CISPO": {"loss_type": "cispo", "epsilon_high": 1.3, "entropy_coef": 0.1},
    "SAPO": {"loss_type": "sapo", "beta": 0.1, "mask_truncated_completions": True},
    "VESPO": {"loss_type": "vespo", "off_policy_mask_threshold": 0.1, "mask_truncated_completions": True},
    "VESPO, KL": {"loss_type": "vespo", "beta": 0.1, "top_entropy_quantile": 0.5},
    "GDPO": {"multi_objective_aggregation": "normalize_then_sum", "reward_weights": [1.0, 0.5]},
    "IcePop": {
        "vllm_importance_sampling_mode": "token_mask",
        "vllm_importance_sampling_clip_min": 0.7,
        "vllm_importance_sampling_clip_max": 1.4,
    },
    "sequences truncated": {
        "vllm_importance_sampling_mode": "sequence_truncate",
        "vllm_importance_sampling_clip_min": 0.6,
        "loss_type": "grpo",
    },
    "geometric mask": {
        "vllm_importance_sampling_mode": "sequence_geometric_mask",
        "vllm_importance_sampling_clip_min": 0.9,
        "vllm_importance_sampling_clip_max": 1.2,
    },
    "off-policy mask": {"off_policy_mask_threshold": 0.05},
    "uncorrected": {"vllm_importance_sampling_correction": False, "epsilon": 0.1, "epsilon_high": 0.3},
    "GSPO, KL, uncorrected": {
        "importance_sampling_level": "sequence",
        "loss_type": "grpo",
        "beta": 0.2,
        "vllm_importance_sampling_correction": False,
    },
    "VESPO, uncorrected": {"loss_type": "vespo", "vllm_importance_sampling_correction": False},
    "VESPO of another shape, sequences truncated": {
        "loss_type": "vespo",
        "vespo_k_pos": 1.0,
        "vespo_lambda_pos": 2.0,
        "vespo_k_neg": 2.0,
        "vespo_lambda_neg": 1.5,
        "vllm_importance_sampling_mode": "sequence_truncate",
    },
    "sequences truncated below alone": {
        "vllm_importance_sampling_mode": "sequence_truncate",
        "vllm_importance_sampling_clip_min": 0.7,
        "vllm_importance_sampling_clip_max": None,
    },
    "sequences masked below alone": {
        "vllm_importance_sampling_mode": "sequence_mask",
        "vllm_importance_sampling_clip_min": 0.6,
        "vllm_importance_sampling_clip_max": None,
    },
    "SAPO at other temperatures, geometric mask below alone": {
        "loss_type": "sapo",
        "sapo_temperature_pos": 3.0,
        "sapo_temperature_neg": 0.5,
        "vllm_importance_sampling_mode": "sequence_geometric_mask",
        "vllm_importance_sampling_clip_min": 0.9,
        "vllm_importance_sampling_clip_max": None,
    },
    "ScaleRL": {
        "loss_type": "cispo",
        "epsilon_high": 5.0,
        "scale_rewards": "advantages",
        "average_by_prompt": True,
        "filter_zero_variance": True,
    },
    "by prompt, KL, masked": {"average_by_prompt": True, "beta": 0.1, "mask_truncated_completions": True},
    "filtered, grpo, KL": {"loss_type": "grpo", "filter_zero_variance": True, "beta": 0.2},
    "filtered, dapo, entropy, quantile": {
        "filter_zero_variance": True,
        "entropy_coef": 0.2,
        "top_entropy_quantile": 0.5,
        "mask_truncated_completions": True,
        "scale_rewards": "batch",
    },
}
OTHERS: dict[str, list[dict[str, Any]]] = {
    "RLOO": [
        {},
        {"normalize_advantages": True, "mask_truncated_completions": True},
        {"beta": 0.0, "reward_clip_range": (0.5, 2.0)},
        {"reward_clip_range": (0.5, 2.0), "vllm_importance_sampling_mode": "sequence_mask"},
        {"vllm_importance_sampling_correction": False, "epsilon": 0.1, "epsilon_high": 0.3},
    ],
    "OnlineDPO": [{}, {"loss_type": "ipo"}, {"missing_eos_penalty": 1.5}, {"beta": [0.5, 0.2]}],
    "ReinforcePP": [
        {"beta": 0.1},
        {"beta": 0.0, "mask_truncated_completions": True},
        {"beta": 0.2, "gamma": 0.9},
        {"beta": 0.2, "baseline": "group", "mask_truncated_completions": True},
        {"beta": 0.1, "vllm_importance_sampling_correction": False},
    ],
    "PPO": [
        {},
        {"gamma": 0.9, "vf_coef": 2.0},
        {"lam": 0.5, "mask_truncated_completions": True},
        {"beta": 0.0, "cliprange_value": 0.5, "vllm_importance_sampling_correction": False},
    ],
}
VARIANTS: dict[str, Variant] = {f"GRPO: {name}": Variant("GRPO", fields) for name, fields in GRPO.items()} | {
    f"{method}: {fields}": Variant(method, fields) for method, choices in OTHERS.items() for fields in choices
}
# The allowed numbers of completions per prompt, for methods that do not accept every number.
_SIZES = {"OnlineDPO": (2,), "PPO": (1, 2, 8)}
# In CI a group has at most four completions: eight take twice the time, and no code depends on the number.
_LARGEST = 8 if PROFILE == "thorough" else 4


def sizes_of(variant: Variant) -> tuple[int, ...]:
    """The numbers of completions per prompt that are drawn for a variant."""
    return tuple(size for size in _SIZES.get(variant.method, (2, 4, 8)) if size <= _LARGEST)


# The first variant of each method.
FIRST = {next(name for name, variant in VARIANTS.items() if variant.method == method) for method in CLASSES}
