"""Small runs of every method on the transformers engine, which is deterministic to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import torch
from datasets import Dataset
from transformers import TrainerCallback

import lockstep
from lockstep.contract.protocol import Engine
from lockstep.run.trainers.online import OnlineTrainer

PROMPTS = Dataset.from_dict({"prompt": [f"what is {i} + {i}" for i in range(8)]})
GROUPS: dict[str, Any] = {"per_device_train_batch_size": 4, "num_generations": 2, "max_completion_length": 6}
ALONE = {**GROUPS, "num_generations": 1}
PAIRS: dict[str, Any] = {"per_device_train_batch_size": 2, "max_new_tokens": 6, "max_length": 100}
# Fields for interrupted thinking; a completion needs room for more tokens with it.
INTERRUPTED: dict[str, Any] = {"max_thinking_length": 3, "interruption": " so: .", "end_of_thinking": "."}
# The fields of a small run, by method.
FIELDS: dict[str, dict[str, Any]] = {
    "GRPO": GROUPS,
    "RLOO": GROUPS,
    "OnlineDPO": PAIRS,
    "ReinforcePP": ALONE,
    "PPO": ALONE,
}


def by_length(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [float(len(ids) + ids[0] % 7) for ids in completion_ids]


def lora() -> peft.LoraConfig:
    return peft.LoraConfig(r=4, target_modules=["q_proj", "up_proj"], task_type="CAUSAL_LM")


def make(
    method: str, model: Any, folder: Path, engine: Engine, fields: dict[str, Any], **arguments: Any
) -> Any:
    """A trainer of a method: `GRPO`, `RLOO`, `OnlineDPO`, `ReinforcePP` or `PPO`."""
    base: dict[str, Any] = {"max_steps": 6, "logging_steps": 1, "save_strategy": "no", "bf16": False}
    base |= {"disable_tqdm": True, "report_to": "none", "learning_rate": 1e-2}
    config = getattr(lockstep, f"{method}Config")(output_dir=str(folder), **{**base, **fields})
    arguments = {"reward_funcs": by_length, "train_dataset": PROMPTS, **arguments}
    return getattr(lockstep, f"{method}Trainer")(model=model, args=config, engine=engine, **arguments)


class StopAfter(TrainerCallback):
    def __init__(self, step: int) -> None:
        self._step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = control.should_training_stop or state.global_step >= self._step


def parameters(module: torch.nn.Module | None) -> dict[str, torch.Tensor]:
    """Copies of a module's parameters, on the host."""
    return (
        {name: p.detach().clone().cpu() for name, p in module.named_parameters()}
        if module is not None
        else {}
    )


def reference_of(run: OnlineTrainer) -> Any:
    """The trainer's separate reference model, if it has one."""
    return run.reference.own if run.reference is not None else None


def logs(run: OnlineTrainer) -> list[dict[str, Any]]:
    """The logs of all steps, without the times."""
    return [timeless(log) for log in run.state.log_history if "loss" in log]


def timeless(log: dict[str, Any]) -> dict[str, Any]:
    """The entries of a log that do not depend on the clock."""
    return {
        name: value
        for name, value in log.items()
        if not name.startswith(("time/", "push/", "step_time", "checked/"))
    }
