"""Builds once, of a single number, what libraries build from mappings of a config, so that a wrong value is known before a model is
loaded.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.trainer_pt_utils import AcceleratorConfig

from lockstep.engines.vllm.arguments import check_user_arguments
from lockstep.errors import InputError, one_line
from lockstep.model_files import build_empty
from lockstep.secret import without_secrets

if TYPE_CHECKING:
    from lockstep.training.config.online_config import OnlineConfig

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


def check_accelerator(given: Any) -> None:
    """Build accelerate's settings.

    Args:
        given: a mapping, its JSON, the path of a JSON file, or settings that are built.

    Raises:
        InputError: accelerate has no such setting, or the file cannot be read.
    """
    if given is None or isinstance(given, AcceleratorConfig):
        return
    with _sentence("accelerator_config", given):
        if isinstance(given, str) and given.startswith("{"):
            given = json.loads(given)
        AcceleratorConfig.from_json_file(given) if isinstance(given, str) else AcceleratorConfig(**given)


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
            LoraConfig(**given, target_modules=["layer"]), torch.nn.ModuleDict({"layer": torch.nn.Linear(1, 1)})
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
    """A model without memory. The other arguments mean something only with a model's files: reading the files checks them."""
    dtype = given.get("dtype", given.get("torch_dtype"))
    if isinstance(dtype, str) and dtype != "auto":
        dtype = getattr(torch, dtype)
    if not isinstance(dtype, torch.dtype | str | Mapping | None):
        raise TypeError(f"{dtype!r} is no dtype; give text such as float32")
    if isinstance(dtype, torch.dtype) and not dtype.is_floating_point:
        raise TypeError(f"{dtype} has no fractions; give float32 or bfloat16")
    attention = given.get("attn_implementation")
    # FlashAttention becomes sdpa, also where it is not installed (`training/forward/policy.py`).
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
    number = torch.ones(1, requires_grad=True)
    checkpoint(torch.exp, number, **{"use_reentrant": False, **given}).sum().backward()
