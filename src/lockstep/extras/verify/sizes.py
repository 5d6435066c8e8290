"""How small a verification is. Imports nothing, so that the command line can read it at once."""

from __future__ import annotations

# What a verification sets itself: sizes that finish in a minute, and no files.
SIZES = {
    "num_generations": 4,
    "per_device_train_batch_size": 12,
    "generation_batch_size": 12,
    "gradient_accumulation_steps": 1,
    "steps_per_generation": 1,
    "num_iterations": 1,
    "max_completion_length": 12,
    "save_strategy": "no",
    "eval_strategy": "no",
    "report_to": "none",
    "shuffle_dataset": False,
    "learning_rate": 1e-6,
    # A verification learns nothing.
    "router_aux_loss_coef": 0.0,
    # Its completions are too short to be interrupted, and its checks ask the engine at any time.
    "max_thinking_length": None,
    "min_thinking_length": None,
    "vllm_enable_sleep_mode": False,
}
