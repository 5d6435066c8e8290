"""Each field of a config has an effect: two values in its own context change something that is seen of a run.

`ROWS` has two values of each field, and where they differ. `ELSEWHERE` has the fields that one process on a CPU cannot
show, with the test that does. CI runs a few rows, because a row is a property of one field: `make test-release` runs
all of them, and so does `make nightly` when it draws this file.
"""

from __future__ import annotations

import json
import re
import socket
import threading
import time
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import pytest
import tiny
from caller import multiply
from datasets import Dataset
from effects import Shown, shown
from methods import PROMPTS, lora
from model_families import save_family
from tokenizers.processors import TemplateProcessing
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState
from transformers.utils.logging import get_verbosity

from lockstep import GRPOConfig, OnlineDPOConfig, PPOConfig, ReinforcePPConfig, RLOOConfig
from lockstep.cli.training import EVALUATES
from lockstep.config.table import options_of
from lockstep.errors import InputError

TESTS = Path(__file__).parents[1]
CHAT = Dataset.from_list([{"prompt": [{"role": "user", "content": f"what is {i} + {i}"}]} for i in range(8)])
LONG = Dataset.from_dict({"prompt": ["what is 12 + 34 " * 6] * 4})
Fields = dict[str, Any]
NONE: Mapping[str, Any] = {}


class Row(NamedTuple):
    """Two values of a field, and what else is set.

    Attributes:
        a, b: the values. A function is called with the folder of the run.
        fields: further fields of the config.
        where: in what the two runs must differ: a name of `Shown`.
        given: further arguments of the trainer, or a function that makes them.
        look: what is seen of the trainer, as `more`.
        before: fields of an earlier run in the same folder.
    """

    a: Any
    b: Any
    fields: Mapping[str, Any] = NONE
    where: str = "metrics"
    method: str = "GRPO"
    model: str = "untied"
    given: Any = NONE
    look: Callable[[Any], Any] = lambda run: None
    before: Mapping[str, Any] | None = None


# ---- rewards, tools and agents --------------------------------------------------------------------------------------


def nothing(completion_ids: list[list[int]], **_: Any) -> list[None]:
    return [None] * len(completion_ids)


def slow(completion_ids: list[list[int]], **_: Any) -> list[float]:
    time.sleep(0.5)
    return [float(len(ids)) for ids in completion_ids]


