"""The weights of a model with an adapter, merged: base + delta, under the base model's names.

They are made one at a time in new memory. Merging in place would make the base weights drift (W5), and a failure
would leave the model merged (H7). The adapted layers are found here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from transformers.pytorch_utils import Conv1D

from lockstep.devices import rounds_products
from lockstep.errors import InputError
from lockstep.models.adapters import causal_model
from lockstep.models.parameters import checkpoint_tensors
from lockstep.models.quantised import dequantised, is_quantised, meta_tensor_of
from lockstep.shards.model import ShardedModel, is_sharded, sharded
from lockstep.weights.source import PlainSource

# Largest allowed difference between the outputs of a merged layer and of the layer with its adapter, divided by the
# rms of the outputs. By the dtype of the base weights. Largest values on tiny models, over 64 to 384 outputs: 9e-7 in
# float32, 0.027 in bfloat16 (`tests/weights/test_live.py`).
_TOLERANCES = {torch.float64: 1e-12, torch.float32: 5e-6}
_HALF_TOLERANCE = 0.08
_EMBEDDING_ROWS = 64
_DORA = ("DoraLinearVariant", "DoraEmbeddingVariant")


class _BaseParameter(NamedTuple):
    """One parameter of the model, and the layer that uses it.

    Attributes:
        name: the parameter's name in the base model, which is also its name in the engine.
        parameter: the values that the model uses, without a LoRA delta.
        original: the parameter that the base model has in the same place.
        owning_module: the plain module that owns the parameter.
        layer: the LoRA layer around `owning_module` if an adapter is active there, else None.
    """

    name: str
    parameter: torch.Tensor
    original: torch.Tensor
    owning_module: torch.nn.Module
    layer: Any


class AdaptedSource(PlainSource):
    """Weights of a model with LoRA (rsLoRA, DoRA) layers, each merged into new memory when it is read.

    Weights without an adapter are read as they are. Modules that were trained as a whole (`modules_to_save`) replace
    the originals. Adapter tensors are not sent. A delta is added in float32, or in float64 for float64 weights. The
    sum is rounded once, to the base weight's dtype. 4-bit weights (QLoRA) are sent as the float32 values that their
    codes stand for.

    Raises:
        InputError: the adapter is not LoRA, several adapters are active, one is merged in place, base layers are in 8
            bits, or the adapter unties tied weights.
    """

    is_model_memory = False

    def __init__(self, model: torch.nn.Module) -> None:
        inner = causal_model(model)
        self._shards = sharded(model)
        _check_kinds(model)
        parameters = _under_checkpoint_names(inner, list(_walk(inner, inner, "")))
        _check_ties(parameters)
        firsts: dict[object, str] = {}
        self._parameters = {f.name: f.parameter for f in parameters}
        self._first = {f.name: firsts.setdefault(id(f.original), f.name) for f in parameters}
        self._owning_modules = {f.name: f.owning_module for f in parameters}
        self._layers = {f.name: f.layer for f in parameters if f.layer is not None}

    def tensor(self, name: str) -> torch.Tensor:
        layer, parameter = self._layers.get(name), self._parameters[name]
        base = dequantised(parameter) if is_quantised(parameter) else _full_tensor(self._shards, parameter)
        if layer is None:
            return base
        adapter = _active_adapters(layer)[0]
        with torch.no_grad():
            if name.endswith("bias"):
                return _merged_bias(layer, adapter, base, self._shards)
            return _merged_weight(layer, adapter, base, self._shards)

    @staticmethod
    def unmerged(model: torch.nn.Module) -> dict[str, torch.Tensor]:
        return PlainSource.unmerged(causal_model(model))

    @staticmethod
    def merge_error(
        model: torch.nn.Module, source: PlainSource, name: str, merged: torch.Tensor, version: int
    ) -> tuple[float, float] | None:
        return _merge_error(model, source, name, merged, version)

    def owning_module(self, name: str) -> torch.nn.Module:
        return self._owning_modules[name]

    def _meta_tensor(self, name: str) -> torch.Tensor:
        parameter = self._parameters[name]
        return meta_tensor_of(parameter) if is_quantised(parameter) else super()._meta_tensor(name)


def _under_checkpoint_names(inner: torch.nn.Module, parameters: list[_BaseParameter]) -> list[_BaseParameter]:
    by_name = {f.name: f for f in parameters}
    return [
        # Experts have no adapter. Therefore a view of their memory is both `parameter` and `original`.
        by_name[p.parameter_name]._replace(name=p.name)
        if p.tensor is by_name[p.parameter_name].parameter
        else by_name[p.parameter_name]._replace(name=p.name, parameter=p.tensor, original=p.tensor)
        for p in checkpoint_tensors(inner, {f.name: f.parameter for f in parameters})
    ]


# ---- the walk
# -----------------------------------------------------------------------------------------------------------


def _walk(module: torch.nn.Module, original: torch.nn.Module, prefix: str) -> Iterator[_BaseParameter]:
    """Every parameter in the base model's order, once for each of its names.

    `original` is the base model's module in this place. It differs from `module` only inside `modules_to_save`.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    layer = None
    if isinstance(module, AuxiliaryTrainingWrapper):
        wrapper: Any = module
        module, original = _saved_module(wrapper, prefix), wrapper.original_module
    elif isinstance(module, BaseTunerLayer):
        layer = _checked_layer(module, prefix)
        module = original = module.get_base_layer()
    for name, parameter in module._parameters.items():
        if parameter is not None:
            _refuse_int8(parameter, prefix + name)
            delta_layer = layer if name == "weight" or (layer is not None and _has_bias(layer)) else None
            yield _BaseParameter(prefix + name, parameter, getattr(original, name), module, delta_layer)
    for name, child in module._modules.items():
        if child is not None:
            yield from _walk(child, getattr(original, name), f"{prefix}{name}.")


