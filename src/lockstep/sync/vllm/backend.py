"""The engine's end of a push into vLLM: our weight-transfer backends, one for a single process and one for servers.

It runs inside vLLM's worker; vLLM's factory creates it. vLLM's layer-wise reload copies (and casts) the tensors into the engine's
layers. The backend records the tensors that were written, and `sync/push.py` compares this acknowledgement with the manifest.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload
from vllm.model_executor.model_loader.reload.types import LayerReloadingInfo

from lockstep.engines.held import HeldWeights
from lockstep.engines.protocol import LoadedWeights
from lockstep.engines.tensor_specs import begin_specs
from lockstep.sync.changes import Update
from lockstep.sync.vllm.reload import (
    begin_reload,
    forget_packed_experts,
    half_loaded,
    keep_packed_experts,
    keep_pending,
    leave_unloaded,
    repack_heads,
)
from lockstep.sync.wire import gloo, shared_memory
from lockstep.sync.wire.chunks import Named, chunks
from lockstep.sync.wire.deltas import Changes, Piece, Reference
from lockstep.sync.wire.slots import taken_chunks

# Merged or cast tensors are loaded in parts of this size. Two parts may be in memory, beside tensors that vLLM still needs.
_PART_BYTES = 16 << 20
_WRAPPED = ".base_layer"


@dataclass
class InProcessInit(WeightTransferInitInfo):
    """Empty: both ends share an address space, so that there is nothing to agree on."""


@dataclass
class InProcessUpdate(WeightTransferUpdateInfo):
    """Named tensors of the trainer, by reference. With an adapter each tensor is made when it is read.

    Attributes:
        base: as in `WeightReceiver.load`.
    """

    tensors: Iterable[Named]
    base: str = ""


@dataclass
class WireInit(WeightTransferInitInfo):
    """The trainer's segment of shared memory."""

    transport: str
    segment: str
    bytes: int


