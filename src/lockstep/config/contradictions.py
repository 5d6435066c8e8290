"""Checks fields that can contradict each other, and what libraries build of a config's mappings.

The first are staleness, corrections and the best model. The second are built once, of a single number, so that a wrong
value is known before a model is loaded.
"""

from __future__ import annotations

import copy
import json
import logging
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, LlamaConfig, Trainer, get_scheduler
from transformers.trainer_pt_utils import AcceleratorConfig
from transformers.utils import is_torch_tf32_available

from lockstep.config.effect import BY_METRIC
from lockstep.config.option import refuse_other_value, value_of
from lockstep.config.table import with_key
from lockstep.engines.vllm.arguments import check_quantization, check_user_arguments
from lockstep.errors import InputError, one_line
from lockstep.files import read_settings
from lockstep.model_files import build_empty
from lockstep.safe_text import without_secrets

if TYPE_CHECKING:
    from lockstep.config.run import OnlineConfig

_logger = logging.getLogger(__name__)


# What a library raises about a value that it cannot use.
UNUSABLE = (
    ValueError, TypeError, AttributeError, KeyError, ArithmeticError, RuntimeError, ImportError, OSError,
)  # fmt: skip


def check_mappings(config: OnlineConfig) -> None:
    """Build what the mappings of a config describe.

    Raises:
        InputError: a library refuses a value. The error names the field and has the library's text.
    """
    check_user_arguments(set(_mapping(config, "vllm_engine_kwargs")), "vllm_engine_kwargs")
    _check("model_init_kwargs", _mapping(config, "model_init_kwargs"), _model)
    _check("gradient_checkpointing_kwargs", _mapping(config, "gradient_checkpointing_kwargs"), _recomputed)


def check_accelerator(given: Any) -> list[str]:
    """Build accelerate's settings.

    Returns a line if settings have no effect: those of data loaders and of a wrapped model.

    Args:
        given: a mapping, its JSON, the path of a JSON file, or settings that are built.

    Raises:
        InputError: accelerate has no such setting, the file cannot be read, or a setting changes the batch.
    """
    if given is None:
        return []
    with _sentence("accelerator_config", given):
        if isinstance(given, str):
            given = json.loads(given if given.startswith("{") else read_settings(Path(given)))
        made = given if isinstance(given, AcceleratorConfig) else AcceleratorConfig(**given)
    if (made.gradient_accumulation_kwargs or {}).get("num_steps", 1) != 1:
        raise InputError(
            "accelerator_config.gradient_accumulation_kwargs.num_steps: set gradient_accumulation_steps"
        )
    usual = AcceleratorConfig().to_dict()
    # A stream of rows sets `dispatch_batches` to false.
    neutral = {"dispatch_batches": False, "use_configured_state": made.use_configured_state}
    changed = [n for n, value in made.to_dict().items() if value not in (usual[n], neutral.get(n, usual[n]))]
    why = "every rank reads all rows before training begins, and the model is not wrapped"
    return [f"{', '.join(changed)} of accelerator_config: no effect here, because {why}"] if changed else []


def check_switches(config: OnlineConfig) -> None:
    """Refuse what transformers would answer with a bare `ValueError`, or take as another field.

    Raises:
        InputError: `tf32` or a compiled forward is asked for where there is none, or `debug` names what is not there.
    """
    # transformers would switch `torch_compile` on, which the user has not set.
    for name in ("torch_compile_backend", "torch_compile_mode"):
        refuse_other_value(name, getattr(config, name), with_key(type(config), "only")[name])
    if config.tf32 and not is_torch_tf32_available():
        raise InputError(
            "tf32=True needs an NVIDIA GPU of the Ampere generation or a later one; leave it out"
        )
    words = config.debug.split() if isinstance(config.debug, str) else map(value_of, config.debug or ())
    if unknown := [word for word in words if word != "underflow_overflow"]:
        raise InputError(f"debug={unknown[0]!r}; it must be underflow_overflow, or left out")


def check_adapter(peft_config: Any) -> None:
    """Put a LoRA adapter around a layer of a single number.

    Raises:
        InputError: PEFT cannot make an adapter with these values.
    """
    if peft_config is None:
        return
    from peft import LoraConfig, inject_adapter_in_model

    if not isinstance(peft_config, LoraConfig):
        return
    # What names modules of the model, or is computed from its weights, has no meaning here.
    given = {
        name: getattr(peft_config, name)
        for name in ("r", "lora_alpha", "lora_dropout", "use_rslora", "use_dora", "bias")
    }
    with _sentence("peft_config", given), torch.random.fork_rng(devices=[]):
        inject_adapter_in_model(
            LoraConfig(**given, target_modules=["layer"]),
            torch.nn.ModuleDict({"layer": torch.nn.Linear(1, 1)}),
        )


def _mapping(config: OnlineConfig, name: str) -> Mapping[str, Any]:
    given = getattr(config, name)
    if not isinstance(given, Mapping | None):
        raise InputError(f'{name}={given!r}; it must be a mapping, such as {{"key": 1}}')
    return given or {}


