"""A field that was set and has no effect is said in one line, or refused; where it has one, nothing is said."""

from __future__ import annotations

import dataclasses
import re
from importlib import import_module
from typing import Any

import pytest
from methods import FIELDS, make

from lockstep import GRPOConfig
from lockstep.cli.describe import CLASSES
from lockstep.cli.fields import AdaptedRunArguments
from lockstep.config.effect import CONDITIONS, OF_A_RUN, Run, say_without_effect, set_fields
from lockstep.config.table import options_of, with_key
from lockstep.contract.protocol import Engine
from lockstep.errors import InputError

# Fields that have an effect in every run, or whose own check says when they have none.
ALWAYS = """
accelerator_config add_special_tokens agent agent_command allowed_token_ids average_by_prompt bad_words baseline
beta bf16 chat_template_kwargs cliprange_value data_seed dataset_name dataset_test_split dataset_types debug
deepspeed disable_dropout disable_tqdm dtype engine engine_dtype entropy_coef environment_factory eval_size
eval_strategy explain filter_zero_variance freeze_vision_tower frequency_penalty fsdp full_determinism gamma
generation_batch_size generation_kwargs gradient_accumulation_steps gradient_checkpointing importance_sampling_level
include_num_input_tokens_seen json lam learning_rate liger_kernel_config log_completions log_level
logging_first_step logging_nan_inf_filter logging_strategy logit_bias logits_chunk_size loss_type
lr_scheduler_kwargs lr_scheduler_type mask_truncated_completions max_completion_length max_grad_norm max_length
max_new_tokens max_staleness max_steps max_thinking_length max_unscored_generations min_p min_thinking_length
min_tokens missing_eos_penalty model model_init_kwargs model_name_or_path multi_objective_aggregation
no_positive_resampling normalize_advantages num_generations num_iterations off_policy_mask_threshold optim
optim_args output_dir per_device_train_batch_size plain_prompts presence_penalty push_to_hub receipt recheck_rewards
rehearse_rewards repetition_penalty report_to restore_callback_states_from_checkpoint resume_from_checkpoint
resume_with_changes reward_clip_range reward_funcs reward_model_path reward_timeout reward_weights rollout_func
rollouts_file rollouts_size_limit router_aux_loss_coef save_strategy seed self_test shuffle_dataset
skip_memory_metrics steps_per_generation stop_strings structured_outputs_choice structured_outputs_grammar
structured_outputs_json sync_ref_model temperature tf32 token_budget tools top_entropy_quantile top_k top_p
torch_empty_cache_steps train_size use_adaptive_entropy use_cache use_cpu
use_liger_kernel use_peft use_vllm value_learning_rate vf_coef vllm_importance_sampling_correction
vllm_max_model_length vllm_mode vllm_server_base_url vllm_server_timeout vllm_server_url_file
vllm_structured_outputs_regex warmup_steps weight_decay
"""
SERVER = {"vllm_mode": "server"}
EVALUATED = {"eval_strategy": "steps", "eval_steps": 10}
SAPO, VESPO = {"loss_type": "sapo"}, {"loss_type": "vespo"}
# Beside a field of a condition: fields without which it has no effect, and fields with which it has one.
PLACES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "vllm": ({"use_vllm": False, "engine_dtype": "bfloat16"}, {"use_vllm": True, "engine_dtype": "bfloat16"}),
    "vllm_here": ({"use_vllm": False}, {"use_vllm": True}),
    "engine_here": (SERVER, {}),
    "servers": ({}, SERVER),
    "server_without_url": ({"vllm_server_base_url": "http://127.0.0.1:1"}, SERVER),
    "correction": ({"vllm_importance_sampling_correction": False}, {}),
    "thinking": ({}, {"max_thinking_length": 8}),
    "filter": ({}, {"top_p": 0.9}),
    "printing": ({}, {"log_completions": True}),
    "low_head": ({"bf16": False}, {"bf16": True}),
    "clip": (SAPO, {}),
    "upper_clip": (VESPO, {"loss_type": "cispo"}),
    "sapo": ({}, SAPO),
    "vespo": (SAPO, VESPO),
    "kl": ({}, {"beta": 0.1}),
    "summed_rewards": ({"multi_objective_aggregation": "normalize_then_sum"}, {}),
    "adaptive_entropy": ({}, {"use_adaptive_entropy": True}),
    "moving_reference": ({}, {"sync_ref_model": True, "beta": 0.1}),
    "checkpointing": ({}, {"gradient_checkpointing": True}),
    "epochs": ({"max_steps": 4}, {}),
    "betas": ({"optim": "sgd"}, {}),
    "eps": ({"optim": "sgd"}, {}),
    "projection": ({}, {"optim": "apollo_adamw"}),
    "log_steps": ({"logging_strategy": "no"}, {}),
    "evaluation": ({}, EVALUATED),
    "evaluation_steps": ({}, {"eval_strategy": "steps"}),
    "saving": ({"save_strategy": "no"}, {}),
    "saving_best": ({"save_strategy": "no"}, EVALUATED | {"save_steps": 10}),
    "save_steps": ({"save_strategy": "epoch"}, {}),
    "metric": ({}, EVALUATED | {"save_strategy": "best"}),
    "hub": ({}, {"push_to_hub": True}),
    "trackers": ({}, {"report_to": "tensorboard"}),
    "trackio": ({"report_to": "tensorboard"}, {"report_to": "trackio"}),
    "fsdp": ({}, {"fsdp": "true"}),
    "peft": ({}, {"use_peft": True}),
    "four_bits": ({"use_peft": True}, {"use_peft": True, "load_in_4bit": True}),
    "subsets": ({"dataset_name": "dots"}, {"dataset_name": "arithmetic"}),
    "splits": ({"dataset_name": "dots"}, {"dataset_name": "my/data"}),
    "drawn_rows": ({"dataset_name": "my/data"}, {"dataset_name": "my/data", "eval_size": 4}),
}
# Values that a rule of this file does not find.
VALUES = {
    "vllm_importance_sampling_mode": "sequence_mask",
    "vllm_importance_sampling_clip_min": 0.5,
    "vllm_weight_transport": "gloo",
    "vllm_model_impl": "transformers",
    "vllm_quantization": "fp8_per_channel",
    "vllm_engine_kwargs": {"enforce_eager": True},
    "gradient_checkpointing_kwargs": {"use_reentrant": False},
    "fsdp_config": {"fsdp_version": 2},
    "limit_mm_per_prompt": {"image": 2},
    "interruption": "Enough. </think>",
    "end_of_thinking": "think>",
    "scale_rewards": "none",
    "metric_for_best_model": "kl",
    "hub_strategy": "end",
    "log_level_replica": "error",
    "ddp_backend": "gloo",
    "bnb_4bit_quant_type": "fp4",
    "tool_format": "hermes",
    "image_urls": ["https://pictures.example/"],
    "optim_target_modules": ["q_proj"],
}


