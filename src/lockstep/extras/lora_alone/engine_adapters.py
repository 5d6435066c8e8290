"""Pushes of an adapter alone to vLLM beside the trainer, whose model is in this process or in worker processes.

The engine holds one adapter at a time, because no request runs during a push.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol

import torch

from lockstep.contract.adapters import AdapterLimits
from lockstep.contract.tensors import LoadedWeights
from lockstep.engines.servers.messages import agreed_answers, one_acknowledgement
from lockstep.engines.vllm.in_process import VLLMInProcess
from lockstep.engines.vllm.start import WorkerProcesses, of_all
from lockstep.weights.wire.transport import WeightTransport

if TYPE_CHECKING:
    from lockstep.engines.vllm.port.lora import LoRARequest


class WorkerCalls(Protocol):
    """The part of `WeightReceiverCalls` that does not change weights."""

    url: str
    world_size: int
    available_bytes: int

    def workers(self, method: str, *args: str) -> list[Any]:
        """Call a method on every worker. Returns what each of them answers."""


class AdapterCalls:
    """A `WeightReceiverCalls` whose tensors are those of an adapter. The engine's own weights do not change.

    Args:
        receiver: the workers that receive the adapter.

    Attributes:
        arrived: each worker's description of the tensors that arrived.
    """

    def __init__(self, receiver: WorkerCalls) -> None:
        self.url, self.world_size, self._receiver = receiver.url, receiver.world_size, receiver
        self.available_bytes = receiver.available_bytes
        self._name = self._segment = ""
        self.arrived: list[Any] = []

    def begin(self, name: str) -> None:
        """Begin the transfer of an adapter of this name."""
        self._name, self.world_size, self.arrived = name, self._receiver.world_size, []

    def init_transfer(self, info: dict[str, Any]) -> None:
        self._segment = info["segment"]
        self.workers("lockstep_open_segment", json.dumps(info))

    def update_weights(self, info: dict[str, Any]) -> None:
        self.arrived = self.workers("lockstep_keep_adapter", self._name, json.dumps(info), self._segment)

    def workers(self, method: str, *args: str) -> list[Any]:
        return self._receiver.workers(method, *args)


def adapter_name(version: int, push_number: int) -> str:
    """A new name for every push. vLLM's prefix cache distinguishes adapters by name and path, not by id."""
    return f"{version}.{push_number}"


class AdaptersInProcess:
    """The adapters of `VLLMInProcess` (an `AdapterReceiver`).

    Attributes:
        request: vLLM's description of the committed adapter, which every request carries; None: none is committed.
    """

    def __init__(self, engine: VLLMInProcess) -> None:
        self._engine, self._call = engine, engine.call
        self._call(_prepare)
        self._pushes = 0
        self._coming: LoRARequest | None = None
        self.request: LoRARequest | None = None
        self._sender = _Sender(engine.workers) if isinstance(engine.workers, WorkerProcesses) else None

    @property
    def limits(self) -> AdapterLimits | None:
        from lockstep.engines.vllm.port.lora import adapter_state

        state, *_ = self._call(adapter_state)
        return None if state is None else AdapterLimits(state["rank"], getattr(torch, state["dtype"]))

    @property
    def name(self) -> str | None:
        """Name of the adapter that requests use."""
        return None if self.request is None else self.request.lora_name

    def base_digest(self) -> str:
        digest, *others = self._call(_base_digest)
        return digest if all(other == digest for other in others) else ""

    def reserved(self) -> AbstractContextManager[None]:
        """Does nothing: no other process uses this engine."""
        return nullcontext()

    def check_base_replaceable(self) -> None:
        """Does nothing: no other run has adapters in this engine."""

    def commit_base(self, digest: str) -> None:
        """Does nothing: the engine refuses requests until `commit`."""

    def begin(self) -> None:
        from lockstep.engines.vllm.port.lora import drop_adapters

        self._engine.prepare_push()
        names = [r.lora_name for r in (self.request, self._coming) if r is not None]
        self.request = self._coming = None
        self._call(drop_adapters, names)

    def load(self, version: int, tensors: Iterable[tuple[str, torch.Tensor]]) -> LoadedWeights:
        from lockstep.engines.vllm.port.lora import PATH, LoRARequest, keep_adapter

        self._pushes += 1
        name = adapter_name(version, self._pushes)
        if self._sender is None:
            (arrived,) = self._call(keep_adapter, name, tensors)
        else:
            arrived = self._sender.send(name, tensors)
        self._coming = LoRARequest(name, self._pushes, PATH + name)
        self._engine.llm.llm_engine.add_lora(self._coming)
        return arrived

    def read_back(self) -> LoadedWeights:
        from lockstep.engines.vllm.port.lora import read_adapter_back

        assert self._coming is not None
        return one_acknowledgement(self._call(read_adapter_back, self._coming.lora_name))

    def commit(self, version: int) -> None:
        self.request, self._coming = self._coming, None
        self._engine.commit_version(version)

    def probe(self, layers: Sequence[str], seed: int) -> dict[str, torch.Tensor]:
        from lockstep.engines.vllm.port.lora import probe_adapter

        assert self.name is not None
        answers = self._call(probe_adapter, self.name, tuple(layers), seed)
        return agreed_answers(answers, "vLLM in this process", torch.equal)

    def close(self) -> None:
        """Release the transport of adapters."""
        if self._sender is not None:
            self._sender.close()


class _Sender:
    """Sends adapters to worker processes, over a transport of its own that it makes for the first adapter."""

    def __init__(self, workers: WorkerProcesses) -> None:
        self._workers, self._calls = workers, AdapterCalls(workers)
        self._transport: WeightTransport | None = None

    def send(self, name: str, tensors: Iterable[tuple[str, torch.Tensor]]) -> LoadedWeights:
        if self._transport is None:
            self._transport = self._workers.choose([self._workers])
        self._calls.begin(name)
        self._workers.send(self._transport, tensors, self._calls)
        return of_all(self._calls.arrived)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()


def _prepare(worker: Any) -> None:
    from lockstep.engines.vllm.port.lora import load_from_memory

    load_from_memory(worker)


def _base_digest(worker: Any) -> str:
    return worker.weight_transfer_engine.base_digest