def _saved_module(wrapper: Any, prefix: str) -> torch.nn.Module:
    """The module that the model uses in a wrapper's place: the trained copy if it is active, else the original."""
    from peft.utils.other import ModulesToSaveWrapper

    if not isinstance(wrapper, ModulesToSaveWrapper):
        raise InputError(
            f"{prefix.rstrip('.')} is a {type(wrapper).__name__}, which is not supported: beside LoRA "
            "layers, only whole modules (modules_to_save) can be trained and sent to an engine"
        )
    active = [name for name in wrapper.active_adapters if name in wrapper.modules_to_save]
    if wrapper.disable_adapters or not active:
        return wrapper.original_module
    return wrapper.modules_to_save[active[0]]


def _checked_layer(layer: Any, prefix: str) -> Any:
    """The LoRA layer, or None if no adapter is active in it. A layer that cannot be merged here is refused."""
    from peft.tuners import lora

    layer_name = prefix.rstrip(".")
    # Exact types: a subclass may compute something else. PEFT has Linear4bit only if bitsandbytes can be imported.
    is_supported = type(layer) in (lora.Linear, lora.Embedding, getattr(lora, "Linear4bit", None))
    if not is_supported or not isinstance(
        layer.get_base_layer(), torch.nn.Linear | torch.nn.Embedding | Conv1D
    ):
        raise InputError(
            f"{layer_name} is a {type(layer).__module__}.{type(layer).__name__} around a "
            f"{type(layer.get_base_layer()).__name__}, which is not supported: for an engine, only LoRA on "
            "linear layers (in full precision, or in 4 bits by bitsandbytes) and on embeddings can be merged"
        )
    if layer.merged:
        raise InputError(
            f"the adapter of {layer_name} is merged into the base weight; call unmerge_adapter() before training"
        )
    active = _active_adapters(layer)
    if len(active) > 1:
        raise InputError(
            f"{layer_name} has {len(active)} active adapters ({', '.join(active)}); exactly one is supported"
        )
    if not active:
        return None
    variant = type(layer.lora_variant.get(active[0])).__name__
    if variant not in ("NoneType", *_DORA):
        raise InputError(
            f"{layer_name} has LoRA of the kind {variant}, which is not supported; plain LoRA, rsLoRA and "
            f"DoRA are supported"
        )
    if _has_bias(layer) and getattr(layer.get_base_layer(), "bias", None) is None:
        raise InputError(
            f"the adapter adds a bias to {layer_name}, but the engine's model has no bias there; leave lora_bias out"
        )
    return layer


def _active_adapters(layer: Any) -> list[str]:
    return [] if layer.disable_adapters else [name for name in layer.active_adapters if name in layer.scaling]


def _has_bias(layer: Any) -> bool:
    return bool(layer.lora_bias.get(_active_adapters(layer)[0]))


