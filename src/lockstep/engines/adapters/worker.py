"""Adapters inside a vLLM worker: they come from memory, are read back from the slots that vLLM computes with, and are removed.

vLLM reads adapters from files. `take_from_memory` replaces that in our engines: an adapter is taken from the tensors that a trainer
has sent, and no path is read. `engines/adapters/in_process.py` and `sync/vllm/worker.py` call these functions through
`collective_rpc`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from vllm.lora.layers import BaseLayerWithLoRA, LoRAMapping
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.request import LoRARequest
from vllm.lora.utils import parse_fine_tuned_lora_name

from lockstep.engines.adapters.cpu_kernel import use_cpu_kernel
from lockstep.engines.adapters.receiver import DOWN
from lockstep.engines.protocol import LoadedWeights
from lockstep.engines.tensor_specs import dtype_name, tensor_specs

Named = tuple[str, torch.Tensor]

# Stands where vLLM expects the path of an adapter.
PATH = "lockstep:"
# Names of adapters that were dropped.
_REMEMBERED = 1024


class _Place(NamedTuple):
    """Where vLLM computes with an adapted layer: a module, and which of its parts."""

    module: Any
    part: int


class FromMemory:
    """Stands in the place of vLLM's loader of adapters, and keeps the tensors of the adapters that trainers use.

    Args:
        loads: vLLM's `WorkerLoRAManager`.
    """

    def __init__(self, loads: Any) -> None:
        self._loads = loads
        self.tensors: dict[str, list[Named]] = {}
        self._ids: dict[str, int] = {}
        # The last names that were dropped, and the ids that vLLM has loaded for them since.
        self._gone: deque[str] = deque(maxlen=_REMEMBERED)
        self._empty: list[int] = []

    @property
    def slots(self) -> Any:
        """vLLM's `LoRAModelManager`."""
        return self._loads._adapter_manager

    def keep(self, name: str, tensors: Iterable[Named]) -> LoadedWeights:
        """Copy the tensors of an adapter. vLLM then loads it, and loads it again if it has needed the place."""
        kept = [(key, tensor.detach().cpu().clone()) for key, tensor in tensors]
        self.tensors[name] = kept
        return LoadedWeights(tensor_specs(kept), ())

    def __call__(self, request: Any) -> LoRAModel:
        """vLLM's `_load_adapter`.

        Raises:
            ValueError: no trainer has sent this adapter.
        """
        name = request.lora_path.removeprefix(PATH)
        is_ours = request.lora_path == PATH + name
        if is_ours and name not in self.tensors and name in self._gone:
            # A request that its trainer has given up, and that has not left the server yet. An error here would end the engine.
            self._empty.append(request.lora_int_id)
            return self.slots.create_dummy_lora(request.lora_int_id, 1, self._loads.embedding_modules)
        if not is_ours or name not in self.tensors:
            raise ValueError(
                f"the adapter {request.lora_path!r} was not sent by a trainer; no adapter is read from a path"
            )
        self._ids[name] = request.lora_int_id
        rank = max(len(tensor) for key, tensor in self.tensors[name] if key.endswith(DOWN))
        return LoRAModel.from_lora_tensors(
            request.lora_int_id,
            dict(self.tensors[name]),
            # The trainer has multiplied B by the adapter's scaling.
            PEFTHelper(r=rank, lora_alpha=rank, target_modules=[]),
            device="cpu",
            dtype=self._loads.lora_config.lora_dtype,
            model_vocab_size=self._loads.vocab_size,
            weights_mapper=_mapper(self.slots.model),
        )

    def activated(self, name: str) -> int:
        """vLLM's id of an adapter, which then is in a slot."""
        number = self._ids[name]
        if number not in self._loads.list_adapters():
            self.slots.add_adapter(self(LoRARequest(name, number, PATH + name)))
        self.slots.activate_adapter(number)
        return number

    def drop(self, names: Iterable[str]) -> None:
        """Remove adapters. Names that are not held are passed over."""
        for name in names:
            if self.tensors.pop(name, None) is not None:
                self._gone.append(name)
            if (number := self._ids.pop(name, None)) is not None:
                self._loads.remove_adapter(number)
        while self._empty:
            self._loads.remove_adapter(self._empty.pop())


def take_from_memory(worker: Any) -> FromMemory | None:
    """Let a worker take adapters from memory, and compute with them fast on a CPU. It may be called again.

    Returns:
        None if vLLM was started without LoRA.
    """
    loads = getattr(worker.model_runner, "lora_manager", None)
    if loads is None:
        return None
    if not isinstance(vars(loads).get("_load_adapter"), FromMemory):
        loads._load_adapter = FromMemory(loads)
        use_cpu_kernel(loads._adapter_manager)
    return loads._load_adapter


