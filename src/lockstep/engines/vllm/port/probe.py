"""The engine's part of the module probe for vLLM. It runs inside a worker, through `collective_rpc`.

The probe calls a linear module in the same way as vLLM does, whether the module is packed, fused, tied, padded or
quantised. It does not read `weight`, because `weight` is empty on a CPU after packing. If several workers share the
model, each worker answers for the modules that it has. The parts of a module that tensor parallelism has split are
gathered, in every worker at the same time and in the same order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from vllm.distributed import tensor_model_parallel_all_gather
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    LinearBase,
    QKVParallelLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.utils import get_packed_modules_mapping

from lockstep.contract.probe import (
    PROBED_ROWS,
    EngineModules,
    HeldPart,
    ModuleKind,
    ProbedModule,
    exact_products,
    expert_input,
    held_digests,
    probe_experts,
    probe_inputs,
    probe_rows,
    probe_vector,
    sendable,
)
from lockstep.devices import sent
from lockstep.engines.vllm.port.quantised import quantization_of


def whole_outputs(module: LinearBase) -> int:
    """Number of outputs of a whole linear module. Copies of a key or value head in several workers count once."""
    return sum(whole_parts(module))


def whole_parts(module: LinearBase) -> list[int]:
    """Number of outputs of each part of a fused linear module. A module that is not fused has one part."""
    sizes = getattr(module, "output_sizes", None) or [module.output_size]
    return [size - _repeated(module, part) for part, size in enumerate(sizes)]


def own_inputs(module: LinearBase, inputs: torch.Tensor) -> torch.Tensor:
    """The columns of the (rows, input_size) inputs that this worker's part of the module uses."""
    if not isinstance(module, RowParallelLinear) or module.tp_size == 1 or not module.input_is_parallel:
        return inputs
    size = module.input_size_per_partition
    return inputs[:, module.tp_rank * size : (module.tp_rank + 1) * size]


