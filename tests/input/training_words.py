"""The command line of a tiny training run in this process, which the tables change in one place."""

from __future__ import annotations

from pathlib import Path


def words(home: Path, model: str, **changes: str) -> list[str]:
    """`lockstep grpo` for one small step. The tables need no model in most rows, because bad input is found before."""
    data = home / "good.jsonl"
    if not data.exists():
        data.write_text("".join(f'{{"prompt": "what is {i} + {i}"}}\n' for i in range(8)))
    fields = {
        "model_name_or_path": model,
        "dataset_name": str(data),
        "reward_funcs": "length",
        "output_dir": str(home / "run"),
        "use_vllm": "false",
        "bf16": "false",
        "max_steps": "1",
        "logging_steps": "1",
        "save_strategy": "no",
        "per_device_train_batch_size": "4",
        "num_generations": "4",
        "max_completion_length": "4",
        "report_to": "none",
        **changes,
    }
    return ["grpo", *(word for name, value in fields.items() for word in (f"--{name}", *value.split("\t")))]
