"""Checks each field of a config by itself: numbers within their bounds, mappings that can be read, trackers that exist.

The checks come before `transformers.TrainingArguments` uses the fields. A value that would make the run wrong is
refused. A value that is only unusual is taken, and a line says so.
"""

from __future__ import annotations

import functools
import json
import logging
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import Field, fields
from typing import Any, NamedTuple, get_type_hints

from lockstep.errors import InputError

_logger = logging.getLogger(__name__)


class Bounds(NamedTuple):
    """The values that a number may have, and those that are usual.

    Attributes:
        low, high: smallest and largest value; None: no limit.
        above, below: whether `low` and `high` themselves are not allowed.
        usual: smallest and largest usual value.
    """

    low: float | None = None
    high: float | None = None
    above: bool = False
    below: bool = False
    usual: tuple[float, float] = (-math.inf, math.inf)

    def holds(self, value: float) -> bool:
        """Whether a number is within the bounds. NaN is not."""
        low, high = self.low, self.high
        return (low is None or (value > low if self.above else value >= low)) and (
            high is None or (value < high if self.below else value <= high)
        )

    def __str__(self) -> str:
        parts = []
        if self.low is not None:
            parts.append(f"{'above' if self.above else 'at least'} {self.low:g}")
        if self.high is not None:
            parts.append(f"{'below' if self.below else 'at most'} {self.high:g}")
        return " and ".join(parts)


SEED = Bounds(0, 2**32 - 1)
SHARE = Bounds(0, 1, above=True)
SECONDS = Bounds(0, above=True)
COUNT = Bounds(1)
PORT = Bounds(1, 65535)
CONTEXT = Bounds(2)

BOUNDS: dict[str, Bounds] = {
    # AdamW moves every weight by about the learning rate in each step.
    "learning_rate": Bounds(0, 1000, usual=(0, 1)),
    # vLLM samples at 0.01 if a temperature is lower. Far above 1000, log-probs do not depend on the policy any more.
    "temperature": Bounds(0.01, 1000, usual=(0.05, 10)),
    "max_steps": Bounds(1, 10**12),
    "num_train_epochs": Bounds(0, above=True),
    "reward_timeout": SECONDS,
    "max_unscored_generations": COUNT,
    "vllm_server_timeout": SECONDS,
    "beta": Bounds(0),
    "delta": Bounds(0, above=True),
    "adam_beta1": Bounds(0, 1, below=True),
    "adam_beta2": Bounds(0, 1, below=True),
    "adam_epsilon": Bounds(0),
    "weight_decay": Bounds(0),
    "max_grad_norm": Bounds(0),
    "warmup_steps": Bounds(0),
    "seed": SEED,
    "data_seed": SEED,
    "logging_steps": Bounds(0, above=True),
    "rollouts_size_limit": Bounds(0),
    "save_steps": Bounds(0, above=True),
    "eval_steps": Bounds(0, above=True),
    "save_total_limit": COUNT,
    "per_device_eval_batch_size": COUNT,
    "generation_batch_size": COUNT,
    "vllm_server_port": PORT,
    "vllm_group_port": Bounds(0, 65535),
    "vllm_gpu_memory_utilization": SHARE,
    "vllm_max_model_length": CONTEXT,
    "vllm_importance_sampling_clip_max": Bounds(0, above=True),
    "vllm_importance_sampling_clip_min": Bounds(0),
    "vllm_max_num_seqs": COUNT,
    "token_budget": COUNT,
    "ddp_timeout": COUNT,
    "logits_chunk_size": COUNT,
    "gradient_accumulation_steps": COUNT,
    "per_device_train_batch_size": COUNT,
    "num_completions_to_print": COUNT,
    "max_completion_length": COUNT,
    "max_thinking_length": COUNT,
    "num_iterations": COUNT,
    "num_generations_eval": COUNT,
    "steps_per_generation": COUNT,
    "ref_model_sync_steps": COUNT,
    "ref_model_mixup_alpha": SHARE,
    "epsilon": Bounds(0),
    "epsilon_high": Bounds(0),
    "top_entropy_quantile": SHARE,
    "sapo_temperature_pos": Bounds(0, above=True),
    "sapo_temperature_neg": Bounds(0, above=True),
    "gamma": Bounds(0, 1),
    "lam": Bounds(0, 1),
    "vf_coef": Bounds(0),
    "router_aux_loss_coef": Bounds(0),
    "cliprange_value": Bounds(0),
    "max_tool_calling_iterations": Bounds(0),
    "tool_timeout": SECONDS,
    "agent_timeout": SECONDS,
    "gateway_port": Bounds(0, 65535),
    "vllm_tensor_parallel_size": COUNT,
}
# "No bound" and "no clipping" are written as infinity.
_MAY_BE_INFINITE = frozenset(
    {
        "max_grad_norm",
        "epsilon",
        "epsilon_high",
        "delta",
        "vllm_importance_sampling_clip_max",
        "off_policy_mask_threshold",
    }
)
# Values with a meaning of their own, outside the bounds.
_SPECIAL: dict[str, tuple[Any, ...]] = {"max_steps": (-1,), "beta": ([],)}


