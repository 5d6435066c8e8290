"""The engine's end of a push into vLLM: a weight-transfer backend for trainer and engine in one process.

Runs inside vLLM's worker, created by vLLM's factory. Tensors arrive by reference and are copied (and cast) into the
engine's layers by vLLM's layer-wise reload; what was written is kept as the acknowledgement that `sync/push.py` compares.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from lockstep.engines.protocol import LoadedWeights
from lockstep.engines.tensor_specs import tensor_specs


@dataclass
class InProcessInit(WeightTransferInitInfo):
    """Nothing to agree on: both ends share an address space."""


@dataclass
class InProcessUpdate(WeightTransferUpdateInfo):
    """Named tensors of the trainer, by reference."""

    names: list[str]
    tensors: list[torch.Tensor]


class InProcessWeightTransfer(WeightTransferEngine[InProcessInit, InProcessUpdate]):
    """vLLM weight-transfer backend that loads the trainer's tensors without a copy in between."""

    init_info_cls = InProcessInit
    update_info_cls = InProcessUpdate

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.acknowledgement = LoadedWeights((), ())
        self._parameters: tuple[str, ...] = ()
        self._open = False

    def init_transfer_engine(self, init_info: InProcessInit) -> None:
        pass

    def start_weight_update(self) -> None:
        if self._open:
            # The update before failed half-way and left layers waiting for the rest: put them back before starting anew.
            finalize_layerwise_reload(self.model, self.model_config)
        self._open = True
        self.acknowledgement = LoadedWeights((), ())
        self._parameters = tuple(name for name, _ in self.model.named_parameters())
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        # Not the base class's, which ends with an accelerator synchronise that fails on CPU.
        self.receive_weights(self.parse_update_info(update_info))
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: InProcessUpdate) -> None:
        arrived = list(zip(update_info.names, update_info.tensors, strict=True))
        written = self.model.load_weights(iter(arrived))
        specs = tensor_specs(arrived)
        untouched = tuple(name for name in self._parameters if name not in (written or ()))
        self.acknowledgement = LoadedWeights(specs, untouched)

    def finish_weight_update(self) -> None:
        ack = self.acknowledgement
        self.acknowledgement = LoadedWeights(ack.tensors, ack.untouched + _half_loaded(self.model))
        finalize_layerwise_reload(self.model, self.model_config)
        repack_heads(self.model)
        self._open = False

    def shutdown(self) -> None:
        pass


def _half_loaded(model: torch.nn.Module) -> tuple[str, ...]:
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


def repack_heads(model: torch.nn.Module) -> None:
    """Pack every output head again from its current weight.

    vLLM 0.32.0 processes a layer when its own weights have arrived. A tied head owns none, so on CPU it kept the packed
    copy made at load, while the embedding it shares moved on (fault W2).
    """
    for module in model.modules():
        if isinstance(module, ParallelLMHead):
            module.quant_method.process_weights_after_loading(module)