def _refuse_int8(parameter: torch.Tensor, name: str) -> None:
    if type(parameter).__name__ == "Int8Params":
        raise InputError(
            f"{name} is quantised to 8 bits, which is not supported: load the model with "
            "BitsAndBytesConfig(load_in_4bit=True), or without a quantization_config"
        )


def _check_kinds(model: torch.nn.Module) -> None:
    """Check the kind of each adapter by its configuration: prompt and prefix adapters add no layers to check."""
    for name, config in getattr(model, "peft_config", {}).items():
        kind = getattr(config.peft_type, "value", config.peft_type)
        if kind != "LORA":
            raise InputError(
                f"adapter {name!r} is of the kind {kind}, which is not supported; only LoRA can be merged"
            )


def _check_ties(parameters: list[_BaseParameter]) -> None:
    """Check that the adapter leaves tied weights equal, because an engine keeps one copy of them."""
    first: dict[int, _BaseParameter] = {}
    for f in parameters:
        other = first.setdefault(id(f.original), f)
        if _memory_key(other) != _memory_key(f):
            raise InputError(
                f"{other.name} and {f.name} are tied in the model, but the adapter unties them, which an "
                f"engine cannot follow: "
                "give neither an adapter, or untie the model (tie_word_embeddings) and save it first"
            )


def _memory_key(f: _BaseParameter) -> object:
    """A key for the memory and the delta of a parameter. Parameters with equal keys always have equal values."""
    if f.layer is None:
        return _address(f.parameter)
    adapter = _active_adapters(f.layer)[0]
    factors = frozenset(map(_address, _factor_parameters(f.layer, adapter)))
    return _address(f.parameter), factors, f.layer.scaling[adapter], adapter in f.layer.lora_variant


def _address(tensor: torch.Tensor) -> int:
    # This rank's part of a sharded parameter may be empty, without an address. Tied modules share one parameter object.
    return id(tensor) if is_sharded(tensor) else tensor.data_ptr()


# ---- merging
# ------------------------------------------------------------------------------------------------------------


def _full_tensor(shards: ShardedModel | None, parameter: torch.Tensor) -> torch.Tensor:
    """The full tensor of a parameter: its own memory, or gathered from all ranks if it is sharded."""
    return parameter.detach() if shards is None else shards.gather(parameter)


def full_factors(layer: Any, shards: ShardedModel | None) -> tuple[torch.Tensor, torch.Tensor, float]:
    """The full factors A (rank, inputs) and B (outputs, rank) of a layer's active adapter, and its scaling."""
    down, up = (_full_tensor(shards, factor) for factor in active_factors(layer))
    return down, up, float(layer.scaling[_active_adapters(layer)[0]])


