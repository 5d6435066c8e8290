"""The module probe: the output of each engine module is that of the weights that the trainer sends.

These weights are merged if the model has an adapter (`weights/source.py`). Both sides get the same input
(`contract/probe.py`). The probe finds faults that a comparison of stored tensors cannot find, because it uses the
weights as the engine computes with them.

Proof `module_probe`.
Shows: both sides draw a vector from one seed; each module that the engine runs gives the output that the trainer's
weights give, in the form in which the engine holds it (packed, fused, tied, padded or quantised); an error names the
layer.
Does not show: attention, positions, anything between modules; a wrong output smaller than the limit.
When: before the first sample, an evaluation included: all modules. Every push: embeddings and heads, 6 linear layers,
6 vectors, drawn again each time.

Proof `codes`.
Shows: with `vllm_quantization`: the codes and scales of each layer that the engine holds in 8 bits are those that the
scheme's formula makes of the sent weights, to the bit.
Does not show: with tensor parallelism, and where a kernel has packed the codes, they cannot be read (the module probe
shows the layer).
When: every push, with the module probe and for its modules; the first time before the first sample.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from lockstep.contract.probe import (
    PROBED_ROWS,
    SAMPLED_ROWS,
    EngineModules,
    ProbedModule,
    expert_input,
    probe_experts,
    probe_rows,
    probe_vector,
)
from lockstep.contract.protocol import ProbedEngine
from lockstep.devices import on_host, sent
from lockstep.errors import InputError, ProofError
from lockstep.extensions import HELD_FORMS, load
from lockstep.models.adapters import head_name
from lockstep.watch.tolerances import output_rounding, probe_limit
from lockstep.weights.push import weights_of
from lockstep.weights.source import PlainSource

# Number of linear layers, and of vectors (norms), in a sampled probe, beside all embeddings and heads.
_SAMPLE = 6
# Number of layers of experts in a sampled probe.
_SAMPLED_LAYERS_OF_EXPERTS = 2
# Checkpoint tensors of one expert: gate, up and down projection.
_PROJECTIONS = 3


@dataclass(frozen=True, slots=True)
class ProbeRecord:
    """The result of one probe, for the receipt.

    Attributes:
        errors: per probed checkpoint tensor, the largest difference of its outputs, minus their rounding, ÷ their rms.
        modules, of_modules: how many modules were probed, of how many that can be.
        unreached: engine parameters that no probe reaches.
        servers: URLs of the servers of which a module is over the limit; empty if the engine is not several servers.
        codes: number of modules in 8 bits whose codes and scales were compared.
        recoded: names of those modules whose codes or scales are not those of the trainer's weights.
    """

    errors: dict[str, float]
    modules: int
    of_modules: int
    unreached: tuple[str, ...]
    limit: float
    seconds: float
    servers: tuple[str, ...] = ()
    codes: int = 0
    recoded: tuple[str, ...] = ()

    @property
    def worst(self) -> tuple[str, float]:
        """The tensor with the largest error."""
        return max(self.errors.items(), key=lambda item: item[1])

    @property
    def failed(self) -> list[str]:
        """Tensors over the limit, worst first. A NaN error is over the limit."""
        over = [(name, error) for name, error in self.errors.items() if not error <= self.limit]
        return [name for name, _ in sorted(over, key=lambda item: -item[1])]


@dataclass(frozen=True, slots=True)
class _Compared:
    """Outputs of the engine, and the same outputs by the trainer's weights.

    Attributes:
        found: (outputs,) of the engine, on the host.
        expected: (outputs,) of the trainer, on its device.
        size: (outputs,) whose root mean square is the size of the outputs.
        inner: (outputs,) the size of what is rounded before it is added up to an output.
    """

    found: torch.Tensor
    expected: torch.Tensor
    size: torch.Tensor
    inner: torch.Tensor | None = None

    @property
    def of_trainer(self) -> tuple[torch.Tensor, ...]:
        """The tensors of the trainer's device."""
        return (self.expected, self.size, *(() if self.inner is None else (self.inner,)))


class HeldForm(Protocol):
    """How the linear modules of one scheme hold their weights, if this is not how they are sent (`HELD_FORMS`)."""

    def vector(self, seed: int, module: str, size: int) -> torch.Tensor:
        """(size,) float32: the input that engine and trainer give to a module instead of the probe vector."""

    def values(self, rows: torch.Tensor) -> torch.Tensor:
        """(rows, inputs) float32: the values that the engine should hold, of rows in the engine's dtype."""

    def digest(self, weights: Iterator[torch.Tensor]) -> str:
        """The digest of what a module should hold of its weights: (outputs, inputs) each, in the engine's dtype."""

    def digests(self, engine: ProbedEngine, names: Sequence[str]) -> dict[str, str]:
        """The digest of what each named module holds; empty where it cannot be read."""


