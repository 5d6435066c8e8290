"""The engine's part of the module probe for the transformers engine: its modules, and their outputs for the probe inputs.

It reads the engine's own copy of the model. `engines/vllm/port/probe.py` does the same for vLLM.
"""

from __future__ import annotations

import torch
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from lockstep.contract.probe import (
    PROBED_ROWS,
    EngineModules,
    ModuleKind,
    ProbedModule,
    expert_input,
    probe_experts,
    probe_inputs,
    probe_rows,
    probe_vector,
)
from lockstep.models.checkpoint_names import checkpoint_tensors, expert_names
from lockstep.to_device import sent


def list_modules(model: PreTrainedModel, checkpoint_names: tuple[str, ...]) -> EngineModules:
    """Every module of a model that has parameters, with the checkpoint names of its weights."""
    probed: dict[str, ProbedModule] = {}
    unreached: list[str] = []
    names_of: dict[str, list[str]] = {}
    for p in checkpoint_tensors(model):
        names_of.setdefault(p.parameter_name, []).append(p.name)
    experts = _experts_of(model, names_of)
    for name, module in model.named_modules():
        own = [n for parameter, _ in module.named_parameters(recurse=False) for n in names_of[f"{name}.{parameter}"]]
        kind = "experts" if name in experts else _kind(module)
        if kind is None or not set(own) <= set(checkpoint_names):
            unreached += own
        elif kind == "experts":
            probed[name] = ProbedModule(name, kind, experts[name], _outputs(module))
        elif own:
            tensors = tuple(own) if kind == "values" else tuple(names_of[f"{name}.weight"])
            has_bias = kind == "linear" and module.bias is not None
            probed[name] = ProbedModule(name, kind, tensors, _outputs(module), has_bias)
    return EngineModules(probed, tuple(unreached))


def _kind(module: torch.nn.Module) -> ModuleKind | None:
    if isinstance(module, torch.nn.Embedding):
        return "embedding"
    if isinstance(module, torch.nn.Linear | Conv1D):
        return "linear"
    return "values" if all(p.dim() == 1 for p in module.parameters(recurse=False)) else None


def _outputs(module: torch.nn.Module) -> int:
    if isinstance(module, torch.nn.Embedding):
        return module.num_embeddings
    if isinstance(module, torch.nn.Linear | Conv1D):
        return module.weight.shape[1 if isinstance(module, Conv1D) else 0]
    if _is_gated_experts(module):
        return module.get_parameter("down_proj").shape[1]
    return sum(p.numel() for p in module.parameters(recurse=False))


def output_of(name: str, module: torch.nn.Module, seed: int, every: bool) -> torch.Tensor:
    """A module's output for its probe input; see `contract/probe.py`."""
    if isinstance(module, torch.nn.Embedding):
        rows = sent(probe_rows(seed, name, module.num_embeddings, every=every), module.weight.device)
        vector = sent(probe_vector(seed, name, module.embedding_dim), module.weight.device)
        # The module's own forward may scale the rows, or take positions instead of ids. Therefore this line reads the weight.
        return torch.cat([module.weight[own].float() @ vector for own in rows.split(PROBED_ROWS)])
    if isinstance(module, torch.nn.Linear | Conv1D):
        size = module.weight.shape[0 if isinstance(module, Conv1D) else 1]
        inputs = probe_inputs(seed, name, size, has_bias=module.bias is not None).to(module.weight.dtype)
        return module(sent(inputs, module.weight.device)).flatten()
    if _is_gated_experts(module):
        weights = module.get_parameter("down_proj")
        chosen = sent(torch.tensor(probe_experts(seed, name, len(weights), every=every)), weights.device)[:, None]
        inputs = sent(expert_input(seed, name, weights.shape[1]).to(weights.dtype), weights.device)
        inputs = inputs.expand(len(chosen), -1).contiguous()
        return module(inputs, chosen, torch.ones_like(chosen, dtype=weights.dtype)).flatten()
    return torch.cat([p.detach().flatten() for p in module.parameters(recurse=False)])


def _is_gated_experts(module: torch.nn.Module) -> bool:
    """Whether a module contains gated experts without biases. Each expert is one slice of `gate_up_proj` and of `down_proj`."""
    return {name for name, _ in module.named_parameters(recurse=False)} == {"gate_up_proj", "down_proj"}


def _experts_of(model: PreTrainedModel, names_of: dict[str, list[str]]) -> dict[str, tuple[str, ...]]:
    """Checkpoint names of the experts' projections, by module: gate, up and down of the first expert, then of the second, …"""
    found: dict[str, tuple[str, ...]] = {}
    for name, module in model.named_modules() if expert_names(model) else ():
        if _is_gated_experts(module):
            gates, downs = names_of[f"{name}.gate_up_proj"], names_of[f"{name}.down_proj"]
            if len(gates) == 2 * len(downs):
                found[name] = tuple(n for e, down in enumerate(downs) for n in (*gates[2 * e : 2 * e + 2], down))
    return found
