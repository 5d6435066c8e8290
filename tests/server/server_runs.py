"""A small training run on servers; a test can inject a fault into each of its steps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import datasets
import torch

from lockstep.learn.methods.grpo import GRPOConfig
from lockstep.run.trainers.methods import GRPOTrainer

# Called with the trainer and the number of the step; returns a context in which the step runs.
Sabotage = Callable[[GRPOTrainer, int], Any]


def even_tokens(completion_ids: list[list[int]], **columns: Any) -> list[float]:
    """A reward that differs within every group: the share of even ids."""
    return [sum(i % 2 == 0 for i in ids) / len(ids) for ids in completion_ids]


def make_trainer(
    model: str,
    folder: Path,
    url: str | None,
    *,
    reward: Any = even_tokens,
    data: Any = None,
    peft_config: Any = None,
    **changes: Any,
) -> GRPOTrainer:
    """A trainer on servers, with fixed values for everything that its final weights depend on."""
    settings: dict[str, Any] = {
        "num_generations": 4,
        "per_device_train_batch_size": 8,
        "max_completion_length": 60,
        "max_steps": 3,
        "learning_rate": 1e-3,
        "save_strategy": "no",
        "report_to": "none",
        "bf16": False,
        "vllm_server_base_url": url,
        "vllm_server_timeout": 240.0,
        # With the correction, the last bits of the engine's log-probs would enter the loss; they depend on the
        # requests of a batch.
        "vllm_importance_sampling_correction": False,
        "disable_tqdm": True,
        **changes,
    }
    if data is None:
        data = datasets.Dataset.from_dict({"prompt": [f"what is {i} + {i + 3}" for i in range(40)]})
    held_out = None
    if settings.get("eval_strategy", "no") != "no":
        held_out = datasets.Dataset.from_dict({"prompt": ["what is 90 + 1", "what is 91 + 1"]})
    config = GRPOConfig(output_dir=str(folder), **settings)
    return GRPOTrainer(model, reward, config, data, held_out, peft_config=peft_config)


def weights(trainer: GRPOTrainer) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in trainer.trained_by_name()["policy"].named_parameters()}


def train(trainer: GRPOTrainer, sabotage: Sabotage | None = None, **kwargs: Any) -> dict[str, torch.Tensor]:
    """The final weights of a run; each step runs inside the context that `sabotage` returns for it."""
    step = trainer.training_step

    def sabotaged(*args: Any, **kwargs: Any) -> torch.Tensor:
        if sabotage is None:
            return step(*args, **kwargs)
        with sabotage(trainer, trainer.state.global_step):
            return step(*args, **kwargs)

    try:
        with patch.object(trainer, "training_step", sabotaged):
            trainer.train(**kwargs)
        return weights(trainer)
    finally:
        trainer.close()


def equal(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    """Whether two sets of weights are the same, bit for bit."""
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
