"""Every method as a small run on tiny models, and functions that compare two runs of a method."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from conftest import start
from methods import INTERRUPTED, PROMPTS, by_length, lora
from shifted_engine import ShiftedEngine
from transformers import Trainer, TrainerCallback

import lockstep
from lockstep.contract.protocol import Completion, Engine
from lockstep.run.trainers.online import OnlineTrainer

# The number of completions per optimizer step; with Online DPO, the number of prompts.
STEP = 8

Reward = Callable[..., list[float]]
# The gradients that each optimizer step of a run uses, by parameter.
Steps = list[dict[str, torch.Tensor]]


def by_last(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Another reward, of another size."""
    return [float(ids[-1] % 50) for ids in completion_ids]


def by_length_of_some(prompts: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
    """A reward that is equal within a group for every second prompt of `PROMPTS`."""
    lengths = zip(prompts, by_length(completion_ids), strict=True)
    return [value if int(prompt.split()[-1]) % 2 else 3.0 for prompt, value in lengths]


@dataclass(frozen=True, slots=True)
class Case:
    """A method with its fields.

    Attributes:
        without: by option, the fields that switch this option off.
        adapted: an adapter is trained instead of the model.
    """

    method: str
    fields: dict[str, Any]
    without: dict[str, dict[str, Any]] = field(default_factory=dict)
    rewards: tuple[Reward, ...] = (by_length,)
    adapted: bool = False


def correction(mode: str, low: float | None, high: float | None) -> dict[str, Any]:
    """The fields of a correction.

    In these tests every bound lies between the smallest and largest weight of `shifted_engine`.
    """
    settings = {"mode": mode, "clip_min": low, "clip_max": high}
    return {f"vllm_importance_sampling_{name}": value for name, value in settings.items()}


_GROUPS: dict[str, Any] = {"num_generations": 4, "max_completion_length": 8, "num_iterations": 2}
_FULL = {"beta": 0.04, "entropy_coef": 0.01, "top_entropy_quantile": 0.5, "off_policy_mask_threshold": 0.5}
_PAIRS = {"max_new_tokens": 8, "max_length": 64}
# One generation per step: the policy that samples the second generation differs from the reference.
_FRESH = {"num_iterations": 1}
_UNBOUNDED = {"bounds": {"vllm_importance_sampling_clip_min": None, "vllm_importance_sampling_clip_max": 3.0}}

# All methods that can take two steps from one generation do so, except the cases with `_FRESH`.
CASES: dict[str, Case] = {
    **{
        f"grpo-{loss}": Case("GRPO", {**_GROUPS, "loss_type": loss})
        for loss in ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "vespo")
    },
    "grpo-full": Case(
        "GRPO",
        {**_GROUPS, **_FULL},
        {
            "reference": {"beta": 0.0},
            "entropy": {"entropy_coef": 0.0},
            "quantile": {"top_entropy_quantile": 1.0},
            "off-policy": {"off_policy_mask_threshold": None},
        },
    ),
    "grpo-masked": Case(
        "GRPO",
        {**_GROUPS, "max_completion_length": 24, "mask_truncated_completions": True},
        {"mask": {"mask_truncated_completions": False}},
    ),
    "grpo-lora": Case(
        "GRPO",
        # There are two generations: in the first one the adapter adds nothing, so the policy equals the reference.
        {**_GROUPS, "max_steps": 4, "beta": 0.1, "scale_rewards": "none", "epsilon": 0.05, "delta": 1.1}
        | {"learning_rate": 0.1},
        {"reference": {"beta": 0.0}, "scale": {"scale_rewards": "group"}, "delta": {"delta": None}},
        adapted=True,
    ),
    "grpo-sequence": Case(
        "GRPO",
        {**_GROUPS, "loss_type": "grpo", "importance_sampling_level": "sequence", "scale_rewards": "batch"}
        | {"learning_rate": 1e-3},
        {"level": {"importance_sampling_level": "token"}, "scale": {"scale_rewards": "group"}},
    ),
    "gdpo": Case(
        "GRPO",
        {**_GROUPS, "multi_objective_aggregation": "normalize_then_sum", "reward_weights": [1.0, 0.5]}
        | {
            "use_adaptive_entropy": True,
            "entropy_coef_delta": 0.05,
            "entropy_target": 3.65,
            "learning_rate": 5e-3,
        },
        {
            "aggregation": {"multi_objective_aggregation": "sum_then_normalize"},
            "entropy": {"use_adaptive_entropy": False},
        },
        rewards=(by_length, by_last),
    ),
    "cispo-token_mask": Case(
        "GRPO",
        {
            **_GROUPS,
            "loss_type": "cispo",
            "epsilon_high": 1.05,
            **correction("token_mask", 1 - 7e-5, 1 + 5e-5),
        },
        {"ceiling": {"epsilon_high": 5.0}, **_UNBOUNDED},
    ),
    "sapo-sequence_geometric_mask": Case(
        "GRPO",
        {**_GROUPS, "loss_type": "sapo", "sapo_temperature_pos": 3.0, "sapo_temperature_neg": 0.5}
        | correction("sequence_geometric_mask", 1 - 2e-5, 1 + 2e-5),
        {"temperatures": {"sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05}, **_UNBOUNDED},
    ),
    "vespo-sequence_truncate": Case(
        "GRPO",
        {**_GROUPS, "loss_type": "vespo", **correction("sequence_truncate", 1 - 5e-5, 1 + 5e-5)},
        _UNBOUNDED,
    ),
    "scalerl": Case(
        "GRPO",
        {
            **_GROUPS,
            "num_generations": 2,
            "loss_type": "cispo",
            "epsilon_high": 5.0,
            "scale_rewards": "advantages",
        }
        | {"average_by_prompt": True, "filter_zero_variance": True},
        {"average": {"average_by_prompt": False}, "filter": {"filter_zero_variance": False}},
        rewards=(by_length_of_some,),
    ),
    "interrupted": Case(
        "GRPO",
        {**_GROUPS, **INTERRUPTED, "max_completion_length": 16, "beta": 0.04, "top_entropy_quantile": 0.5},
        {"interruption": {"max_thinking_length": None}},
    ),
    "gspo": Case(
        "GRPO",
        {**_GROUPS, "importance_sampling_level": "sequence", "loss_type": "luspo", "learning_rate": 1e-3},
    ),
    "rloo": Case("RLOO", {**_GROUPS, "num_generations": 2, "beta": 0.05, "normalize_advantages": True}),
    "rloo-lora": Case(
        "RLOO",
        {
            **_GROUPS,
            **_FRESH,
            "num_generations": 2,
            "beta": 0.5,
            "reward_clip_range": [4.0, 9.0],
            "learning_rate": 0.2,
        },
        {"reference": {"beta": 0.0}, "range": {"reward_clip_range": None}},
        adapted=True,
    ),
    "dpo-sigmoid": Case("OnlineDPO", {**_PAIRS, "loss_type": "sigmoid"}),
    "dpo-ipo": Case("OnlineDPO", {**_PAIRS, "loss_type": "ipo"}),
    "reinforce++": Case("ReinforcePP", {**_GROUPS, "num_generations": 1, "beta": 0.01}),
    "reinforce++-group": Case(
        "ReinforcePP", {**_GROUPS, "num_generations": 2, "beta": 0.01, "baseline": "group"}
    ),
    "ppo": Case("PPO", {**_GROUPS, "num_generations": 1, "beta": 0.05}),
    "ppo-sequence_mask": Case(
        "PPO",
        {
            **_GROUPS,
            **_FRESH,
            "num_generations": 1,
            "beta": 0.5,
            **correction("sequence_mask", 1 - 1e-4, 1 + 1e-4),
        },
        {"reference": {"beta": 0.0}, **_UNBOUNDED},
    ),
}


# What ranks add up is the same in these cases as in another case of the same method: their losses, corrections and
# masks are of one token or of one sequence.
OF_ONE_RANK = (
    *(
        "grpo-bnpo",
        "grpo-cispo",
        "grpo-sapo",
        "grpo-vespo",
        "cispo-token_mask",
        "sapo-sequence_geometric_mask",
    ),
    *("vespo-sequence_truncate", "gspo", "rloo-lora", "dpo-ipo", "reinforce++-group", "ppo-sequence_mask"),
)


def shifted_engine(model: str) -> Engine:
    """The transformers engine in fp32, with every log-prob slightly off."""

    def wave(answer: Completion, place: int) -> float:
        return 1e-4 * math.sin(1 + 3 * answer.key.sample + 5 * answer.token_ids[0] + 2 * place)

    return ShiftedEngine(start("transformers", model), wave)  # type: ignore[return-value]


def make(
    case: str,
    model: str,
    folder: Path,
    *,
    engine: Engine | None = None,
    size: int = STEP,
    ranks: int = 1,
    reward: Reward | None = None,
    data: Any = PROMPTS,
    evaluation: Any = None,
    **fields: Any,
) -> OnlineTrainer:
    """A trainer with two steps (or its case's), each cut into micro-batches of `size` on each of `ranks` processes."""
    chosen = CASES[case]
    base: dict[str, Any] = {
        "max_steps": 2,
        "logging_steps": 1,
        "save_strategy": "no",
        "bf16": False,
        "use_vllm": False,
    }
    # Completions of different lengths, some of them cut.
    base |= {"stop_strings": list("aeiou")}
    base |= {"disable_tqdm": True, "report_to": [], "max_grad_norm": 0.0}
    # AdamW would make full-size steps even from gradients that are almost zero, and so from their rounding.
    base |= {"optim": "sgd", "learning_rate": 0.02, "model_init_kwargs": {"dtype": torch.float64}}
    base |= {"per_device_train_batch_size": size, "gradient_accumulation_steps": STEP // (size * ranks)}
    config = getattr(lockstep, f"{chosen.method}Config")(
        output_dir=str(folder), **{**base, **chosen.fields, **fields}
    )
    run: OnlineTrainer = getattr(lockstep, f"{chosen.method}Trainer")(
        model,
        reward_funcs=[reward] if reward is not None else list(chosen.rewards),
        args=config,
        train_dataset=data,
        eval_dataset=evaluation,
        peft_config=lora() if chosen.adapted else None,
        engine=engine,
    )
    if run.critic is not None:
        run.critic.double()
    return run


def norm_in_double(norm: Any, hidden: torch.Tensor) -> torch.Tensor:
    """`Qwen2RMSNorm.forward` in the dtype of its input; transformers would round to float32."""
    return norm.weight * hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + norm.variance_epsilon)


class Gradients(TrainerCallback):
    """Records the gradients of each optimizer step, also those of the critic."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self.steps: Steps = []
        trainer.add_callback(self)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        named = {name: p for name, p in self._trainer.model.named_parameters() if p.requires_grad}
        # TRL's trainers have no critic.
        if (critic := getattr(self._trainer, "critic", None)) is not None:
            named |= {f"critic.{name}": p for name, p in critic.named_parameters()}
        self.steps.append({name: p.grad.clone() for name, p in named.items()})


def gradients(trainer: OnlineTrainer) -> Steps:
    """The gradients of every step of a run."""
    kept = Gradients(trainer)
    trainer.train()
    return kept.steps


def difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """The largest difference of two sets of tensors, by each tensor's norm; near zero, by the norm of all."""
    assert one.keys() == other.keys()
    whole = sum(float(tensor.norm()) ** 2 for tensor in one.values()) ** 0.5
    parts = [(other[name] - tensor).norm() / (tensor.norm() + 1e-3 * whole) for name, tensor in one.items()]
    # The built-in `max` would lose a NaN.
    return float(torch.stack(parts).max())
