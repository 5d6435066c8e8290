"""The engine's end of a push into vLLM: our weight-transfer backends, one for a single process and one for servers.

A backend runs inside vLLM's worker, and vLLM's factory creates it. vLLM's layer-wise reload copies (and casts) the
tensors into the engine's layers. The backend records the tensors that were written, and `weights/push.py` compares
this acknowledgement with the manifest.

A reload takes less work and memory here than in vLLM itself. vLLM loads a layer into new memory, packs it, and copies
the result to the layer's old place. Packing does not change an unquantised embedding or head. Therefore its new
weight can be written directly into its place. Heads that share a weight then share one packed copy.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
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

from lockstep.contract.tensors import Begun, HeldWeights, LoadedWeights, begin_specs, dtype_name, one_push
from lockstep.weights.source import Update
from lockstep.weights.wire import cuda_ipc, shared_memory
from lockstep.weights.wire.network import GLOO, NCCL, Receiver
from lockstep.weights.wire.stream import Changes, Named, Piece, ReceivedWeights, chunks

# The attribute in which vLLM keeps a module's packed weight on a CPU: a function that multiplies by this weight.
_PACKED_WEIGHT = "cpu_linear"


def begin_reload(model: torch.nn.Module) -> tuple[LayerReloadingInfo, ...]:
    """Prepare every layer for new weights, and return vLLM's record of each layer, which it updates as weights arrive.

    Unquantised embeddings and heads are prepared for writing in place.
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
    """Restore the weights of layers that received nothing, without packing, and without vLLM's warning per layer."""
    for layer in model.modules():
        info = get_layerwise_info(layer)
        if (
            info.can_load()
            and not info.load_numel
            and info.kernel_tensors
            and not is_deferred_attention_layer(layer)
        ):
            _place_kernel_tensors(layer, info)
            info.reset()


