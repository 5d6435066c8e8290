"""A generation object that records each call's result, and a plain forward's log-probs with the same weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from lockstep.extras.trl.vllm_generation import LockstepGeneration


@dataclass
class Call:
    """One call of `generate` on this rank."""

    asked: list[list[int]]
    prompt_ids: list[list[int]]
    completion_ids: list[list[int]]
    logprobs: list[list[float]]
    plain: list[list[float]]
    version: int

    @property
    def worst(self) -> float:
        """The largest difference between the log-probs of the engine and of the plain forward."""
        pairs = [p for row in zip(self.logprobs, self.plain, strict=True) for p in zip(*row, strict=True)]
        return max((abs(a - b) for a, b in pairs), default=0.0)


class Recording(LockstepGeneration):
    """`LockstepGeneration` that records its calls."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.calls: list[Call] = []

    def generate(self, prompts: Any, images: Any, num_generations: int, profiler: Any = None) -> Any:
        found = super().generate(prompts, images, num_generations, profiler)
        prompt_ids, completion_ids, logprobs, token_ids = found
        assert token_ids == [[[token] for token in row] for row in completion_ids]
        plain = [plain_logps(self.model, p, c) for p, c in zip(prompt_ids, completion_ids, strict=True)]
        rows = [[value for (value,) in row] for row in logprobs]
        self.calls.append(
            Call([list(p) for p in prompts], prompt_ids, completion_ids, rows, plain, self.version)
        )
        return found


@torch.no_grad()
def plain_logps(model: Any, prompt_ids: list[int], completion_ids: list[int]) -> list[float]:
    """Log-probs at temperature 1 of a completion, from one forward of the whole row."""
    logits = model(torch.tensor([[*prompt_ids, *completion_ids]])).logits[0, len(prompt_ids) - 1 : -1]
    return logits.log_softmax(-1).gather(1, torch.tensor(completion_ids)[:, None])[:, 0].tolist()


def train(generation: Any, model: str, folder: Any, peft_config: Any = None, **settings: Any) -> Any:
    """Train TRL's GRPOTrainer on a tiny model, with `generation` instead of TRL's own generation object."""
    import trl
    import trl.trainer.grpo_trainer
    from datasets import Dataset

    original = trl.trainer.grpo_trainer.VLLMGeneration
    trl.trainer.grpo_trainer.VLLMGeneration = generation
    prompts = ["hello world", "the quick brown", "what is 12", "fox"]
    args: dict[str, Any] = {
        "vllm_mode": "colocate",
        "vllm_max_model_length": 128,
        "max_steps": 3,
        "learning_rate": 1e-2,
    }
    args |= {
        "per_device_train_batch_size": 8,
        "num_generations": 4,
        "max_completion_length": 8,
        "logging_steps": 1,
    }
    args |= {"bf16": False, "use_cpu": True, "report_to": "none", "save_strategy": "no", "disable_tqdm": True}
    try:
        trainer = trl.GRPOTrainer(
            model=model,
            reward_funcs=distinct_letters,
            args=trl.GRPOConfig(output_dir=str(folder), use_vllm=True, **(args | settings)),
            train_dataset=Dataset.from_dict({"prompt": prompts * 4}),
            peft_config=peft_config,
        )
    finally:
        trl.trainer.grpo_trainer.VLLMGeneration = original
    trainer.train()
    return trainer


def distinct_letters(completions: list[str], **columns: Any) -> list[float]:
    """A reward that differs within a group, so that every step changes the weights."""
    return [float(len(set(text))) for text in completions]
