"""The beginning and the end of a weight update by vLLM's layer-wise reload, with less work and memory than in vLLM itself.

vLLM loads a layer into new memory, packs it, and copies the result to the layer's old place. Packing does not change
an unquantised embedding or head. Therefore its new weight can be written directly into its place. Heads that share a
weight then share one packed copy.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import (
    _get_original_loader,
    _place_kernel_tensors,
    get_layerwise_info,
)
from vllm.model_executor.model_loader.reload.types import LayerReloadingInfo
from vllm.model_executor.model_loader.reload.utils import get_layer_tensors
from vllm.utils.nccl import unpinned_nccl_env

from lockstep.contract.tensors import dtype_name

# The attribute in which vLLM keeps a module's packed weight on a CPU: a function that multiplies by this weight.
_PACKED_WEIGHT = "cpu_linear"


def begin_reload(model: torch.nn.Module) -> tuple[LayerReloadingInfo, ...]:
    """Prepare every layer for new weights. Unquantised embeddings and heads are prepared for writing in place.

    Returns:
        vLLM's record of each layer, which it updates while weights arrive.
    """
    initialize_layerwise_reload(model)
    for layer in _embeddings_and_heads(model):
        info = get_layerwise_info(layer)
        if _is_unquantised(layer) and _has_loaded_layout(info):
            _place_kernel_tensors(layer, info)
            for tensor in get_layer_tensors(layer).values():
                tensor.weight_loader = _get_original_loader(tensor)
            info.reset()
    return tuple(get_layerwise_info(layer) for layer in model.modules())


def end_reload(model: torch.nn.Module, model_config: Any) -> None:
    """End the update of every layer. A layer that has only a part of its tensors gets its earlier weights back."""
    finalize_layerwise_reload(model, model_config)


def nccl_environment() -> AbstractContextManager[None]:
    """Inside the context, NCCL starts without vLLM's choice of its algorithms."""
    return unpinned_nccl_env()


def loaded_dtypes(model: torch.nn.Module) -> list[str]:
    """Names of the dtypes that parameters have while they are loaded, before a layer processes them."""
    recorded = (get_layerwise_info(layer).restore_metadata[0] for layer in model.modules())
    return sorted({dtype_name(tensor.dtype) for tensors in recorded for tensor in tensors.values()})


def restore_unloaded(model: torch.nn.Module) -> None:
    """Restore the weights of layers that received nothing. These layers are not packed again.

    vLLM would do the same at the end of the update, with a warning per layer.
    """
    for layer in model.modules():
        info = get_layerwise_info(layer)
        if info.can_load() and not info.load_numel and info.kernel_tensors and not is_deferred_attention_layer(layer):
            _place_kernel_tensors(layer, info)
            info.reset()


def repack_heads(model: torch.nn.Module, written: Collection[str]) -> None:
    """Pack the new weights of embeddings and output heads again, each weight once.

    Args:
        written: names of the model's parameters that this update has written.

    vLLM 0.32.0 processes a layer when the layer's own weights have arrived. A tied head owns no weights. So on CPU it kept
    the packed copy that was made at load, while the embedding that it shares was updated (fault W2).
    """
    # A LoRA layer around an embedding adds its own part to the name.
    named = model.named_parameters(remove_duplicate=False)
    new = {id(p) for name, p in named if name.replace(".base_layer", "") in written}
    loaded = [
        layer for layer in _embeddings_and_heads(model) if any(id(p) in new for p in layer.parameters(recurse=False))
    ]
    unquantised = [layer for layer in loaded if _is_unquantised(layer)]
    for layer in unquantised:
        # Drop the old copies first, so that old and new copies are never in memory together.
        vars(layer).pop(_PACKED_WEIGHT, None)
    packed: dict[int, Any] = {}
    for layer in unquantised:
        # Packing may change a bias. Therefore a layer with a bias does not share its packed copy.
        first = packed.setdefault(id(layer.weight), layer) if getattr(layer, "bias", None) is None else layer
        if first is layer:
            layer.quant_method.process_weights_after_loading(layer)
        elif _PACKED_WEIGHT in vars(first):
            setattr(layer, _PACKED_WEIGHT, getattr(first, _PACKED_WEIGHT))
    for layer in loaded:
        if isinstance(layer, ParallelLMHead) and not _is_unquantised(layer):
            layer.quant_method.process_weights_after_loading(layer)