def by_first(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [float(ids[0] % 5) for ids in completion_ids]


def by_last(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [float(ids[-1] % 3) for ids in completion_ids]


def sometimes_equal(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [1.0 if place < 2 else ids[0] % 7.0 for place, ids in enumerate(completion_ids)]


def best_at_1(completion_ids: list[list[int]], trainer_state: Any, **_: Any) -> list[float]:
    return [100.0 * (trainer_state.global_step == 1) + ids[0] % 7 for ids in completion_ids]


def best_at_2(completion_ids: list[list[int]], trainer_state: Any, **_: Any) -> list[float]:
    return [100.0 * (trainer_state.global_step == 2) + ids[0] % 7 for ids in completion_ids]


def slow_multiply(a: int, b: int) -> int:
    """Multiply two numbers.

    Args:
        a: The first factor.
        b: The second factor.
    """
    time.sleep(0.3)
    return a * b


slow_multiply.__name__ = multiply.__name__
SEEN: list[Any] = []


def threaded_multiply(a: int, b: int) -> int:
    """Multiply two numbers.

    Args:
        a: The first factor.
        b: The second factor.
    """
    SEEN.append(threading.current_thread() is threading.main_thread())
    return a * b


threaded_multiply.__name__ = multiply.__name__


def agent(base_url: str, api_key: str, row: dict[str, Any]) -> float:
    SEEN.append(urlsplit(base_url))
    body = json.dumps({"model": "policy", "messages": row["prompt"], "max_tokens": 4}).encode()
    headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
    with urllib.request.urlopen(
        urllib.request.Request(f"{base_url}/chat/completions", body, headers)
    ) as answer:
        json.load(answer)
    return 1.0


def slow_agent(base_url: str, api_key: str, row: dict[str, Any]) -> float:
    time.sleep(0.5)
    return agent(base_url, api_key, row)


def hosts(run: Any) -> set[Any]:
    return {place.hostname for place in SEEN}


def ports(run: Any) -> set[Any]:
    return {place.port for place in SEEN}


def free_port(folder: Path) -> int:
    with socket.socket() as there:
        there.bind(("127.0.0.1", 0))
        return there.getsockname()[1]


class Steps(TrainerCallback, ExportableState):
    """Counts steps, and keeps its count in checkpoints."""

    def __init__(self, count: int = 0) -> None:
        self.count = count

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.count += 1

    def state(self) -> dict[str, Any]:
        return {"args": {}, "attributes": {"count": self.count}}


def counted(run: Any) -> int:
    return next(c.count for c in run.callback_handler.callbacks if isinstance(c, Steps))


def saved(name: str) -> Callable[[Any], Any]:
    """A field of the config that is saved beside the weights."""
    return lambda run: json.loads((Path(run.args.output_dir) / "checkpoint-1/config.json").read_text())[name]


def title(run: Any) -> str:
    return re.findall("<title>.*?</title>", (Path(run.args.output_dir) / "report.html").read_text())[0]


def hooks(run: Any) -> int:
    return sum(len(module._forward_hooks) for module in run.model.modules())


def first_checkpoint(folder: Path) -> str:
    return str(folder / "run" / "checkpoint-1")


def likely_full_stop(folder: Path) -> dict[str, float]:
    (token,) = tiny.make_tokenizer()(".")["input_ids"]
    return {str(token): 9.0}


def file_of_urls(folder: Path) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "urls").write_text("http://127.0.0.1:7\n")
    return str(folder / "urls")


# ---- contexts -------------------------------------------------------------------------------------------------------

HELD_OUT: Fields = {"eval_dataset": PROMPTS.select(range(2))}
EVALUATED: Fields = {"eval_strategy": "steps", "eval_steps": 1}
SAVED: Fields = {"save_strategy": "steps", "save_steps": 1}
BEST: Fields = {**SAVED, **EVALUATED, "load_best_model_at_end": True}
ONE_BEST: Fields = {**HELD_OUT, "reward_funcs": best_at_1}
TWO_BEST: Fields = {**HELD_OUT, "reward_funcs": [best_at_1, best_at_2]}
# The policy moves within a generation: ratios are not 1.
AGAIN: Fields = {"num_iterations": 2, "learning_rate": 0.05}
# Engine and trainer differ.
GAP: Fields = {"engine_dtype": "bfloat16"}
TOOLS: Fields = {"tools": [multiply], "train_dataset": CHAT}
AGENT: Fields = {"agent": agent, "train_dataset": CHAT}
TWO_REWARDS: Fields = {"reward_funcs": [by_first, by_last]}
CALLS: Fields = {"max_completion_length": 60}
TALKS: Fields = {"max_completion_length": 40, "vllm_max_model_length": 256}
MOVING: Fields = {"sync_ref_model": True, "beta": 0.1, "ref_model_sync_steps": 1, "max_steps": 3}
ADAPTIVE: Fields = {
    "use_adaptive_entropy": True,
    "entropy_coef": 0.5,
    "entropy_target": 100.0,
    "max_steps": 3,
}
THINKS: Fields = {
    "max_thinking_length": 3,
    "interruption": " so: .",
    "end_of_thinking": ".",
    "max_completion_length": 20,
}
SAPO: Fields = {**AGAIN, "loss_type": "sapo"}
VESPO: Fields = {**AGAIN, "loss_type": "vespo"}
VLLM: Fields = {"use_vllm": True}
SERVER: Fields = {"use_vllm": None, "vllm_mode": "server"}
HUB: Fields = {**SAVED, "push_to_hub": True}
TRACKIO: Fields = {"report_to": "trackio"}
RESUMED: Fields = {**SAVED, "resume_from_checkpoint": first_checkpoint}

# The two values of each field, in the order of `--help`.
ROWS: dict[str, Row] = {
    "disable_dropout": Row(True, False, where="error", model="dropout"),
    "logging_steps": Row(1, 2),
    "log_completions": Row(True, False, where="printed"),
    "num_completions_to_print": Row(1, 2, {"log_completions": True}, "printed"),
    "log_unique_prompts": Row(True, False, {"log_completions": True}, "printed"),
    "rollouts_size_limit": Row(0, 1.0, where="files"),
    "max_thinking_length": Row(3, None, THINKS),
    "min_thinking_length": Row(1, None, THINKS),
    "interruption": Row(" so: .", ".", THINKS),
    "end_of_thinking": Row(".", "so", {**THINKS, "logit_bias": likely_full_stop}),
    "max_tool_calling_iterations": Row(0, 2, CALLS, model="caller", given=TOOLS),
    "tool_timeout": Row(0.1, 60.0, CALLS, model="caller", given={**TOOLS, "tools": [slow_multiply]}),
    "tool_threads": Row(
        True,
        False,
        CALLS,
        "more",
        model="caller",
        given={**TOOLS, "tools": [threaded_multiply]},
        look=lambda run: set(SEEN),
    ),
    "tool_format": Row("hermes", "pythonic", CALLS, "error", model="caller", given=TOOLS),
    "temperature": Row(1.0, 0.5),
    "stop_strings": Row(["a", "e"], None),
    "top_p": Row(0.5, 1.0),
    "top_k": Row(5, 0),
    "min_p": Row(0.2, None),
    "repetition_penalty": Row(2.0, 1.0),
    "presence_penalty": Row(2.0, 0.0),
    "frequency_penalty": Row(2.0, 0.0),
    "logit_bias": Row({"5": 9.0}, None),
    "bad_words": Row(["a", "e"], None),
    "allowed_token_ids": Row([5, 6, 7, 8], None),
    "min_tokens": Row(5, 0, model="talkative"),
    "generation_kwargs": Row({"top_k": 3}, None),
    "vllm_structured_outputs_regex": Row("[ab]+", None),
    "structured_outputs_json": Row({"type": "integer"}, None),
    "structured_outputs_choice": Row(["ab", "cd"], None),
    "structured_outputs_grammar": Row('root ::= "a" | "b"', None),
    "max_kept_ids": Row(2, 400, {"top_p": 0.99}, "error"),
    "learning_rate": Row(1e-2, 1e-3, where="weights"),
    "bf16": Row(True, False),
    "model_init_kwargs": Row({"dtype": "bfloat16"}, None),
    "chat_template_kwargs": Row(
        {"shout": True}, None, where="requests", model="shouting", given={"train_dataset": CHAT}
    ),
    "add_special_tokens": Row(True, False, where="requests", model="special"),
    "shuffle_dataset": Row(True, False, where="requests"),
    "reward_weights": Row([1.0, 5.0], None, given=TWO_REWARDS),
    "reward_timeout": Row(0.1, 600.0, where="error", given={"reward_funcs": slow}),
    "max_unscored_generations": Row(1, 10, where="error", given={"reward_funcs": nothing}),
    "rehearse_rewards": Row(True, False, where="calls"),
    "recheck_rewards": Row(True, False, where="calls"),
    "vllm_importance_sampling_correction": Row(True, False, GAP, "weights"),
    "vllm_importance_sampling_mode": Row(
        "token_truncate", "sequence_mask", {**GAP, "vllm_importance_sampling_clip_max": 1.001}, "weights"
    ),
    "vllm_importance_sampling_clip_max": Row(1.0001, 3.0, GAP, "weights"),
    "vllm_importance_sampling_clip_min": Row(0.9999, None, GAP, "weights"),
    "vllm_max_model_length": Row(20, None, where="error", given={"train_dataset": LONG}),
    "vllm_max_num_seqs": Row(1, 4, where="batches"),
    "max_staleness": Row(1, 0, {"max_steps": 3}),
    "engine_dtype": Row("bfloat16", "float32"),
    "cast_lm_head_to_fp32": Row(True, False, {"bf16": True}),
    "router_aux_loss_coef": Row(0.5, 0.0, where="weights", model="experts"),
    "token_budget": Row(8, 100, where="forwards"),
    "logits_chunk_size": Row(2, 512, where="logits"),
    "num_generations": Row(2, 4),
    "num_generations_eval": Row(1, 3, EVALUATED, given=HELD_OUT),
    "max_completion_length": Row(3, 6),
    "generation_batch_size": Row(4, 8),
    "steps_per_generation": Row(1, 2),
    "num_iterations": Row(1, 2),
    "epsilon": Row(0.001, 0.9, AGAIN),
    "epsilon_high": Row(0.001, 0.9, AGAIN),
    "beta": Row(0.5, 0.0),
    "mask_truncated_completions": Row(True, False),
    "no_positive_resampling": Row(0.1, None, {"max_steps": 8}, "requests"),
    "sync_ref_model": Row(True, False, {"beta": 0.5, "ref_model_sync_steps": 1, "max_steps": 3}),
    "ref_model_mixup_alpha": Row(0.1, 0.9, {**MOVING, "max_steps": 3}),
    "ref_model_sync_steps": Row(1, 2, {**MOVING, "max_steps": 3}),
    "loss_type": Row("dapo", "grpo", model="talkative"),
    "importance_sampling_level": Row("token", "sequence", AGAIN),
    "delta": Row(1.001, None, {**AGAIN, "num_iterations": 4, "max_steps": 4}),
    "sapo_temperature_pos": Row(1.0, 5.0, {**AGAIN, "loss_type": "sapo"}),
    "sapo_temperature_neg": Row(1.0, 5.0, {**AGAIN, "loss_type": "sapo"}),
    "vespo_k_pos": Row(1.0, 5.0, {**AGAIN, "loss_type": "vespo"}),
    "vespo_lambda_pos": Row(1.0, 5.0, {**AGAIN, "loss_type": "vespo"}),
    "vespo_k_neg": Row(1.0, 5.0, {**AGAIN, "loss_type": "vespo"}),
    "vespo_lambda_neg": Row(1.0, 5.0, {**AGAIN, "loss_type": "vespo"}),
    "use_bias_correction_kl": Row(True, False, {"beta": 0.5}, "weights"),
    "scale_rewards": Row("group", "none"),
    "multi_objective_aggregation": Row("sum_then_normalize", "normalize_then_sum", given=TWO_REWARDS),
    "average_by_prompt": Row(True, False, model="talkative"),
    "filter_zero_variance": Row(True, False, given={"reward_funcs": sometimes_equal}),
    "top_entropy_quantile": Row(0.3, 1.0),
    "entropy_coef": Row(0.5, 0.0),
    "use_adaptive_entropy": Row(True, False, {"entropy_coef": 0.1, "max_steps": 3}),
    "entropy_coef_min": Row(0.0, 0.495, {**ADAPTIVE, "entropy_target": 0.0}),
    "entropy_coef_max": Row(0.5, 1.0, ADAPTIVE),
    "entropy_coef_delta": Row(0.1, 0.2, ADAPTIVE),
    "entropy_target": Row(0.0, 100.0, ADAPTIVE),
    "off_policy_mask_threshold": Row(0.0, None, {**AGAIN, "max_steps": 4}),
    "gradient_checkpointing": Row(True, False, where="forwards"),
    "gradient_checkpointing_kwargs": Row(
        {"use_reentrant": True}, {"use_reentrant": False}, {"gradient_checkpointing": True}, "forwards"
    ),
    "eval_strategy": Row("steps", "no", {"eval_steps": 1}, given=HELD_OUT),
    "eval_steps": Row(1, 2, {"eval_strategy": "steps"}, given=HELD_OUT),
    "eval_on_start": Row(True, False, given=HELD_OUT),
    "eval_delay": Row(2, 0, EVALUATED, given=HELD_OUT),
    "max_steps": Row(1, 2),
    "num_train_epochs": Row(0.5, 1.0, {"max_steps": -1}),
    "per_device_train_batch_size": Row(4, 8),
    "gradient_accumulation_steps": Row(1, 2),
    "lr_scheduler_type": Row("linear", "constant"),
    "lr_scheduler_kwargs": Row(
        {"num_cycles": 3}, None, {"lr_scheduler_type": "cosine_with_restarts", "max_steps": 4}
    ),
    "warmup_steps": Row(2, 0),
    "optim": Row("sgd", "adamw_torch"),
    "optim_args": Row("momentum=0.9", None, {"optim": "sgd"}, "weights"),
    "weight_decay": Row(0.5, 0.0, where="weights"),
    "max_grad_norm": Row(1e-6, 1.0, {"optim": "sgd"}, "weights"),
    "adam_beta1": Row(0.5, 0.9, where="weights"),
    "adam_beta2": Row(0.5, 0.999, where="weights"),
    "adam_epsilon": Row(1e-2, 1e-8, where="weights"),
    "seed": Row(1, 2, where="requests"),
    "data_seed": Row(1, 2, where="requests"),
    "report_to": Row("tensorboard", "none", where="files"),
    "run_name": Row("one", "two", where="more", look=title),
    "logging_strategy": Row("steps", "no"),
    "logging_first_step": Row(True, False, {"logging_steps": 5}),
    "log_level": Row("info", "error", where="more", look=lambda run: get_verbosity()),
    "output_dir": Row("one", "two", where="files"),
    "save_steps": Row(1, 2, SAVED, "files"),
    "save_total_limit": Row(1, None, SAVED, "files"),
    "save_strategy": Row("steps", "no", {"save_steps": 1}, "files"),
    "save_only_model": Row(True, False, SAVED, "files"),
    "load_best_model_at_end": Row(True, False, {**SAVED, **EVALUATED}, "weights", given=ONE_BEST),
    "metric_for_best_model": Row(
        "rewards/best_at_1/mean", "rewards/best_at_2/mean", BEST, "weights", given=TWO_BEST
    ),
    "greater_is_better": Row(True, False, BEST, "weights", given=ONE_BEST),
    "skip_memory_metrics": Row(True, False),
    "include_num_input_tokens_seen": Row("all", "no"),
    "disable_tqdm": Row(True, False, where="printed"),
    "use_cache": Row(True, False, SAVED, "more", look=saved("use_cache")),
    "restore_callback_states_from_checkpoint": Row(
        True,
        False,
        RESUMED,
        "more",
        given=lambda: {"callbacks": [Steps()]},
        look=counted,
        before={"resume_from_checkpoint": None},
    ),
    "debug": Row("underflow_overflow", "", where="more", look=hooks),
    "max_new_tokens": Row(3, 6, method="OnlineDPO"),
    "max_length": Row(20, 100, where="error", method="OnlineDPO", given={"train_dataset": LONG}),
    "missing_eos_penalty": Row(2.0, None, method="OnlineDPO", model="talkative"),
    "normalize_advantages": Row(True, False, method="RLOO", where="weights", fields={"optim": "sgd"}),
    "reward_clip_range": Row([0.0, 1.0], None, method="RLOO"),
    "gamma": Row(0.5, 1.0, method="PPO"),
    "baseline": Row("group", "none", {"num_generations": 2}, method="ReinforcePP"),
    "lam": Row(0.5, 1.0, method="PPO"),
    "vf_coef": Row(0.5, 0.1, method="PPO", where="weights"),
    "cliprange_value": Row(0.0001, 0.9, AGAIN, method="PPO", where="metrics"),
    "value_learning_rate": Row(0.1, 0.001, method="PPO", where="metrics"),
    "vllm_mode": Row("server", "colocate", VLLM, "started"),
    "vllm_server_base_url": Row("http://127.0.0.1:7", "http://127.0.0.1:9", SERVER, "started"),
    "vllm_server_url_file": Row(file_of_urls, None, SERVER, "started"),
    "vllm_server_host": Row("localhost", "127.0.0.1", SERVER, "started"),
    "vllm_server_port": Row(7, 9, SERVER, "started"),
    "vllm_server_key_file": Row("one", "two", SERVER, "started"),
    "vllm_weight_transport": Row("gloo", "shared_memory", SERVER, "started"),
    "vllm_weight_deltas": Row(True, False, SERVER, "started"),
    "vllm_group_host": Row("localhost", "127.0.0.1", SERVER, "started"),
    "vllm_group_port": Row(7, 9, SERVER, "started"),
    "vllm_server_timeout": Row(5.0, 9.0, SERVER, "started"),
    "vllm_tensor_parallel_size": Row(1, 2, VLLM, "started"),
    "use_vllm": Row(True, False, where="started"),
    "vllm_gpu_memory_utilization": Row(0.1, 0.2, VLLM, "started"),
    "vllm_model_impl": Row("vllm", "transformers", VLLM, "started"),
    "vllm_engine_kwargs": Row({"block_size": 32}, None, VLLM, "started"),
    "vllm_enable_lora": Row(
        True, False, {**VLLM, "bf16": True}, "started", given=lambda: {"peft_config": lora()}
    ),
    "vllm_quantization": Row("fp8_per_channel", None, {**VLLM, **GAP}, "started"),
    "agent_timeout": Row(0.2, 60.0, TALKS, given={**AGENT, "agent": slow_agent}),
    "gateway_host": Row("localhost", "127.0.0.1", TALKS, "more", given=AGENT, look=hosts),
    "gateway_port": Row(free_port, free_port, TALKS, "more", given=AGENT, look=ports),
    "project": Row("one", "two", TRACKIO, "sent"),
    "trackio_space_id": Row("one", "two", TRACKIO, "sent"),
    "trackio_bucket_id": Row("one", "two", TRACKIO, "sent"),
    "trackio_static_space_id": Row("one", "two", TRACKIO, "sent"),
    "push_to_hub": Row(True, False, SAVED, "sent"),
    "hub_model_id": Row("me/one", "me/two", HUB, "sent"),
    "hub_strategy": Row("end", "checkpoint", HUB, "sent"),
    "hub_private_repo": Row(True, False, TRACKIO, "sent"),
    "hub_revision": Row("one", "two", HUB, "sent"),
    "hub_always_push": Row(True, False, HUB, "sent"),
    "hub_token": Row("hf_one", "hf_two", HUB, "sent"),
    "resume_from_checkpoint": Row(
        first_checkpoint, None, SAVED, "requests", before={"resume_from_checkpoint": None}
    ),
    "resume_with_changes": Row(
        True, False, RESUMED, "error", before={"resume_from_checkpoint": None, "learning_rate": 1e-3}
    ),
}

# Fields that one process on a CPU cannot show: why, and the test that shows their effect.
ELSEWHERE: dict[str, tuple[str, str]] = {
    "accelerator_config": (
        "all that it says is of data loaders and wrapped models: a line says so, or it is refused",
        "run/test_fields_with_an_effect.py::test_settings_of_accelerate_are_said_to_have_no_effect_or_refused",
    ),
    "do_eval": (
        "eval_strategy sets it; alone it is said to have no effect",
        "run/test_fields_with_an_effect.py::test_a_field_is_said_where_it_has_no_effect_and_not_where_it_has_one",
    ),
    "optim_target_modules": (
        "galore_torch and apollo_torch are not installed where tests run",
        "run/test_fields_with_an_effect.py::test_a_field_is_said_where_it_has_no_effect_and_not_where_it_has_one",
    ),
    "log_level_replica": ("several processes", "run/test_measured_effects.py::test_what_a_replica_prints"),
    "log_on_each_node": ("several machines", "run/test_measured_effects.py::test_what_a_replica_prints"),
    "save_on_each_node": (
        "several machines; refused",
        "run/test_measured_effects.py::test_a_run_of_several_processes_saves_once",
    ),
    "ddp_timeout": (
        "several processes",
        "run/test_launcher.py::test_a_rank_says_that_it_waits_for_rank_0_and_does_so_no_longer_than_its_limit",
    ),
    "ddp_backend": (
        "several processes",
        "run/test_two_ranks.py::test_two_ranks_take_the_steps_of_one_and_log_them_alike",
    ),
    "fsdp": (
        "several processes",
        "run/test_sharded_training.py::test_each_rank_holds_its_share_of_weights_gradients_and_moments",
    ),
    "fsdp_config": (
        "several processes",
        "shards/test_shard_settings.py::test_what_would_compute_or_hold_something_else_is_refused_by_name",
    ),
    "deepspeed": (
        "several processes",
        "run/test_sharded_training.py::test_each_rank_holds_its_share_of_weights_gradients_and_moments",
    ),
    "use_cpu": (
        "a GPU",
        "run/test_device.py::test_another_device_is_no_other_setting_and_the_receipt_notes_it",
    ),
    "tf32": (
        "a GPU",
        "models/test_models.py::test_whether_a_gpu_rounds_float32_is_known_after_every_setting",
    ),
    "torch_empty_cache_steps": (
        "a GPU",
        "run/test_harmless_fields.py::test_the_cache_of_the_device_is_emptied_as_often_as_asked",
    ),
    "full_determinism": (
        "it switches what is deterministic on a CPU anyway",
        "run/test_harmless_fields.py::test_full_determinism_is_that_of_transformers",
    ),
    "use_liger_kernel": (
        "a GPU, or Triton's interpreter",
        "learn/test_liger.py::test_training_with_the_kernels_of_the_gpu_is_training_without",
    ),
    "liger_kernel_config": (
        "a GPU, or Triton's interpreter",
        "learn/test_liger.py::test_training_with_the_kernels_of_the_gpu_is_training_without",
    ),
    "vllm_enable_sleep_mode": (
        "a GPU",
        "engines/test_sleep.py::test_a_run_sleeps_after_every_generation_and_learns_the_same",
    ),
    "log_multimodal": (
        "a model that reads pictures",
        "images/test_images_recipe.py::test_the_recipe_runs_on_a_tiny_model_and_its_report_shows_the_pictures",
    ),
    "freeze_vision_tower": (
        "a model that reads pictures",
        "images/test_adapters_with_pictures.py::test_a_frozen_tower_stays_and_the_language_part_learns",
    ),
    "min_pixels": (
        "a model that reads pictures",
        "images/test_limits_of_pictures.py::test_a_run_keeps_the_limits_of_its_config",
    ),
    "max_pixels": (
        "a model that reads pictures",
        "images/test_limits_of_pictures.py::test_a_run_keeps_the_limits_of_its_config",
    ),
    "limit_mm_per_prompt": (
        "a model that reads pictures",
        "images/test_pictures_in_turns.py::test_a_result_with_more_pictures_than_the_limit_is_an_error_for_the_model",
    ),
    "image_urls": (
        "a model that reads pictures",
        "images/test_picture_urls.py::test_a_run_learns_from_the_bytes_that_it_fetched_once",
    ),
    "reward_model_path": (
        "a reward model",
        "learn/test_online_dpo.py::test_a_reward_model_can_be_named_in_the_configuration",
    ),
}
CONFIGS = (GRPOConfig, RLOOConfig, OnlineDPOConfig, ReinforcePPConfig, PPOConfig)


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Callable[[str], str]:
    """The directory of a tiny model, by its name in `ROWS`."""
    made: dict[str, str] = {}

    def model(name: str) -> str:
        if name in ("untied", "talkative", "caller"):
            return str(request.getfixturevalue(f"{name}_dir"))
        if name not in made:
            made[name] = _save(name, tmp_path_factory.mktemp("effects") / name)
        return made[name]

    return model


def _save(name: str, folder: Path) -> str:
    if name == "experts":
        return save_family("mixtral", folder)
    more = {"attention_dropout": 0.1} if name == "dropout" else {}
    tiny.make_model(**more).save_pretrained(folder)  # type: ignore[arg-type]
    tokenizer = tiny.make_tokenizer()
    if name == "shouting":
        tokenizer.chat_template += "{% if shout %}!!{% endif %}"
    if name == "special":
        # Plain text gets a token at its beginning.
        first = "<|system|>"
        pairs = [(first, tokenizer.convert_tokens_to_ids(first))]
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single=f"{first} $A", special_tokens=pairs
        )
    tokenizer.save_pretrained(folder)
    return str(folder)


def two(
    name: str,
    folder: Path,
    models: Callable[[str], str],
    capsys: pytest.CaptureFixture[str],
    do: Callable[[Any], Any] = lambda run: run.train(),
) -> tuple[Shown, Shown]:
    """What is seen of two runs with the two values of a field."""
    row = ROWS[name]

    def one(place: Path, value: Any) -> Shown:
        SEEN.clear()
        for fields in [row.before, {}] if row.before is not None else [{}]:
            given = row.given() if callable(row.given) else row.given
            whole = {**row.fields, name: value, **fields}
            found = shown(row.method, models(row.model), place, whole, given, capsys, row.look, do)
        return found

    return one(folder / "a", row.a), one(folder / "b", row.b)


@pytest.mark.parametrize("name", ROWS)
def test_two_values_of_a_field_are_two_runs(
    name: str, models: Callable[[str], str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = two(name, tmp_path, models, capsys)
    where = ROWS[name].where
    assert getattr(first, where) != getattr(second, where), (first.error, second.error)
    if where not in ("error", "started", "metrics"):
        assert not first.error
        assert not second.error


# Fields that `lockstep evaluate` takes. Those of an agent are measured while it trains.
TAKEN = [
    name
    for name, said in options_of(GRPOConfig).items()
    if name in ROWS and said.get("part", EVALUATES[0]) in EVALUATES
]


@pytest.mark.release
@pytest.mark.parametrize("name", TAKEN)
def test_two_values_of_a_field_that_an_evaluation_takes_are_two_evaluations(
    name: str,
    models: Callable[[str], str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    row = ROWS[name]
    given = row.given() if callable(row.given) else row.given
    held_out = {"eval_dataset": given.get("train_dataset", PROMPTS), **given}
    monkeypatch.setitem(ROWS, name, row._replace(given=held_out))
    first, second = two(name, tmp_path, models, capsys, lambda run: run.evaluate())
    assert vars(first) != vars(second)


# Contexts in which two equal runs must be equal in all that is seen; only then a difference is one of two values.
@pytest.mark.parametrize("name", ["top_p", "eval_steps", "tool_timeout", "save_steps", "gamma", "bf16"])
def test_two_runs_with_one_value_differ_in_nothing(
    name: str,
    models: Callable[[str], str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(ROWS, name, ROWS[name]._replace(a=ROWS[name].b))
    first, second = two(name, tmp_path, models, capsys)
    assert not second.error
    assert vars(first) == vars(second)


def test_every_field_is_measured_or_shown_elsewhere() -> None:
    fields = {
        name
        for kind in CONFIGS
        for name, said in options_of(kind).items()
        # Fields with one value, and those of no effect, say so.
        if not said.keys() & {"only", "no_effect"}
    }
    assert not ROWS.keys() & ELSEWHERE.keys()
    assert ROWS.keys() | ELSEWHERE.keys() == fields


@pytest.mark.parametrize("place", sorted({place for _, place in ELSEWHERE.values()}))
def test_what_is_shown_elsewhere_is_tested_there(place: str) -> None:
    file, _, name = place.partition("::")
    assert f"def {name}(" in (TESTS / file).read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("fields", "level"),
    [
        ({"log_level_replica": "error", "log_on_each_node": False}, 40),
        ({"log_level_replica": "info", "log_on_each_node": False}, 20),
        ({"log_level_replica": "error", "log_level": "info"}, 20),
    ],
)
def test_what_a_replica_prints(fields: dict[str, Any], level: int, monkeypatch: pytest.MonkeyPatch) -> None:
    config = GRPOConfig(output_dir="unused", use_cpu=True, **fields)
    # The first process of the second machine.
    monkeypatch.setattr(GRPOConfig, "process_index", 1)
    monkeypatch.setattr(GRPOConfig, "local_process_index", 0)
    assert config.get_process_log_level() == level


def test_a_run_of_several_processes_saves_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GRPOConfig, "world_size", 2)
    with pytest.raises(InputError, match="save_on_each_node=True is not supported with several processes"):
        GRPOConfig(output_dir="unused", use_cpu=True, bf16=False, save_on_each_node=True)
