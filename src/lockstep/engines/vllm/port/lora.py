"""Adapters inside a vLLM worker: functions that load them from memory, read them back, probe them and remove them.

vLLM itself loads adapters from files. `load_from_memory` replaces its loader: the worker then takes an adapter from
the tensors that a trainer has sent, and reads no file. The functions are called through `collective_rpc`.

`CPUKernel` computes LoRA on a CPU: one pair of matrix products for each adapter of a step. It replaces the CPU kernel
of vLLM 0.32.0, which has two defects. It copies the matrices A and B once per token, so that a prompt of a thousand
tokens copies them a thousand times. If one token of a step has an adapter, it also applies the adapter of the last
slot to the tokens that have none (fault D6). The probes compute with our kernel too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from vllm.lora.layers import BaseLayerWithLoRA, LoRAMapping
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU
from vllm.lora.request import LoRARequest
from vllm.lora.utils import parse_fine_tuned_lora_name

from lockstep.contract.adapters import DOWN
from lockstep.contract.probe import sendable
from lockstep.contract.tensors import LoadedWeights, dtype_name, tensor_specs

# The slot of each adapter that is used in a step, and the indices of its tokens (None: all tokens).
SlotTokens = list[tuple[int, torch.Tensor | None]]


class CPUKernel:
    """Replaces `PunicaWrapperCPU.add_lora_linear`. vLLM's wrapper knows which token of a step has which adapter."""

    def __init__(self, wrapper: PunicaWrapperCPU) -> None:
        self._wrapper, self._update = wrapper, wrapper.update_metadata
        self._slots: SlotTokens = []
        wrapper.update_metadata, wrapper.add_lora_linear = self.update_metadata, self.add_lora_linear
        if wrapper.indices_len[0] is not None:
            self._slots = tokens_by_slot(wrapper.token_lora_indices)

    def update_metadata(self, *args: Any, **kwargs: Any) -> None:
        """Replaces vLLM's `update_metadata`, which comes before each step with other requests than the last one."""
        self._update(*args, **kwargs)
        self._slots = tokens_by_slot(self._wrapper.token_lora_indices)

    def add_lora_linear(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_a_stacked: Sequence[torch.Tensor],
        lora_b_stacked: Sequence[torch.Tensor],
        scale: float,
        output_slices: Sequence[int],
        **others: Any,
    ) -> None:
        """Add scale × B A x to y in place, with the A and B of each token's adapter.

        As in vLLM's kernel, A x is computed in float32, and the product with B in the dtype of y.

        Args:
            y: (tokens, outputs) outputs of the layer without its adapter.
            x: (tokens, inputs) inputs of the layer.
        """
        for slot, tokens in self._slots:
            inputs = x if tokens is None else x[tokens]
            added = torch.cat(
                [
                    ((inputs.float() @ down[slot, 0].float().T) * scale).to(y.dtype)
                    @ up[slot, 0].to(y.dtype).T
                    for down, up in zip(lora_a_stacked, lora_b_stacked, strict=True)
                ],
                dim=-1,
            )
            if tokens is None:
                y += added
            else:
                y[tokens] += added


def tokens_by_slot(indices: torch.Tensor) -> SlotTokens:
    """The tokens of a step by the slot of their adapter, from the slot of each token; −1: the token has no adapter."""
    found = indices.unique().tolist()
    if len(found) == 1:
        return [(found[0], None)] if found[0] >= 0 else []
    return [(slot, (indices == slot).nonzero()[:, 0]) for slot in found if slot >= 0]


def use_cpu_kernel(manager: Any) -> None:
    """Install the kernel if vLLM's `LoRAModelManager` uses its own kernel for CPUs. Safe to call again."""
    for wrapper in manager.punica_wrapper_mapping.values():
        if type(wrapper) is PunicaWrapperCPU and "add_lora_linear" not in vars(wrapper):
            CPUKernel(wrapper)


Named = tuple[str, torch.Tensor]

# vLLM needs a path for each adapter. This prefix and the adapter's name take its place.
PATH = "lockstep:"
# Number of dropped adapters whose names a worker remembers.
_REMEMBERED = 1024


class _Place(NamedTuple):
    """The module in which vLLM computes an adapted layer, and the layer's index in it (0 if it is not fused)."""

    module: Any
    part: int


