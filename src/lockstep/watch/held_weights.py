"""The exact probe: each engine module computes with the very weights that the trainer sends, to the bit, in any dtype.

The module probe compares outputs within the rounding of the dtype. In bf16 this hides weights that are a few optimizer
steps old. Here a linear module is given rows of the identity matrix, so that its output is its weight
(`contract/probe.py`), and digests of both sides are compared.

A push looks at one of as many equal shares of the model as it has layers, and at one column of every other matrix. So a
matrix that a push has left out is seen at this push, and a single wrong element after as many pushes as there are
layers. On a CPU, where products with the identity are not cheap, both take four times as many pushes. Where a tensor
must be made to be read (merged adapters, sharded or 4-bit weights), only the shares are looked at.

Proof `held_weights`.
Shows: every linear layer, embedding, head, norm and bias of the engine computes with the trainer's weights in the
engine's dtype, to the bit, in whatever form it holds them; an error names the tensors, and the version of older ones.
Does not show: experts, layers in 8 bits (`codes`), vLLM's form of `A_log`, modules that no probe reaches (the receipt
names them); with `vllm_enable_lora`, what the adapter adds (`adapter`).
When: before the first sample, and after an engine was lost: all. Every push: all vectors, one column of every matrix
(on a CPU of one matrix in four), and a share: all within as many pushes as there are layers (on a CPU four times).
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from transformers import PreTrainedModel

from lockstep.contract.probe import HeldPart, ProbedModule, held_digests
from lockstep.contract.protocol import ProbedEngine
from lockstep.contract.tensors import key_for
from lockstep.errors import ProofError
from lockstep.models.adapters import head_name
from lockstep.watch.modules import ModuleProbe
from lockstep.weights.push import weights_of
from lockstep.weights.source import PlainSource

# On a CPU, a share is this many times smaller.
_PACE_ON_A_CPU = 4
# Numbers that are held at a time, unless one share has more.
_AT_ONCE = 1 << 25
# How many tensors an error names.
_NAMED = 4
# For so many pushes at least a digest is kept, to know the version of older numbers.
_KEPT = 200


@dataclass(frozen=True, slots=True)
class HeldRecord:
    """The result of one comparison, for the receipt.

    Attributes:
        modules, of_modules: how many modules were compared as a whole, of how many that the module probe reaches.
        shares, of_shares: how many shares of the model were compared, of how many.
        differing: checkpoint names of the tensors of which the engine holds other numbers.
        late: those of them of which it holds numbers of an older version.
        older: the last of these versions; None: the numbers are of no version that the trainer has kept a digest of.
        servers: URLs of the servers that differ; empty if the engine is not several servers.
    """

    modules: int
    of_modules: int
    shares: int
    of_shares: int
    differing: tuple[str, ...]
    late: tuple[str, ...]
    older: int | None
    servers: tuple[str, ...]
    seconds: float


class HeldWeights:
    """Compares what an engine's modules hold with a model's weights, which it only reads.

    Args:
        probe: the probe of the engine's modules.
        dtype: dtype to which the engine casts weights.
        source: the weights that the engine's plain modules should hold; None: those that a push of the model sends.

    Attributes:
        unreached: names of the modules that only the module probe reaches.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        engine: ProbedEngine,
        probe: ModuleProbe,
        dtype: torch.dtype,
        *,
        source: Callable[[PreTrainedModel], PlainSource] | None = None,
    ) -> None:
        self._model, self._engine, self._probe, self._dtype = model, engine, probe, dtype
        self._weights = weights_of if source is None else source
        self._source = self._weights(model)
        # The engine's names of each module. Several servers put their URL before the name.
        self._names: dict[str, list[str]] = {}
        for name, module in probe.modules.probed.items():
            if module.kind != "experts" and not module.quantization:
                self._names.setdefault(_own(name), []).append(name)
        self.unreached = tuple(name for name in probe.modules.probed if _own(name) not in self._names)
        # One key for all comparisons, so that the digests of two versions can be compared.
        self._key = key_for(self._source.tensor(name) for name in self._source.names[:1])
        self._pace = _PACE_ON_A_CPU if self._key is None else 1
        self._shares = self._pace * (
            int(getattr(model.config.get_text_config(), "num_hidden_layers", 0)) or 1
        )
        embeddings = [m for m in probe.modules.probed.values() if m.kind == "embedding"]
        heads = [head_name(model), *(name for module in embeddings for name in module.tensors)]
        self._vocabulary = {self._source.first_name(name) for name in heads if name in self._source.names}
        self._turn = 0
        # By part and digest, the last version in which the trainer had these numbers there.
        self._versions: dict[str, dict[str, int]] = {}
        # Number of comparisons, and the version at which digests were forgotten.
        self._compared, self._forgotten_at = 0, 0

    @torch.no_grad()
    def compare(self, version: int, *, every: bool) -> HeldRecord:
        """Compare all weights, or those whose turn it is."""
        start = time.perf_counter()
        # Made again for every comparison, because the active adapter may have changed.
        self._source = self._weights(self._model)
        turns = range(self._shares) if every else range(self._turn, self._turn + 1)
        compared: list[HeldPart] = []
        wrong: dict[HeldPart, str] = {}
        ahead = self._columns_ahead(self._turn if every else self._turn + 1)
        for shares in self._together(turns):
            parts = shares if every else shares + self._columns(self._turn)
            asked = {one: part for part in parts for one in self._asked(part)}
            found = self._engine.held(list(asked), self._dtype, self._key)
            due, ahead = self._digests([*parts, *ahead], version), []
            digests = {one: found.get(str(one), "") for one in asked}
            wrong |= {one: digest for one, digest in digests.items() if digest != due[asked[one]]}
            compared += shares
        if not every:
            self._turn = (self._turn + 1) % self._shares
        versions = {part: self._versions[str(_plain(part))].get(digest) for part, digest in wrong.items()}
        tensors = {part: self._tensors(part, version) for part in wrong}
        self._compared += 1
        if self._compared % _KEPT == 0:
            self._forget(version)
        late = [part for part in wrong if versions[part] is not None]
        servers = sorted({part.name.rpartition("/")[0] for part in wrong} - {""})
        return HeldRecord(
            len({part.name for part in compared}),
            len(self._probe.modules.probed),
            len(turns),
            self._shares,
            tuple(dict.fromkeys(name for part in wrong for name in tensors[part])),
            tuple(dict.fromkeys(name for part in late for name in tensors[part])),
            max((version for version in versions.values() if version is not None), default=None),
            tuple(servers),
            time.perf_counter() - start,
        )

    def _forget(self, version: int) -> None:
        """Forget digests from before the last call, so that a long run needs no more memory than a short one."""
        oldest, self._forgotten_at = self._forgotten_at, version
        kept = (
            (label, {d: v for d, v in own.items() if v >= oldest}) for label, own in self._versions.items()
        )
        self._versions = {label: own for label, own in kept if own}

    # ---- which parts ------------------------------------------------------------------------------------------------

    def _together(self, turns: Iterable[int]) -> Iterator[list[HeldPart]]:
        """The shares of some turns, so many at a time that few numbers are held and the host waits seldom."""
        parts: dict[HeldPart, None] = {}
        size = 0
        for turn in turns:
            own = [part for part in self._parts(turn) if part not in parts]
            more = sum((part.stop - part.start) * self._module(part.name).outputs for part in own)
            if parts and size + more > _AT_ONCE:
                yield list(parts)
                parts, size = {}, 0
            parts, size = parts | dict.fromkeys(own), size + more
        yield list(parts)

    def _parts(self, turn: int) -> list[HeldPart]:
        """The share of a turn, by the modules' own names. Every share has all vectors and biases, which are small."""
        slim = self._source.is_model_memory
        # Embeddings and heads are as large as many layers: a slice of each.
        sliced = [name for name in self._names if slim and self._is_of_vocabulary(name)]
        whole = [name for name in self._names if name not in sliced and not (slim and self._is_vector(name))]
        own = whole[len(whole) * turn // self._shares : len(whole) * (turn + 1) // self._shares]
        parts = [HeldPart(name, 0, self._size(name)) for name in own]
        for name in sliced:
            size = self._size(name)
            parts.append(HeldPart(name, size * turn // self._shares, size * (turn + 1) // self._shares))
        if slim:
            parts += [HeldPart(name, 0, self._size(name)) for name in self._names if self._is_vector(name)]
        biased = [name for name in self._names if self._module(name).has_bias and (slim or name in own)]
        return [part for part in parts if part.start < part.stop] + [HeldPart(n, 0, 0) for n in biased]

    def _columns(self, turn: int) -> list[HeldPart]:
        """One column of every matrix, or of one in `_pace`; another one at each turn."""
        if not self._source.is_model_memory:
            return []
        linear = [name for name in self._names if self._module(name).kind == "linear"]
        chosen = linear[turn % self._pace :: self._pace]
        places = [(name, _column(turn, number, self._size(name))) for number, name in enumerate(chosen)]
        return [HeldPart(name, place, place + 1) for name, place in places]

    def _columns_ahead(self, turn: int) -> list[HeldPart]:
        """The columns of the next turns.

        If the next pushes have no effect, the engine still has the numbers of now when they look at these columns.
        """
        return [part for k in range(self._pace) for part in self._columns((turn + k) % self._shares)]

    def _size(self, name: str) -> int:
        """Number of inputs of a linear module, of rows of an embedding, or of elements of vectors."""
        module = self._module(name)
        return self._probe.inputs(module.tensors[0]) if module.kind == "linear" else module.outputs

    def _is_of_vocabulary(self, name: str) -> bool:
        module = self._module(name)
        return module.kind == "embedding" or self._source.first_name(module.tensors[0]) in self._vocabulary

    def _is_vector(self, name: str) -> bool:
        return self._module(name).kind == "values"

    def _module(self, name: str) -> ProbedModule:
        return self._probe.modules.probed[self._names[name][0]]

    def _asked(self, part: HeldPart) -> list[HeldPart]:
        """A part as every server of the engine is asked for it."""
        return [part._replace(name=name) for name in self._names[part.name]]

    # ---- what the engine should hold --------------------------------------------------------------------------------

    def _digests(self, parts: Sequence[HeldPart], version: int) -> dict[HeldPart, str]:
        """The digest of the trainer's numbers of each part, which belong to a version from now on."""
        values: dict[HeldPart, torch.Tensor] = {}
        for name, own in groupby(parts, lambda part: part.name):
            module = self._module(name)
            # Once per module, because a source may make its tensors.
            tensors = [self._source.tensor(tensor) for tensor in module.tensors]
            values |= {part: self._values(part, module, tensors) for part in own}
        digests = held_digests(values, self._dtype, self._key)
        for label, digest in digests.items():
            self._versions.setdefault(label, {})[digest] = version
        return {part: digests[str(part)] for part in values}

    def _values(self, part: HeldPart, module: ProbedModule, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """The numbers of a part in the order in which the module gives them."""
        if module.kind == "values":
            return torch.cat([tensor.flatten() for tensor in tensors])[part.start : part.stop]
        if module.kind == "embedding":
            return tensors[0][part.start : part.stop]
        if part.asks_for_bias:
            found = [self._bias(name, module, tensors[0].device) for name in module.tensors]
        else:
            found = [
                (tensor if self._probe.transposed(name) else tensor.T)[part.start : part.stop].to(self._dtype)
                for name, tensor in zip(module.tensors, tensors, strict=True)
            ]
        return part.outputs(torch.cat(found, dim=1))

    def _bias(self, name: str, module: ProbedModule, device: torch.device) -> torch.Tensor:
        """(1, outputs) of the bias beside a weight; zeros if this part of a fused module has none."""
        beside = name.removesuffix("weight") + "bias"
        if beside in self._source.names:
            return self._source.tensor(beside)[None].to(self._dtype)
        return torch.zeros(1, self._probe.outputs(module, name), dtype=self._dtype, device=device)

    # ---- what differs -----------------------------------------------------------------------------------------------

    def _tensors(self, part: HeldPart, version: int) -> list[str]:
        """Checkpoint names of the tensors that are wrong in a part. The engine is asked for each alone."""
        module = self._probe.modules.probed[part.name]
        if part.asks_for_bias:
            beside = [name.removesuffix("weight") + "bias" for name in module.tensors]
            return [name for name in beside if name in self._source.names]
        if module.kind != "linear" or len(module.tensors) == 1:
            return list(module.tensors)
        wrong, first = [], 0
        for name in module.tensors:
            last = first + self._probe.outputs(module, name)
            one = part._replace(first=first, last=last)
            found = self._engine.held([one], self._dtype, self._key).get(str(one))
            if found != self._digests([_plain(one)], version)[_plain(one)]:
                wrong.append(name)
            first = last
        return wrong or list(module.tensors)


def _column(turn: int, number: int, size: int) -> int:
    """A column of a matrix that has `size`, drawn for a turn and the matrix's number."""
    return random.Random(f"{turn} {number}").randrange(size)


def _own(name: str) -> str:
    """A module's name without its server."""
    return name.rpartition("/")[2]


def _plain(part: HeldPart) -> HeldPart:
    return part._replace(name=_own(part.name))


def check_held(record: HeldRecord, version: int) -> None:
    """Check that no weight of the engine is another one than the trainer's. The message names the tensors."""
    if not record.differing:
        return
    shown = ", ".join(record.differing[:_NAMED]) + (", …" if len(record.differing) > _NAMED else "")
    raise ProofError(
        "held_weights",
        f"at version {version} the engine computes with other numbers than the trainer's in "
        f"{len(record.differing)} tensors, compared to the bit: {shown}",
        cause_of(record),
        "do not train on this engine; name the model, the layers and the engine's version in a report",
    )


def cause_of(record: HeldRecord) -> str:
    """What is known of the numbers that differ."""
    named = record.late or record.differing
    layers = named[0] + (" and others" if len(record.differing) > 1 else "")
    layers += f" at {', '.join(record.servers)}" if record.servers else ""
    if record.older is not None:
        return (
            f"the engine computes with older weights of {layers}: those of version {record.older}. Later pushes had no "
            "effect there, or the engine was restarted"
        )
    return (
        f"the engine computes with other weights of {layers} than the trainer sends: older ones, or a part of them "
        "was changed or written into the wrong place"
    )