def check_bounds(given: Any, bounds: Mapping[str, Bounds]) -> None:
    """Check that numbers lie within their bounds.

    Args:
        given: has an attribute for each name. One that is None is not checked.

    Raises:
        InputError: a number is out of bounds.
    """
    for name, allowed in bounds.items():
        value = getattr(given, name)
        if value is not None:
            _check_within(name, value, allowed)


def _check_within(name: str, value: float, allowed: Bounds) -> None:
    if not allowed.holds(value):
        raise InputError(f"{name}={value}; it must be {allowed}")


def check_fields(config: Any) -> None:
    """Check the fields of a config, before anything uses them.

    Raises:
        InputError: a number is NaN, infinite or out of bounds; a mapping cannot be read; a tracker does not exist.
    """
    kinds: Any = type(config)
    types = _types(kinds)
    for field in fields(config):
        _check_kind(field, getattr(config, field.name, None), types[field.name])
        for value in _numbers(getattr(config, field.name, None)):
            check_number(field.name, value)
    for name in config._VALID_DICT_FIELDS:
        _check_mapping(name, getattr(config, name, None))
    check_trackers(config.report_to)
    _check_list("reward_weights", config.reward_weights, int | float, "numbers")
    _check_list("stop_strings", config.stop_strings, str, "texts")
    if any(not text for text in config.stop_strings or ()):
        raise InputError("stop_strings: an empty string would end every completion at once")


@functools.cache
def _types(config_class: type) -> dict[str, str]:
    """The type of each field, as text. The parser of transformers changes `Field.type`, so that it is not used here."""
    return {name: str(found) for name, found in get_type_hints(config_class).items()}


def _check_kind(field: Field, value: Any, kind: str) -> None:
    """Refuse another kind of value for a number. On the command line, the parser has done it already."""
    is_number = isinstance(field.default, int | float) and not isinstance(field.default, bool)
    may_be_none = "None" in kind or "Optional" in kind
    if not is_number or (value is None and may_be_none):
        return
    if not isinstance(value, int | float) or (isinstance(value, bool) and "bool" not in kind):
        raise InputError(f"{field.name}={value!r:.80}; it must be a number")


def _check_list(name: str, value: Any, kind: Any, what: str) -> None:
    if value is not None and not (isinstance(value, list | tuple) and all(isinstance(entry, kind) for entry in value)):
        raise InputError(f"{name}={value!r:.80}; it must be a list of {what}")


def _numbers(value: Any) -> Iterator[float]:
    for entry in value if isinstance(value, list | tuple) else [value]:
        if isinstance(entry, int | float) and not isinstance(entry, bool):
            yield entry


def check_number(name: str, value: float) -> None:
    """Check one number of a field.

    Raises:
        InputError: it is NaN, infinite or out of the field's bounds.
    """
    if isinstance(value, float) and (math.isnan(value) or (math.isinf(value) and name not in _MAY_BE_INFINITE)):
        raise InputError(f"{name}={value}; it must be a finite number")
    bounds = BOUNDS.get(name)
    if bounds is None or value in _SPECIAL.get(name, ()):
        return
    _check_within(name, value, bounds)
    low, high = bounds.usual
    if not low <= value <= high:
        _logger.warning(f"{name}={value:g} is unusual (usually {low:g} to {high:g})")


def _check_mapping(name: str, value: Any) -> None:
    if not isinstance(value, str) or not value.startswith("{"):
        return
    try:
        json.loads(value)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{name}={value:.80} is not a mapping in JSON: {error}") from error


def check_trackers(report_to: Any) -> None:
    """Refuse trackers that transformers does not know, before a model is loaded.

    Raises:
        InputError: there is no such tracker.
    """
    from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

    known = {*INTEGRATION_TO_CALLBACK, "all", "none"}
    named = [report_to] if isinstance(report_to, str) else report_to or ()
    for name in named:
        if name not in known:
            raise InputError(f"report_to: there is no tracker {name!r}; there are {', '.join(sorted(known))}")


def check_installed(report_to: Iterable[str]) -> None:
    """Refuse trackers that this machine does not have. transformers would raise after the model is loaded.

    Raises:
        InputError: a tracker is not installed.
    """
    from transformers.integrations.integration_utils import get_available_reporting_integrations

    # transformers does not say of these two whether they are there.
    here = {*get_available_reporting_integrations(), "azure_ml", "flyte", "all", "none"}
    if missing := [name for name in report_to if name not in here]:
        raise InputError(
            f"report_to: the tracker {missing[0]} is not installed, or a variable of the environment switches it off; install it, "
            "or leave it out"
        )
