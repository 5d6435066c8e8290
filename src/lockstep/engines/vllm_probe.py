"""The engine's half of the module probe for vLLM: runs inside a worker, through `collective_rpc`.

A linear module is called as vLLM calls it (packed, fused, tied, padded or quantised as it then is); nothing is read from
`weight`, which on CPU is empty after packing. Needs the whole module in one worker (tensor parallel size 1).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

from lockstep.engines.probe import EngineModules, ModuleKind, ProbedModule, probe_rows, probe_vector

_AS_HEAD = ":as_head"


def list_modules(worker: Any, checkpoint_names: tuple[str, ...]) -> EngineModules:
    """Every module with parameters, under the checkpoint names of its weights."""
    model = worker.model_runner.model
    names = _by_engine_name(model, checkpoint_names)
    probed: dict[str, ProbedModule] = {}
    unreached: list[str] = []
    for name, module in _with_parameters(model):
        kind, parameters = _kind(name, module)
        tensors = tuple(tensor for p in parameters for tensor in names.get(p, ()))
        if kind is None or not all(p in names for p in parameters):
            unreached += [f"{name}.{own}" for own, _ in module.named_parameters(recurse=False)]
        else:
            probed[name] = ProbedModule(name, kind, tensors)
    _reach_shared_head(probed)
    return EngineModules(probed, tuple(unreached))


def probe_modules(worker: Any, names: tuple[str, ...], seed: int) -> dict[str, torch.Tensor]:
    """Output of each named module for its probe input, as 1-D float32 tensors on CPU."""
    modules: dict[str, Any] = dict(worker.model_runner.model.named_modules())
    with torch.inference_mode():
        return {name: _output(name, modules[name.removesuffix(_AS_HEAD)], seed).float().cpu() for name in names}


def _output(name: str, module: Any, seed: int) -> torch.Tensor:
    if isinstance(module, ParallelLMHead) or name.endswith(_AS_HEAD):
        vector = probe_vector(seed, name, module.embedding_dim).to(module.weight)[None]
        logits = module.quant_method.apply(module, vector, bias=getattr(module, "bias", None))
        return logits[0, : module.org_vocab_size]
    if isinstance(module, VocabParallelEmbedding):
        found = module(probe_rows(seed, name, module.org_vocab_size).to(module.weight.device)).float()
        return found @ probe_vector(seed, name, found.shape[-1]).to(found.device)
    if isinstance(module, LinearBase):
        device = next(module.parameters()).device
        answer = module(probe_vector(seed, name, module.input_size).to(device, module.params_dtype)[None])
        output, bias = answer if isinstance(answer, tuple) else (answer, None)
        return output[0] if bias is None else output[0] + bias
    return torch.cat([p.detach().flatten() for _, p in module.named_parameters(recurse=False)])


def _with_parameters(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    for name, module in model.named_modules():
        # A tied head shares its parameter, which `named_parameters` of the whole model would list once.
        if next(module.parameters(recurse=False), None) is not None:
            yield name, module


def _kind(name: str, module: torch.nn.Module) -> tuple[ModuleKind | None, list[str]]:
    """How a module can be probed, and the parameters that tell its checkpoint names."""
    if isinstance(module, ParallelLMHead | LinearBase):
        return "linear", [f"{name}.weight"]
    if isinstance(module, VocabParallelEmbedding):
        return "embedding", [f"{name}.weight"]
    own = dict(module.named_parameters(recurse=False))
    vectors = all(p.dim() == 1 and p.numel() > 0 for p in own.values())
    return ("values" if vectors else None), [f"{name}.{parameter}" for parameter in own]


def _reach_shared_head(probed: dict[str, ProbedModule]) -> None:
    """Where the embedding itself makes the logits (Gemma), probe it as the head that it also is."""
    embeddings = [m for m in probed.values() if m.kind == "embedding"]
    if len(embeddings) == 1 and not any("lm_head" in name for name in probed):
        (shared,) = embeddings
        probed[shared.name + _AS_HEAD] = ProbedModule(shared.name + _AS_HEAD, "linear", shared.tensors)


def _by_engine_name(model: Any, checkpoint_names: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    """vLLM's parameter name → checkpoint names, by the model's own mapping; shards of a fused one in output order."""
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    packed = getattr(model, "packed_modules_mapping", None) or {}
    shards: dict[str, dict[int, str]] = {}
    for name in checkpoint_names:
        mapped = mapper.map_name(name) if mapper is not None else name
        if mapped is None:
            continue
        owner, _, kind = mapped.rpartition(".")
        part = name.rpartition(".")[0].rpartition(".")[2]
        outer, _, last = owner.rpartition(".")
        position = 0
        for fused, parts in packed.items():
            if part in parts and last in (fused, part):
                mapped, position = f"{outer}.{fused}.{kind}", parts.index(part)
        shards.setdefault(mapped, {})[position] = name
    return {engine_name: tuple(found[i] for i in sorted(found)) for engine_name, found in shards.items()}
