"""A field that was set and has no effect is said in one line, or refused; where it has one, nothing is said."""

from __future__ import annotations

import dataclasses
import re
from importlib import import_module
from typing import Any

import pytest
from methods import FIELDS, make

from lockstep import GRPOConfig, OnlineDPOConfig, PPOConfig, ReinforcePPConfig, RLOOConfig
from lockstep.cli.describe import CLASSES
from lockstep.cli.fields import AdaptedRunArguments
from lockstep.config.effect import CONDITIONS, OF_A_RUN, Run, say_without_effect, set_fields
from lockstep.config.table import options_of, with_key
from lockstep.contract.protocol import Engine
from lockstep.errors import InputError

# Fields with an effect in every run. test_measured_effects.py measures those of configs.
ALWAYS = """
average_by_prompt baseline beta bf16 dataset_name dtype engine engine_dtype entropy_coef eval_size eval_strategy
filter_zero_variance frequency_penalty full_determinism gamma generation_batch_size generation_kwargs
gradient_accumulation_steps gradient_checkpointing include_num_input_tokens_seen json lam learning_rate log_completions
log_level logging_first_step logging_strategy logit_bias logits_chunk_size loss_type lr_scheduler_type
mask_truncated_completions max_completion_length max_grad_norm max_length max_new_tokens max_staleness max_steps
max_unscored_generations min_p min_tokens model model_name_or_path multi_objective_aggregation no_positive_resampling
normalize_advantages num_generations num_iterations off_policy_mask_threshold optim output_dir
per_device_train_batch_size plain_prompts presence_penalty push_to_hub rehearse_rewards repetition_penalty report_to
reward_clip_range reward_funcs reward_timeout rollouts_file rollouts_size_limit run_name save_strategy seed self_test
shuffle_dataset skip_memory_metrics steps_per_generation stop_strings structured_outputs_choice
structured_outputs_grammar structured_outputs_json temperature token_budget top_entropy_quantile top_k top_p
use_adaptive_entropy use_cache use_peft vf_coef value_learning_rate
vllm_max_model_length vllm_mode vllm_server_timeout vllm_structured_outputs_regex weight_decay
allowed_token_ids bad_words max_thinking_length
"""
# Fields whose own check refuses them, or says a line, where they have no effect: by what.
OWN_CHECK = {
    "accelerator_config": "a line names the settings; `num_steps` is refused",
    "agent": "refused beside agent_command, and by a trainer beside other makers of rollouts",
    "agent_command": "refused beside agent",
    "dataset_test_split": "refused with data that have no splits",
    "debug": "refused where it is no check of a model",
    "deepspeed": "refused beside fsdp; its values that contradict the config are refused",
    "disable_dropout": "false is refused where there is dropout, and changes nothing where there is none",
    "disable_tqdm": "true is what is so already, beside the live view",
    "environment_factory": "refused beside other makers of rollouts",
    "explain": "reads a directory, and stops",
    "freeze_vision_tower": "refused with a model that has none",
    "fsdp": "refused beside deepspeed",
    "liger_kernel_config": "refused without use_liger_kernel",
    "lr_scheduler_kwargs": "refused by the schedule that does not take them",
    "min_thinking_length": "refused without max_thinking_length",
    "missing_eos_penalty": "refused with a judge",
    "model_init_kwargs": "a line with a model that is loaded",
    "optim_args": "a line, where it changes nothing of the optimizer",
    "receipt": "reads a file, and stops",
    "restore_callback_states_from_checkpoint": "of a run that goes on: nobody knows it when a config is made",
    "resume_from_checkpoint": "refused by commands, and by a trainer if there is none",
    "resume_with_changes": "a permission: it is used when a run goes on with changes",
    "reward_model_path": "a line beside reward functions, refused beside a judge",
    "reward_weights": "refused without as many reward functions",
    "rollout_func": "refused beside other makers of rollouts",
    "router_aux_loss_coef": "refused with a model that is no mixture of experts",
    "sync_ref_model": "refused without beta",
    "tools": "refused beside other makers of rollouts",
    "use_cpu": "on a machine without a GPU it asks for what is so",
    "use_liger_kernel": "refused without a GPU",
    "use_vllm": "refused in server mode; with another engine a trainer is given one on purpose",
    "vllm_server_base_url": "refused beside vllm_server_url_file; sets server mode",
    "vllm_server_url_file": "refused beside vllm_server_base_url; sets server mode",
}
# The fields of a method's own config, if it has them and GRPO's has not.
OTHERS = (RLOOConfig, OnlineDPOConfig, ReinforcePPConfig, PPOConfig)
SERVER = {"vllm_mode": "server"}
EVALUATED = {"eval_strategy": "steps", "eval_steps": 10}
TWICE = {"num_iterations": 2}
SAPO, VESPO = {"loss_type": "sapo"}, {"loss_type": "vespo"}
# Beside a field of a condition: fields without which it has no effect, and fields with which it has one.
PLACES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "vllm": ({"use_vllm": False, "engine_dtype": "bfloat16"}, {"use_vllm": True, "engine_dtype": "bfloat16"}),
    "vllm_here": ({"use_vllm": False}, {"use_vllm": True}),
    "engine_here": (SERVER, {}),
    "servers": ({}, SERVER),
    "server_without_url": ({"vllm_server_base_url": "http://127.0.0.1:1"}, SERVER),
    "token_weights": ({}, {}),
    "correction": ({"vllm_importance_sampling_correction": False}, {}),
    "thinking": ({}, {"max_thinking_length": 8}),
    "filter": ({}, {"top_p": 0.9}),
    "printing": ({}, {"log_completions": True}),
    "low_head": ({"bf16": False}, {"bf16": True}),
    "clip": (SAPO, {}),
    "upper_clip": (VESPO, {}),
    "sapo": ({}, SAPO),
    "vespo": (SAPO, VESPO),
    "kl": ({}, {"beta": 0.1}),
    "summed_rewards": ({"multi_objective_aggregation": "normalize_then_sum"}, {}),
    "adaptive_entropy": ({}, {"use_adaptive_entropy": True}),
    "moving_reference": ({}, {"sync_ref_model": True, "beta": 0.1}),
    "checkpointing": ({}, {"gradient_checkpointing": True}),
    **dict.fromkeys(("several_steps", "several_steps_or_below_1", "several_steps_or_kl"), ({}, TWICE)),
    "several_steps_or_cispo": ({}, TWICE),
    "warm_up": ({"lr_scheduler_type": "constant"}, {}),
    "shuffled": ({"shuffle_dataset": False}, {}),
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
    **dict.fromkeys(("hub", "hub_or_trackio"), ({}, {"push_to_hub": True})),
    "trackio": ({"report_to": "tensorboard"}, {"report_to": "trackio"}),
    "fsdp": ({}, {"fsdp": "true"}),
    "peft": ({"use_peft": False, "load_in_4bit": False}, {"use_peft": True}),
    "four_bits": ({"use_peft": True}, {"use_peft": True, "load_in_4bit": True}),
    "data": ({"dataset_name": None}, {"dataset_name": "my/data"}),
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
    "importance_sampling_level": "sequence",
    "chat_template_kwargs": {"shout": True},
    "tf32": False,
}
# One process without a GPU cannot show where these hold.
NOT_HERE = ("processes", "gpu")
CONFIGS = (GRPOConfig, *OTHERS)


