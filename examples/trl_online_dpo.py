"""Online DPO with a reward model, in the manner of TRL.

For TRL, import the two names from `trl.experimental.online_dpo`.

    python examples/trl_online_dpo.py MODEL REWARD_MODEL

The policy answers questions; a reward model (a sequence classifier with one output) says which of two answers is
better.
"""

from __future__ import annotations

import sys

from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from lockstep import OnlineDPOConfig, OnlineDPOTrainer

SETTINGS = {
    "output_dir": "runs/trl_online_dpo",
    "per_device_train_batch_size": 8,
    "max_new_tokens": 64,
    "max_steps": 100,
    "logging_steps": 1,
    "save_strategy": "no",
    "eval_strategy": "no",
    "report_to": "none",
}


def questions(rows: int) -> Dataset:
    """Prompts alone: the reward model needs no answers."""
    return Dataset.from_dict(
        {"prompt": [[{"role": "user", "content": f"What is {i} plus {i}?"}] for i in range(rows)]}
    )


def main(model_name: str, reward_name: str, **settings: object) -> OnlineDPOTrainer:
    """Train, save, and return the trainer."""
    args = OnlineDPOConfig(**{**SETTINGS, "reward_model_path": reward_name, **settings})
    model = AutoModelForCausalLM.from_pretrained(model_name, dtype="float32", trust_remote_code=False)
    reward_model = AutoModelForSequenceClassification.from_pretrained(
        reward_name, num_labels=1, trust_remote_code=False
    )
    tokenizer = AutoTokenizer.from_pretrained(model_name, padding_side="left", trust_remote_code=False)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    reward_tokenizer = AutoTokenizer.from_pretrained(
        reward_name, truncation_side="left", trust_remote_code=False
    )
    trainer = OnlineDPOTrainer(
        model=model,
        reward_funcs=reward_model,
        args=args,
        train_dataset=questions(32),
        eval_dataset=questions(4) if args.eval_strategy != "no" else None,
        processing_class=tokenizer,
        reward_processing_classes=reward_tokenizer,
    )
    trainer.train()
    trainer.save_model(args.output_dir)
    if args.push_to_hub:
        trainer.push_to_hub(dataset_name="questions")
    return trainer


if __name__ == "__main__":
    main(*sys.argv[1:3])
