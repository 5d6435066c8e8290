"""The FSDP configuration of TrainingArguments and accelerate's environment, as `shards/settings.py` reads it."""

from __future__ import annotations

from typing import Any

import pytest

from lockstep.errors import InputError
from lockstep.shards.settings import take_settings

LAUNCHED = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_RESHARD_AFTER_FORWARD": "true"}
# What `accelerate launch` sets beside, if the file says nothing about it.
LAUNCHED |= {
    "FSDP_OFFLOAD_PARAMS": "false",
    "FSDP_MIN_NUM_PARAMS": "100000000",
    "FSDP_SHARDING_STRATEGY": "FULL_SHARD",
}
LAUNCHED |= {"FSDP_ACTIVATION_CHECKPOINTING": "false", "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP"}


def test_without_fsdp_nothing_is_sharded_and_the_environment_stays() -> None:
    environment = {"ACCELERATE_USE_FSDP": "false", "FSDP_VERSION": "1"}
    assert take_settings(None, None, environment) is None
    assert environment == {"ACCELERATE_USE_FSDP": "false", "FSDP_VERSION": "1"}


@pytest.mark.parametrize("fsdp", [True, "full_shard auto_wrap", ["full_shard"], "true"])
def test_training_arguments_ask_for_shards(fsdp: Any) -> None:
    assert take_settings(fsdp, {"fsdp_version": 2, "reshard_after_forward": True}, {}) is not None


def test_accelerate_s_environment_asks_for_shards_and_its_own_plugin_is_switched_off_for_good() -> None:
    environment = dict(LAUNCHED)
    assert take_settings(None, None, environment) is not None
    assert "ACCELERATE_USE_FSDP" not in environment
    # A second config of the same process asks too.
    assert take_settings(None, None, environment) is not None


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"FSDP_VERSION": "1"}, "FSDP version 1"),
        ({"FSDP_RESHARD_AFTER_FORWARD": "false"}, "fsdp_reshard_after_forward=false"),
        ({"FSDP_OFFLOAD_PARAMS": "true"}, "fsdp_offload_params=true"),
        ({"FSDP_ACTIVATION_CHECKPOINTING": "true"}, "gradient_checkpointing=True"),
        ({"FSDP_AUTO_WRAP_POLICY": "SIZE_BASED_WRAP"}, "fsdp_auto_wrap_policy=SIZE_BASED_WRAP"),
    ],
)
def test_what_would_compute_or_hold_something_else_is_refused_by_name(
    changes: dict[str, str], said: str
) -> None:
    with pytest.raises(InputError, match=said):
        take_settings(None, None, LAUNCHED | changes)
    fields = {name.lower(): value for name, value in changes.items()}
    with pytest.raises(InputError, match=said):
        take_settings(True, fields, {})


def test_other_strategies_of_the_field_are_refused() -> None:
    with pytest.raises(InputError, match="fsdp=shard_grad_op"):
        take_settings("shard_grad_op", None, {})
