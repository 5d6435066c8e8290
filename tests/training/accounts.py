"""Every method as a small run on tiny models, and the numbers by which two runs of one are compared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import TrainerCallback

import lockstep
from lockstep.engines.protocol import Engine
from lockstep.training.online import OnlineTrainer

PROMPTS = Dataset.from_dict({"prompt": [f"what is {i} + {i}" for i in range(8)]})
# What one optimizer step learns from: completions; with Online DPO, prompts.
STEP = 8

_GROUPS: dict[str, Any] = {"num_generations": 4, "max_completion_length": 8, "num_iterations": 2}
_FULL = {"beta": 0.04, "entropy_coef": 0.01, "top_entropy_quantile": 0.5, "off_policy_mask_threshold": 0.5}
_PAIRS = {"max_new_tokens": 8, "max_length": 64}

# Name: the method, and its fields. All that can take two steps from one generation do.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{
        f"grpo-{loss}": ("GRPO", {**_GROUPS, "loss_type": loss})
        for loss in ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "vespo")
    },
    "grpo-full": ("GRPO", {**_GROUPS, **_FULL}),
    "grpo-masked": ("GRPO", {**_GROUPS, "max_completion_length": 24, "mask_truncated_completions": True}),
    "gspo": ("GRPO", {**_GROUPS, "importance_sampling_level": "sequence", "loss_type": "luspo", "learning_rate": 1e-3}),
    "rloo": ("RLOO", {**_GROUPS, "num_generations": 2, "beta": 0.05, "normalize_advantages": True}),
    "dpo-sigmoid": ("OnlineDPO", {**_PAIRS, "loss_type": "sigmoid"}),
    "dpo-ipo": ("OnlineDPO", {**_PAIRS, "loss_type": "ipo"}),
    "reinforce++": ("ReinforcePP", {**_GROUPS, "num_generations": 1, "beta": 0.01}),
    "reinforce++-group": ("ReinforcePP", {**_GROUPS, "num_generations": 2, "beta": 0.01, "baseline": "group"}),
    "ppo": ("PPO", {**_GROUPS, "num_generations": 1, "beta": 0.05}),
}


def by_length(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """A reward that differs within a group."""
    return [float(len(ids) + ids[0] % 7) for ids in completion_ids]


def make(
    case: str,
    model: str,
    folder: Path,
    *,
    engine: Engine | None = None,
    size: int = STEP,
    ranks: int = 1,
    reward: Any = by_length,
    evaluation: Any = None,
    **fields: Any,
) -> OnlineTrainer:
    """A trainer that takes two steps, each cut into micro-batches of `size` on each of `ranks` processes."""
    method, own = CASES[case]
    base: dict[str, Any] = {"max_steps": 2, "logging_steps": 1, "save_strategy": "no", "bf16": False, "use_vllm": False}
    # Completions of different lengths, some of them cut.
    base |= {"stop_strings": list("aeiou")}
    base |= {"disable_tqdm": True, "report_to": [], "max_grad_norm": 0.0}
    # AdamW would make whole steps of gradients that are all but zero, and of their rounding.
    base |= {"optim": "sgd", "learning_rate": 0.02, "model_init_kwargs": {"dtype": torch.float64}}
    base |= {"per_device_train_batch_size": size, "gradient_accumulation_steps": STEP // (size * ranks)}
    config = getattr(lockstep, f"{method}Config")(output_dir=str(folder), **{**base, **own, **fields})
    kind = getattr(lockstep, f"{method}Trainer")
    run = kind(model, reward_funcs=reward, args=config, train_dataset=PROMPTS, eval_dataset=evaluation, engine=engine)
    if run.critic is not None:
        run.critic.double()
    return run


def norm_in_double(norm: Any, hidden: torch.Tensor) -> torch.Tensor:
    """`Qwen2RMSNorm.forward` in the dtype of its input, which transformers rounds to float32."""
    return norm.weight * hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + norm.variance_epsilon)


class Gradients(TrainerCallback):
    """Keeps what each optimizer step would use, the critic's gradients too."""

    def __init__(self, trainer: OnlineTrainer) -> None:
        self._trainer = trainer
        self.steps: list[dict[str, torch.Tensor]] = []
        trainer.add_callback(self)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        named = dict(self._trainer.model.named_parameters())
        if self._trainer.critic is not None:
            named |= {f"critic.{name}": p for name, p in self._trainer.critic.named_parameters()}
        self.steps.append({name: p.grad.clone() for name, p in named.items()})


def gradients(trainer: OnlineTrainer) -> list[dict[str, torch.Tensor]]:
    """Those of every step of a run."""
    kept = Gradients(trainer)
    trainer.train()
    return kept.steps


def difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """Of two sets of tensors, the largest relative to the tensor's own norm; one that is all but zero counts as a part of all."""
    assert one.keys() == other.keys()
    whole = sum(float(tensor.norm()) ** 2 for tensor in one.values()) ** 0.5
    return max(
        float((other[name] - tensor).norm()) / (float(tensor.norm()) + 1e-3 * whole) for name, tensor in one.items()
    )
