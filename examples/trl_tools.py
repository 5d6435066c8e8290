"""GRPO with a tool, in the manner of TRL. If `lockstep` is replaced by `trl` in the import, TRL runs the same script.

    python examples/trl_tools.py [MODEL]      (a model whose chat template shows tools; default: Qwen/Qwen3-0.6B from
    a hub)

The task is multiplication. A rollout is rewarded for a call of the tool with the right numbers.
docs/internals/conversations.md
"""

from __future__ import annotations

import random
import sys

from datasets import Dataset

from lockstep import GRPOConfig, GRPOTrainer

SETTINGS = {
    "output_dir": "runs/trl_tools",
    "per_device_train_batch_size": 16,
    "num_generations": 8,
    "max_completion_length": 256,
    "max_tool_calling_iterations": 2,
    "max_steps": 100,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
}


def multiply(a: int, b: int) -> int:
    """
    Multiply two numbers.

    Args:
        a: The first number.
        b: The second number.

    Returns:
        Their product.
    """
    return a * b


def called_rightly(completions, a, b, **columns):
    """1 if the first call of a rollout has the numbers of its row, 0.5 for any other call of the tool."""
    rewards = []
    for messages, first, second in zip(completions, a, b, strict=True):
        calls = [call["function"] for message in messages for call in message.get("tool_calls") or []]
        given = [call["arguments"] for call in calls if call["name"] == "multiply"]
        right = bool(given) and given[0] == {"a": first, "b": second}
        rewards.append(1.0 if right else 0.5 if given else 0.0)
    return rewards


def multiplications(rows: int) -> Dataset:
    """Prompts, and the numbers that they ask for."""
    drawn = random.Random(0)
    pairs = [(drawn.randint(2, 9), drawn.randint(2, 9)) for _ in range(rows)]
    prompts = [[{"role": "user", "content": f"What is {a} times {b}? Use the tool."}] for a, b in pairs]
    return Dataset.from_dict({"prompt": prompts, "a": [a for a, _ in pairs], "b": [b for _, b in pairs]})


def main(model: str, **more) -> GRPOTrainer:
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=called_rightly,
        args=GRPOConfig(**{**SETTINGS, **more}),
        train_dataset=multiplications(256),
        tools=[multiply],
    )
    trainer.train()
    return trainer


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "Qwen/Qwen3-0.6B")
