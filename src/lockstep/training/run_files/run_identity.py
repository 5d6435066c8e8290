"""Which fields make a run the run it is, and which may change when it goes on.

Comes from: the config of a training command. Goes to: `run.json` in the run's directory (`run_directory.py`), which is compared
with the config of the command that wants to go on there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from lockstep.training.config.online_config import OnlineConfig

# Fields that do not decide what is learned, by the reason. Everything else is a part of the run's identity.
_BOOKKEEPING: dict[str, set[str]] = {
    "where the run writes, and what it is called": {
        "output_dir", "logging_dir", "run_name", "project", "report_to", "trackio_space_id", "trackio_bucket_id",
        "trackio_static_space_id",
    },
    "when it logs, saves and evaluates, and what it prints": {
        "logging_strategy", "logging_steps", "logging_first_step", "save_strategy", "save_steps", "save_total_limit",
        "eval_strategy", "eval_steps", "eval_delay", "eval_on_start", "disable_tqdm", "log_level", "log_level_replica",
        "log_on_each_node", "log_completions", "num_completions_to_print", "log_unique_prompts", "skip_memory_metrics",
    },
    "whether and how it goes to the hub": {
        "push_to_hub", "hub_model_id", "hub_strategy", "hub_private_repo", "hub_always_push", "hub_revision",
    },
    # The same sums in other pieces: they differ by rounding, as they do on another machine.
    "how much memory it takes": {
        "token_budget", "logits_chunk_size", "gradient_checkpointing", "gradient_checkpointing_kwargs",
        "vllm_gpu_memory_utilization", "vllm_max_num_seqs", "per_device_eval_batch_size", "torch_empty_cache_steps",
    },
    "how long it waits": {"vllm_server_timeout", "reward_timeout", "ddp_timeout"},
    "where servers are, and how weights reach them": {
        "vllm_server_base_url", "vllm_server_host", "vllm_server_port", "vllm_server_key_file", "vllm_weight_transport",
        "vllm_group_host", "vllm_group_port",
    },
    "what is tried before it starts": {"rehearse_rewards"},
    "an object that is not comparable": {"accelerator_config"},
}  # fmt: skip
_IGNORED = frozenset().union(*_BOOKKEEPING.values())
# A run may become longer: its steps so far are those of the longer run, but for a learning rate that follows the length.
_MAY_GROW = ("max_steps", "num_train_epochs")


def is_bookkeeping(name: str) -> bool:
    """Whether a field may have any value when a run goes on. Fields that hold a token or key are never written down."""
    return name in _IGNORED or name.endswith("_token")


def curve_settings(config: OnlineConfig) -> dict[str, Any]:
    """The fields that decide what a run learns; a run may only be continued with the same ones (or with more steps)."""
    kept = {name: value for name, value in asdict(config).items() if not is_bookkeeping(name)}
    return kept | ({"processes": config.world_size} if config.world_size > 1 else {})


def changed_fields(earlier: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Names of the fields by which two runs are different runs; `method` first, since other methods have other fields.

    Args:
        earlier: what `run.json` holds; also one that was written when more fields counted.
    """
    names = {name for name in earlier.keys() | now.keys() if not is_bookkeeping(name)}
    changed = [name for name in names if earlier.get(name) != now.get(name) and not _grew(name, earlier, now)]
    return sorted(changed, key=lambda name: (name != "method", name))


def longer(earlier: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Names of the fields by which a run is asked to go on for longer than it was."""
    # Where a number of steps is given, epochs decide nothing.
    names = _MAY_GROW[:1] if now.get("max_steps", -1) > 0 else _MAY_GROW
    return [name for name in names if _grew(name, earlier, now)]


def follows_length(settings: Mapping[str, Any]) -> bool:
    """Whether the learning rate of a step depends on how many steps the run has."""
    return not str(settings.get("lr_scheduler_type", "")).startswith("constant")


def _grew(name: str, earlier: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    before, after = earlier.get(name), now.get(name)
    # max_steps is -1 where epochs decide.
    return name in _MAY_GROW and None not in (before, after) and 0 < before < after  # type: ignore[operator]
