"""The two parts of a model with an adapter, each as a source of a push: its base weights, and the adapter alone.

In `weights/merged.py` both parts become one merged model. It also finds the adapted layers, for both ways.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from lockstep.contract.adapters import DOWN, UP
from lockstep.errors import InputError
from lockstep.models.adapters import causal_model, head_name, is_adapted
from lockstep.models.quantised import is_quantised
from lockstep.weights.merged import AdaptedSource, active_factors, full_factors, is_dora, is_module_to_save
from lockstep.weights.source import PlainSource

_MERGED_INSTEAD = "; leave vllm_enable_lora out, and merged weights are sent instead"


class BaseSource(AdaptedSource):
    """The base weights of a model with an adapter, under the names of its checkpoint; 4-bit weights as float32."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__(model)
        self.adapted = dict(self._layers)
        self._layers = {}
        self.is_model_memory = self._shards is None and not any(map(is_quantised, self._parameters.values()))


class AdapterSource(PlainSource):
    """The tensors A and scaling × B of each adapted layer, in the engine's dtype of adapters.

    Their names are the layer's name with the suffix `DOWN` or `UP`. B is multiplied by the scaling in float32 and
    rounded once. The engine does not scale it again.
    """

    is_model_memory = False

    def __init__(self, model: torch.nn.Module, dtype: torch.dtype) -> None:
        base = BaseSource(model)
        self._shards, self._dtype = base._shards, dtype
        self.layers = {name.removesuffix(".weight"): layer for name, layer in base.adapted.items()}
        self._first = {layer + end: layer + end for layer in self.layers for end in (DOWN, UP)}

    @property
    def rounded(self) -> bool:
        """Whether the tensors are sent in half precision."""
        return self._dtype not in (torch.float32, torch.float64)

    def tensor(self, name: str) -> torch.Tensor:
        layer = self.layers[name.removesuffix(DOWN).removesuffix(UP)]
        down, up, scaling = full_factors(layer, self._shards)
        if name.endswith(DOWN):
            return down.to(self._dtype)
        return (up.to(torch.promote_types(up.dtype, torch.float32)) * scaling).to(self._dtype)

    def _meta_tensor(self, name: str) -> torch.Tensor:
        down, up = active_factors(self.layers[name.removesuffix(DOWN).removesuffix(UP)])
        return torch.empty((down if name.endswith(DOWN) else up).shape, dtype=self._dtype, device="meta")

    def delta(self, layer: str) -> torch.Tensor:
        """(outputs, inputs) float32: what the adapter adds to a layer's weight, computed from the sent tensors."""
        return self.tensor(layer + UP).float() @ self.tensor(layer + DOWN).float()


class EffectiveSource(BaseSource):
    """base + delta: the weights that have the same effect as the engine's base and its adapter together.

    Base and adapter are rounded to the engine's dtype first. Their sum is computed in float32. The module probe uses
    it.
    """

    def __init__(self, model: torch.nn.Module, dtype: torch.dtype) -> None:
        super().__init__(model)
        self._dtype = dtype
        self._adapter = AdapterSource(model, dtype)

    def tensor(self, name: str) -> torch.Tensor:
        base = super().tensor(name).to(self._dtype).float()
        layer = name.removesuffix(".weight")
        if layer not in self._adapter.layers:
            return base
        delta = self._adapter.delta(layer)
        # GPT-2 stores its weights as (inputs, outputs).
        return base + (delta.T if self._adapter.layers[layer].fan_in_fan_out else delta)


def check_alone(model: torch.nn.Module) -> None:
    """Refuse a model whose adapter cannot be sent alone."""
    if not is_adapted(model):
        raise InputError(
            "vllm_enable_lora sends an adapter alone, and the model has none: set use_peft (in Python: give "
            "a peft_config), or leave vllm_enable_lora out"
        )
    base = BaseSource(model)
    if base._shards is not None:
        raise InputError("vllm_enable_lora is not supported with a sharded model (FSDP)" + _MERGED_INSTEAD)
    if copied := next((name for name, module in model.named_modules() if is_module_to_save(module)), None):
        raise InputError(
            f"{copied} is trained as a whole (modules_to_save), which vLLM's LoRA cannot hold: leave "
            f"modules_to_save out" + _MERGED_INSTEAD
        )
    head = head_name(model).removesuffix(".weight")
    for name, layer in base.adapted.items():
        layer_name = name.rpartition(".")[0]
        if name.endswith("bias"):
            raise InputError(
                f"the adapter of {layer_name} has a bias, which vLLM's LoRA cannot hold: leave lora_bias out"
                + _MERGED_INSTEAD
            )
        if is_dora(layer):
            raise InputError("vLLM's LoRA cannot compute DoRA: leave use_dora out" + _MERGED_INSTEAD)
        if layer_name == head or isinstance(base.owning_module(name), torch.nn.Embedding):
            raise InputError(
                f"the adapter adapts {layer_name}: an embedding or the output head cannot be proven in "
                "vLLM's LoRA; take it out of target_modules" + _MERGED_INSTEAD
            )
    factors = {id(p) for layer in base.adapted.values() for p in active_factors(layer)}
    if trained := next(
        (n for n, p in model.named_parameters() if p.requires_grad and id(p) not in factors), None
    ):
        raise InputError(
            f"{trained} is trained beside the adapter, and vLLM's LoRA has no place for it: freeze it (with "
            f"PEFT: bias='none')" + _MERGED_INSTEAD
        )


def adapter_shape(model: torch.nn.Module) -> tuple[int, list[str]]:
    """The largest rank of an adapter, and the names of the layers that it adapts."""
    layers = dict(_layers(model))
    return max(len(active_factors(layer)[0]) for layer in layers.values()), list(layers)


def _layers(model: torch.nn.Module) -> Iterator[tuple[str, object]]:
    for name, layer in BaseSource(causal_model(model)).adapted.items():
        yield name.removesuffix(".weight"), layer
