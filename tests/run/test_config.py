"""Errors name fields that contradict each other or are not supported; nothing is ignored."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import lockstep.config.run
from lockstep.errors import InputError
from lockstep.learn.methods.grpo import GRPOConfig


def config(**fields: Any) -> GRPOConfig:
    return GRPOConfig(output_dir="unused", **fields)


BEST: dict[str, Any] = {"load_best_model_at_end": True, "eval_strategy": "steps", "save_strategy": "steps"}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"cache_implementation": "static"}, "cache_implementation"),
        ({"sync_ref_model": True}, "sync_ref_model"),
        ({"temperature": 0.0}, "temperature"),
        ({"vllm_mode": "remote"}, "vllm_mode"),
        ({"vllm_importance_sampling_clip_max": None}, "needs a bound"),
        ({**BEST, "num_iterations": 2, "save_steps": 3, "eval_steps": 3}, "make save_steps a multiple of 2"),
        ({"auto_find_batch_size": True}, "auto_find_batch_size"),
        ({"num_generations": 1}, "num_generations"),
        ({"num_generations": 3}, "not a multiple of num_generations=3"),
        ({"generation_batch_size": 16, "steps_per_generation": 4}, "give one of the two"),
        ({"generation_batch_size": 12}, "not a multiple of per_device_train_batch_size"),
        ({"gradient_accumulation_steps": 4, "steps_per_generation": 2}, "span two generations"),
        ({"save_strategy": "best", "metric_for_best_model": "eval_reward"}, "save_strategy=best"),
        ({"neftune_noise_alpha": 5.0}, "neftune_noise_alpha"),
        ({"label_smoothing_factor": 0.1}, "label_smoothing_factor"),
        ({"optim": "schedule_free_adamw"}, "optim=schedule_free_adamw"),
        ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps=0"),
        ({"model_init_kwargs": "foo"}, "model_init_kwargs"),
        ({"model_init_kwargs": {"trust_remote_code": True}}, "code that comes with a model is not run"),
        ({"loss_type": "reinforce"}, "loss_type"),
        ({"scale_rewards": "sometimes"}, "scale_rewards"),
        ({"max_completion_length": 0}, "max_completion_length"),
    ],
)
def test_a_field_that_cannot_be_honoured_is_refused_by_name(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        config(**fields)


def test_a_field_that_does_not_exist_is_refused() -> None:
    with pytest.raises(TypeError, match="no_such_field"):
        config(no_such_field=1)


@pytest.mark.parametrize(
    ("fields", "prompts", "micro_batches", "single"),
    [
        ({}, 1, 1, True),
        ({"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4}, 2, 4, True),
        (
            {"per_device_train_batch_size": 2, "generation_batch_size": 16, "gradient_accumulation_steps": 4},
            2,
            8,
            False,
        ),
        ({"num_iterations": 2, "save_steps": 10}, 1, 2, False),
    ],
)
def test_sizes_follow_trls_arithmetic(
    fields: dict[str, Any], prompts: int, micro_batches: int, single: bool
) -> None:
    made = config(**fields)
    assert (made.prompts_per_generation, made.micro_batches_per_generation, made.single_update) == (
        prompts,
        micro_batches,
        single,
    )


def test_defaults_that_trl_has_are_trls() -> None:
    made = config()
    assert (made.learning_rate, made.num_generations, made.max_completion_length) == (1e-6, 8, 512)
    assert (made.temperature, made.epsilon, made.epsilon_high, made.loss_type) == (1.0, 0.2, 0.2, "dapo")
    assert (made.scale_rewards, made.num_iterations, made.beta) == ("group", 1, 0.0)


def test_precision_follows_the_machine_and_the_engine_follows_the_trainer() -> None:
    assert config(bf16=False).engine_torch_dtype == config(bf16=False).trainer_dtype == torch.float32
    assert config(bf16=True).engine_torch_dtype == config(bf16=True).trainer_dtype == torch.bfloat16
    assert config(bf16=True, engine_dtype="float32").engine_torch_dtype == torch.float32


@pytest.mark.parametrize(("fast", "dtype"), [(True, torch.bfloat16), (False, torch.float32)])
def test_where_nothing_is_said_both_sides_take_bf16_exactly_where_it_is_fast(
    fast: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lockstep.config.run, "has_fast_bf16", lambda: fast)
    made = config()
    assert made.bf16 is fast
    assert made.engine_torch_dtype == made.trainer_dtype == dtype
    # The user's own choice has priority over the fast dtype.
    assert config(bf16=not fast).bf16 is not fast


@pytest.mark.parametrize(("given", "meant"), [(True, "group"), (False, "none"), ("batch", "batch")])
def test_scale_rewards_takes_trls_older_values(given: Any, meant: str) -> None:
    assert config(scale_rewards=given).scale_rewards == meant


@pytest.mark.parametrize(
    "fields", [BEST, {"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "steps"}], ids=str
)
def test_where_an_evaluation_decides_it_is_by_its_reward(fields: dict[str, Any]) -> None:
    assert config(**fields).metric_for_best_model == "reward"


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"bf16": "false"}, "bf16='false'; it must be true or false"),
        ({"use_vllm": "false"}, "use_vllm='false'; it must be true or false"),
        ({"num_generations": 2.0}, "num_generations=2.0; it must be a whole number"),
        ({"seed": 1.5}, "seed=1.5; it must be a whole number"),
        ({"seed": None}, "seed=None; it must be a whole number"),
        ({"max_completion_length": True}, "max_completion_length=True; it must be a whole number"),
        ({"optim": 3}, "optim=3; it must be text"),
        ({"image_urls": "https://a"}, "image_urls='https://a'; it must be a list"),
    ],
)
def test_every_field_is_checked_by_its_declared_type(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=re.escape(said)):
        config(**fields)


def test_numpys_numbers_and_paths_are_taken() -> None:
    found = config(
        num_generations=np.int64(4), learning_rate=np.float64(0.5), shuffle_dataset=np.bool_(False)
    )
    assert type(found.num_generations) is int
    assert found.learning_rate == 0.5
    assert found.shuffle_dataset is False
    assert GRPOConfig(output_dir=Path("x")).output_dir == "x"  # type: ignore[arg-type]
    assert config(report_to=None).report_to == []


def test_the_settings_of_sharding_may_be_a_mapping_in_json() -> None:
    found = config(fsdp="true", fsdp_config='{"fsdp_version": 2}')
    assert found.shards is not None
