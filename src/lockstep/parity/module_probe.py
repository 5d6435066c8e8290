"""The module probe: each module that the engine really runs, against the same product with the trainer's weights.

Comes from: the trained model and `Engine.probe`, both given the same input (`engines/probe.py`). Goes to: every push, which does
not serve training before its probe has passed, and `lockstep verify`, which probes every module. It sees what a comparison of
stored tensors cannot: weights that are packed, fused, tied, padded or quantised, as the engine computes with them.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from lockstep.engines.probe import ProbedModule, probe_rows, probe_vector
from lockstep.engines.protocol import ProbedEngine
from lockstep.errors import InputError, ProofError
from lockstep.parity.tolerances import probe_limit

# Linear modules that a sampled probe takes, beside embeddings, heads and vectors, which it always does.
_SAMPLE = 8


@dataclass(frozen=True, slots=True)
class ProbeRecord:
    """What one probe found; figures of the receipt.

    Attributes:
        errors: for each checkpoint tensor probed, max |engine − trainer| ÷ rms(trainer) over its outputs.
        modules: how many modules were probed, of how many that can be.
        unreached: engine parameters that no probe reaches.
    """

    errors: dict[str, float]
    modules: int
    of_modules: int
    unreached: tuple[str, ...]
    limit: float
    seconds: float

    @property
    def worst(self) -> tuple[str, float]:
        """The tensor with the largest error."""
        return max(self.errors.items(), key=lambda item: item[1])

    @property
    def failed(self) -> list[str]:
        """Tensors over the limit, worst first; an error that is not a number is one."""
        over = [(name, error) for name, error in self.errors.items() if not error <= self.limit]
        return [name for name, _ in sorted(over, key=lambda item: -item[1])]


class ModuleProbe:
    """Compares an engine's modules with a model's weights.

    Args:
        model: the trained model; only read.
        engine: holds, supposedly, the same weights.
        engine_dtype: dtype that the engine casts weights to.

    Raises:
        InputError: the engine runs no module under the model's names.
    """

    def __init__(self, model: PreTrainedModel, engine: ProbedEngine, engine_dtype: torch.dtype) -> None:
        self._model = model
        self._engine = engine
        self._dtype = engine_dtype
        self._modules = engine.modules(tuple(name for name, _ in model.named_parameters(remove_duplicate=False)))
        if not self._modules.probed:
            raise InputError("the engine runs no module under the trained model's names; it cannot be proven")

    def names(self, seed: int | None) -> list[str]:
        """Modules to probe: all of them, or with a seed all but the linear layers, of which a sample is drawn."""
        probed = self._modules.probed
        if seed is None:
            return list(probed)
        layers = [name for name, module in probed.items() if module.kind == "linear" and not self._is_head(module)]
        drawn = set(random.Random(seed).sample(layers, min(_SAMPLE, len(layers))))
        return [name for name in probed if name in drawn or name not in layers]

    @torch.no_grad()
    def measure(self, names: Sequence[str], seed: int) -> ProbeRecord:
        """Errors of the named modules for the probe input of `seed`."""
        start = time.perf_counter()
        answers = self._engine.probe(names, seed)
        parameters = dict(self._model.named_parameters(remove_duplicate=False))
        errors: dict[str, float] = {}
        for name in names:
            module = self._modules.probed[name]
            parts = [self._expected(module, tensor, seed, parameters) for tensor in module.tensors]
            found = answers[name].split([len(part) for part in parts]) if _fits(answers[name], parts) else None
            for i, tensor in enumerate(module.tensors):
                error = _relative_error(found[i], parts[i].cpu()) if found else float("inf")
                errors[tensor] = max(errors.get(tensor, 0.0), error)
        seconds = time.perf_counter() - start
        limit = probe_limit(self._dtype)
        return ProbeRecord(errors, len(names), len(self._modules.probed), self._modules.unreached, limit, seconds)

    def _expected(
        self, module: ProbedModule, tensor: str, seed: int, parameters: dict[str, torch.nn.Parameter]
    ) -> torch.Tensor:
        weight = self._cast(parameters[tensor])
        if module.kind == "values":
            return weight.flatten()
        if module.kind == "embedding":
            rows = probe_rows(seed, module.name, len(weight)).to(weight.device)
            return weight[rows] @ probe_vector(seed, module.name, weight.shape[1]).to(weight.device)
        if isinstance(self._model.get_submodule(tensor.rpartition(".")[0]), Conv1D):
            weight = weight.T
        vector = probe_vector(seed, module.name, weight.shape[1]).to(weight.device, self._dtype).float()
        output = weight @ vector
        bias = parameters.get(tensor.removesuffix("weight") + "bias")
        return output if bias is None else output + self._cast(bias)

    def _cast(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        """The values that the engine should hold, in float32."""
        return parameter.detach().to(self._dtype).float()

    def _is_head(self, module: ProbedModule) -> bool:
        head = self._model.get_output_embeddings().weight
        parameters = dict(self._model.named_parameters(remove_duplicate=False))
        return any(parameters[tensor] is head for tensor in module.tensors)


def check_probe(record: ProbeRecord, version: int) -> None:
    """Pass or stop.

    Raises:
        ProofError: a module computes something else than the trainer's weights would; names the layers.
    """
    failed = record.failed
    if not failed:
        return
    shown = ", ".join(f"{name} by {record.errors[name]:.2g}" for name in failed[:4])
    raise ProofError(
        "module_probe",
        f"at version {version} {len(failed)} of {len(record.errors)} weights give other outputs in the engine than in the "
        f"trainer (limit {record.limit:.0e} of their size): {shown}{', …' if len(failed) > 4 else ''}",
        _cause(record, failed),
        "do not train on this engine; name the model, the layer and the engine's version in a report",
    )


def _cause(record: ProbeRecord, failed: list[str]) -> str:
    if len(failed) == len(record.errors):
        return "no weight of the push is in use: the load was acknowledged without effect, or the engine was restarted"
    if len(failed) <= 2:
        return "the engine kept an older copy of this layer, or wrote the sent one into the wrong place (packing, tying, order)"
    return "a part of the push is not in use, or was written into the wrong places"


def _fits(answer: torch.Tensor, parts: list[torch.Tensor]) -> bool:
    return len(answer) == sum(len(part) for part in parts)


def _relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    size = float(expected.square().mean().sqrt()) or 1.0
    error = float((found - expected).abs().max()) / size
    # max() of a tensor with NaN is NaN, which no comparison would pass on.
    return error if error == error else float("inf")
