"""GRPO with an environment, in the manner of TRL.

If `lockstep` is replaced by `trl` in the import, TRL runs the same script.

    python examples/trl_environment.py [MODEL]      (a model whose chat template shows tools; default: Qwen/Qwen3-0.6B
    from a hub)

The environment is a counter. Its method is the model's tool, and it gives the reward itself.
docs/internals/conversations.md
"""

from __future__ import annotations

import sys

from datasets import Dataset

from lockstep import GRPOConfig, GRPOTrainer

SETTINGS = {
    "output_dir": "runs/trl_environment",
    "per_device_train_batch_size": 16,
    "num_generations": 8,
    "max_completion_length": 256,
    "max_tool_calling_iterations": 4,
    "max_steps": 100,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
}


class Counter:
    """A counter that should be as high as possible after a few calls."""

    def reset(self, **row) -> str:
        """Begin a rollout."""
        self.count = 0
        return " The counter is at 0."

    def add(self, a: int) -> str:
        """
        Add a number to the counter.

        Args:
            a: The number, from 0 to 9.

        Returns:
            Where the counter is.
        """
        if not 0 <= a <= 9:
            raise ValueError("the number must be from 0 to 9")
        self.count += a
        return f"The counter is at {self.count}."

    def get_reward(self) -> float:
        """The higher, the better."""
        return self.count / 10


def rows(number: int) -> Dataset:
    """The same task in every row."""
    prompt = [{"role": "user", "content": "Bring the counter as high as you can."}]
    return Dataset.from_dict({"prompt": [prompt] * number})


def main(model: str, **more) -> GRPOTrainer:
    trainer = GRPOTrainer(
        model=model,
        args=GRPOConfig(**{**SETTINGS, **more}),
        train_dataset=rows(256),
        environment_factory=Counter,
    )
    trainer.train()
    return trainer


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "Qwen/Qwen3-0.6B")