def _check(name: str, given: Mapping[str, Any], build: Callable[[Mapping[str, Any]], None]) -> None:
    if given:
        with _sentence(name, given):
            build(given)


@contextmanager
def _sentence(name: str, given: Any) -> Iterator[None]:
    try:
        yield
    except UNUSABLE as error:
        said = f"{type(error).__name__}: {one_line(error)}"
        raise InputError(f"{name}={without_secrets(given)} cannot be used: {said:.300}") from error


def _model(given: Mapping[str, Any]) -> None:
    """A model without memory.

    The other arguments mean something only with a model's files: reading the files checks them.
    """
    dtype = given.get("dtype", given.get("torch_dtype"))
    if isinstance(dtype, str) and dtype != "auto":
        dtype = getattr(torch, dtype)
    if not isinstance(dtype, torch.dtype | str | Mapping | None):
        raise TypeError(f"{dtype!r} is no dtype; give text such as float32")
    if isinstance(dtype, torch.dtype) and not dtype.is_floating_point:
        raise TypeError(f"{dtype} has no fractions; give float32 or bfloat16")
    attention = given.get("attn_implementation")
    # FlashAttention becomes sdpa, also where it is not installed (`learn/policy_and_reference.py`).
    if isinstance(attention, str) and "/" not in attention and "flash" not in attention.lower():
        sizes = {
            "vocab_size": 8,
            "hidden_size": 8,
            "intermediate_size": 8,
            "num_hidden_layers": 1,
            "num_attention_heads": 1,
        }
        with torch.device("meta"):
            build_empty(AutoModelForCausalLM, LlamaConfig(**sizes, attn_implementation=attention))


def _recomputed(given: Mapping[str, Any]) -> None:
    if not isinstance(given.get("use_reentrant", False), bool):
        raise TypeError(f"use_reentrant is {given['use_reentrant']!r}, and must be true or false")
    for name in ("every_n_layers", "offload"):
        if name in given:
            raise TypeError(f"{name} is not supported yet")
    number = torch.ones(1, requires_grad=True)
    checkpoint(torch.exp, number, **{"use_reentrant": False, **given}).sum().backward()


def check_staleness(config: OnlineConfig) -> None:
    """Check `max_staleness`.

    Raises:
        InputError: generations cannot be sampled that many steps ahead, or another field contradicts it.
    """
    if config.max_staleness == 0:
        return
    if config.max_staleness < 0 or config.max_staleness % config.optimizer_steps_per_generation:
        raise InputError(
            f"max_staleness={config.max_staleness}; it must be 0 or a multiple of the "
            f"{config.optimizer_steps_per_generation} optimizer steps of a generation"
        )
    if not config.vllm_importance_sampling_correction:
        raise InputError(
            "max_staleness samples with older weights, and vllm_importance_sampling_correction=false leaves that "
            "uncorrected; leave one of the two out"
        )


def check_corrections(config: OnlineConfig) -> None:
    """Check the bounds of the importance weights.

    Raises:
        InputError: there is no bound, or the lower bound is not below the upper one.
    """
    low, high = config.vllm_importance_sampling_clip_min, config.vllm_importance_sampling_clip_max
    if low is not None and high is not None and low >= high:
        raise InputError(
            f"vllm_importance_sampling_clip_min={low} must be below vllm_importance_sampling_clip_max={high}"
        )
    if config.vllm_importance_sampling_correction and low is None and high is None:
        raise InputError(
            "vllm_importance_sampling_correction needs a bound: set vllm_importance_sampling_clip_max, or switch it off"
        )


def check_quantised_sampling(config: OnlineConfig) -> None:
    """Check `vllm_quantization`.

    Raises:
        InputError: the engine cannot hold the weights in this way, or another field contradicts it.
    """
    if config.vllm_quantization is None:
        return
    check_quantization(config.vllm_quantization, config.engine_torch_dtype, "vllm_quantization")
    if not config.vllm_importance_sampling_correction:
        raise InputError(
            "vllm_quantization samples with weights in 8 bits, and vllm_importance_sampling_correction=false "
            "leaves that "
            "uncorrected; leave one of the two out"
        )
    for name, refused in {
        "use_vllm=false": config.use_vllm is False,
        "vllm_enable_lora": config.vllm_enable_lora,
        str(config.sharded_by): config.sharded_by is not None,
    }.items():
        if refused:
            raise InputError(f"{name} is not supported with vllm_quantization; leave one of the two out")


def complete_schedule(config: OnlineConfig) -> None:
    """Give a schedule that follows metrics the direction of its metric, unless the user has.

    torch's default is that smaller is better, which is wrong for a reward.
    """
    name, given = value_of(config.lr_scheduler_type), config.lr_scheduler_kwargs
    if name in BY_METRIC and isinstance(given, dict | None) and "mode" not in (given or {}):
        config.lr_scheduler_kwargs = {**(given or {}), "mode": "max" if config.greater_is_better else "min"}


