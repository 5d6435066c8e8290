"""Variables of `accelerate launch` that change numerics beside the config: each is taken or refused."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import lockstep
from lockstep.errors import InputError
from lockstep.training.config.launcher import take_launcher

PRECISION = "ACCELERATE_MIXED_PRECISION"
ACCUMULATION = "ACCELERATE_GRADIENT_ACCUMULATION_STEPS"


def config(tmp_path: Path, **fields: Any) -> lockstep.GRPOConfig:
    return lockstep.GRPOConfig(output_dir=str(tmp_path), use_vllm=False, **fields)


@pytest.mark.parametrize(
    ("name", "value", "fields", "says"),
    [
        (PRECISION, "bf16", {"bf16": False}, "bf16 is false in the config"),
        (PRECISION, "fp16", {"bf16": True}, f"{PRECISION}=fp16 is not supported"),
        (PRECISION, "fp8", {}, "fp8 is not supported"),
        ("ACCELERATE_DYNAMO_BACKEND", "INDUCTOR", {}, "compiled forward"),
        ("ACCELERATE_USE_MEGATRON_LM", "true", {}, "Megatron-LM is not supported"),
        ("ACCELERATE_USE_PARALLELISM_CONFIG", "true", {}, "parallelism config is not supported"),
        (ACCUMULATION, "4", {"gradient_accumulation_steps": 2}, "gradient_accumulation_steps is 2"),
    ],
)
def test_a_variable_of_the_launcher_that_contradicts_the_config_is_refused(
    name: str, value: str, fields: dict[str, Any], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(InputError, match=says):
        config(tmp_path, **fields)


@pytest.mark.parametrize(
    ("name", "value", "fields", "expected"),
    [
        (PRECISION, "bf16", {}, {"bf16": True, "mixed_precision": "bf16"}),
        (PRECISION, "bf16", {"bf16": True}, {"bf16": True, "mixed_precision": "bf16"}),
        # What the launcher sets unless it is told otherwise.
        (PRECISION, "no", {"bf16": True}, {"mixed_precision": "bf16"}),
        (PRECISION, "no", {"bf16": False}, {"mixed_precision": "no"}),
        ("ACCELERATE_DYNAMO_BACKEND", "NO", {"bf16": False}, {"bf16": False}),
        (ACCUMULATION, "2", {"gradient_accumulation_steps": 2}, {"gradient_accumulation_steps": 2}),
    ],
)
def test_what_the_launcher_asks_for_and_the_config_leaves_open_is_taken(
    name: str,
    value: str,
    fields: dict[str, Any],
    expected: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # On a machine with fast bfloat16 the config would choose it without the launcher.
    monkeypatch.setattr("lockstep.training.config.online_config.has_fast_bf16", lambda: False)
    monkeypatch.setenv(name, value)
    made = config(tmp_path, **fields)
    assert {field: getattr(made, field) for field in expected} == expected


def test_a_launch_on_the_cpu_is_one_of_the_config() -> None:
    """On its own: without a GPU every config is on the CPU."""
    fields: Any = SimpleNamespace(use_cpu=False, deepspeed=None)
    take_launcher(fields, {"ACCELERATE_USE_CPU": "true"})
    assert fields.use_cpu is True
