"""The user's DeepSpeed configuration: TrainingArguments' `deepspeed`, or the environment of `accelerate launch`.

accelerate's own DeepSpeed plugin would put DeepSpeed's engine and optimizer beside the proofs. So
`take_zero_settings` reads what it would read, and switches it off: `extras/deepspeed/weights.py` then lets DeepSpeed
shard the model. `check_values` compares the configuration with the fields of the run, as transformers does: "auto" is
the field's value, and another value must be equal to it.
"""

from __future__ import annotations

import importlib.metadata
import json
import logging
from collections.abc import Mapping, MutableMapping, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from lockstep.config.option import value_of
from lockstep.errors import InputError
from lockstep.files import read_settings
from lockstep.private_caches import expanded
from lockstep.shards.settings import switch_off, switched_on

if TYPE_CHECKING:
    from lockstep.shards.model import Shard

_logger = logging.getLogger(__name__)
# The version whose names are used: `ds_tensor`, `ds_status`, `all_gather_coalesced` and `partition` of a parameter.
TESTED = "0.19.8"
_PREFIX = "ACCELERATE_DEEPSPEED_"
_NOWHERE = (None, "", "none")
_ALONE = "weights, gradients and moments stay on their rank's device; leave it out"

# Sections and values that change only how fast DeepSpeed's own engine is, what it prints, or how its own checkpoints
# are written.
_NO_EFFECT = {
    "steps_per_print", "wall_clock_breakdown", "memory_breakdown", "dump_state", "flops_profiler", "comms_logger",
    "tensorboard", "wandb", "csv_monitor", "comet", "monitor_config", "zero_allow_untested_optimizer",
    "zero_force_ds_cpu_optimizer", "aio", "checkpoint", "seed", "disable_allgather",
}  # fmt: skip
_NO_EFFECT_IN_ZERO = {
    "overlap_comm", "contiguous_gradients", "reduce_scatter", "reduce_bucket_size", "allgather_partitions",
    "allgather_bucket_size", "sub_group_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold",
    "stage3_model_persistence_threshold", "stage3_max_live_parameters", "stage3_max_reuse_distance",
    "stage3_gather_16bit_weights_on_model_save", "stage3_gather_fp16_weights_on_model_save",
    "stage3_module_granularity_threshold", "stage3_use_all_reduce_for_fetch_params", "round_robin_gradients",
    "ignore_unused_parameters", "memory_efficient_linear", "load_from_fp32_weights", "elastic_checkpoint",
    "legacy_stage1",
    "use_multi_rank_bucket_allreduce", "override_module_apply", "pipeline_loading_checkpoint",
    "log_trace_cache_warnings",
}  # fmt: skip
_KNOWN = {
    "zero_optimization", "optimizer", "bf16", "torch_autocast", "gradient_accumulation_steps", "gradient_clipping",
    "train_batch_size", "train_micro_batch_size_per_gpu",
}  # fmt: skip
_KNOWN_IN_ZERO = {
    "stage", "offload_param", "offload_optimizer", "cpu_offload", "cpu_offload_params", "cpu_offload_use_pin_memory",
}  # fmt: skip
_KNOWN_IN_PARAMS = {"lr", "betas", "eps", "weight_decay", "torch_adam", "adam_w_mode"}
# Names with the values that change nothing, and why others are refused. A section is refused unless it is empty or
# switched off.
_REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "zero_optimization.zero_quantized_weights": ((False,), "weights are gathered as they are"),
    "zero_optimization.zero_quantized_nontrainable_weights": ((False,), "weights are gathered as they are"),
    "zero_optimization.zero_quantized_gradients": ((False,), "gradients are summed in float32"),
    "zero_optimization.zero_hpz_partition_size": ((1,), "every weight is cut over all ranks"),
    "zero_optimization.mics_shard_size": ((-1, 0), "every weight is cut over all ranks"),
    "communication_data_type": ((None, "fp32"), "gradients are summed in float32"),
    "gradient_predivide_factor": ((1,), "gradients are summed and not averaged"),
    "prescale_gradients": ((False,), "gradients are summed and not averaged"),
    "fp16.enabled": ((False, "auto"), "use bf16"),
    "amp.enabled": ((False,), "use bf16"),
    "scheduler": ((None,), "set lr_scheduler_type and warmup_steps instead"),
    "activation_checkpointing": ((None,), "set gradient_checkpointing=True instead"),
}


class RunFields(Protocol):
    """The fields of a run that a DeepSpeed configuration names too."""

    world_size: int
    per_device_train_batch_size: int
    gradient_accumulation_steps: int
    max_grad_norm: float
    learning_rate: float
    adam_beta1: float
    adam_beta2: float
    adam_epsilon: float
    weight_decay: float
    bf16: bool | None
    optim: Any


