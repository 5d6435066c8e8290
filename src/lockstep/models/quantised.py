"""Base weights in 4 bits (QLoRA, arXiv 2305.14314), by bitsandbytes: what is accepted, and the values that layers compute with.

Comes from: `models/policy.py`, which loads them, or a model of the user's. Goes to: `sync/adapters.py`, which sends an engine these
values and the adapter's delta, in full precision: an engine never quantises anew what the trainer has quantised.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch

from lockstep.errors import InputError


def check_quantization(config: Any, peft_config: Any) -> None:
    """Refuse quantisations whose weights could not be given to an engine, or not be trained.

    Args:
        config: a `transformers.BitsAndBytesConfig`, or None.

    Raises:
        InputError: it is of another kind, bitsandbytes is missing, or no adapter is asked for.
    """
    if config is None:
        return
    if isinstance(config, Mapping):
        raise InputError(
            f"quantization_config={dict(config)} is a mapping, which is not read: on the command line set use_peft and "
            "load_in_4bit in its place (4 bits are all that is supported); in Python give the trainer "
            "quantization_config=BitsAndBytesConfig(load_in_4bit=True) beside a peft_config"
        )
    if not getattr(config, "load_in_4bit", False):
        raise InputError(
            f"quantization_config is a {type(config).__name__} that does not load in 4 bits, which is not supported: "
            "give a BitsAndBytesConfig(load_in_4bit=True), or leave it out"
        )
    if peft_config is None:
        raise InputError(
            "quantised weights cannot be trained themselves: give a peft_config beside quantization_config"
        )
    try:
        import bitsandbytes  # noqa: F401
    except ImportError as error:
        raise InputError("quantization_config needs bitsandbytes; install lockstep-rl[quantised]") from error


def is_quantised(parameter: torch.Tensor) -> bool:
    """Whether a parameter holds 4-bit codes of bitsandbytes'."""
    return type(parameter).__name__ == "Params4bit"


def dequantised(parameter: Any) -> torch.Tensor:
    """The float32 values of a quantised parameter: a layer that computes in float32 multiplies with exactly these.

    Raises:
        InputError: its codes lie in the order of bitsandbytes' CPU inference, which no training can follow.
    """
    import bitsandbytes

    # A state that is shared with the layer, so that only a copy is told another dtype.
    state = copy.copy(_state(parameter))
    state.dtype = torch.float32
    return bitsandbytes.functional.dequantize_4bit(parameter.data, state)


def outline_of(parameter: Any) -> torch.Tensor:
    """What `dequantised` gives, without memory (device `meta`)."""
    return torch.empty(_state(parameter).shape, dtype=torch.float32, device="meta")


def keep_order(model: torch.nn.Module) -> None:
    """Keep bitsandbytes from packing weights anew for inference.

    On a CPU with AVX-512 BF16 its layers do so in their first forward in eval mode without a gradient, a look at a fresh model
    say; from then on no gradient passes through them, in silence (bitsandbytes 0.50.2, `Linear4bit.forward`).

    Raises:
        InputError: a layer has been packed already.
    """
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            _state(module.weight)
            module.support_avx512bf16_for_cpu = False  # type: ignore[assignment]


def _state(parameter: Any) -> Any:
    if getattr(parameter.quant_state, "packing_format_for_cpu", False):
        raise InputError(
            "the model's 4-bit weights are packed for inference (it was run in eval mode before), and no gradient passes through "
            "them: give the trainer the model's name and a quantization_config, or a model that was not run yet"
        )
    return parameter.quant_state