def conditional(*kinds: type) -> list[tuple[type, str, str]]:
    """Each field with each of its conditions. A field that several classes have comes once."""
    found = {}
    for kind in reversed(kinds):
        for name, conditions in with_key(kind, "only_with").items():
            found.update({(name, condition): kind for condition in conditions})
    return sorted(((kind, *key) for key, kind in found.items()), key=lambda row: row[1:])


def around(kind: type, name: str, condition: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Fields with which this condition alone does not hold, and fields with which all hold."""
    others: dict[str, Any] = {}
    for other in with_key(kind, "only_with")[name]:
        if other != condition and other in CONDITIONS:
            others |= PLACES[other][1]
    outside, inside = PLACES.get(condition, ({}, {}))
    return others | outside, others | inside


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


def made(fields: dict[str, Any], kind: type = GRPOConfig) -> Any:
    return kind(output_dir="unused", use_cpu=True, **{"bf16": False} | fields)


def lines_of(
    fields: dict[str, Any], capsys: pytest.CaptureFixture[str], kind: type = GRPOConfig
) -> list[str]:
    """What a config of these fields says, or by what it is refused."""
    capsys.readouterr()
    try:
        made(fields, kind)
    except InputError as error:
        return [str(error)]
    return capsys.readouterr().err.splitlines()


def about(name: str, lines: list[str]) -> list[str]:
    return [line for line in lines if "no effect" in line and re.search(rf"\b{name}\b", line)]


def test_every_field_has_a_known_condition_or_is_judged_to_need_none() -> None:
    found = set()
    for kind in {
        getattr(import_module(m), n) for c in CLASSES.values() for m, n in (p.split(":") for p in c)
    }:
        for name, said in options_of(kind).items():
            assert set(said.get("only_with", ())) <= CONDITIONS.keys() | OF_A_RUN.keys(), name
            if not said.keys() & {"only", "no_effect", "only_with"}:
                found.add(name)
    assert not OWN_CHECK.keys() & set(ALWAYS.split())
    assert found - {"logging_dir"} == set(ALWAYS.split()) | OWN_CHECK.keys()


@pytest.mark.parametrize(
    ("kind", "name", "condition"),
    [
        row
        for row in conditional(*CONFIGS)
        if row[2] in CONDITIONS and row[2] not in (*NOT_HERE, "token_weights")
    ],
)
def test_a_field_is_said_where_it_has_no_effect_and_not_where_it_has_one(
    kind: type, name: str, condition: str, capsys: pytest.CaptureFixture[str]
) -> None:
    value, (outside, inside) = value_of(name, kind), around(kind, name, condition)
    lines = lines_of(outside | {name: value}, capsys, kind)
    refused = [line for line in lines if name in line and re.search("needs vLLM|not supported with", line)]
    assert len(about(name, lines) + refused) == 1, lines
    assert CONDITIONS[condition].without in lines[0] or refused
    assert not about(name, lines_of(inside | {name: value}, capsys, kind))
    assert not about(name, lines_of(outside, capsys, kind))


@pytest.mark.parametrize(
    "fields",
    [
        {"epsilon_high": 5.0, "loss_type": "cispo"},
        {"delta": 0.5},
        {"importance_sampling_level": "sequence", "loss_type": "grpo", "beta": 0.1},
    ],
)
def test_one_step_per_generation_is_enough_for_some_bounds_and_for_the_divergence(
    fields: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert not lines_of(fields, capsys)


@pytest.mark.parametrize("name", [n for _, n, c in conditional(*CONFIGS) if c in NOT_HERE])
def test_a_field_of_several_processes_or_of_gpus_is_said_elsewhere(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert len(about(name, lines_of({name: value_of(name, GRPOConfig)}, capsys))) == 1


@pytest.mark.parametrize(("kind", "name", "condition"), conditional(AdaptedRunArguments))
def test_an_argument_of_a_command_is_said_or_refused_likewise(
    kind: type, name: str, condition: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def said(fields: dict[str, Any]) -> list[str]:
        given = AdaptedRunArguments(**fields)
        try:
            say_without_effect(given, set_fields(given))
        except InputError as error:
            return [str(error)]
        return capsys.readouterr().err.splitlines()

    value, (outside, inside) = value_of(name, kind), around(kind, name, condition)
    assert len(about(name, said(outside | {name: value}))) == 1
    assert not about(name, said(inside | {name: value}))


@pytest.mark.parametrize(
    ("kind", "name", "condition"), [row for row in conditional(*CONFIGS) if row[2] in OF_A_RUN]
)
def test_what_a_trainer_was_given_decides_for_the_fields_of_a_run(
    kind: type, name: str, condition: str, capsys: pytest.CaptureFixture[str]
) -> None:
    args = made(around(kind, name, condition)[1] | {name: value_of(name, kind)}, kind)
    capsys.readouterr()
    say_without_effect(args, set_fields(args), Run(*[False] * len(Run._fields)))
    assert OF_A_RUN[condition].without in "".join(about(name, capsys.readouterr().err.splitlines()))
    say_without_effect(args, set_fields(args), Run(*[True] * len(Run._fields)))
    assert not about(name, capsys.readouterr().err.splitlines())


def test_a_trainer_says_what_has_no_effect_in_its_run(
    untied_dir: str, tmp_path: Any, hf_engine: Engine, capsys: pytest.CaptureFixture[str]
) -> None:
    fields = {**FIELDS["GRPO"], "tool_timeout": 5.0, "agent_timeout": 6.0, "min_pixels": 9, "max_pixels": 99}
    fields |= {"chat_template_kwargs": {"shout": True}, "recheck_rewards": False, "use_vllm": True}
    fields |= {"vllm_model_impl": "transformers", "add_special_tokens": False}
    make("GRPO", untied_dir, tmp_path, hf_engine, fields)
    said = "".join(capsys.readouterr())
    assert "chat_template_kwargs has no effect without conversations" in said
    assert "vllm_model_impl has no effect without an engine that the trainer starts" in said
    assert "recheck_rewards" not in said
    assert "add_special_tokens" not in said
    assert "tool_timeout has no effect without tools or environments" in said
    assert "agent_timeout has no effect without an agent" in said
    assert "min_pixels and max_pixels have no effect with a model that reads no pictures" in said


def test_online_dpo_has_no_weights_of_tokens_to_switch_off(capsys: pytest.CaptureFixture[str]) -> None:
    fields = {"vllm_importance_sampling_correction": False}
    assert len(about("vllm_importance_sampling_correction", lines_of(fields, capsys, OnlineDPOConfig))) == 1
    assert not lines_of(fields, capsys)


def test_settings_of_accelerate_are_said_to_have_no_effect_or_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    (line,) = lines_of({"accelerator_config": {"split_batches": True, "even_batches": False}}, capsys)
    assert "split_batches, even_batches of accelerator_config: no effect here" in line
    usual = {"even_batches": True, "dispatch_batches": False}
    assert not lines_of({"accelerator_config": usual}, capsys)
    refused = {"accelerator_config": {"gradient_accumulation_kwargs": {"num_steps": 2}}}
    assert "set gradient_accumulation_steps" in lines_of(refused, capsys)[0]


@pytest.mark.parametrize("fields", [{"torch_compile_backend": "inductor"}, {"torch_compile_mode": "default"}])
def test_what_asks_for_a_compiled_forward_is_refused(
    fields: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    (line,) = lines_of(fields, capsys)
    assert "not supported" in line
    assert next(iter(fields)) in line


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"tf32": True}, "tf32=True needs an NVIDIA GPU"),
        ({"debug": "tpu_metrics_debug"}, "debug='tpu_metrics_debug'; it must be underflow_overflow"),
        ({"debug": "everything"}, "debug='everything'; it must be underflow_overflow"),
    ],
)
def test_a_switch_that_nothing_here_has_is_one_sentence(
    fields: dict[str, Any], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (line,) = lines_of(fields, capsys)
    assert line.startswith(said)


def test_a_config_of_defaults_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert lines_of({}, capsys) == []