def remove_expert_kernels(model: torch.nn.Module) -> dict[RoutedExperts, Any]:
    """Remove the CPU kernels of experts, so that vLLM packs the weights of experts in this update as it did at the first load.

    vLLM 0.32.0 packs and pads experts only if a layer has no kernel yet. If the old kernel stays, it reads the rows of the new
    weights in the wrong order, and an update of padded experts fails (fault W10). If there is no kernel, vLLM makes a new one.

    Returns:
        The old kernels. `restore_expert_kernels` gives them back to layers that received nothing.
    """
    kernels = {}
    for layer in model.modules():
        if isinstance(layer, RoutedExperts) and isinstance(layer.quant_method, UnquantizedFusedMoEMethod):
            kernel = layer.quant_method.moe_kernel
            if kernel is not None and isinstance(kernel.fused_experts, CPUUnquantizedExperts):
                kernels[layer] = kernel
                layer.quant_method.moe_kernel = None
    return kernels


def restore_expert_kernels(kernels: dict[RoutedExperts, Any]) -> None:
    """Give each layer of experts its old kernel back if this update has made no new one."""
    for layer, kernel in kernels.items():
        if layer.quant_method.moe_kernel is None:
            layer.quant_method.moe_kernel = kernel


def copy_pending(layers: Iterable[LayerReloadingInfo], temporary: Sequence[torch.Tensor]) -> None:
    """Copy the tensors that vLLM has received and not used yet.

    vLLM writes a layer when all of its tensors have arrived. Until then it keeps references to them, and the next chunk would
    overwrite their memory.

    Args:
        layers: the result of `begin_reload`.
        temporary: tensors whose memory the next chunk will reuse.
    """
    memory = {tensor.untyped_storage().data_ptr() for tensor in temporary}
    for info in layers:
        for _, call in info.loaded_weights:
            for name, value in call.arguments.items():
                if isinstance(value, torch.Tensor) and value.untyped_storage().data_ptr() in memory:
                    call.arguments[name] = value.clone()


def half_loaded(model: torch.nn.Module) -> tuple[str, ...]:
    """Layers that received only some of their elements, for example one projection of a fused layer.

    Must be called before `end_reload`, which discards the counts. vLLM counts a fused parameter as loaded as
    soon as its first part arrives. Embeddings and heads are left out, because they may hold padding that is never sent. If one of
    them is missing completely, the comparison of names finds it.
    """
    half = []
    for name, layer in model.named_modules():
        info = get_layerwise_info(layer)
        if (
            info.can_load()
            and 0 < info.load_numel < info.load_numel_total
            and not isinstance(layer, VocabParallelEmbedding)
        ):
            half.append(f"{name} ({info.load_numel} of {info.load_numel_total} elements)")
    return tuple(half)


def _embeddings_and_heads(model: torch.nn.Module) -> Iterator[Any]:
    return (layer for layer in model.modules() if isinstance(layer, VocabParallelEmbedding))


def _is_unquantised(layer: Any) -> bool:
    return type(layer.quant_method) is UnquantizedEmbeddingMethod


def _has_loaded_layout(info: LayerReloadingInfo) -> bool:
    """Whether the tensors that the layer computes with have the shapes and dtypes of the tensors that are loaded."""
    return info.kernel_tensors is not None and all(
        name in now and (now[name].shape, now[name].dtype) == (tensor.shape, tensor.dtype)
        for now, recorded in zip(info.kernel_tensors, info.restore_metadata, strict=True)
        for name, tensor in recorded.items()
    )