def check_schedule(config: OnlineConfig) -> None:
    """Make the schedule of a single number, so that what is wrong with it is known before a model is loaded.

    Raises:
        InputError: it cannot be made, or has no rate at some step.
    """
    name, given = value_of(config.lr_scheduler_type), config.lr_scheduler_kwargs
    # The data decide how long the run is, if the config does not. A guess must be longer than the warm-up.
    warmup = config.get_warmup_steps(config.max_steps if config.max_steps > 0 else 1000)
    total = config.max_steps if config.max_steps > 0 else max(1000, 2 * warmup)
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=config.learning_rate)
    try:
        made = get_scheduler(name, optimizer, warmup, total, given)
        factors = (
            [
                made.lr_lambdas[0](s)
                for s in sorted({0, 1, warmup, *range(0, total, max(1, total // 100)), total})
            ]
            if hasattr(made, "lr_lambdas")
            else _reduced(name, given)
        )
        bad = [f for f in factors if isinstance(f, complex) or not math.isfinite(f) or f < 0]
    except UNUSABLE as error:
        said = f" with lr_scheduler_kwargs={given}" if given else ""
        raise InputError(
            f"lr_scheduler_type={name}{said} cannot be used: {error}; lr_scheduler_kwargs has its arguments, "
            f"and its numbers "
            "stand without quotation marks"
        ) from error
    if bad:
        raise InputError(
            f"lr_scheduler_type={name} multiplies learning_rate by {bad[0]} at some step; change lr_scheduler_kwargs"
        )
    if name == "constant_with_warmup" and given:
        raise InputError(
            f"lr_scheduler_type={name} takes no lr_scheduler_kwargs, and there are {given}; leave them out"
        )
    if 0 < config.max_steps < warmup and config.process_index == 0:
        _logger.warning(
            f"warmup_steps={warmup} is more than max_steps={config.max_steps}: learning_rate is never reached"
        )


def _reduced(name: str, given: Any) -> list[float]:
    """Rates of a schedule by metric whose metric stays as it is, as shares of the first: at once, without patience."""
    found = []
    for patience in ({}, {"patience": 0}):
        optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
        made = get_scheduler(name, optimizer, scheduler_specific_kwargs={**(given or {}), **patience})
        for _ in range(4):
            made.step(0.0)
            found.append(optimizer.param_groups[0]["lr"])
    return found


# These look at the modules of the model when they are made.
_OF_A_MODEL = ("galore", "apollo", "lomo", "adalomo")


def check_optimizer(config: OnlineConfig) -> None:
    """Make the optimizer of a single number, so that what is wrong with it is known before a model is loaded.

    DeepSpeed makes its own. A few look at the model and are made later: here only their package is looked for.

    Raises:
        InputError: it cannot be made.
    """
    name, given = value_of(config.optim), config.optim_args
    if config.zero is not None:
        return
    try:
        if name.startswith(_OF_A_MODEL):
            with suppress(ValueError, AttributeError):
                Trainer.get_optimizer_cls_and_kwargs(config)
            return
        made, settings = Trainer.get_optimizer_cls_and_kwargs(config)
        made([torch.nn.Parameter(torch.zeros(1))], **settings)
        if given and config.process_index == 0:
            other = copy.copy(config)
            other.optim_args = None
            if Trainer.get_optimizer_cls_and_kwargs(other) == (made, settings):
                _logger.warning(f"optim_args={given} changes nothing of optim={name}")
    except UNUSABLE as error:
        said = f" with optim_args={given}" if given else ""
        raise InputError(
            f"optim={name}{said} cannot be used: {type(error).__name__}: {one_line(error)}; optim_args has its "
            "arguments, as in momentum=0.9,nesterov=true"
        ) from error


def check_best_model(config: OnlineConfig) -> None:
    """Check that the best model of a run can be found. `run/files/checkpoints.py` places the checkpoints.

    Raises:
        InputError: the checkpoints are not where the evaluations are, or there are no evaluations.
    """
    steps = config.optimizer_steps_per_generation
    if config.saves_best:
        if value_of(config.eval_strategy) == "no":
            raise InputError(
                "save_strategy=best saves after an evaluation, and there is none; set eval_strategy"
            )
        every = config.eval_steps or 0
        if value_of(config.eval_strategy) == "steps" and (every < 1 or every % steps):
            raise InputError(
                f"save_strategy=best with eval_steps={every:g}: a run can go on only from where a generation "
                f"of {steps} optimizer "
                f"steps ends; make eval_steps a multiple of {steps}"
            )
        return
    if not config.load_best_model_at_end:
        return
    by_steps = value_of(config.save_strategy) == "steps"
    if by_steps and (config.save_steps < 1 or config.save_steps % steps):
        raise InputError(
            f"load_best_model_at_end with save_steps={config.save_steps:g}: checkpoints are only written "
            f"where a generation of "
            f"{steps} optimizer steps ends, which would not be where evaluations are; make save_steps a "
            f"multiple of {steps}"
        )
