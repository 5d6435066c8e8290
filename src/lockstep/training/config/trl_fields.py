"""Fields of TRL that support one value here. A script that sets them runs; any other value is refused by name.

`training/config/online_config.py` inherits them. The error and docs/migrating-from-trl.md say why other values are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lockstep.errors import InputError


def doc(text: str, **metadata: Any) -> dict[str, Any]:
    """Metadata of a field: its line in `--help`."""
    return {"help": text, **metadata}


def check_bounds(config: Any, bounds: Mapping[str, tuple[float, float | None]]) -> None:
    """Check that numbers lie within their bounds.

    Args:
        bounds: per field, the smallest and the largest value (None: no limit). A field that is None is not checked.

    Raises:
        InputError: a number is out of bounds.
    """
    for name, (low, high) in bounds.items():
        value = getattr(config, name)
        if value is not None and not (value >= low and (high is None or value <= high)):
            most = "" if high is None else f" and at most {high:g}"
            raise InputError(f"{name}={value}; it must be at least {low:g}{most}")


_ONE_VALUE = doc("Only one value is supported; see docs/migrating-from-trl.md.")
_SHARED_SUPPORT = "trainer and engine must give a token the same support"
_VLLM_ARGUMENT = "give it in vllm_engine_kwargs, or to 'lockstep serve'"

# Per name: the supported values, and why others are refused.
ONE_VALUE: dict[str, tuple[tuple[Any, ...], str]] = {
    "trust_remote_code": ((False,), "code that comes with a model is not run"),
    "router_aux_loss_coef": ((None, 0.0), "the routers' auxiliary loss is not supported yet"),
    "disable_dropout": ((True,), "dropout is always off: the policy that is trained must be the one that sampled"),
    "ds3_gather_for_generation": ((True,), "DeepSpeed is not supported yet"),
    "pad_to_multiple_of": (("auto", None), "nothing is padded here"),
    "top_p": ((1.0,), _SHARED_SUPPORT),
    "top_k": ((0,), _SHARED_SUPPORT),
    "min_p": ((None,), _SHARED_SUPPORT),
    "repetition_penalty": ((1.0,), _SHARED_SUPPORT),
    "generation_kwargs": ((None, {}), "use the fields temperature, max_completion_length and stop_strings"),
    "cache_implementation": ((None,), "the engines choose their own cache"),
    "vllm_model_impl": (("vllm", "auto"), "only vLLM's own model implementations can be proven"),
    "vllm_enable_sleep_mode": ((False,), "sleep mode is not supported yet; lower vllm_gpu_memory_utilization instead"),
    "vllm_structured_outputs_regex": ((None,), _SHARED_SUPPORT),
    "vllm_tensor_parallel_size": ((1,), "an engine in this process cannot be split; " + _VLLM_ARGUMENT),
    "use_transformers_continuous_batching": ((False,), "use vLLM"),
    "transformers_continuous_batching_config": ((None,), "use vLLM"),
    "use_transformers_paged": ((False,), "use vLLM"),
    "log_multimodal": ((True, False), "images are not supported yet"),
    "log_completions_hub_repo": ((None,), "completions are kept in the run's directory"),
    "max_tool_calling_iterations": ((None,), "tools are not supported yet"),
    "vllm_importance_sampling_cap": ((None,), "TRL has renamed it to vllm_importance_sampling_clip_max"),
}


# Fields of TrainingArguments that Lockstep's step does not use, or that would break it, with the only supported value.
UNSUPPORTED: dict[str, object] = {
    "fp16": False,
    "auto_find_batch_size": False,
    "load_best_model_at_end": False,
    "full_determinism": False,
    "ignore_data_skip": False,
    "bf16_full_eval": False,
    "fp16_full_eval": False,
    "parallelism_config": None,
    "remove_unused_columns": False,
    "dataloader_drop_last": True,
    "torch_compile": False,
    "deepspeed": None,
    "label_smoothing_factor": 0.0,
    "neftune_noise_alpha": None,
    "save_only_model": False,
    "include_num_input_tokens_seen": "no",
    "torch_empty_cache_steps": None,
    "dataloader_num_workers": 0,
    "resume_from_checkpoint": None,
    "train_sampling_strategy": "random",
}


def refuse_unsupported(name: str, given: Any) -> None:
    """Check one field of `UNSUPPORTED`.

    Raises:
        InputError: the value is not supported.
    """
    if given != UNSUPPORTED[name]:
        raise InputError(f"{name}={given!r} is not supported yet; only {UNSUPPORTED[name]!r} is")


def refuse_other_value(name: str, given: Any) -> None:
    """Check one field of `ONE_VALUE`.

    Raises:
        InputError: the value is not supported.
    """
    values, why = ONE_VALUE[name]
    if given not in values:
        raise InputError(f"{name}={given!r} is not supported, only {values[0]!r} is: {why}")


@dataclass
class OneValueFields:
    """The fields of TRL's configs that `ONE_VALUE` lists."""

    trust_remote_code: bool = field(default=False, metadata=_ONE_VALUE)
    router_aux_loss_coef: float | None = field(default=None, metadata=_ONE_VALUE)
    disable_dropout: bool = field(default=True, metadata=_ONE_VALUE)
    ds3_gather_for_generation: bool = field(default=True, metadata=_ONE_VALUE)
    pad_to_multiple_of: str | None = field(default="auto", metadata=_ONE_VALUE)
    top_p: float = field(default=1.0, metadata=_ONE_VALUE)
    top_k: int = field(default=0, metadata=_ONE_VALUE)
    min_p: float | None = field(default=None, metadata=_ONE_VALUE)
    repetition_penalty: float = field(default=1.0, metadata=_ONE_VALUE)
    generation_kwargs: dict | str | None = field(default=None, metadata=_ONE_VALUE)
    cache_implementation: str | None = field(default=None, metadata=_ONE_VALUE)
    vllm_model_impl: str = field(default="vllm", metadata=_ONE_VALUE)
    vllm_enable_sleep_mode: bool = field(default=False, metadata=_ONE_VALUE)
    vllm_structured_outputs_regex: str | None = field(default=None, metadata=_ONE_VALUE)
    vllm_tensor_parallel_size: int = field(default=1, metadata=_ONE_VALUE)
    use_transformers_continuous_batching: bool = field(default=False, metadata=_ONE_VALUE)
    transformers_continuous_batching_config: dict | str | None = field(default=None, metadata=_ONE_VALUE)
    use_transformers_paged: bool = field(default=False, metadata=_ONE_VALUE)
    log_multimodal: bool = field(default=True, metadata=_ONE_VALUE)
    log_completions_hub_repo: str | None = field(default=None, metadata=_ONE_VALUE)
    max_tool_calling_iterations: int | None = field(default=None, metadata=_ONE_VALUE)
    vllm_importance_sampling_cap: float | None = field(default=None, metadata=_ONE_VALUE)

    def refuse_other_values(self) -> None:
        """Check the fields.

        Raises:
            InputError: a field has a value that is not supported.
        """
        for name in ONE_VALUE:
            refuse_other_value(name, getattr(self, name))