def repack_heads(model: torch.nn.Module, written: Collection[str]) -> None:
    """Pack the new weights of embeddings and output heads again, each weight that is in `written` once.

    vLLM 0.32.0 processes a layer when the layer's own weights have arrived. A tied head owns no weights. So on CPU it
    kept the packed copy that was made at load, while the embedding that it shares was updated (fault W2).
    """
    # A LoRA layer around an embedding adds its own part to the name.
    named = model.named_parameters(remove_duplicate=False)
    new = {id(p) for name, p in named if name.replace(".base_layer", "") in written}
    loaded = [
        layer
        for layer in _embeddings_and_heads(model)
        if any(id(p) in new for p in layer.parameters(recurse=False))
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
    """Remove the CPU kernels of experts, so that vLLM packs their weights as at first. Returns the old kernels.

    vLLM 0.32.0 packs and pads experts only if a layer has no kernel yet. If the old kernel stays, it reads the rows of
    the new weights in the wrong order, and an update of padded experts fails (fault W10).
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
    """Copy the tensors that vLLM has received and not used yet, if they are in `temporary` memory.

    vLLM writes a layer when all of its tensors have arrived. Until then it keeps references to them, and the next chunk
    would overwrite their memory.
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
    soon as its first part arrives. Embeddings and heads are left out, because they may hold padding that is never
    sent. If one of them is missing completely, the comparison of names finds it.
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


# Size of the parts in which merged or cast tensors are loaded: two are in memory, and what vLLM still needs.
PART_BYTES = 16 << 20
_BASE_LAYER = ".base_layer"


@dataclass
class InProcessInit(WeightTransferInitInfo):
    """Empty, because both ends are in one process and need no setup."""


@dataclass
class InProcessUpdate(WeightTransferUpdateInfo):
    """Named tensors of the trainer, by reference. If the model has an adapter, each tensor is made when it is read.

    Attributes:
        base: digest of the weights that the engine must already hold; empty: the tensors are all weights of the model.
    """

    tensors: Iterable[Named]
    base: str = ""


@dataclass
class WireInit(WeightTransferInitInfo):
    """The trainer's segment of shared memory, and the handle of its buffer on the GPU if its slot is there."""

    transport: str
    segment: str
    bytes: int
    buffer: list[Any] | None = None


@dataclass
class WireUpdate(WeightTransferUpdateInfo):
    """All chunks of one push, which arrive in the shared-memory segment, over gloo or over NCCL.

    Attributes:
        chunks: what each chunk may hold (`chunks.TensorPlace`).
        rank: rank of this server's first worker among the `size` ranks of the push (over gloo and NCCL the trainer is
            one of them).
        push: number of the push, in the segment.
        timeout: seconds to wait for one chunk.
        secret: the secret of this push over gloo or NCCL (`weights/wire/groups.py`).
        base: digest of the weights that the engine must already hold; empty: the tensors are all weights of the model.
        keeps: whether the worker keeps a copy of what it receives. Then later pushes can send only the changed
            elements.
        group: name of the group of devices that stays between pushes (`weights/wire/groups.py`).
        digest_key: key of the push's digests, in hex; empty: they are xxh3.
    """

    transport: str
    chunks: list[list[list[Any]]]
    rank: int
    size: int
    timeout: float
    push: int = 0
    host: str = ""
    port: int = 0
    secret: str = ""
    base: str = ""
    keeps: bool = False
    group: str = ""
    digest_key: str = ""


class _LayerwiseTransfer(WeightTransferEngine):
    """The common part of our backends: one update through vLLM's layer-wise reload, with an acknowledgement."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.acknowledgement = LoadedWeights((), ())
        self.held = HeldWeights()
        self._parameters: tuple[str, ...] = ()
        self._layers: tuple[Any, ...] = ()
        self._kernels: dict[Any, Any] = {}
        self._is_updating = False
        # What this update has loaded: descriptions, parameters written, and names of tensors that were stored.
        self._loaded: list[tuple[Begun, set[str], set[str]]] = []

    @property
    def base_digest(self) -> str:
        """Digest of the weights that the engine holds; empty during an update, or if parameters received nothing."""
        return "" if self._is_updating or self.acknowledgement.untouched else self.held.digest

    def forget_weights(self) -> None:
        """Forget what the engine holds, because its memory is about to be discarded (`engines/vllm/port/engine.py`)."""
        self.held.forget()

    def start_weight_update(self) -> None:
        if self._is_updating:
            # The previous update failed half-way: restore the layers that have a part of their tensors.
            end_reload(self.model, self.model_config)
        self._is_updating = True
        self.acknowledgement = LoadedWeights((), ())
        self.held.open()
        self._loaded = []
        computed_with = [name for name, _ in self.model.named_parameters()]
        self._layers = begin_reload(self.model)
        # A module in 8 bits computes with scales, which it makes of the loaded weight itself.
        loaded = {name for name, _ in self.model.named_parameters(remove_duplicate=False)}
        # `load_weights` reports names without the `.base_layer` that a LoRA layer adds to a parameter.
        self._parameters = tuple(name.replace(_BASE_LAYER, "") for name in computed_with if name in loaded)
        self._kernels = remove_expert_kernels(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        # The base class's method ends with an accelerator synchronise that fails on CPU.
        self.receive_weights(self.parse_update_info(update_info))
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()

    def load(self, arrived: Sequence[Named]) -> None:
        """Load some tensors, and compute their descriptions at the same time."""
        if not arrived:
            return
        begun = begin_specs(arrived)
        try:
            with StoredNames(arrived) as stored:
                written = {
                    name.replace(_BASE_LAYER, "") for name in self.model.load_weights(iter(arrived)) or ()
                }
        finally:
            # Nothing reads the tensors on the host any more; a GPU reads its own in the order of the stream.
            begun.settle()
        self._loaded.append((begun, written, stored.names))

    def finish_weight_update(self) -> None:
        for begun, written, stored in self._loaded:
            self.held.add(begun(), written, stored)
        self.acknowledgement = self.held.close(self._parameters, half_loaded(self.model))
        restore_unloaded(self.model)
        end_reload(self.model, self.model_config)
        restore_expert_kernels(self._kernels)
        repack_heads(self.model, self.held.written_now)
        self._is_updating = False

    def shutdown(self) -> None:
        pass


class InProcessWeightTransfer(_LayerwiseTransfer):
    """For trainer and engine in one process: loads the trainer's tensors without a copy in between."""

    init_info_cls = InProcessInit
    update_info_cls = InProcessUpdate

    def init_transfer_engine(self, init_info: InProcessInit) -> None:
        pass

    def receive_weights(self, update_info: InProcessUpdate) -> None:
        tensors = update_info.tensors
        if not self.held.accepts_base(update_info.base):
            return
        if isinstance(tensors, Update) and tensors.is_model_memory:
            # One call, because vLLM searches the whole model for tied weights at the start of each load.
            self.load(list(tensors))
        else:
            for part in chunks(tensors, PART_BYTES):
                self.load(part)


class ServerWeightTransfer(_LayerwiseTransfer):
    """For a server's worker: receives chunks from shared memory, or a whole push over gloo or NCCL."""

    init_info_cls = WireInit
    update_info_cls = WireUpdate

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._segment: shared_memory.Segment | None = None
        # Segments of the trainers that send adapters, by name.
        self._segments: dict[str, shared_memory.Segment] = {}
        # The run that has reserved this engine for its push, and the end of the reservation by the monotonic clock.
        self._reserved = "", 0.0
        self._receiver = Receiver(self.device, nccl_environment)
        self._reference = ReceivedWeights()

    def init_transfer_engine(self, init_info: WireInit) -> None:
        self._close_segment()
        self._segment = self._opened(init_info)

    def receive_weights(self, update_info: WireUpdate) -> None:
        is_accepted = self.held.accepts_base(update_info.base)
        if not (update_info.keeps and update_info.base):
            self._reference.clear()
        # Close at once even if a load fails: transfers in flight then end before the next push can begin.
        key = int(update_info.digest_key, 16) if update_info.digest_key else None
        with (
            one_push(key, remembers=False),
            contextlib.closing(self._incoming_pieces(update_info, self._segment)) as incoming,
        ):
            for pieces in incoming:
                # An update that may not be loaded is received too, because other servers receive the same bytes.
                if is_accepted and update_info.keeps:
                    is_accepted = self._reference.take(pieces)
                elif is_accepted:
                    self._load_temporary(pieces)
            if not is_accepted:
                self.held.refuse()
            elif update_info.keeps:
                self.load(self._reference.to_load())

    def forget_weights(self) -> None:
        super().forget_weights()
        self._reference.clear()

    def reserve(self, run: str, seconds: float) -> bool:
        """Reserve this engine for the push of one run. Returns whether no other run has reserved it."""
        owner, until = self._reserved
        if owner != run and time.monotonic() < until:
            return False
        self._reserved = run, time.monotonic() + seconds
        return True

    def open_segment(self, info: Mapping[str, Any]) -> None:
        """Map the segment of a trainer that sends adapters. Segments of trainers that are gone are closed."""
        for name in [name for name, segment in self._segments.items() if segment.is_abandoned]:
            self._segments.pop(name).close()
        self._segments[info["segment"]] = self._opened(WireInit(**info))

    def received(self, info: Mapping[str, Any], segment: str) -> list[Named]:
        """Receive the tensors of an adapter, and copy them into new memory. The engine's weights do not change."""
        with contextlib.closing(
            self._incoming_pieces(WireUpdate(**info), self._segments.get(segment))
        ) as incoming:
            return [(name, tensor.clone()) for pieces in incoming for name, tensor in _whole_tensors(pieces)]

    def _incoming_pieces(
        self, update_info: WireUpdate, segment: shared_memory.Segment | None
    ) -> Generator[list[Piece], None, None]:
        # The trainer names the rank of the server's first worker; the other workers have the ranks after it.
        worker_rank = update_info.rank + self.parallel_config.rank
        if update_info.transport in (GLOO, NCCL):
            return self._receiver.receive({**vars(update_info), "rank": worker_rank}, update_info.chunks)
        if update_info.transport in (shared_memory.NAME, cuda_ipc.NAME) and segment is not None:
            return segment.pieces(
                update_info.chunks,
                push=update_info.push,
                worker=worker_rank,
                workers=update_info.size,
                timeout=update_info.timeout,
            )
        raise ValueError(f"the trainer has not set up the transport {update_info.transport!r}")

    def _opened(self, info: WireInit) -> shared_memory.Segment:
        return cuda_ipc.open_segment(info.segment, info.bytes, info.buffer, self.device)

    def _load_temporary(self, pieces: Sequence[Piece]) -> None:
        """Load tensors whose memory is reused as soon as the next chunk is requested."""
        arrived = _whole_tensors(pieces)
        self.load(arrived)
        copy_pending(self._layers, [tensor for _, tensor in arrived])

    def shutdown(self) -> None:
        self._close_segment()
        self._receiver.close()
        for segment in self._segments.values():
            segment.close()
        self._segments = {}

    def _close_segment(self) -> None:
        if self._segment is not None:
            self._segment.close()
        self._segment = None


def _whole_tensors(pieces: Sequence[Piece]) -> list[Named]:
    """The tensors that arrived as a whole."""
    return [(name, tensor) for name, tensor in pieces if not isinstance(tensor, Changes)]


_COPY = torch.ops.aten.copy_.default
# A parameter of one element may be filled with a number that is read from the sent tensor.
_READ_NUMBER = torch.ops.aten._local_scalar_dense.default


class StoredNames(TorchDispatchMode):
    """Follows sent tensors through the operations of a load, and finds which of them vLLM has stored.

    `load_weights` of vLLM skips tensors for which its model has no place, without an error: for example every bias
    that its modules do not have. The names that it returns are those of its own parameters. Therefore the sent
    tensors themselves are followed. What is computed from a sent tensor belongs to the tensor's name.
    `weights/push.py` refuses a push of which a tensor was not stored.

    Args:
        arrived: the sent tensors, by name. The caller keeps them alive.

    Attributes:
        names: names of the tensors that were copied into another tensor, as a whole or in part.
    """

    def __init__(self, arrived: Sequence[tuple[str, torch.Tensor]]) -> None:
        super().__init__()
        self.names: set[str] = set()
        # One tensor may have several names.
        self._origins: Any = WeakIdKeyDictionary()
        for name, tensor in arrived:
            self._origins[tensor] = self._origins.get(tensor, frozenset()) | {name}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        origins = frozenset().union(*(self._origins.get(each, ()) for each in _tensors((args, kwargs))))
        if func is _COPY or func is _READ_NUMBER:
            self.names |= self._origins.get(args[func is _COPY], frozenset())
        elif origins:
            for made in _tensors(result):
                self._origins[made] = origins
        return result


def _tensors(values: Any) -> list[torch.Tensor]:
    return [each for each in tree_leaves(values) if isinstance(each, torch.Tensor)]
