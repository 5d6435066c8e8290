"""Fields of TRL and transformers that support one value here, have no effect here, or have other names here.

A script that sets the first two kinds runs. Any other value of the first kind is refused by name. Any value of the
second kind is taken, and a line says that it has no effect. A field of the third kind is refused with what to set
instead; removed fields of Lockstep are among them. `OnlineConfig` inherits the fields; other fields of the first two
kinds are transformers' own (`training/config/options.py`). docs/reference/migrating-from-trl.md gives reasons.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, Self

from lockstep.errors import InputError
from lockstep.training.config.option import option, refuse_other_value
from lockstep.training.config.options import with_key

_logger = logging.getLogger(__name__)


_ONE_VALUE = "Only one value is supported; see docs/reference/migrating-from-trl.md."

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


@dataclass
class OneValueFields:
    """The fields of TRL's configs, and two of transformers whose default is another one here."""

    trust_remote_code: bool = option(False, _ONE_VALUE, only="code that comes with a model is not run")
    disable_dropout: bool = option(
        True, "Switch dropout off. False is refused where the model or its adapter has dropout.", group="model"
    )
    ds3_gather_for_generation: bool = option(True, _ONE_VALUE, only="a push gathers one tensor at a time, as it must")
    pad_to_multiple_of: int | str | None = option(
        "auto", "Has no effect: nothing is padded.", no_effect="nothing is padded"
    )
    cache_implementation: str | None = option(None, _ONE_VALUE, only="the engines choose their own cache")
    use_transformers_continuous_batching: bool = option(False, _ONE_VALUE, only="use vLLM")
    transformers_continuous_batching_config: dict | str | None = option(None, _ONE_VALUE, only="use vLLM")
    use_transformers_paged: bool = option(False, _ONE_VALUE, only="use vLLM")
    log_completions_hub_repo: str | None = option(None, _ONE_VALUE, only="completions are kept in the run's directory")
    vllm_importance_sampling_cap: float | None = option(
        None, _ONE_VALUE, only="TRL has renamed it to vllm_importance_sampling_clip_max"
    )

    remove_unused_columns: bool | None = option(
        False, "Must stay false: rewards get all columns.", only="reward functions get all columns"
    )
    dataloader_drop_last: bool = option(
        True, "Must stay true: a generation is always whole.", only="a generation is always whole"
    )

    def __new__(cls, *_: Any, **given: Any) -> Self:
        for name in given.keys() & INSTEAD.keys():
            raise InputError(f"{cls.__name__} has no field {name!r}; {INSTEAD[name]}")
        return super().__new__(cls)

    def refuse_other_values(self) -> None:
        """Check the fields that support one value.

        Raises:
            InputError: a field has a value that is not supported.
        """
        for name, only in with_key(type(self), "only").items():
            refuse_other_value(name, getattr(self, name), only)

    def drop_what_has_no_effect(self, *, owner: bool) -> None:
        """Set the fields that have no effect to their neutral values.

        Args:
            owner: whether this process says so.
        """
        for name, (neutral, why) in with_key(type(self), "no_effect").items():
            given = getattr(self, name)
            if given not in (neutral, None) and owner:
                _logger.warning(f"{name}={given!r} has no effect here: {why}")
            setattr(self, name, neutral)