def adapter_state(worker: Any) -> dict[str, Any] | None:
    """What the worker was started with, and the adapters that it holds, as JSON types; None: it was started without LoRA."""
    memory = take_from_memory(worker)
    if memory is None:
        return None
    config = memory.slots.lora_config
    return {
        "rank": config.max_lora_rank,
        "dtype": dtype_name(config.lora_dtype),
        "room": memory.slots.capacity,
        "names": list(memory.tensors),
    }


def keep_adapter(worker: Any, name: str, tensors: Iterable[Named]) -> LoadedWeights:
    """Copy an adapter that arrives; `add_lora` of vLLM then loads it."""
    return _memory(worker).keep(name, tensors)


def drop_adapters(worker: Any, names: Sequence[str]) -> None:
    """Remove adapters."""
    _memory(worker).drop(names)


def held_adapter(worker: Any, name: str) -> LoadedWeights:
    """An adapter as vLLM computes with it: its tensors, read back from vLLM's slots.

    With tensor parallelism each worker has a part of some tensors. Those are not read back (the probe covers them).
    """
    memory = _memory(worker)
    slot = memory.slots.lora_index_to_id.index(memory.activated(name))
    found, untouched = [], []
    for key, sent in memory.tensors[name]:
        shape = sent.shape
        place = _place(memory.slots, key)
        if place is None:
            untouched.append(key)
            continue
        stacked = place.module.lora_a_stacked if key.endswith(DOWN) else place.module.lora_b_stacked
        if place.module.tp_size == 1:
            # What lies beyond the adapter's own rank must be zero. It is read too, as part of a larger tensor.
            whole = stacked[place.part][slot, 0]
            found.append((key, whole[: shape[0], : shape[1]] if not _beyond(whole, shape) else whole))
    return LoadedWeights(tensor_specs(found), tuple(untouched))


def probe_adapter(worker: Any, name: str, layers: Sequence[str], seed: int) -> dict[str, torch.Tensor]:
    """For each adapted layer (3, outputs) float32: outputs with the adapter, without it, and their difference."""
    from lockstep.engines.vllm.probe import linear_output
    from lockstep.engines.vllm.shards import whole_parts

    memory = _memory(worker)
    places = {layer: _place(memory.slots, layer + DOWN) for layer in layers}
    answers: dict[str, torch.Tensor] = {}
    with torch.inference_mode():
        for layer, place in places.items():
            if place is None:
                continue
            sizes = whole_parts(place.module.base_layer)
            start, size = sum(sizes[: place.part]), sizes[place.part]
            rows = []
            for used in (name, None):
                use_adapter(worker, used, 1)
                rows.append(linear_output(layer, place.module, seed)[0, start : start + size].float().cpu())
            answers[layer] = torch.stack([*rows, rows[0] - rows[1]])
    return answers


def use_adapter(worker: Any, name: str | None, rows: int) -> None:
    """Let the modules use an adapter (None: no adapter) for the next inputs of so many rows. A step of vLLM sets its own."""
    memory = take_from_memory(worker)
    if memory is None:
        return
    number = 0 if name is None else memory.activated(name)
    memory.slots.set_adapter_mapping(LoRAMapping((number,) * rows, (number,) * rows, is_prefill=True))


def _memory(worker: Any) -> FromMemory:
    memory = take_from_memory(worker)
    if memory is None:
        raise ValueError("vLLM was started without LoRA (enable_lora)")
    return memory


def _mapper(model: Any) -> Any:
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    return None if mapper is None else mapper.get_rename_mapper()


def _place(slots: Any, key: str) -> _Place | None:
    """The module that computes with an adapter's tensor; None if there is none."""
    owner, _ = parse_fine_tuned_lora_name(key, _mapper(slots.model))
    for module, part in _candidates(slots, owner):
        if isinstance(module, BaseLayerWithLoRA):
            return _Place(module, part)
    return None


def _candidates(slots: Any, owner: str) -> Iterator[tuple[Any, int]]:
    yield slots.modules.get(owner), 0
    for fused, parts in slots.packed_modules.items():
        if owner in parts:
            yield slots.modules.get(fused), parts.index(owner)


def _beyond(whole: torch.Tensor, shape: torch.Size) -> bool:
    """Whether a slot has values beyond the adapter's own tensor."""
    return bool(whole[shape[0] :].any()) or bool(whole[:, shape[1] :].any())
