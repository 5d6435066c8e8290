"""Pushes of an adapter alone to vLLM in the trainer's process, and to its workers.

Pushes of an adapter alone to vLLM in the trainer's process. The engine holds one adapter at a time, because no
request runs during a push.

The calls by which a transport sends an adapter to the workers of one engine. The engine's own weights do not change.

It works for servers and for worker processes beside the trainer.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

import torch

from lockstep.contract.adapters import AdapterLimits
from lockstep.contract.tensors import LoadedWeights
from lockstep.engines.servers.messages import agreed_answers
from lockstep.errors import InputError

if TYPE_CHECKING:
    from vllm import LLM
    from vllm.lora.request import LoRARequest


class WorkerCalls(Protocol):
    """The part of `WeightReceiverCalls` that does not change weights."""

    url: str
    world_size: int
    available_bytes: int

    def workers(self, method: str, *args: str) -> list[Any]:
        """Call a method on every worker. Returns what each of them answers."""


class AdapterCalls:
    """A `WeightReceiverCalls` whose tensors are those of an adapter.

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


def one_acknowledgement(found: Sequence[LoadedWeights]) -> LoadedWeights:
    """The acknowledgements of several workers or servers as one."""
    first, *others = found
    return replace(first, others=tuple(others))


# The values that vLLM accepts as the largest rank of an adapter (`max_lora_rank`).
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)


def adapter_arguments(rank: int, layers: Collection[str]) -> dict[str, Any]:
    """Arguments of `vllm.LLM` for one adapter.

    Args:
        rank: largest rank of the adapter's layers.
        layers: names of the adapted layers. vLLM puts a LoRA layer around these only, because each LoRA layer costs
            time.

    Raises:
        InputError: the rank is larger than vLLM supports.
    """
    if rank > RANKS[-1]:
        raise InputError(
            f"the adapter has rank {rank}, and vLLM's LoRA supports at most {RANKS[-1]}: lower lora_r, or "
            f"leave vllm_enable_lora "
            "out; then merged weights are sent"
        )
    return {
        "enable_lora": True,
        "max_loras": 1,
        "max_cpu_loras": 1,
        "max_lora_rank": next(size for size in RANKS if size >= rank),
        "lora_target_modules": sorted({layer.rpartition(".")[2] for layer in layers}),
    }


def adapter_name(version: int, push_number: int) -> str:
    """A new name for every push. vLLM's prefix cache distinguishes adapters by name and path, not by id."""
    return f"{version}.{push_number}"


class AdaptersInProcess:
    """The adapters of `VLLMInProcess`.

    Args:
        llm: vLLM's engine.
        call: calls a function with every worker as its first argument.
        workers: the workers (`engines/vllm/`).
        close_requests: called at the beginning of a push; the engine must then refuse requests.
        open_requests: called with the weight version at the end of a push; the engine may then answer requests again.
    """

    def __init__(
        self, llm: LLM, call: Callable[..., list[Any]], workers: Any, close_requests: Any, open_requests: Any
    ) -> None:
        self._llm, self._call, self._workers = llm, call, workers
        self._close_requests, self._open_requests = close_requests, open_requests
        call(_prepare)
        self._pushes = 0
        self._coming: LoRARequest | None = None
        # vLLM's description of the committed adapter, which every request carries; None: no adapter is committed.
        self.request: LoRARequest | None = None

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

        self._close_requests()
        names = [r.lora_name for r in (self.request, self._coming) if r is not None]
        self.request = self._coming = None
        self._call(drop_adapters, names)

    def load(self, version: int, tensors: Iterable[tuple[str, torch.Tensor]]) -> LoadedWeights:
        from vllm.lora.request import LoRARequest

        from lockstep.engines.vllm.port.lora import PATH

        self._pushes += 1
        name = adapter_name(version, self._pushes)
        arrived = self._workers.keep_adapter(name, tensors)
        self._coming = LoRARequest(name, self._pushes, PATH + name)
        self._llm.llm_engine.add_lora(self._coming)
        return arrived

    def read_back(self) -> LoadedWeights:
        from lockstep.engines.vllm.port.lora import read_adapter_back

        assert self._coming is not None
        return one_acknowledgement(self._call(read_adapter_back, self._coming.lora_name))

    def commit(self, version: int) -> None:
        self.request, self._coming = self._coming, None
        self._open_requests(version)

    def probe(self, layers: Sequence[str], seed: int) -> dict[str, torch.Tensor]:
        from lockstep.engines.vllm.port.lora import probe_adapter

        assert self.name is not None
        answers = self._call(probe_adapter, self.name, tuple(layers), seed)
        return agreed_answers(answers, "vLLM in this process", torch.equal)


def _prepare(worker: Any) -> None:
    from lockstep.engines.vllm.port.lora import load_from_memory

    load_from_memory(worker)


def _base_digest(worker: Any) -> str:
    return worker.weight_transfer_engine.base_digest
