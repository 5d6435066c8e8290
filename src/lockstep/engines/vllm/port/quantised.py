"""What a vLLM engine in 8 bits holds: which modules are quantised, and the digests of their codes and scales.

It runs inside a worker (`WORKERS` of `lockstep.extensions`). The digests are compared with the codes of the trainer's
weights. For a second canary, the modules can leave their inputs as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.quantization.online.fp8 import Fp8PtpcOnlineLinearMethod

from lockstep.contract.probe import codes_digest

_SCHEMES = {Fp8PtpcOnlineLinearMethod: "fp8_per_channel"}


def quantization_of(module: Any) -> str:
    """The scheme in which a module computes; empty: none; the name of vLLM's class: one that is not supported."""
    method = getattr(module, "quant_method", None)
    if method is None or "Unquantized" in type(method).__name__:
        return ""
    # Some GPUs have another format of 8 bits.
    known = module.weight.dtype == torch.float8_e4m3fn if type(method) in _SCHEMES else False
    return _SCHEMES[type(method)] if known else type(method).__name__


def code_digests(worker: Any, names: Sequence[str]) -> dict[str, str]:
    """The digest of each named module's codes and scales (`codes_digest`); empty where they cannot be read.

    They cannot be read where workers share the module, and where vLLM's kernel has packed or padded them.
    """
    model = worker.model_runner.model
    own = {name for name, _ in model.named_modules()}
    return {
        name: _digest(model.get_submodule(path)) for name in names if (path := name.rpartition("/")[2]) in own
    }


def quantise_inputs(worker: Any, wanted: bool) -> bool:
    """Set whether the modules in 8 bits quantise their inputs, or multiply them with the values of their codes.

    A canary without quantised inputs shows what stands between the modules: it has the gap of the engine's dtype,
    because no code of an input can be rounded to its other neighbour.

    Returns False if it cannot be set here: vLLM runs a compiled program, which would not change, or a kernel has
    packed the codes.
    """
    modules = [
        m for m in worker.model_runner.model.modules() if isinstance(m, LinearBase) and quantization_of(m)
    ]
    readable = all(
        type(m.quant_method) in _SCHEMES and m.weight.dtype == torch.float8_e4m3fn for m in modules
    )
    if not modules or not readable or not worker.vllm_config.model_config.enforce_eager:
        return False
    for module in modules:
        # Each module has a method object of its own.
        if wanted:
            vars(module.quant_method).pop("apply", None)
        else:
            module.quant_method.apply = _with_values
    return True


def _with_values(layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    values = (layer.weight.t().float() * layer.weight_scale).to(x.dtype)
    return torch.nn.functional.linear(x, values, bias)


def _digest(module: Any) -> str:
    if not isinstance(module, LinearBase) or module.tp_size > 1:
        return ""
    # vLLM keeps the codes of this scheme as (inputs, outputs).
    codes, scales = module.weight.t(), module.weight_scale
    whole = (
        tuple(codes.shape) == (module.output_size, module.input_size) and scales.numel() == module.output_size
    )
    return codes_digest(codes, scales) if whole and codes.dtype == torch.float8_e4m3fn else ""