class MemoryLoader:
    """Replaces the loader of vLLM's `WorkerLoRAManager`. It keeps what trainers have sent, by the adapter's name."""

    def __init__(self, manager: Any) -> None:
        self._manager = manager
        self.tensors: dict[str, list[Named]] = {}
        self._ids: dict[str, int] = {}
        # The names that were dropped last, and vLLM's ids of the empty adapters that were loaded for such names.
        self._dropped: deque[str] = deque(maxlen=_REMEMBERED)
        self._empty_ids: list[int] = []

    @property
    def slots(self) -> Any:
        """vLLM's `LoRAModelManager`."""
        return self._manager._adapter_manager

    def keep(self, name: str, tensors: Iterable[Named]) -> LoadedWeights:
        """Copy the tensors of an adapter. vLLM loads it afterwards, and again if it has dropped it for another one."""
        kept = [(key, tensor.detach().cpu().clone()) for key, tensor in tensors]
        self.tensors[name] = kept
        return LoadedWeights(tensor_specs(kept), ())

    def __call__(self, request: Any) -> LoRAModel:
        """Load an adapter. Replaces vLLM's `_load_adapter`."""
        name = request.lora_path.removeprefix(PATH)
        is_ours = request.lora_path == PATH + name
        if is_ours and name not in self.tensors and name in self._dropped:
            # The trainer has given this request up, but the server still holds it. An error here would end the engine.
            self._empty_ids.append(request.lora_int_id)
            return self.slots.create_dummy_lora(request.lora_int_id, 1, self._manager.embedding_modules)
        if not is_ours or name not in self.tensors:
            raise ValueError(
                f"no trainer has sent the adapter {request.lora_path!r}; this server does not read adapters from files"
            )
        self._ids[name] = request.lora_int_id
        rank = max(len(tensor) for key, tensor in self.tensors[name] if key.endswith(DOWN))
        return LoRAModel.from_lora_tensors(
            request.lora_int_id,
            dict(self.tensors[name]),
            # The trainer has multiplied B by the adapter's scaling.
            PEFTHelper(r=rank, lora_alpha=rank, target_modules=[]),
            device="cpu",
            dtype=self._manager.lora_config.lora_dtype,
            model_vocab_size=self._manager.vocab_size,
            weights_mapper=_mapper(self.slots.model),
        )

    def activate(self, name: str) -> int:
        """Put an adapter into a slot, if it is in none. Returns vLLM's id of the adapter."""
        number = self._ids[name]
        if number not in self._manager.list_adapters():
            self.slots.add_adapter(self(LoRARequest(name, number, PATH + name)))
        self.slots.activate_adapter(number)
        return number

    def drop(self, names: Iterable[str]) -> None:
        """Remove adapters. Names of adapters that are not here are ignored."""
        for name in names:
            if self.tensors.pop(name, None) is not None:
                self._dropped.append(name)
            if (number := self._ids.pop(name, None)) is not None:
                self._manager.remove_adapter(number)
        while self._empty_ids:
            self._manager.remove_adapter(self._empty_ids.pop())


def load_from_memory(worker: Any) -> MemoryLoader | None:
    """Give a worker a `MemoryLoader` and a faster CPU kernel; None: it has no LoRA. Safe to call again."""
    manager = getattr(worker.model_runner, "lora_manager", None)
    if manager is None:
        return None
    if not isinstance(vars(manager).get("_load_adapter"), MemoryLoader):
        manager._load_adapter = MemoryLoader(manager)
        use_cpu_kernel(manager._adapter_manager)
    return manager._load_adapter


def adapter_state(worker: Any) -> dict[str, Any] | None:
    """A worker's limits and the names of the adapters it holds, as JSON types; None: vLLM was started without LoRA."""
    memory = load_from_memory(worker)
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
    """Copy the tensors of an adapter that arrives. vLLM's `add_lora` loads the adapter afterwards."""
    return _memory(worker).keep(name, tensors)


def drop_adapters(worker: Any, names: Sequence[str]) -> None:
    """Remove adapters from a worker."""
    _memory(worker).drop(names)


def read_adapter_back(worker: Any, name: str) -> LoadedWeights:
    """The tensors of an adapter, read back from the slot that vLLM computes with.

    With tensor parallelism, a worker has only a part of some tensors. These are not read back; the probe covers them.
    """
    memory = _memory(worker)
    slot = memory.slots.lora_index_to_id.index(memory.activate(name))
    found, untouched = [], []
    for key, sent in memory.tensors[name]:
        shape = sent.shape
        place = _place(memory.slots, key)
        if place is None:
            untouched.append(key)
            continue
        stacked = place.module.lora_a_stacked if key.endswith(DOWN) else place.module.lora_b_stacked
        if place.module.tp_size == 1:
            # A slot may be larger than the tensor. If the rest is not zero, the whole slot fails the comparison.
            whole = stacked[place.part][slot, 0]
            found.append(
                (key, whole[: shape[0], : shape[1]] if not _has_values_beyond(whole, shape) else whole)
            )
    return LoadedWeights(tensor_specs(found), tuple(untouched))


def probe_adapter(worker: Any, name: str, layers: Sequence[str], seed: int) -> dict[str, torch.Tensor]:
    """(3, N) per adapted layer of this worker: its output with the adapter, its output without, and the difference."""
    from lockstep.engines.vllm.port.probe import linear_output, whole_parts

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
                rows.append(linear_output(layer, place.module, seed)[0, start : start + size].float())
            answers[layer] = torch.stack([*rows, rows[0] - rows[1]])
    return sendable(answers)


def use_adapter(worker: Any, name: str | None, rows: int) -> None:
    """Let the modules use an adapter (None: none) for inputs of `rows` rows, until vLLM's next step sets its own."""
    memory = load_from_memory(worker)
    if memory is None:
        return
    number = 0 if name is None else memory.activate(name)
    memory.slots.set_adapter_mapping(LoRAMapping((number,) * rows, (number,) * rows, is_prefill=True))


def _memory(worker: Any) -> MemoryLoader:
    memory = load_from_memory(worker)
    if memory is None:
        raise ValueError("vLLM was started without LoRA (enable_lora)")
    return memory


def _mapper(model: Any) -> Any:
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    return None if mapper is None else mapper.get_rename_mapper()


def _place(slots: Any, key: str) -> _Place | None:
    """The module that computes with a tensor of an adapter; None if the model has no such module."""
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


def _has_values_beyond(whole: torch.Tensor, shape: torch.Size) -> bool:
    """Whether a slot has values other than zero outside the first `shape` rows and columns."""
    return bool(whole[shape[0] :].any()) or bool(whole[:, shape[1] :].any())
