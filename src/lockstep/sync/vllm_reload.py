"""vLLM's layer-wise reload, with less work: what a whole update begins and ends with in an engine.

vLLM loads a layer into new memory, packs it, and copies the result to where the layer was. An unquantised embedding or head ends
as what arrived, so that it can be written where it lies, and those that share a weight need one packed copy of it, not one each.
Used by `sync/vllm_backend.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)
from vllm.model_executor.model_loader.reload import initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import (
    _get_original_loader,
    _place_kernel_tensors,
    get_layerwise_info,
)
from vllm.model_executor.model_loader.reload.types import LayerReloadingInfo
from vllm.model_executor.model_loader.reload.utils import get_layer_tensors

from lockstep.engines.tensor_specs import dtype_name

# Where vLLM keeps a module's packed weight on a CPU: a function that multiplies by it.
_PACKED = "cpu_linear"


def begin_reload(model: torch.nn.Module) -> tuple[LayerReloadingInfo, ...]:
    """Make every layer ready for new weights; unquantised embeddings and heads to be written in place.

    Returns:
        What vLLM notes of each layer while weights come.
    """
    initialize_layerwise_reload(model)
    for layer in _vocabularies(model):
        info = get_layerwise_info(layer)
        if _is_plain(layer) and _lies_as_it_arrives(info):
            _place_kernel_tensors(layer, info)
            for tensor in get_layer_tensors(layer).values():
                tensor.weight_loader = _get_original_loader(tensor)
            info.reset()
    return tuple(get_layerwise_info(layer) for layer in model.modules())


def loaded_dtypes(model: torch.nn.Module) -> list[str]:
    """Names of the dtypes that parameters have while they are loaded, whatever a layer makes of them after."""
    recorded = (get_layerwise_info(layer).restore_metadata[0] for layer in model.modules())
    return sorted({dtype_name(tensor.dtype) for tensors in recorded for tensor in tensors.values()})


def repack_heads(model: torch.nn.Module) -> None:
    """Pack every embedding and output head again from its current weight, each weight once.

    vLLM 0.32.0 processes a layer when its own weights have arrived. A tied head owns none, so on CPU it kept the packed
    copy made at load, while the embedding it shares moved on (fault W2).
    """
    plain = [layer for layer in _vocabularies(model) if _is_plain(layer)]
    for layer in plain:
        # The old copies go first, or there would be room needed for two.
        vars(layer).pop(_PACKED, None)
    packed: dict[int, Any] = {}
    for layer in plain:
        # A bias may be changed by packing, so that such a layer is packed by itself.
        first = packed.setdefault(id(layer.weight), layer) if getattr(layer, "bias", None) is None else layer
        if first is layer:
            layer.quant_method.process_weights_after_loading(layer)
        elif _PACKED in vars(first):
            setattr(layer, _PACKED, getattr(first, _PACKED))
    for layer in _vocabularies(model):
        if isinstance(layer, ParallelLMHead) and not _is_plain(layer):
            layer.quant_method.process_weights_after_loading(layer)


def keep_pending(layers: Iterable[LayerReloadingInfo], passing: Sequence[torch.Tensor]) -> None:
    """Copy what vLLM still waits to use.

    A layer is written when all of it has arrived; until then vLLM keeps references to its parts, which the next chunk would
    overwrite.

    Args:
        layers: what `begin_reload` gave.
    """
    memory = {tensor.untyped_storage().data_ptr() for tensor in passing}
    for info in layers:
        for _, call in info.loaded_weights:
            for name, value in call.arguments.items():
                if isinstance(value, torch.Tensor) and value.untyped_storage().data_ptr() in memory:
                    call.arguments[name] = value.clone()


def half_loaded(model: torch.nn.Module) -> tuple[str, ...]:
    """Layers that got some of their elements and not all: one projection of a fused one, say.

    To be asked before `finalize_layerwise_reload`, which forgets. vLLM counts a fused parameter as loaded with its first
    part. Embeddings and heads may hold padding that is never sent; whole ones are covered by name.
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


def _vocabularies(model: torch.nn.Module) -> Iterator[Any]:
    return (layer for layer in model.modules() if isinstance(layer, VocabParallelEmbedding))


def _is_plain(layer: Any) -> bool:
    return type(layer.quant_method) is UnquantizedEmbeddingMethod


def _lies_as_it_arrives(info: LayerReloadingInfo) -> bool:
    """Whether what the layer computes with has the shape and dtype of what is loaded."""
    return info.kernel_tensors is not None and all(
        name in now and (now[name].shape, now[name].dtype) == (tensor.shape, tensor.dtype)
        for now, recorded in zip(info.kernel_tensors, info.restore_metadata, strict=True)
        for name, tensor in recorded.items()
    )
