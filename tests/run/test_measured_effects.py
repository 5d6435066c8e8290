"""Each field of a config has an effect: two values in its own context change something that is seen of a run."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from effects import Shown, shown
from methods import PROMPTS
from datasets import Dataset
from caller import multiply
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback


class Row(NamedTuple):
    """Two values of a field, and what else is set: fields of the config, and arguments of the trainer.

    Attributes:
        where: in what the two runs must differ: names of `Shown`.
    """

    a: Any
    b: Any
    fields: dict[str, Any] = {}
    where: str = "metrics"
    method: str = "GRPO"
    model: str = "untied"
    given: dict[str, Any] = {}
    look: Callable[[Any], Any] = lambda run: None


CHAT = Dataset.from_list([{"prompt": [{"role": "user", "content": f"what is {i} + {i}"}]} for i in range(8)])
HELD_OUT = PROMPTS.select(range(2))
EVALUATED: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 1}
TESTED: dict[str, Any] = {"eval_dataset": HELD_OUT}
SAVED: dict[str, Any] = {"save_strategy": "steps", "save_steps": 1}
# The policy moves within a generation: ratios are not 1.
AGAIN: dict[str, Any] = {"num_iterations": 2, "learning_rate": 0.05}
# Engine and trainer differ.
GAP: dict[str, Any] = {"engine_dtype": "bfloat16"}
CALLS: dict[str, Any] = {"max_completion_length": 60}
TOOLS: dict[str, Any] = {"tools": [multiply], "train_dataset": CHAT}


def nothing(completion_ids: list[list[int]], **_: Any) -> list[None]:
    return [None] * len(completion_ids)


def slow(completion_ids: list[list[int]], **_: Any) -> list[float]:
    time.sleep(0.5)
    return [float(len(ids)) for ids in completion_ids]


def slow_tool(a: int, b: int) -> int:
    """Multiply.

    Args:
        a: a number.
        b: a number.
    """
    time.sleep(0.3)
    return a * b

slow_tool.__name__ = "multiply"

def equal(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Some groups have equal rewards."""
    return [float(i // 2) if i < 2 else ids[0] % 7.0 for i, ids in enumerate(completion_ids)]


def best_at_one(completion_ids: list[list[int]], trainer_state: Any, **_: Any) -> list[float]:
    return [100.0 * (trainer_state.global_step == 1) + len(ids) + ids[0] % 7 for ids in completion_ids]

def ones(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [float(ids[0] % 2) for ids in completion_ids]

def by_first(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [float(ids[0] % 5) for ids in completion_ids]
def by_last(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [float(ids[-1] % 3) for ids in completion_ids]


def position_of_logs(run):
    return None

MOVING = {"sync_ref_model": True, "beta": 0.1, "ref_model_sync_steps": 1}
ADAPTIVE = {"use_adaptive_entropy": True, "entropy_coef": 0.5, "entropy_target": 100.0, "max_steps": 3}
BF16 = {"bf16": True}
THINKS = {"max_thinking_length": 3, "interruption": " so: .", "end_of_thinking": "."}
BEST = {**SAVED, **EVALUATED, "load_best_model_at_end": True}
BESTED = {**TESTED, "reward_funcs": best_at_one}
LONG = Dataset.from_dict({"prompt": ["what is 12 + 34 " * 6] * 4})

ROWS: dict[str, Row] = {
    # the order of the page
    "disable_dropout": Row(True, False, where="error", model="dropout"),
    "logging_steps": Row(1, 2),
    "logging_nan_inf_filter": Row(True, False),
    "log_completions": Row(True, False, where="printed"),
    "num_completions_to_print": Row(1, 2, {"log_completions": True}, "printed"),
    "log_unique_prompts": Row(True, False, {"log_completions": True}, "printed"),
    "rollouts_size_limit": Row(0, 1.0, where="files"),
    "max_thinking_length": Row(3, None, {"interruption": " so: .", "end_of_thinking": "."}),
    "min_thinking_length": Row(1, None, THINKS),
    "interruption": Row(" so: .", ".", THINKS),
    "end_of_thinking": Row(".", "so", THINKS, "metrics"),
    "max_tool_calling_iterations": Row(0, 2, CALLS, model="caller", given=TOOLS),
    "tool_timeout": Row(0.1, 60.0, CALLS, model="caller", given={**TOOLS, "tools": [slow_tool]}),
    "tool_threads": Row(True, False, CALLS, model="caller", given=TOOLS),
    "tool_format": Row("hermes", "pythonic", CALLS, model="caller", given=TOOLS),
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
    "chat_template_kwargs": Row({"shout": True}, None, where="requests", model="shouting", given={"train_dataset": CHAT}),
    "add_special_tokens": Row(True, False, where="requests", model="bos"),
    "shuffle_dataset": Row(True, False, where="requests"),
    "reward_weights": Row([1.0, 5.0], None, given={"reward_funcs": [by_first, by_last]}),
    "reward_timeout": Row(0.1, 600.0, where="error", given={"reward_funcs": slow}),
    "max_unscored_generations": Row(1, 10, where="error", given={"reward_funcs": nothing}),
    "rehearse_rewards": Row(True, False, where="calls"),
    "recheck_rewards": Row(True, False, where="calls"),
    "vllm_importance_sampling_correction": Row(True, False, GAP, "weights"),
    "vllm_importance_sampling_mode": Row("token_truncate", "sequence_mask", {**GAP, "vllm_importance_sampling_clip_max": 1.001}, "weights"),
    "vllm_importance_sampling_clip_max": Row(1.0001, 3.0, GAP, "weights"),
    "vllm_importance_sampling_clip_min": Row(0.9999, None, GAP, "weights"),
    "vllm_max_model_length": Row(20, None, where="error", given={"train_dataset": LONG}),
    "vllm_max_num_seqs": Row(1, 4, where="batches"),
    "max_staleness": Row(1, 0, {"max_steps": 3}),
    "engine_dtype": Row("bfloat16", "float32"),
    "cast_lm_head_to_fp32": Row(True, False, BF16),
    "router_aux_loss_coef": Row(0.5, 0.0, where="weights", model="experts"),
    "token_budget": Row(8, 100, where="forwards"),
    "logits_chunk_size": Row(2, 512, where="logits"),
    "num_generations": Row(2, 4),
    "num_generations_eval": Row(1, 3, EVALUATED, given=TESTED),
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
    "delta": Row(1.001, None, {**AGAIN, "epsilon": 0.0001}),
    "sapo_temperature_pos": Row(1.0, 5.0, {**AGAIN, "loss_type": "sapo"}),
    "sapo_temperature_neg": Row(1.0, 5.0, {**AGAIN, "loss_type": "sapo"}),
    "vespo_k_pos": Row(1.0, 5.0, {**AGAIN, "loss_type": "vespo"}),
    "vespo_lambda_pos": Row(1.0, 5.0, {**AGAIN, "loss_type": "vespo"}),
    "vespo_k_neg": Row(1.0, 5.0, {**AGAIN, "loss_type": "vespo"}),
    "vespo_lambda_neg": Row(1.0, 5.0, {**AGAIN, "loss_type": "vespo"}),
    "use_bias_correction_kl": Row(True, False, {"beta": 0.5}, "weights"),
    "scale_rewards": Row("group", "none"),
    "multi_objective_aggregation": Row("sum_then_normalize", "normalize_then_sum", given={"reward_funcs": [by_first, by_last]}),
    "average_by_prompt": Row(True, False, model="talkative"),
    "filter_zero_variance": Row(True, False, given={"reward_funcs": equal}),
    "top_entropy_quantile": Row(0.3, 1.0),
    "entropy_coef": Row(0.5, 0.0),
    "use_adaptive_entropy": Row(True, False, {"entropy_coef": 0.1, "max_steps": 3}),
    "entropy_coef_min": Row(0.0, 0.495, {**ADAPTIVE, "entropy_target": 0.0}),
    "entropy_coef_max": Row(0.5, 1.0, ADAPTIVE),
    "entropy_coef_delta": Row(0.1, 0.2, ADAPTIVE),
    "entropy_target": Row(0.0, 100.0, ADAPTIVE),
    "off_policy_mask_threshold": Row(0.0, None, {**AGAIN, "max_steps": 4}),
    "gradient_checkpointing": Row(True, False, where="forwards"),
    "gradient_checkpointing_kwargs": Row({"use_reentrant": True}, {"use_reentrant": False}, {"gradient_checkpointing": True}, "forwards"),
    "eval_strategy": Row("steps", "no", {"eval_steps": 1}, given=TESTED),
    "eval_steps": Row(1, 2, {"eval_strategy": "steps"}, given=TESTED),
    "eval_on_start": Row(True, False, given=TESTED),
    "eval_delay": Row(1, 0, {**EVALUATED, "eval_delay": 0}, given=TESTED),
    "max_steps": Row(1, 2),
    "num_train_epochs": Row(0.5, 1.0, {"max_steps": -1}),
    "per_device_train_batch_size": Row(4, 8),
    "gradient_accumulation_steps": Row(1, 2),
    "lr_scheduler_type": Row("linear", "constant"),
    "lr_scheduler_kwargs": Row({"num_cycles": 3}, None, {"lr_scheduler_type": "cosine_with_restarts", "max_steps": 4}),
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
    "run_name": Row("one", "two", {"report_to": "tensorboard"}, where="files"),
    "logging_strategy": Row("steps", "no"),
    "logging_first_step": Row(True, False, {"logging_steps": 5}),
    "log_level": Row("info", "error", where="printed"),
    "output_dir": Row(..., ..., where="files"),
    "save_steps": Row(1, 2, SAVED, "files"),
    "save_total_limit": Row(1, None, SAVED, "files"),
    "save_strategy": Row("steps", "no", {"save_steps": 1}, "files"),
    "save_only_model": Row(True, False, SAVED, "files"),
    "load_best_model_at_end": Row(True, False, {**SAVED, **EVALUATED}, "weights", given=BESTED),
    "metric_for_best_model": Row("reward", "completions/mean_length", BEST, "weights", given=BESTED),
    "greater_is_better": Row(True, False, BEST, "weights", given=BESTED),
    "skip_memory_metrics": Row(True, False),
    "include_num_input_tokens_seen": Row("all", "no"),
    "do_eval": Row(True, False, EVALUATED, given=TESTED),
    "disable_tqdm": Row(True, False, where="printed"),
    "torch_empty_cache_steps": Row(1, None, where="metrics"),
    "accelerator_config": Row({"split_batches": True}, None),
    "use_cache": Row(True, False, SAVED, where="files"),
    "restore_callback_states_from_checkpoint": Row(True, False),
    "full_determinism": Row(True, False, where="metrics"),
    "debug": Row("underflow_overflow", "", where="printed"),
    "local_rank": Row(0, -1),
    "use_cpu": Row(True, False),
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
}


@pytest.fixture(scope="session")
def models(tmp_path_factory, request):
    import tiny
    made = {}
    def get(name):
        if name in made: return made[name]
        folder = tmp_path_factory.mktemp("effects") / name
        if name in ("untied","talkative","caller"):
            made[name] = request.getfixturevalue(f"{name}_dir")
        elif name == "dropout":
            made[name] = str(tiny.save(tiny.make_model(attention_dropout=0.1), folder))
        elif name == "experts":
            from model_families import save_family
            made[name] = save_family("mixtral", folder)
        elif name == "shouting":
            path = tiny.save(tiny.make_model(), folder)
            tok = AutoTokenizer.from_pretrained(path)
            tok.chat_template = tok.chat_template + "{% if shout %}!!{% endif %}"
            tok.save_pretrained(path)
            made[name] = str(path)
        elif name == "bos":
            from tokenizers.processors import TemplateProcessing
            path = tiny.save(tiny.make_model(), folder)
            tok = AutoTokenizer.from_pretrained(path)
            tok.backend_tokenizer.post_processor = TemplateProcessing(single="<|system|> $A", special_tokens=[("<|system|>", tok.convert_tokens_to_ids("<|system|>"))])
            tok.save_pretrained(path)
            made[name] = str(path)
        return made[name]
    return get


@pytest.mark.parametrize("name", ROWS)
def test_two_values(name, models, tmp_path, capsys):
    row = ROWS[name]
    found = []
    for which, value in (("a", row.a), ("b", row.b)):
        found.append(shown(row.method, models(row.model), tmp_path / which, {**row.fields, name: value}, row.given, capsys, row.look))
    a, b = found
    differ = [n for n in vars(a) if getattr(a, n) != getattr(b, n)]
    print(name, "DIFFER", differ, "ERR", a.error[:150], "|", b.error[:150])
    print({l for l in (a.printed | b.printed) if "no effect" in l})
    assert row.where in differ
    if row.where != "error":
        assert not a.error and not b.error
