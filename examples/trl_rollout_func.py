"""GRPO with a `rollout_func`, in the manner of TRL.

If `lockstep` is replaced by `trl` in the import, TRL runs the same script.

    python examples/trl_rollout_func.py [MODEL]      (default: HuggingFaceTB/SmolLM2-135M-Instruct from a hub)

The function samples with the trainer's own model, in two turns with a question between them. It is written for any
trainer; with Lockstep, `lockstep.generate_rollout_completions` samples much faster. The model is rewarded for digits
in its second turn.
"""

from __future__ import annotations

import sys

import torch
from datasets import Dataset

from lockstep import GRPOConfig, GRPOTrainer

SETTINGS = {
    "output_dir": "runs/trl_rollout_func",
    "per_device_train_batch_size": 16,
    "num_generations": 8,
    "max_completion_length": 64,
    "max_steps": 50,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
}
TURN = 8


def two_turns(prompts, trainer):
    """Two turns of each rollout. The ids between them are marked as not sampled."""
    tokenizer = trainer.processing_class
    between = tokenizer("\nAnd as a number?\n", add_special_tokens=False)["input_ids"]
    found = {"prompt_ids": [], "completion_ids": [], "logprobs": [], "env_mask": [], "second": []}
    for prompt in prompts:
        ids = tokenizer(prompt)["input_ids"]
        first, first_logprobs = turn(trainer.model, ids)
        second, second_logprobs = turn(trainer.model, ids + first + between)
        found["prompt_ids"].append(ids)
        found["completion_ids"].append(first + between + second)
        found["logprobs"].append(first_logprobs + [0.0] * len(between) + second_logprobs)
        found["env_mask"].append([1] * len(first) + [0] * len(between) + [1] * len(second))
        found["second"].append(tokenizer.decode(second))
    return found


@torch.no_grad()
def turn(model, ids):
    """A few sampled ids, and their log-probs."""
    sampled, logprobs, cache = [], [], None
    given = torch.tensor([ids], device=model.device)
    for _ in range(TURN):
        output = model(input_ids=given, past_key_values=cache, use_cache=True)
        cache, scores = output.past_key_values, output.logits[0, -1].float().log_softmax(-1)
        token = int(torch.multinomial(scores.exp(), 1))
        sampled.append(token)
        logprobs.append(float(scores[token]))
        given = torch.tensor([[token]], device=model.device)
    return sampled, logprobs


def digits(second, **columns):
    """The share of digits in the second turn."""
    return [sum(letter.isdigit() for letter in text) / max(len(text), 1) for text in second]


def main(model: str, **more) -> GRPOTrainer:
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=digits,
        args=GRPOConfig(**{**SETTINGS, **more}),
        train_dataset=Dataset.from_dict(
            {"prompt": ["How many fingers has a hand? ", "How many legs has a dog? "] * 64}
        ),
        rollout_func=two_turns,
    )
    trainer.train()
    return trainer


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "HuggingFaceTB/SmolLM2-135M-Instruct")