@dataclass(frozen=True, slots=True)
class ZeroSettings:
    """The user's DeepSpeed configuration, whose settings are all supported.

    Attributes:
        found: the configuration; sections are dicts.
        source: where it comes from, for errors.
        field: the value of TrainingArguments' `deepspeed`; None if the environment asked.
    """

    found: dict[str, Any]
    source: str
    field: Any
    title = "DeepSpeed ZeRO-3"

    @property
    def shards(self) -> bool:
        """Whether models are sharded (stage 3). Otherwise each rank holds whole models and a whole optimizer."""
        return _stage(self.found) == 3

    @property
    def saves_less(self) -> str:
        """What to say about a stage that spreads the optimizer over ranks (1 and 2), which is whole here; or empty."""
        stage = _stage(self.found)
        if stage not in (1, 2):
            return ""
        return (
            f"zero_optimization.stage={stage} ({self.source}) spreads the optimizer over ranks. Here every rank holds "
            "it whole: the results are the same, and the memory is that of stage 0. To save memory, use stage 3"
        )

    @property
    def weights(self) -> Shard:
        """What shards a model. It imports DeepSpeed when it is called."""
        from lockstep.extras.deepspeed.weights import ZeroWeights

        return ZeroWeights

    def check_values(self, fields: RunFields) -> None:
        """Refuse a value that differs from the run's field. "auto" stands for the field's value."""
        micro, steps = fields.per_device_train_batch_size, fields.gradient_accumulation_steps
        whole = micro * steps * fields.world_size
        optimizer = value_of(fields.optim)
        for name, due, field in (
            ("train_micro_batch_size_per_gpu", micro, "per_device_train_batch_size"),
            ("gradient_accumulation_steps", steps, "gradient_accumulation_steps"),
            ("train_batch_size", whole, "per_device_train_batch_size × steps × processes"),
            ("gradient_clipping", fields.max_grad_norm, "max_grad_norm"),
            ("bf16.enabled", bool(fields.bf16), "bf16"),
            ("torch_autocast.enabled", bool(fields.bf16), "bf16"),
            ("optimizer.params.lr", fields.learning_rate, "learning_rate"),
            ("optimizer.params.betas", [fields.adam_beta1, fields.adam_beta2], "adam_beta1, adam_beta2"),
            ("optimizer.params.eps", fields.adam_epsilon, "adam_epsilon"),
            ("optimizer.params.weight_decay", fields.weight_decay, "weight_decay"),
        ):
            given = _value(self.found, name, "auto")
            if given != "auto" and (list(given) if isinstance(given, tuple) else given) != due:
                raise InputError(
                    f"{name}={given} ({self.source}), and {field} is {due}; give both the same value, or "
                    f'write "auto" for {name}'
                )
        if "optimizer" in self.found and not optimizer.startswith("adamw_torch"):
            found = f"{self.source} asks for AdamW, and optim is {optimizer}"
            raise InputError(f"{found}; leave one of the two out")


def take_zero_settings(deepspeed: Any, environment: MutableMapping[str, str]) -> ZeroSettings | None:
    """The user's configuration; None: nothing asks for DeepSpeed. accelerate's switch in the environment is replaced.

    Args:
        deepspeed: the field of TrainingArguments: a path, a dict, or JSON.

    Raises:
        InputError: a setting is not supported, or DeepSpeed is not installed. The error names the setting.
    """
    if not deepspeed and not switched_on("DEEPSPEED", environment):
        return None
    file = environment.get(f"{_PREFIX}CONFIG_FILE", "none")
    if deepspeed:
        found, source = _read(deepspeed), "deepspeed"
    elif file.lower() not in _NOWHERE:
        found, source = _read(file), file
    else:
        found, source = _of_environment(environment), "accelerate's environment"
    _check(found, source)
    switch_off("DEEPSPEED", environment)
    settings = ZeroSettings(found, source, deepspeed or None)
    if settings.shards:
        check_installed()
    return settings


def check_installed() -> None:
    """Refuse a run without DeepSpeed, which is not imported; warn of another version than the tested one."""
    try:
        found = importlib.metadata.version("deepspeed")
    except importlib.metadata.PackageNotFoundError:
        raise InputError(
            "DeepSpeed is asked for, and it is not installed: pip install 'lockstep-rl[deepspeed]', or use "
            "FSDP2 (fsdp=True)"
        ) from None
    if found != TESTED:
        _logger.warning(f"DeepSpeed {found} is installed, and ZeRO-3 has been tested with {TESTED} only")


