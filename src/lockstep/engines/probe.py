"""The engine's modules as the module probe sees them, and the inputs that both sides put through them.

The engine answers with the modules' outputs. `parity/module_probe.py` computes the same products from the trainer's weights. Only
names, seeds and short vectors are exchanged, so that the same probe works within one process and over a network.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch

# Number of rows that a sampled probe looks up in an embedding.
SAMPLED_ROWS = 2048
# Number of experts that a sampled probe asks per layer.
SAMPLED_EXPERTS = 4

# A power of two is exact in every dtype. It is large, so that the effect of a weight stands out beside a large bias.
_SCALE = 64.0

ModuleKind = Literal["linear", "embedding", "values", "experts"]


@dataclass(frozen=True, slots=True)
class ProbedModule:
    """One module as the engine runs it.

    Attributes:
        name: the engine's name of the module.
        kind: a `linear` module maps a vector, an `embedding` looks rows up, `values` (norms and other vectors) are compared
            directly. `experts` map a vector one by one, past their router.
        tensors: checkpoint names of its weights. Those of a fused module are in the order of its output; those of experts are the
            gate, up and down projection of the first expert, then of the second, and so on.
        outputs: number of output values per input.
        biased: whether the module adds a bias. It then also answers a zero input.
    """

    name: str
    kind: ModuleKind
    tensors: tuple[str, ...]
    outputs: int
    biased: bool = False


@dataclass(frozen=True, slots=True)
class EngineModules:
    """The modules that a probe can reach in an engine, and the names of the engine's parameters that no probe reaches."""

    probed: Mapping[str, ProbedModule]
    unreached: tuple[str, ...]


def probe_vector(seed: int, module: str, size: int) -> torch.Tensor:
    """(size,) float32 normal vector, which is the same on both sides."""
    return _SCALE * torch.randn(size, generator=_generator(seed, module))


def probe_inputs(seed: int, module: str, size: int, *, biased: bool) -> torch.Tensor:
    """(1, size) the probe vector. For a module with a bias: (2, size), the probe vector and a row of zeros."""
    vector = probe_vector(seed, module, size)[None]
    return torch.cat([vector, torch.zeros_like(vector)]) if biased else vector


def probe_rows(seed: int, module: str, rows: int, *, every: bool) -> torch.Tensor:
    """Ids that are looked up in an embedding of `rows` rows: all of them, or a random sample."""
    if every or rows <= SAMPLED_ROWS:
        return torch.arange(rows)
    # With repetitions, because a permutation of a whole vocabulary would cost more than the probe.
    return torch.randint(rows, (SAMPLED_ROWS,), generator=_generator(seed, f"{module}\x1frows"))


def probe_experts(seed: int, module: str, experts: int, *, every: bool) -> list[int]:
    """The experts of a module that a probe asks: all of them, or a random sample, ascending."""
    if every or experts <= SAMPLED_EXPERTS:
        return list(range(experts))
    return sorted(
        torch.randperm(experts, generator=_generator(seed, f"{module}\x1fexperts"))[:SAMPLED_EXPERTS].tolist()
    )


def expert_input(seed: int, module: str, size: int) -> torch.Tensor:
    """(size,) float32 normal vector of an ordinary size: an expert is not linear, and large inputs would saturate it."""
    return probe_vector(seed, module, size) / _SCALE


def encode_floats(values: torch.Tensor) -> str:
    """A 1-D float32 tensor on CPU as text: little-endian, base64."""
    return base64.b64encode(values.contiguous().numpy().astype("<f4").tobytes()).decode()


def decode_floats(text: str) -> torch.Tensor:
    """The tensor that was given to `encode_floats`."""
    return torch.frombuffer(bytearray(base64.b64decode(text, validate=True)), dtype=torch.float32)


def _generator(seed: int, text: str) -> torch.Generator:
    digest = hashlib.blake2b(f"{seed}\x1f{text}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "big") >> 1)