@dataclass
class WireUpdate(WeightTransferUpdateInfo):
    """All chunks of one push, which arrive in the shared-memory segment or over gloo.

    Attributes:
        chunks: what each chunk may hold (`chunks.Placed`).
        rank: rank of this server's first worker among the `size` ranks of the push (over gloo the trainer is one of them).
        push: number of the push, in the segment.
        timeout: seconds to wait for one chunk.
        secret: of this push over gloo (`gloo_proof.py`).
        base: as in `WeightReceiver.load`.
        keeps: whether the worker keeps a copy of what it receives, so that later pushes can send changed elements alone.
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


class _LayerwiseTransfer(WeightTransferEngine):
    """Shared by all our backends: one update through vLLM's layer-wise reload, with an acknowledgement.

    Layers of which the update has no tensor keep what they compute with.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.acknowledgement = LoadedWeights((), ())
        self.held = HeldWeights()
        self._parameters: tuple[str, ...] = ()
        self._layers: tuple[LayerReloadingInfo, ...] = ()
        self._kernels: dict[Any, Any] = {}
        self._open = False

    @property
    def base_digest(self) -> str:
        """Digest of the weights that the engine holds; empty during an update, and where some parameters received nothing."""
        return "" if self._open or self.acknowledgement.untouched else self.held.digest

    def start_weight_update(self) -> None:
        if self._open:
            # The previous update failed half-way, and layers still wait for their rest: restore them before starting again.
            finalize_layerwise_reload(self.model, self.model_config)
        self._open = True
        self.acknowledgement = LoadedWeights((), ())
        self.held.open()
        # A LoRA layer around a module adds its own part to the names of parameters. A load reports them without it.
        self._parameters = tuple(name.replace(_WRAPPED, "") for name, _ in self.model.named_parameters())
        self._layers = begin_reload(self.model)
        self._kernels = forget_packed_experts(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        # The base class's method ends with an accelerator synchronise that fails on CPU.
        self.receive_weights(self.parse_update_info(update_info))
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()

    def load(self, arrived: Sequence[Named]) -> None:
        """Load some tensors, and compute their descriptions at the same time."""
        if not arrived:
            return
        finish_specs = begin_specs(arrived)
        try:
            written = {name.replace(_WRAPPED, "") for name in self.model.load_weights(iter(arrived)) or ()}
        finally:
            # When this returns, nothing reads the tensors any more.
            specs = finish_specs()
        self.held.add(specs, written)

    def finish_weight_update(self) -> None:
        self.acknowledgement = self.held.close(self._parameters, half_loaded(self.model))
        leave_unloaded(self.model)
        finalize_layerwise_reload(self.model, self.model_config)
        keep_packed_experts(self._kernels)
        repack_heads(self.model, self.held.written_now)
        self._open = False

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
        if isinstance(tensors, Update) and tensors.own_memory:
            # One single load: vLLM searches the whole model for tied weights at the start of each load.
            self.load(list(tensors))
        else:
            for part in chunks(tensors, _PART_BYTES):
                self.load(part)


class ServerWeightTransfer(_LayerwiseTransfer):
    """For a server's worker: receives chunks from shared memory, or a whole push over gloo."""

    init_info_cls = WireInit
    update_info_cls = WireUpdate

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._segment: shared_memory.Segment | None = None
        # Segments of the trainers that send adapters, by name.
        self._segments: dict[str, shared_memory.Segment] = {}
        # The run that pushes now, and until when at most.
        self._reserved = "", 0.0
        self._gloo = gloo.Receiver()
        self._reference = Reference()

    def init_transfer_engine(self, init_info: WireInit) -> None:
        self._close_segment()
        self._segment = shared_memory.Segment(init_info.segment, init_info.bytes)

    def receive_weights(self, update_info: WireUpdate) -> None:
        takes = self.held.accepts_base(update_info.base)
        if not (update_info.keeps and update_info.base):
            self._reference.clear()
        # Close at once even if a load fails: transfers in flight then end before the next push can begin.
        with contextlib.closing(self._coming(update_info, self._segment)) as coming:
            for pieces in coming:
                # An update that may not be loaded is received too, because other servers receive the same bytes.
                if takes and update_info.keeps:
                    takes = self._reference.take(pieces)
                elif takes:
                    self._load_passing(pieces)
        if not takes:
            self.held.refuse()
        elif update_info.keeps:
            self.load(self._reference.to_load())

    def reserve(self, run: str, seconds: float) -> bool:
        """Reserve this engine for the push of one run. Returns whether no other run has reserved it."""
        owner, until = self._reserved
        if owner != run and time.monotonic() < until:
            return False
        self._reserved = run, time.monotonic() + seconds
        return True

    def open_segment(self, info: Mapping[str, Any]) -> None:
        """Map the segment of a trainer that sends adapters. Segments of trainers that are gone are closed."""
        for name in [name for name, segment in self._segments.items() if segment.is_left]:
            self._segments.pop(name).close()
        self._segments[info["segment"]] = shared_memory.Segment(info["segment"], info["bytes"])

    def received(self, info: Mapping[str, Any], segment: str) -> list[Named]:
        """The tensors of a push that is no update of the weights, in memory of their own.

        Args:
            info: the fields of `WireUpdate`.
            segment: name of the trainer's segment, if it sends through shared memory.
        """
        with contextlib.closing(self._coming(WireUpdate(**info), self._segments.get(segment))) as coming:
            return [(name, tensor.clone()) for pieces in coming for name, tensor in _whole(pieces)]

    def _coming(
        self, update_info: WireUpdate, segment: shared_memory.Segment | None
    ) -> Generator[list[Piece], None, None]:
        # The trainer names the rank of the server's first worker; the other workers have the ranks after it.
        own = update_info.rank + self.parallel_config.rank
        if update_info.transport == gloo.NAME:
            return self._gloo.receive({**vars(update_info), "rank": own}, update_info.chunks)
        if update_info.transport == shared_memory.NAME and segment is not None:
            return shared_memory.pieces_of(
                taken_chunks(
                    segment.memory,
                    segment.handle,
                    update_info.chunks,
                    push=update_info.push,
                    worker=own,
                    workers=update_info.size,
                    timeout=update_info.timeout,
                )
            )
        raise ValueError(f"transport {update_info.transport!r} was not agreed on")

    def _load_passing(self, pieces: Sequence[Piece]) -> None:
        """Load tensors whose memory is reused as soon as the next chunk is requested."""
        arrived = _whole(pieces)
        self.load(arrived)
        keep_pending(self._layers, [tensor for _, tensor in arrived])

    def shutdown(self) -> None:
        self._close_segment()
        for segment in self._segments.values():
            segment.close()
        self._segments = {}

    def _close_segment(self) -> None:
        if self._segment is not None:
            self._segment.close()
        self._segment = None


def _whole(pieces: Sequence[Piece]) -> list[Named]:
    """The tensors that arrived as a whole."""
    return [(name, tensor) for name, tensor in pieces if not isinstance(tensor, Changes)]