def _read(given: Any) -> dict[str, Any]:
    if isinstance(given, Mapping):
        return dict(given)
    text = str(given)
    try:
        found = json.loads(text if text.lstrip().startswith("{") else read_settings(expanded(text)))
    except (OSError, ValueError) as error:
        raise InputError(f"deepspeed={text[:200]} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise InputError(f"deepspeed={text[:200]} is not a JSON object")
    return found


def _of_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    """The configuration that accelerate would make of its own fields."""

    def offload(what: str) -> dict[str, str]:
        return {"device": environment.get(f"{_PREFIX}OFFLOAD_{what}_DEVICE", "none")}

    stage = environment.get(f"{_PREFIX}ZERO_STAGE", "2")
    found: dict[str, Any] = {
        "zero_optimization": {
            "stage": int(stage) if stage.isdigit() else stage,
            "offload_optimizer": offload("OPTIMIZER"),
            "offload_param": offload("PARAM"),
        }
    }
    for name in ("gradient_accumulation_steps", "gradient_clipping"):
        given = environment.get(f"ACCELERATE_{name.upper()}", "auto")
        try:
            found[name] = given if given == "auto" else float(given)
        except ValueError:
            raise InputError(f"{name}={given} in accelerate's environment is not a number") from None
    return found


def _check(found: dict[str, Any], source: str) -> None:
    zero, optimizer = _section(found, "zero_optimization", source), _section(found, "optimizer", source)
    if (stage := _stage(found)) not in (0, 1, 2, 3):
        raise InputError(f"zero_optimization.stage={stage} ({source}); it must be 0, 1, 2 or 3")
    for part in ("param", "optimizer"):
        device = _section(zero, f"offload_{part}", source).get("device")
        if str(device).lower() not in ("none", ""):
            name = f"zero_optimization.offload_{part}.device={device}"
            raise InputError(f"{name} is not supported ({source}): {_ALONE}")
    for old in ("cpu_offload", "cpu_offload_params", "cpu_offload_use_pin_memory"):
        if zero.get(old):
            raise InputError(f"zero_optimization.{old}={zero[old]} is not supported ({source}): {_ALONE}")
    for name, (values, why) in _REFUSED.items():
        given = _value(found, name, values[0])
        given = None if isinstance(given, dict) and not any(given.values()) else given
        if given not in values:
            shown = "" if isinstance(given, dict) else f"={given}"
            raise InputError(f"{name}{shown} is not supported ({source}): {why}")
    if optimizer and str(optimizer.get("type")).lower() != "adamw":
        raise InputError(
            f"optimizer.type={optimizer.get('type')} is not supported ({source}): use AdamW, or leave the "
            "optimizer out and set optim"
        )
    _check_names(found, zero, optimizer, source)


def _check_names(found: dict[str, Any], zero: dict[str, Any], optimizer: dict[str, Any], source: str) -> None:
    parameters = _section(optimizer, "params", source)
    refused = [name.partition(".") for name in _REFUSED]
    in_zero = {name for section, _, name in refused if section == "zero_optimization"}
    odd = _odd(found, _KNOWN | _NO_EFFECT | {section for section, *_ in refused})
    odd += _odd(zero, _KNOWN_IN_ZERO | _NO_EFFECT_IN_ZERO | in_zero, "zero_optimization.")
    odd += _odd(optimizer, {"type", "params", "legacy_fusion"}, "optimizer.")
    odd += _odd(parameters, _KNOWN_IN_PARAMS, "optimizer.params.")
    if parameters.get("adam_w_mode") is False:
        odd.append("optimizer.params.adam_w_mode=false")
    odd += _odd(_section(found, "bf16", source), {"enabled", "immediate_grad_update"}, "bf16.")
    if odd:
        raise InputError(f"{odd[0]} is not supported ({source}); leave it out (docs/guides/deepspeed.md)")


def _odd(section: Mapping[str, Any], known: Set[str], prefix: str = "") -> list[str]:
    return [prefix + name for name in section if name not in known]


def _stage(found: Mapping[str, Any]) -> Any:
    return _value(found, "zero_optimization.stage", 0)


def _section(found: Mapping[str, Any], name: str, source: str) -> dict[str, Any]:
    section = found.get(name)
    if section is None:
        return {}
    if not isinstance(section, dict):
        raise InputError(f"{name}={section} ({source}) must be a section with names and values")
    return section


def _value(found: Mapping[str, Any], name: str, default: Any) -> Any:
    """The value of a dotted name."""
    value: Any = found
    for part in name.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return default
        value = value[part]
    return value