def active_factors(layer: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The parameters A and B of a layer's active adapter. Sharded parameters are not gathered."""
    return _factor_parameters(layer, _active_adapters(layer)[0])


def is_dora(layer: Any) -> bool:
    """Whether a layer's active adapter is DoRA, which has a trained magnitude per output."""
    return _active_adapters(layer)[0] in layer.lora_variant


def is_module_to_save(module: torch.nn.Module) -> bool:
    """Whether a module was trained as a whole beside the adapter (`modules_to_save`)."""
    from peft.utils.other import AuxiliaryTrainingWrapper

    return isinstance(module, AuxiliaryTrainingWrapper)


def _factors(layer: Any, adapter: str, shards: ShardedModel | None) -> tuple[torch.Tensor, torch.Tensor]:
    """The two factors of the delta: `left @ right` has the shape of the layer's weight."""
    down, up = (_full_tensor(shards, factor) for factor in _factor_parameters(layer, adapter))
    if adapter in layer.lora_embedding_A:
        return down.T, up.T
    return (down.T, up.T) if layer.fan_in_fan_out else (up, down)


def _factor_parameters(layer: Any, adapter: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The parameters A and B of a layer."""
    if adapter in layer.lora_embedding_A:
        return layer.lora_embedding_A[adapter], layer.lora_embedding_B[adapter]
    return layer.lora_A[adapter].weight, layer.lora_B[adapter].weight


def _merged_weight(layer: Any, adapter: str, base: torch.Tensor, shards: ShardedModel | None) -> torch.Tensor:
    """base + scaling × delta, in new memory. DoRA (arXiv 2402.09353) scales each output to its trained magnitude."""
    left, right = (factor.to(_wider_dtype(base)) for factor in _factors(layer, adapter, shards))
    total = torch.addmm(base.to(_wider_dtype(base)), left, right, alpha=layer.scaling[adapter])
    if adapter in layer.lora_variant:
        # One output of a layer is one row of its weight, or one column if the weight is stored transposed.
        transposed = layer.fan_in_fan_out or adapter in layer.lora_embedding_A
        length = total.norm(dim=0 if transposed else 1, keepdim=True)
        magnitude = _full_tensor(shards, layer.lora_magnitude_vector[adapter].weight)
        total.mul_(magnitude.to(total.dtype).view_as(length) / length)
    return total.to(base.dtype)


def _merged_bias(layer: Any, adapter: str, base: torch.Tensor, shards: ShardedModel | None) -> torch.Tensor:
    added = _full_tensor(shards, layer.lora_B[adapter].bias).to(_wider_dtype(base))
    return torch.add(base.to(_wider_dtype(base)), added, alpha=layer.scaling[adapter]).to(base.dtype)


def _wider_dtype(base: torch.Tensor) -> torch.dtype:
    return torch.promote_types(base.dtype, torch.float32)


# ---- a merged weight, and the live layer
# --------------------------------------------------------------------------------


def _merge_error(
    model: torch.nn.Module, source: PlainSource, name: str, merged: torch.Tensor, version: int
) -> tuple[float, float] | None:
    layer_name = name.removesuffix(".weight")
    layer: Any = causal_model(model).get_submodule(layer_name)
    base: Any = source.owning_module(name)
    if merged.dim() != 2:
        # A norm that was trained as a whole (`modules_to_save`).
        return None
    if is_quantised(base.weight) and not base.training:
        # A forward would pack the 4-bit weights for inference, and nothing would unpack them again.
        return None
    inputs = _inputs(base, merged, version)
    shards = sharded(model)
    bias = source.tensor(f"{layer_name}.bias") if f"{layer_name}.bias" in source.names else None
    with torch.no_grad(), without_dropout(layer), torch.autocast(merged.device.type, enabled=False):
        # The layer runs alone: no forward of the whole model gathers its sharded weights.
        with nullcontext() if shards is None else shards.whole_around(layer):
            layer_output = layer(inputs)
        merged_output = _merged_output(base, merged, bias, inputs)
    difference = float((layer_output - merged_output).abs().max())
    return difference, _tolerance(base.weight) * float(merged_output.square().mean().sqrt())


def _inputs(base: torch.nn.Module, merged: torch.Tensor, seed: int) -> torch.Tensor:
    """Inputs of a layer, on its device: ids for an embedding, one random vector in its dtype for a linear layer."""
    generator = torch.Generator().manual_seed(seed)
    if isinstance(base, torch.nn.Embedding):
        return torch.randint(len(merged), (_EMBEDDING_ROWS,), generator=generator).to(merged.device)
    width = merged.shape[0] if isinstance(base, Conv1D) else merged.shape[1]
    return torch.randn(1, width, generator=generator).to(merged.device, merged.dtype)


def _merged_output(
    base: torch.nn.Module, merged: torch.Tensor, bias: torch.Tensor | None, inputs: torch.Tensor
) -> torch.Tensor:
    """The output of a layer with the merged weight, in float32 or wider."""
    wide = torch.promote_types(merged.dtype, torch.float32)
    if isinstance(base, torch.nn.Embedding):
        # Some families scale the rows that they look up.
        return merged[inputs].to(wide) * getattr(base, "embed_scale", 1.0)
    weight = merged.T if isinstance(base, Conv1D) else merged
    return torch.nn.functional.linear(
        inputs.to(wide), weight.to(wide), None if bias is None else bias.to(wide)
    )


def _tolerance(weight: torch.Tensor) -> float:
    rounded = weight.is_cuda and rounds_products(torch.float32)
    return (
        _HALF_TOLERANCE if is_quantised(weight) or rounded else _TOLERANCES.get(weight.dtype, _HALF_TOLERANCE)
    )


@contextmanager
def without_dropout(layer: torch.nn.Module) -> Iterator[None]:
    """Switch off the layer's dropout in this context.

    The other modules stay in training mode, because in evaluation mode 4-bit weights are packed and never unpacked.
    """
    training = {m: m.training for m in layer.modules() if isinstance(m, torch.nn.Dropout)}
    for module in training:
        module.eval()
    try:
        yield
    finally:
        for module, before in training.items():
            module.training = before
