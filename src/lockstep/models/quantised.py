"""Base weights in 4 bits (QLoRA, arXiv 2305.14314) by bitsandbytes: their settings, and the values of their codes.

The adapter's delta is added to these values, with which layers compute, and the engine gets the sum in full precision.
An engine never quantises again what the trainer has quantised.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch

from lockstep.errors import InputError, check_extra


def check_quantization(config: Any, peft_config: Any) -> None:
    """Refuse a quantisation whose weights could not be sent to an engine or could not be trained."""
    if config is None:
        return
    if isinstance(config, Mapping):
        raise InputError(
            f"quantization_config={dict(config)!r:.80} is a mapping, which is not supported: on the command line "
            "set use_peft and load_in_4bit instead (only 4 bits are supported); in Python give the trainer "
            "quantization_config=BitsAndBytesConfig(load_in_4bit=True) and a peft_config"
        )
    if not getattr(config, "load_in_4bit", False):
        raise InputError(
            f"quantization_config is a {type(config).__name__} that does not load in 4 bits, which is not "
            "supported: give a BitsAndBytesConfig(load_in_4bit=True), or leave it out"
        )
    if peft_config is None:
        raise InputError(
            "quantised weights cannot be trained themselves: give a peft_config beside quantization_config"
        )
    check_extra("quantization_config", "quantized", "bitsandbytes")


def is_quantised(parameter: torch.Tensor) -> bool:
    """Whether a parameter holds 4-bit codes of bitsandbytes."""
    return type(parameter).__name__ == "Params4bit"


def dequantised(parameter: Any) -> torch.Tensor:
    """The float32 values of a quantised parameter. A layer that computes in float32 multiplies with exactly these."""
    import bitsandbytes

    # The layer uses this state too. Therefore only a copy of it gets another dtype.
    state = copy.copy(_quant_state(parameter))
    state.dtype = torch.float32
    return bitsandbytes.functional.dequantize_4bit(parameter.data, state)


def meta_tensor_of(parameter: Any) -> torch.Tensor:
    """A tensor like the result of `dequantised`, without memory (device `meta`)."""
    return torch.empty(_quant_state(parameter).shape, dtype=torch.float32, device="meta")


def prevent_packing(model: torch.nn.Module) -> None:
    """Prevent bitsandbytes from packing weights for inference; refuse a model in which a layer has packed them.

    On a CPU with AVX-512 BF16, a layer packs its weights in its first forward in eval mode without a gradient, for
    example when somebody tries a new model. After that no gradient passes through the layer, and no error is raised
    (bitsandbytes 0.50.2, `Linear4bit.forward`).
    """
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            _quant_state(module.weight)
            module.support_avx512bf16_for_cpu = False  # type: ignore[assignment]


def _quant_state(parameter: Any) -> Any:
    if getattr(parameter.quant_state, "packing_format_for_cpu", False):
        raise InputError(
            "the model's 4-bit weights are packed for inference (it was run in eval mode before), and no "
            "gradient passes through them: give the trainer the model's name and a quantization_config, or "
            "a model that was not run yet"
        )
    return parameter.quant_state
