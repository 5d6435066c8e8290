"""What is taken of the DeepSpeed configuration of TrainingArguments or accelerate's environment, what is refused."""

from __future__ import annotations

import importlib.metadata
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from lockstep.errors import InputError
from lockstep.extras.deepspeed.settings import take_zero_settings

STAGE = {"zero_optimization": {"stage": 3}}
# What `accelerate launch` sets for a file as TRL's deepspeed_zero3.yaml.
LAUNCHED = {
    "ACCELERATE_USE_DEEPSPEED": "true",
    "ACCELERATE_CONFIG_DS_FIELDS": "deepspeed_multinode_launcher,offload_optimizer_device,zero_stage",
    "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3",
    "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "none",
    "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": "none",
    "ACCELERATE_DEEPSPEED_ZERO3_INIT": "true",
    "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL": "true",
}
# As in the documentation of transformers.
USUAL: dict[str, Any] = {
    "bf16": {"enabled": "auto"},
    "fp16": {"enabled": "auto"},
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
    },
    "zero_optimization": {
        "stage": 3,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "sub_group_size": 1e9,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_max_live_parameters": 1e9,
        "stage3_max_reuse_distance": 1e9,
        "stage3_gather_16bit_weights_on_model_save": True,
        "offload_optimizer": {"device": "none", "pin_memory": True},
    },
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "steps_per_print": 2000,
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "wall_clock_breakdown": False,
}


@pytest.fixture(autouse=True)
def _installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.19.8")


@dataclass
class Fields:
    """The fields of a run on two processes."""

    world_size: int = 2
    per_device_train_batch_size: int = 4
    gradient_accumulation_steps: int = 3
    max_grad_norm: float = 1.0
    learning_rate: float = 1e-6
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_epsilon: float = 1e-8
    weight_decay: float = 0.0
    bf16: bool | None = True
    optim: str = "adamw_torch_fused"


