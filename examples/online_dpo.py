"""Online DPO on a running server: two completions per prompt, and the longer one is preferred.

    lockstep serve Qwen/Qwen2-0.5B-Instruct
    python examples/online_dpo.py Qwen/Qwen2-0.5B-Instruct

To port a script from TRL, change two lines: its imports. The requests of both completions carry the name of their
prompt, and the two completions are compared under this name. So the number of prompts in a batch and the order of the
server's answers do not matter.
"""

from __future__ import annotations

import argparse
from typing import Any

from datasets import Dataset

from lockstep import OnlineDPOConfig, OnlineDPOTrainer

TOPICS = [
    "rain",
    "bread",
    "the moon",
    "a lighthouse",
    "owls",
    "chess",
    "rivers",
    "glass",
    "maps",
    "tea",
    "wind",
    "clocks",
]


def longer(completions: list[str], **columns: Any) -> list[float]:
    """The reward of a completion is its length in characters."""
    return [float(len(text)) for text in completions]


def main(words: list[str] | None = None) -> OnlineDPOTrainer:
    """Train, and return the trainer."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("model", help="the model that is served: a directory or a hub id")
    parser.add_argument("--server", default="http://127.0.0.1:8000", help="the server's URL")
    parser.add_argument("--output_dir", default="runs/online-dpo")
    parser.add_argument("--max_steps", type=int, default=20)
    parser.add_argument("--max_new_tokens", type=int, default=64)
    arguments = parser.parse_args(words)

    args = OnlineDPOConfig(
        output_dir=arguments.output_dir,
        use_vllm=True,
        vllm_mode="server",
        vllm_server_base_url=arguments.server,
        per_device_train_batch_size=4,
        max_new_tokens=arguments.max_new_tokens,
        max_steps=arguments.max_steps,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
    )
    trainer = OnlineDPOTrainer(
        model=arguments.model,
        reward_funcs=longer,
        args=args,
        train_dataset=Dataset.from_dict({"prompt": [f"Write a sentence about {topic}." for topic in TOPICS]}),
    )
    try:
        trainer.train()
    finally:
        trainer.close()
    return trainer


if __name__ == "__main__":
    main()