def conditional(kind: type) -> list[tuple[str, str]]:
    """Each field of a class with the last of its conditions, which the others stand before."""
    return [(name, conditions[-1]) for name, conditions in with_key(kind, "only_with").items()]


def value_of(name: str, kind: type) -> Any:
    if name in VALUES:
        return VALUES[name]
    (field,) = (f for f in dataclasses.fields(kind) if f.name == name)  # type: ignore[arg-type]
    default, hint = field.default, str(field.type)
    if isinstance(default, bool):
        return not default
    if isinstance(default, int | float):
        return (
            type(default)(default * 2 or 1) if default >= 1 or "int" in hint or not default else default / 2
        )
    if isinstance(default, str) or "str" in hint:
        return ["x"] if "list" in hint else "x"
    return True if "bool" in hint else 3


def made(fields: dict[str, Any]) -> GRPOConfig:
    return GRPOConfig(output_dir="unused", use_cpu=True, **{"bf16": False} | fields)


def lines_of(fields: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> list[str]:
    """What a config of these fields says, or by what it is refused."""
    capsys.readouterr()
    try:
        made(fields)
    except InputError as error:
        return [str(error)]
    return capsys.readouterr().err.splitlines()


def about(name: str, lines: list[str]) -> list[str]:
    return [line for line in lines if "no effect" in line and re.search(rf"\b{name}\b", line)]


def test_every_field_has_a_known_condition_or_is_said_to_have_an_effect_always() -> None:
    found = set()
    for kind in {
        getattr(import_module(m), n) for c in CLASSES.values() for m, n in (p.split(":") for p in c)
    }:
        for name, said in options_of(kind).items():
            assert set(said.get("only_with", ())) <= CONDITIONS.keys() | OF_A_RUN.keys(), name
            if not said.keys() & {"only", "no_effect", "only_with"}:
                found.add(name)
    assert found - {"logging_dir"} == set(ALWAYS.split())


@pytest.mark.parametrize(
    ("name", "condition"), [p for p in conditional(GRPOConfig) if p[1] in CONDITIONS and p[1] != "processes"]
)
def test_a_field_is_said_where_it_has_no_effect_and_not_where_it_has_one(
    name: str, condition: str, capsys: pytest.CaptureFixture[str]
) -> None:
    value, (outside, inside) = value_of(name, GRPOConfig), PLACES[condition]
    lines = lines_of(outside | {name: value}, capsys)
    refused = [line for line in lines if name in line and re.search("needs vLLM|not supported with", line)]
    assert len(about(name, lines) + refused) == 1, lines
    assert not about(name, lines_of(inside | {name: value}, capsys))
    assert not about(name, lines_of(outside, capsys))


@pytest.mark.parametrize("name", [n for n, c in conditional(GRPOConfig) if c == "processes"])
def test_a_field_of_several_processes_is_said_in_one(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert len(about(name, lines_of({name: value_of(name, GRPOConfig)}, capsys))) == 1


@pytest.mark.parametrize(("name", "condition"), conditional(AdaptedRunArguments))
def test_an_argument_of_a_command_is_said_or_refused_likewise(
    name: str, condition: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def said(fields: dict[str, Any]) -> list[str]:
        given = AdaptedRunArguments(**fields)
        try:
            say_without_effect(given, set_fields(given))
        except InputError as error:
            return [str(error)]
        return capsys.readouterr().err.splitlines()

    value, (outside, inside) = value_of(name, AdaptedRunArguments), PLACES[condition]
    assert len(about(name, said(outside | {name: value}))) == 1
    assert not about(name, said(inside | {name: value}))


@pytest.mark.parametrize(
    ("name", "condition"), [pair for pair in conditional(GRPOConfig) if pair[1] in OF_A_RUN]
)
def test_what_a_trainer_was_given_decides_for_the_fields_of_a_run(
    name: str, condition: str, capsys: pytest.CaptureFixture[str]
) -> None:
    args = made({name: value_of(name, GRPOConfig)})
    capsys.readouterr()
    say_without_effect(args, set_fields(args), Run(False, False, False, False))
    assert len(about(name, capsys.readouterr().err.splitlines())) == 1
    say_without_effect(args, set_fields(args), Run(True, condition == "agent", True, True))
    assert not about(name, capsys.readouterr().err.splitlines())


def test_a_trainer_says_what_has_no_effect_in_its_run(
    untied_dir: str, tmp_path: Any, hf_engine: Engine, capsys: pytest.CaptureFixture[str]
) -> None:
    fields = {**FIELDS["GRPO"], "tool_timeout": 5.0, "agent_timeout": 6.0, "min_pixels": 9, "max_pixels": 99}
    make("GRPO", untied_dir, tmp_path, hf_engine, fields)
    said = "".join(capsys.readouterr())
    assert "tool_timeout has no effect without tools or environments" in said
    assert "agent_timeout has no effect without an agent" in said
    assert "min_pixels and max_pixels have no effect with a model that reads no pictures" in said


def test_a_config_of_defaults_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert lines_of({}, capsys) == []