def merged(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """A configuration with some values changed."""
    result = dict(one)
    for name, value in other.items():
        inside = isinstance(value, dict) and isinstance(result.get(name), dict)
        result[name] = merged(result[name], value) if inside else value
    return result


def test_without_deepspeed_nothing_is_sharded_and_the_environment_stays() -> None:
    environment = {"ACCELERATE_USE_DEEPSPEED": "false", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "2"}
    assert take_zero_settings(None, environment) is None
    assert environment == {"ACCELERATE_USE_DEEPSPEED": "false", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "2"}


def test_the_usual_configuration_is_taken_as_a_path_as_a_dict_and_as_json(tmp_path: Path) -> None:
    path = tmp_path / "zero3.json"
    path.write_text(json.dumps(USUAL))
    for given in (str(path), USUAL, json.dumps(USUAL)):
        settings = take_zero_settings(given, {})
        assert settings is not None
        assert settings.shards
        assert settings.field == given
        settings.check_values(Fields())


def test_accelerate_s_environment_asks_for_shards_and_its_own_plugin_is_switched_off_for_good() -> None:
    environment = dict(LAUNCHED)
    # A second config of the same process asks too.
    for _ in range(2):
        settings = take_zero_settings(None, environment)
        assert settings is not None
        assert settings.shards
        assert settings.field is None
        settings.check_values(Fields())
        assert "ACCELERATE_USE_DEEPSPEED" not in environment


def test_accelerate_s_environment_may_name_a_file(tmp_path: Path) -> None:
    path = tmp_path / "zero.json"
    named = LAUNCHED | {"ACCELERATE_DEEPSPEED_CONFIG_FILE": str(path)}
    path.write_text(json.dumps(USUAL))
    assert take_zero_settings(None, dict(named)) is not None
    path.write_text(json.dumps({"zero_optimization": {"stage": 5}}))
    with pytest.raises(InputError, match=r"stage=5 \(.*zero\.json\); it must be 0, 1, 2 or 3"):
        take_zero_settings(None, dict(named))


@pytest.mark.parametrize(
    "given", [{"zero_optimization": {"stage": n}} for n in range(3)] + [{"steps_per_print": 5}]
)
def test_stages_below_3_leave_models_whole_and_need_no_deepspeed(
    given: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.metadata, "version", _missing)
    settings = take_zero_settings(given, {})
    assert settings is not None
    assert not settings.shards


def _missing(name: str) -> str:
    raise importlib.metadata.PackageNotFoundError(name)


def test_without_the_package_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", _missing)
    with pytest.raises(InputError, match=r"pip install 'lockstep-rl\[deepspeed\]'"):
        take_zero_settings(STAGE, {})


def test_another_version_gets_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.18.0")
    take_zero_settings(STAGE, {})
    assert "DeepSpeed 0.18.0 is installed" in caplog.text


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"zero_optimization": {"stage": "auto"}}, "stage=auto"),
        ({"zero_optimization": {"offload_param": {"device": "cpu"}}}, r"offload_param\.device=cpu"),
        ({"zero_optimization": {"offload_optimizer": {"device": "nvme"}}}, r"offload_optimizer\.device=nvme"),
        ({"zero_optimization": {"cpu_offload": True}}, "cpu_offload=True"),
        ({"zero_optimization": {"zero_quantized_weights": True}}, "zero_quantized_weights=True"),
        ({"zero_optimization": {"zero_hpz_partition_size": 8}}, "zero_hpz_partition_size=8"),
        ({"zero_optimization": {"mics_shard_size": 4}}, "mics_shard_size=4"),
        ({"zero_optimization": {"stage_3": 1}}, r"zero_optimization\.stage_3"),
        ({"zero_optimization": 3}, "zero_optimization=3"),
        ({"optimizer": {"type": "OneBitAdam"}}, r"optimizer\.type=OneBitAdam"),
        ({"optimizer": {"params": {"freeze_step": 1}}}, r"optimizer\.params\.freeze_step"),
        ({"optimizer": {"params": {"adam_w_mode": False}}}, "adam_w_mode"),
        ({"scheduler": {"type": "WarmupLR"}}, "scheduler is not supported .*lr_scheduler_type"),
        ({"fp16": {"enabled": True}}, r"fp16\.enabled=True"),
        ({"amp": {"enabled": True}}, r"amp\.enabled=True"),
        ({"bf16": {"bf16_optimizer_states": True}}, r"bf16\.bf16_optimizer_states"),
        ({"communication_data_type": "bf16"}, "communication_data_type=bf16"),
        ({"prescale_gradients": True}, "prescale_gradients=True"),
        (
            {"activation_checkpointing": {"partition_activations": True}},
            "activation_checkpointing .*gradient_checkp",
        ),
        ({"tensor_parallel": {"autotp_size": 2}}, "tensor_parallel"),
        ({"sequence_parallel_size": 2}, "sequence_parallel_size"),
    ],
)
def test_what_would_compute_or_hold_something_else_is_refused_by_name(
    changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(InputError, match=said):
        take_zero_settings(merged(USUAL, changes), {})


def test_a_section_that_is_switched_off_is_taken() -> None:
    off = {"activation_checkpointing": {"partition_activations": False, "cpu_checkpointing": False}}
    assert take_zero_settings(USUAL | off, {}) is not None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("ACCELERATE_DEEPSPEED_ZERO_STAGE", "7"),
        ("ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE", "cpu"),
        ("ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE", "nvme"),
        ("ACCELERATE_GRADIENT_CLIPPING", "much"),
    ],
)
def test_the_environment_s_settings_are_refused_by_name(name: str, value: str) -> None:
    with pytest.raises(InputError, match=f"={value} .*accelerate's environment"):
        take_zero_settings(None, LAUNCHED | {name: value})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"train_micro_batch_size_per_gpu": 8},
            "train_micro_batch_size_per_gpu=8 .*per_device_train_batch_size is 4",
        ),
        ({"gradient_accumulation_steps": 1}, "gradient_accumulation_steps=1 .* is 3"),
        ({"train_batch_size": 12}, "train_batch_size=12 .* is 24"),
        ({"gradient_clipping": 0.5}, r"gradient_clipping=0\.5 .*max_grad_norm is 1\.0"),
        ({"bf16": {"enabled": False}}, r"bf16\.enabled=False .*bf16 is True"),
        ({"optimizer": {"params": {"lr": 3e-5}}}, r"optimizer\.params\.lr=3e-05 .*learning_rate is 1e-06"),
        ({"optimizer": {"params": {"betas": [0.8, 0.999]}}}, "betas"),
        ({"optimizer": {"params": {"eps": 1e-6}}}, "adam_epsilon"),
        ({"optimizer": {"params": {"weight_decay": 0.1}}}, "weight_decay"),
    ],
)
def test_a_value_that_differs_from_the_run_s_own_is_refused(changes: dict[str, Any], said: str) -> None:
    settings = take_zero_settings(merged(USUAL, changes), {})
    assert settings is not None
    with pytest.raises(InputError, match=said):
        settings.check_values(Fields())


def test_values_that_are_the_run_s_own_are_taken() -> None:
    same = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 3, "train_batch_size": 24}
    same |= {"gradient_clipping": 1, "bf16": {"enabled": True}}
    settings = take_zero_settings(
        merged(USUAL, same | {"optimizer": {"params": {"lr": 1e-6, "betas": [0.9, 0.999]}}}), {}
    )
    assert settings is not None
    settings.check_values(Fields())


def test_an_optimizer_of_the_configuration_and_another_one_of_the_run_contradict_each_other() -> None:
    settings = take_zero_settings(USUAL, {})
    assert settings is not None
    with pytest.raises(InputError, match="asks for AdamW, and optim is sgd"):
        settings.check_values(Fields(optim="sgd"))


@pytest.mark.parametrize("given", ["/no/such.json", "{broken", "[1]"])
def test_a_configuration_that_cannot_be_read_is_refused(given: str) -> None:
    with pytest.raises(InputError, match=r"deepspeed=.* (cannot be read|is not a JSON object)"):
        take_zero_settings(given, {})