class ModuleProbe:
    """Compares an engine's modules with a model's weights, which it only reads.

    Args:
        engine_dtype: dtype to which the engine casts weights.
        source: the weights that the engine should compute with; None: those that a push of the model sends. Weights
            of a given source are in the engine's dtype already, or are sums of such weights.

    Raises:
        InputError: the engine runs no module under the model's names; a module is quantised in a way that cannot be
            proven; or the model has an adapter of a kind that cannot be merged.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        engine: ProbedEngine,
        engine_dtype: torch.dtype,
        *,
        source: Callable[[PreTrainedModel], PlainSource] | None = None,
    ) -> None:
        self._model, self._engine, self._dtype, self._given = model, engine, engine_dtype, source
        self._source = self._weights()
        self.modules = self._comparable(engine.modules(self._source.names))
        if not self.modules.probed:
            raise InputError("the engine runs no module under the trained model's names; it cannot be proven")
        for module in self.modules.probed.values():
            if module.quantization and (module.quantization not in HELD_FORMS or module.kind != "linear"):
                raise InputError(
                    f"the engine computes {module.name} in 8 bits by {module.quantization}, which cannot be proven "
                    f"yet: linear layers in {', '.join(HELD_FORMS)} can, experts cannot; leave vllm_quantization out"
                )

    @torch.no_grad()
    def measure(self, seed: int, *, every: bool) -> ProbeRecord:
        """Errors for the probe input of `seed`: of `every` module and output, or of a sample, as in a run."""
        start = time.perf_counter()
        # Made again for every probe and for every push, because the active adapter may have changed.
        self._source = self._weights()
        names = list(self.modules.probed) if every else self._sample(seed)
        answers = self._engine.probe(names, seed, every=every)
        limit, errors, wrong = probe_limit(self._dtype), dict[str, float](), set[str]()
        probed, compared = self.modules.probed, []
        for name in names:
            for tensors, found in self._by_tensor(probed[name], answers[name], seed, every):
                pairs = [] if found is None else self._compared(probed[name], tensors, seed, found, every)
                compared.append((name, tensors, pairs))
        # The trainer's outputs of all modules are read from its device at once.
        own = iter(on_host([t for *_, pairs in compared for pair in pairs for t in pair.of_trainer]))
        for name, tensors, pairs in compared:
            error = max((self._distance(pair, own) for pair in pairs), default=float("inf"))
            errors |= {tensor: max(errors.get(tensor, 0.0), error) for tensor in tensors}
            if not error <= limit:
                # Several servers put their URL before the name (`engines/servers/server.py`).
                wrong.add(name.rpartition("/")[0])
        codes, recoded = self._compared_codes([name for name in names if probed[name].quantization])
        seconds, servers = time.perf_counter() - start, tuple(sorted(wrong - {""}))
        counts = len(names), len(probed), self.modules.unreached
        return ProbeRecord(errors, *counts, limit, seconds, servers, codes, recoded)

    def _compared_codes(self, names: list[str]) -> tuple[int, tuple[str, ...]]:
        """How many modules' codes and scales were compared, and the names of those that differ from the trainer's."""
        told: dict[str, str] = {}
        for scheme in dict.fromkeys(self.modules.probed[name].quantization for name in names):
            own = [name for name in names if self.modules.probed[name].quantization == scheme]
            digests = self._form(scheme).digests(self._engine, own)
            told |= {name: digest for name, digest in digests.items() if digest}
        return len(told), tuple(name for name, digest in told.items() if digest != self._codes_digest(name))

    def _codes_digest(self, name: str) -> str:
        """The digest that a module in another form must have: that of its weights, in the order of its outputs."""
        module = self.modules.probed[name]
        weights = ((tensor, self._source.tensor(tensor)) for tensor in module.tensors)
        return self._form(module.quantization).digest(
            (weight.T if self.transposed(tensor) else weight).to(self._dtype) for tensor, weight in weights
        )

    def _form(self, scheme: str) -> HeldForm:
        return load(HELD_FORMS[scheme])()

    def _weights(self) -> PlainSource:
        return weights_of(self._model) if self._given is None else self._given(self._model)

    def reached(self) -> float:
        """Share of the trainer's weights, counted in elements, that a probe reaches."""
        source = self._source
        names = {source.first_name(name) for name in source.names if not name.endswith("bias")}
        tensors = [tensor for module in self.modules.probed.values() for tensor in module.tensors]
        reached = set(map(source.first_name, tensors))
        weights = {name: source.shape(name).numel() for name in names}
        return sum(size for name, size in weights.items() if name in reached) / sum(weights.values())

    def _comparable(self, found: EngineModules) -> EngineModules:
        """Leave out modules whose outputs are not those of the named weights in order (loaders pad and merge)."""
        probed, unreached = {}, list(found.unreached)
        for name, module in found.probed.items():
            if self._all_outputs(module) == module.outputs:
                probed[name] = module
            else:
                unreached.append(f"{name}.weight")
        return EngineModules(probed, tuple(unreached))

    def _sample(self, seed: int) -> list[str]:
        """Names of all embeddings and heads, and of a sample of the layers and of the vectors."""
        probed, head = self.modules.probed, self._source.first_name(head_name(self._model))
        linear = [(name, module.tensors) for name, module in probed.items() if module.kind == "linear"]
        layers = [name for name, own in linear if head not in map(self._source.first_name, own)]
        vectors = [name for name, module in probed.items() if module.kind == "values"]
        experts = [name for name, module in probed.items() if module.kind == "experts"]
        draw = random.Random(seed)
        sizes = ((layers, _SAMPLE), (vectors, _SAMPLE), (experts, _SAMPLED_LAYERS_OF_EXPERTS))
        drawn = {name for kind, size in sizes for name in draw.sample(kind, min(size, len(kind)))}
        return [name for name in probed if name in drawn or name not in {*layers, *vectors, *experts}]

    def _all_outputs(self, module: ProbedModule) -> int:
        if module.kind == "experts":
            return self.outputs(module, module.tensors[_PROJECTIONS - 1])
        return sum(self.outputs(module, tensor) for tensor in module.tensors)

    def outputs(self, module: ProbedModule, tensor: str) -> int:
        """Number of outputs of a module that belong to one of its tensors."""
        shape = self._source.shape(tensor)
        if module.kind == "values":
            return shape.numel()
        return shape[1] if self.transposed(tensor) else shape[0]

    def _by_tensor(
        self, module: ProbedModule, answer: torch.Tensor, seed: int, every: bool
    ) -> list[tuple[tuple[str, ...], torch.Tensor | None]]:
        """An answer split by the module's tensors, (inputs, outputs) each; all None if the answer has the wrong size.

        An expert's output depends on all of its tensors together.
        """
        if module.kind == "embedding":
            return [((module.tensors[0],), answer)]
        if module.kind == "experts":
            count = len(module.tensors) // _PROJECTIONS
            first = [_PROJECTIONS * e for e in probe_experts(seed, module.name, count, every=every)]
            names = [module.tensors[i : i + _PROJECTIONS] for i in first]
            whole = len(answer) == len(names) * module.outputs
            return [(n, answer.view(len(names), -1)[i] if whole else None) for i, n in enumerate(names)]
        inputs = 2 if module.has_bias else 1
        if len(answer) != inputs * module.outputs:
            return [((tensor,), None) for tensor in module.tensors]
        sizes = [self.outputs(module, tensor) for tensor in module.tensors]
        pieces = answer.view(inputs, -1).split(sizes, dim=1)
        return [((tensor,), piece) for tensor, piece in zip(module.tensors, pieces, strict=True)]

    def _compared(
        self, module: ProbedModule, tensors: tuple[str, ...], seed: int, found: torch.Tensor, every: bool
    ) -> list[_Compared]:
        """The outputs of one tensor, or of one expert; with a bias, those of the bias too."""
        if module.kind == "experts":
            gate, up, down = (self._cast(self._source.tensor(tensor)) for tensor in tensors)
            vector = sent(expert_input(seed, module.name, gate.shape[1]), gate.device).to(self._dtype).float()
            owning_module: Any = self._source.owning_module(tensors[0])
            inner = owning_module.act_fn(gate @ vector) * (up @ vector)
            expected = down @ inner
            # The engine rounds what stands between the projections too.
            return [_Compared(found, expected, expected, (down.square() @ inner.square()).sqrt())]
        (tensor,) = tensors
        beside = tensor.removesuffix("weight") + "bias"
        weight = self._source.tensor(tensor)
        bias = self._source.tensor(beside) if beside in self._source.names else None
        if module.kind == "values":
            expected = self._cast(weight).flatten()
            return [_Compared(found[0], expected, expected)]
        draw = self._form(module.quantization).vector if module.quantization else probe_vector
        vector = sent(draw(seed, module.name, self.inputs(tensor)), weight.device)
        if module.kind == "embedding":
            rows = probe_rows(seed, module.name, len(weight), every=every)
            pieces = sent(rows, weight.device).split(PROBED_ROWS)
            expected = torch.cat([self._cast(weight[own]) @ vector for own in pieces])
            return [_Compared(found, expected, expected)]
        if self.transposed(tensor):
            weight = weight.T
        elif not every and len(weight) > 2 * SAMPLED_ROWS:
            # One output per vocabulary entry is too many: a sample shows a stale head as well.
            rows = probe_rows(seed, module.name, len(weight), every=False)
            found, rows = found[:, rows], sent(rows, weight.device)
            weight, bias = weight[rows], None if bias is None else bias[rows]
        vector = vector.to(self._dtype).float()
        product = torch.cat([self._held(module, own) @ vector for own in weight.split(PROBED_ROWS)])
        if not module.has_bias or bias is None:
            return [_Compared(found[0], product, product)]
        added = self._cast(bias)
        return [_Compared(found[0], product + added, product), _Compared(found[1], added, added)]

    def _held(self, module: ProbedModule, rows: torch.Tensor) -> torch.Tensor:
        """The values of some rows of a weight that the engine should hold, in float32."""
        if not module.quantization:
            return self._cast(rows)
        return self._form(module.quantization).values(rows.to(self._dtype))

    def inputs(self, tensor: str) -> int:
        """Number of inputs of a linear module that belong to one of its tensors."""
        return self._source.shape(tensor)[0 if self.transposed(tensor) else 1]

    def _distance(self, pair: _Compared, own: Iterator[torch.Tensor]) -> float:
        """max over outputs of |engine − trainer|, minus the rounding of the output itself, ÷ rms(size).

        `own` gives the tensors of `pair.of_trainer`, on the host.
        """
        expected, size, *inner = (next(own) for _ in pair.of_trainer)
        rounded = sum(inner, start=expected.abs())
        beyond = ((pair.found - expected).abs() - output_rounding(self._dtype) * rounded).max().clamp(min=0.0)
        error = float(beyond) / (float(size.norm()) / len(size) ** 0.5 or 1.0)
        # A NaN would pass every comparison with a limit.
        return error if error == error else float("inf")

    def transposed(self, tensor: str) -> bool:
        """Whether the trainer stores this weight as (inputs, outputs), as GPT-2 does."""
        return isinstance(self._source.owning_module(tensor), Conv1D)

    def _cast(self, parameter: torch.Tensor) -> torch.Tensor:
        """The values that the engine should hold, in float32."""
        return parameter.to(self._dtype).float() if self._given is None else parameter.float()


