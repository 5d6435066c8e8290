"""Faults of an engine that holds the weights in 8 bits: Q1 to Q5. They need a stage with `vllm_quantization`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch.nn.functional import linear

from lockstep.contract.tensors import LoadedWeights
from lockstep.extras.selftest.seams import Fault, Patch, is_vllm, loads_instead, vllm_worker
from lockstep.extras.verify.stage import Stage

# Codes and scales of a layer.
_Held = tuple[torch.Tensor, torch.Tensor]


def _after_loads(stage: Stage, change: Callable[[Any, _Held], object]) -> Patch:
    """The engine changes what it has made of the weights of one layer, and acknowledges what has arrived.

    `change` gets vLLM's layer, and the codes and scales that it had when the fault began.
    """
    layer, real = _layers(stage)[-1], stage.engine.load
    before = layer.weight.clone(), layer.weight_scale.clone()

    def load(tensors: Iterable[tuple[str, torch.Tensor]], base: str = "") -> LoadedWeights:
        found = real(tensors, base)
        with torch.no_grad():
            change(layer, before)
        return found

    return patch.object(stage.engine, "load", load)


def _not_quantised_again(layer: Any, before: _Held) -> None:
    layer.weight.copy_(before[0])
    layer.weight_scale.copy_(before[1])


def _older_scales(layer: Any, before: _Held) -> None:
    layer.weight_scale.copy_(before[1])


def _next_code(layer: Any, before: _Held) -> None:
    # The bits of the next code are the next number. The first code is not the largest one, after which there is none.
    codes = layer.weight.t().contiguous().view(torch.uint8)
    codes[0, 0] += 1 if int(codes[0, 0]) & 127 < 126 else -1
    layer.weight.copy_(codes.view(layer.weight.dtype).t())


def _scales_off(layer: Any, before: _Held) -> None:
    layer.weight_scale.mul_(1 + 2.0**-20)


def _not_quantised(stage: Stage) -> Patch:
    """One layer computes with its weight as it was sent."""
    layer, source = _layers(stage)[-1], stage.model
    (weight,) = [
        m.weight for n, m in source.named_modules() if n.endswith(f"layers.{_depth(stage) - 1}.mlp.down_proj")
    ]

    def apply(layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return linear(x, weight.detach().to(x), bias)

    return patch.object(layer.quant_method, "apply", apply)


def _one_step_off(stage: Stage) -> Patch:
    """One tensor arrives with errors of 2⁻⁴ of its numbers: as large as those of 8 bits."""
    name = f"model.layers.{_depth(stage) - 1}.mlp.down_proj.weight"

    def off(sent: list[tuple[str, torch.Tensor]]) -> list[tuple[str, torch.Tensor]]:
        noise = torch.Generator().manual_seed(0)
        signs = {n: torch.randint(0, 2, t.shape, generator=noise).to(t) * 2 - 1 for n, t in sent if n == name}
        return [(n, t * (1 + 2.0**-4 * signs[n]) if n in signs else t) for n, t in sent]

    return loads_instead(stage, off)


def _layers(stage: Stage) -> list[Any]:
    """vLLM's layers in 8 bits, in the model's order. The last one is the last layer's projection down."""
    modules = vllm_worker(stage).model_runner.model.modules()
    return [m for m in modules if getattr(m, "weight_scale", None) is not None]


def _depth(stage: Stage) -> int:
    return int(stage.model.config.get_text_config().num_hidden_layers)


def _in_8_bits(stage: Stage) -> str:
    quantised = is_vllm(stage) and stage.config.vllm_quantization is not None
    if quantised and not any(n.endswith("mlp.down_proj") for n, _ in stage.model.named_modules()):
        return "the last layer of the model is not an mlp.down_proj"
    return "" if quantised else "the engine does not hold the weights in 8 bits (vllm_quantization)"


QUANTISED_FAULTS = tuple(
    Fault(name, what, inject, needs=_in_8_bits)
    for name, what, inject in (
        (
            "Q1",
            "a layer is not quantised again after a push",
            partial(_after_loads, change=_not_quantised_again),
        ),
        ("Q2", "a layer keeps the scales of older weights", partial(_after_loads, change=_older_scales)),
        ("Q3", "one code of a layer is the next number", partial(_after_loads, change=_next_code)),
        ("Q3b", "the scales of a layer are off by 1e-6", partial(_after_loads, change=_scales_off)),
        ("Q4", "a layer that should be in 8 bits computes with the weight as it was sent", _not_quantised),
        ("Q5", "a tensor arrives with errors that are as large as those of 8 bits", _one_step_off),
    )
)