def gathered(module: LinearBase, outputs: torch.Tensor) -> torch.Tensor:
    """(rows, outputs) outputs of the whole module, gathered from all workers."""
    if not isinstance(module, ColumnParallelLinear) or module.tp_size == 1 or module.gather_output:
        return outputs
    sizes = getattr(module, "output_sizes", None) or [module.output_size]
    parts = outputs.split([size // module.tp_size for size in sizes], dim=-1)
    return torch.cat([_gathered_part(module, i, part) for i, part in enumerate(parts)], dim=-1)


def gathered_vocabulary(module: Any, logits: torch.Tensor) -> torch.Tensor:
    """(rows, padded vocabulary) logits of the whole head, gathered from all workers."""
    return logits if module.tp_size == 1 else tensor_model_parallel_all_gather(logits.contiguous(), -1)


def _gathered_part(module: Any, number: int, part: torch.Tensor) -> torch.Tensor:
    found = tensor_model_parallel_all_gather(part.contiguous(), -1)
    if not _repeated(module, number):
        return found
    # Workers with consecutive ranks hold copies of the same head.
    by_worker = found.view(len(found), module.tp_size, -1)
    return by_worker[:, :: module.num_kv_head_replicas].flatten(1)


def _repeated(module: Any, number: int) -> int:
    """Number of outputs of a part that are copies of other outputs."""
    if not isinstance(module, QKVParallelLinear) or number == 0 or module.num_kv_head_replicas == 1:
        return 0
    size = module.output_sizes[number]
    return size - size // module.num_kv_head_replicas


# Suffix of the name under which an embedding is also probed as an output head.
_AS_HEAD = ":as_head"
# vLLM replaces an adapted module by a LoRA layer, which holds the original module under this name.
_WRAPPED = ".base_layer"
_SHARD_ORDER = ("q", "k", "v")


def list_modules(worker: Any, checkpoint_names: tuple[str, ...]) -> EngineModules:
    """Every module of a worker's model that has parameters, with the checkpoint names of its weights."""
    model = worker.model_runner.model
    names = _by_engine_name(model, checkpoint_names)
    probed: dict[str, ProbedModule] = {}
    unreached: list[str] = []
    for name, module in _with_parameters(model):
        if experts := _expert_tensors(module, checkpoint_names):
            scheme = quantization_of(module)
            probed[name] = ProbedModule(name, "experts", experts, _outputs(module), quantization=scheme)
            continue
        kind, parameters = _kind(name, module)
        tensors = tuple(tensor for p in parameters for tensor in names.get(p, ()))
        # vLLM holds −exp(A_log), which no probe compares with A_log. The canary covers it.
        is_changed = any(tensor.endswith(".A_log") for tensor in tensors)
        if kind is None or is_changed or not all(p in names for p in parameters):
            unreached += [f"{name}.{own}" for own, _ in module.named_parameters(recurse=False)]
        else:
            has_bias = kind == "linear" and getattr(module, "bias", None) is not None
            probed[name] = ProbedModule(
                name, kind, tensors, _outputs(module), has_bias, quantization_of(module)
            )
    _add_tied_head(probed)
    return EngineModules(probed, tuple(unreached))


def probe_modules(
    worker: Any, names: tuple[str, ...], seed: int, every: bool, adapter: str | None = None
) -> dict[str, torch.Tensor]:
    """1-D float32 outputs, on the CPU, of this worker's named modules for their probe inputs, with this adapter."""
    model = worker.model_runner.model
    own = {name for name, _ in _with_parameters(model)}
    answers = {}
    with torch.inference_mode():
        for name in names:
            if _own_name(name) in own:
                module = model.get_submodule(_own_name(name))
                if hasattr(module, "base_layer"):
                    from lockstep.engines.vllm.port.lora import use_adapter

                    use_adapter(worker, adapter, 2 if module.bias is not None else 1)
                answers[name] = _output(name, module, seed, every).float()
    return sendable(answers)


def digests_of_held(
    worker: Any, parts: Sequence[HeldPart], dtype: torch.dtype, key: int | None
) -> dict[str, str]:
    """Digests of parts of what this worker's modules hold (`held_digests`). An adapter of vLLM's has no part in it."""
    model = worker.model_runner.model
    own = {name for name, _ in _with_parameters(model)}
    with torch.inference_mode(), exact_products():
        found = {
            part: _held(part, plain_module(model.get_submodule(_own_name(part.name))))
            for part in parts
            if _own_name(part.name) in own
        }
        return held_digests(found, dtype, key)


def _held(part: HeldPart, module: Any) -> torch.Tensor:
    """The numbers of a part of a module, as it computes with them; see `contract/probe.py`."""
    if isinstance(module, LinearBase) and not _is_convolution(module):
        inputs = part.inputs(module.input_size, next(module.parameters()), module.params_dtype)
        if part.asks_for_bias:
            return part.outputs(_whole_output(module, module, inputs))
        with _without_bias(module):
            return part.outputs(_whole_output(module, module, inputs))
    if isinstance(module, ParallelLMHead) or part.name.endswith(_AS_HEAD):
        bias = getattr(module, "bias", None) if part.asks_for_bias else None
        inputs = part.inputs(module.embedding_dim, module.weight)
        logits = gathered_vocabulary(module, module.quant_method.apply(module, inputs, bias=bias))
        return part.outputs(logits[:, : module.org_vocab_size])
    if isinstance(module, VocabParallelEmbedding):
        rows = torch.arange(part.start, part.stop, device=module.weight.device)
        return VocabParallelEmbedding.forward(module, rows)
    held = torch.cat([p.detach().flatten() for _, p in module.named_parameters(recurse=False)])
    return held[part.start : part.stop]


@contextmanager
def _without_bias(module: Any) -> Iterator[None]:
    """Inside the context a linear module adds no bias."""
    bias = module.bias
    try:
        module.bias = None
        yield
    finally:
        module.bias = bias


def _own_name(name: str) -> str:
    """The module's name in this model, without the server's prefix and the head's suffix."""
    return name.rpartition("/")[2].removesuffix(_AS_HEAD)


def linear_output(name: str, module: Any, seed: int, *, with_zeros: bool = False) -> torch.Tensor:
    """(rows, outputs) of a whole linear module for its probe input, and for a row of zeros if it is asked.

    The module may have a LoRA layer of vLLM around it.
    """
    own = plain_module(module)
    quantised = bool(quantization_of(own))
    inputs = probe_inputs(seed, name, own.input_size, has_bias=with_zeros, quantised=quantised)
    return _whole_output(own, module, sent(inputs.to(own.params_dtype), next(own.parameters()).device))


def _whole_output(own: LinearBase, module: Any, inputs: torch.Tensor) -> torch.Tensor:
    """(rows, outputs) of a whole linear module. `own` is the module without a LoRA layer around it."""
    answer = module(own_inputs(own, inputs).contiguous())
    output, bias = answer if isinstance(answer, tuple) else (answer, None)
    return gathered(own, output if bias is None else output + bias)


def plain_module(module: Any) -> Any:
    """The original module, without a LoRA layer of vLLM around it."""
    return module.base_layer if hasattr(module, "base_layer") else module


def _output(name: str, module: Any, seed: int, every: bool) -> torch.Tensor:
    own = plain_module(module)
    if isinstance(own, LinearBase) and not _is_convolution(own):
        return linear_output(name, module, seed, with_zeros=own.bias is not None).flatten()
    # Only linear modules may have adapters; all others are refused.
    module = own
    if isinstance(module, ParallelLMHead) or name.endswith(_AS_HEAD):
        bias = getattr(module, "bias", None)
        inputs = probe_inputs(seed, name, module.embedding_dim, has_bias=bias is not None)
        inputs = sent(inputs.to(module.weight.dtype), module.weight.device)
        logits = gathered_vocabulary(module, module.quant_method.apply(module, inputs, bias=bias))
        return logits[:, : module.org_vocab_size].flatten()
    if isinstance(module, VocabParallelEmbedding):
        rows = sent(probe_rows(seed, name, module.org_vocab_size, every=every), module.weight.device)
        vector = sent(probe_vector(seed, name, module.embedding_dim), module.weight.device)
        # Without the scale of a class of transformers (VaultGemma); vLLM's models scale outside the module.
        found = [
            VocabParallelEmbedding.forward(module, own).float() @ vector for own in rows.split(PROBED_ROWS)
        ]
        return torch.cat(found)
    if isinstance(module, RoutedExperts):
        chosen = torch.tensor(probe_experts(seed, name, module.global_num_experts, every=every))
        device, dtype = module.w13_weight.device, module.params_dtype
        inputs = sent(expert_input(seed, name, module.hidden_size).to(dtype), device)
        inputs = inputs.expand(len(chosen), -1).contiguous()
        weights = torch.ones(len(chosen), 1, dtype=torch.float32, device=device)
        return module.forward_modular(
            inputs, weights, sent(chosen[:, None].to(torch.int32), device)
        ).flatten()
    return torch.cat([p.detach().flatten() for _, p in module.named_parameters(recurse=False)])


def _expert_tensors(module: Any, checkpoint_names: tuple[str, ...]) -> tuple[str, ...]:
    """Checkpoint names of each expert's projections; empty: there are none, or the probe cannot test their kind."""
    if (
        not isinstance(module, RoutedExperts)
        or module.quant_method.is_monolithic
        or module.moe_config.has_bias
    ):
        return ()
    if module.moe_config.tp_size > 1 or module.use_ep or not module.moe_config.is_act_and_mul:
        return ()
    projections = (module.ckpt_gate_proj_name, module.ckpt_up_proj_name, module.ckpt_down_proj_name)
    found = tuple(
        f"{module.layer_name}.{e}.{p}.weight" for e in range(module.global_num_experts) for p in projections
    )
    return found if set(found) <= set(checkpoint_names) else ()


def _outputs(module: Any) -> int:
    if isinstance(module, ParallelLMHead | VocabParallelEmbedding):
        return module.org_vocab_size
    if isinstance(module, LinearBase) and not _is_convolution(module):
        return whole_outputs(module)
    if isinstance(module, RoutedExperts):
        return module.hidden_size
    return sum(p.numel() for p in module.parameters(recurse=False))


def _with_parameters(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    for name, module in model.named_modules():
        # Each module is asked: the whole model's `named_parameters` lists a tied parameter only once.
        if next(module.parameters(recurse=False), None) is not None:
            # A module inside a LoRA layer is named as without the LoRA layer.
            yield name.removesuffix(_WRAPPED), module


def _kind(name: str, module: torch.nn.Module) -> tuple[ModuleKind | None, list[str]]:
    """The kind of probe for a module (None: it cannot be probed), and the parameters whose checkpoint names it has."""
    if _is_convolution(module):
        whole = module.tp_size == 1
        return ("values" if whole else None), [
            f"{name}.{own}" for own, _ in module.named_parameters(recurse=False)
        ]
    if isinstance(module, ParallelLMHead | LinearBase):
        return "linear", [f"{name}.weight"]
    if isinstance(module, VocabParallelEmbedding):
        return "embedding", [f"{name}.weight"]
    own = dict(module.named_parameters(recurse=False))
    vectors = all(p.dim() == 1 and p.numel() > 0 for p in own.values())
    return ("values" if vectors else None), [f"{name}.{parameter}" for parameter in own]


def _is_convolution(module: Any) -> bool:
    """Whether a linear module only holds the weight of a convolution, as in Mamba layers, and is never called."""
    return isinstance(module, LinearBase) and getattr(module, "weight", torch.empty(0)).dim() == 3


def _add_tied_head(probed: dict[str, ProbedModule]) -> None:
    """If the embedding also computes the logits (Gemma), add it a second time, as an output head."""
    embeddings = [m for m in probed.values() if m.kind == "embedding"]
    if len(embeddings) == 1 and not any("lm_head" in name for name in probed):
        (tied,) = embeddings
        probed[tied.name + _AS_HEAD] = replace(tied, name=tied.name + _AS_HEAD, kind="linear")


def _by_engine_name(model: Any, checkpoint_names: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    """Checkpoint names by vLLM's parameter name, from the mapping of the model, or else of its parts (Qwen2-VL).

    Shards of a fused parameter are in output order.
    """
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    packed = get_packed_modules_mapping(model)
    shards: dict[str, dict[int, str]] = {}
    for name in checkpoint_names:
        found = mapper._map_name_with_shard(name) if mapper is not None else (name, None)
        if found is None:
            continue
        mapped, shard = found
        position = (
            _SHARD_ORDER.index(shard) if shard in _SHARD_ORDER else shard if isinstance(shard, int) else 0
        )
        if shard is None:
            mapped, position = _packed_into(mapped, packed)
        shards.setdefault(mapped, {})[position] = name
    return {engine_name: tuple(found[i] for i in sorted(found)) for engine_name, found in shards.items()}


def _packed_into(name: str, packed: dict[str, list[str]]) -> tuple[str, int]:
    """The fused parameter that contains a part, and the part's index in it; if there is none: the name, and 0."""
    owner, _, parameter = name.rpartition(".")
    outer, _, part = owner.rpartition(".")
    for fused, parts in packed.items():
        if part in parts:
            return f"{outer}.{fused}.{parameter}", parts.index(part)
    return name, 0