def check_probe(record: ProbeRecord, version: int) -> None:
    """Check a probe's errors against their limit, and that no codes differ. The message names the layers."""
    failed = record.failed
    if not failed:
        _check_codes(record, version)
        return
    shown = ", ".join(f"{name} by {record.errors[name]:.2g}" for name in failed[:4])
    where = f" at {', '.join(record.servers)}" if record.servers else ""
    raise ProofError(
        "module_probe",
        f"at version {version} {len(failed)} of {len(record.errors)} weights give other outputs in the engine{where} "
        f"than in the trainer (limit {record.limit:.0e} of their size): {shown}{', …' if len(failed) > 4 else ''}",
        _cause(record, failed),
        "do not train on this engine; name the model, the layer and the engine's version in a report",
    )


def _check_codes(record: ProbeRecord, version: int) -> None:
    if record.recoded:
        raise ProofError(
            "codes",
            f"at version {version} {len(record.recoded)} of {record.codes} modules hold other codes or scales in 8 "
            f"bits than those of the trainer's weights: {', '.join(record.recoded[:4])}"
            f"{', …' if len(record.recoded) > 4 else ''}",
            "the engine did not quantise the layer again after this push, or quantises by another formula",
            "do not train on this engine; name the model, the layer and the engine's version in a report",
        )


def _cause(record: ProbeRecord, failed: list[str]) -> str:
    if len(failed) == len(record.errors):
        return "no weight of the push is in use: the load was acknowledged without effect, or the engine was restarted"
    if len(failed) <= 2:
        return (
            "the engine kept an older copy of this layer, or wrote the sent one into the wrong place "
            "(packing, tying, order)"
        )
    return "a part of the push is not in use, or was written into the wrong places"
