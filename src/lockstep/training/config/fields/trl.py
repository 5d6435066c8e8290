"""Fields of TRL and transformers that support one value here, have no effect here, or have other names here.

A script that sets the first two kinds runs. Any other value of the first kind is refused by name. Any value of the
second kind is taken, and a line says that it has no effect. A field of the third kind is refused with what to set
instead; removed fields of Lockstep are among them. `OnlineConfig` inherits the fields. docs/reference/migrating-from-trl.md
gives reasons.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any, Self

from lockstep.errors import InputError

_logger = logging.getLogger(__name__)


def doc(text: str, **metadata: Any) -> dict[str, Any]:
    """Metadata of a field: its line in `--help`."""
    return {"help": text, **metadata}


_ONE_VALUE = doc("Only one value is supported; see docs/reference/migrating-from-trl.md.")

# Per name: the supported values, and why others are refused.
ONE_VALUE: dict[str, tuple[tuple[Any, ...], str]] = {
    "trust_remote_code": ((False,), "code that comes with a model is not run"),
    "ds3_gather_for_generation": ((True,), "a push gathers one tensor at a time, as it must"),
    "cache_implementation": ((None,), "the engines choose their own cache"),
    "use_transformers_continuous_batching": ((False,), "use vLLM"),
    "transformers_continuous_batching_config": ((None,), "use vLLM"),
    "use_transformers_paged": ((False,), "use vLLM"),
    "log_completions_hub_repo": ((None,), "completions are kept in the run's directory"),
    "vllm_importance_sampling_cap": ((None,), "TRL has renamed it to vllm_importance_sampling_clip_max"),
}


# Fields of TrainingArguments that Lockstep's step does not use, or that would break it: the only supported value, and the reason.
UNSUPPORTED: dict[str, tuple[object, str]] = {
    "fp16": (
        False,
        "float16 needs a loss scaler, which multiplies the gradients that the proofs compare and leaves out steps; use bf16, or "
        "neither for float32",
    ),
    "auto_find_batch_size": (
        False,
        "the batch is a part of the method; lower token_budget instead, which changes no result",
    ),
    "ignore_data_skip": (False, "a resumed run would get other prompts than the run without a break"),
    "enable_jit_checkpoint": (
        False,
        "its handler of SIGTERM would replace Lockstep's, and the run would end as if it were finished; the commands write a "
        "checkpoint at SIGTERM without it",
    ),
    "parallelism_config": (None, "use FSDP2 or DeepSpeed (docs/guides/sharding.md)"),
    "remove_unused_columns": (False, "reward functions get all columns"),
    "dataloader_drop_last": (True, "a generation is always whole"),
    "torch_compile": (False, "a compiled forward has not been compared with the engine"),
    "label_smoothing_factor": (0.0, "it has no meaning for these losses"),
    "neftune_noise_alpha": (None, "the engine has no such noise"),
    "train_sampling_strategy": ("random", "use shuffle_dataset"),
}

_SAMPLED = "an evaluation samples with the engine, in the engine's dtype"
_NO_OUTPUTS = "an evaluation samples, and gathers no outputs of the model"
_UNWRAPPED = "the model is not wrapped by DistributedDataParallel"

# Fields without an effect here: the value that the rest of the code sees, and the reason.
WITHOUT_EFFECT: dict[str, tuple[Any, str]] = {
    "dataloader_num_workers": (0, "prompts are token ids before training begins"),
    "pad_to_multiple_of": ("auto", "nothing is padded"),
    "bf16_full_eval": (False, _SAMPLED),
    "fp16_full_eval": (False, _SAMPLED),
    "prediction_loss_only": (False, _NO_OUTPUTS),
    "eval_accumulation_steps": (None, _NO_OUTPUTS),
    "eval_do_concat_batches": (True, _NO_OUTPUTS),
    "include_for_metrics": ([], _NO_OUTPUTS),
    "batch_eval_metrics": (False, _NO_OUTPUTS),
    "ddp_bucket_cap_mb": (None, _UNWRAPPED),
    "ddp_find_unused_parameters": (None, _UNWRAPPED),
}

# What TRL or an earlier Lockstep calls a field and is none here: what a user sets instead.
INSTEAD = {
    "max_prompt_length": "no prompt is cut here: drop rows that are too long, or raise vllm_max_model_length",
    **dict.fromkeys(
        ("dtype", "torch_dtype"),
        "bf16 says in what the trainer computes, engine_dtype in what the engine does, and model_init_kwargs: {dtype: …} how the "
        "trained weights are held",
    ),
    "overlap_rewards": "it was removed; max_staleness has its purpose: a server samples later generations while rewards are "
    "computed",
    "renderer": "it was removed: the model's chat template makes the ids between turns, and tool_format says how tool calls are "
    "written",
}


def refuse_unsupported(name: str, given: Any) -> None:
    """Check one field of `UNSUPPORTED`.

    Raises:
        InputError: the value is not supported.
    """
    value, why = UNSUPPORTED[name]
    if given != value:
        raise InputError(f"{name}={given!r} is not supported, only {value!r} is: {why}")


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
    disable_dropout: bool = field(
        default=True, metadata=doc("Switch dropout off. False is refused where the model or its adapter has dropout.")
    )
    ds3_gather_for_generation: bool = field(default=True, metadata=_ONE_VALUE)
    pad_to_multiple_of: int | str | None = field(default="auto", metadata=doc("Has no effect: nothing is padded."))
    cache_implementation: str | None = field(default=None, metadata=_ONE_VALUE)
    use_transformers_continuous_batching: bool = field(default=False, metadata=_ONE_VALUE)
    transformers_continuous_batching_config: dict | str | None = field(default=None, metadata=_ONE_VALUE)
    use_transformers_paged: bool = field(default=False, metadata=_ONE_VALUE)
    log_multimodal: bool = field(default=True, metadata=_ONE_VALUE)
    log_completions_hub_repo: str | None = field(default=None, metadata=_ONE_VALUE)
    vllm_importance_sampling_cap: float | None = field(default=None, metadata=_ONE_VALUE)

    def __new__(cls, *_: Any, **given: Any) -> Self:
        for name in given.keys() & INSTEAD.keys():
            raise InputError(f"{cls.__name__} has no field {name!r}; {INSTEAD[name]}")
        return super().__new__(cls)

    def refuse_other_values(self) -> None:
        """Check the fields.

        Raises:
            InputError: a field has a value that is not supported.
        """
        for name in ONE_VALUE:
            refuse_other_value(name, getattr(self, name))

    def drop_what_has_no_effect(self, *, owner: bool) -> None:
        """Set the fields of `WITHOUT_EFFECT` to their neutral values.

        Args:
            owner: whether this process says so.
        """
        for name, (neutral, why) in WITHOUT_EFFECT.items():
            given = getattr(self, name)
            if given not in (neutral, None) and owner:
                _logger.warning(f"{name}={given!r} has no effect here: {why}")
            setattr(self, name, neutral)
