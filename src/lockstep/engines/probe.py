"""What an engine says about the modules that it runs, and the inputs that both sides put through them.

The engine's half answers with outputs; `parity/module_probe.py` computes the same products from the trainer's weights. Only
names, seeds and short vectors cross, so that the same probe works in one process and over a wire.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch

# Rows of an embedding that a sampled probe looks up.
SAMPLED_ROWS = 2048

# A power of two, exact in every dtype: what a weight does must stand out beside a large bias.
_SCALE = 64.0

ModuleKind = Literal["linear", "embedding", "values"]


@dataclass(frozen=True, slots=True)
class ProbedModule:
    """One module as the engine runs it.

    Attributes:
        name: the engine's name for it.
        kind: `linear` maps a vector, `embedding` looks rows up, `values` (norms and other vectors) is compared as it is.
        tensors: checkpoint names of its weights; those of a fused module in the order of its output.
        outputs: how many values one input gives.
        biased: whether the module adds a bias; it then answers a zero input too.
    """

    name: str
    kind: ModuleKind
    tensors: tuple[str, ...]
    outputs: int
    biased: bool = False


@dataclass(frozen=True, slots=True)
class EngineModules:
    """The modules that an engine can be probed at, and its parameters that no probe reaches."""

    probed: Mapping[str, ProbedModule]
    unreached: tuple[str, ...]


def probe_vector(seed: int, module: str, size: int) -> torch.Tensor:
    """(size,) float32 normal vector, the same on both sides."""
    return _SCALE * torch.randn(size, generator=_generator(seed, module))


def probe_inputs(seed: int, module: str, size: int, *, biased: bool) -> torch.Tensor:
    """(1, size) the probe vector; (2, size) with a row of zeros below it for a module with a bias."""
    vector = probe_vector(seed, module, size)[None]
    return torch.cat([vector, torch.zeros_like(vector)]) if biased else vector


def probe_rows(seed: int, module: str, rows: int, *, every: bool) -> torch.Tensor:
    """Ids that an embedding of `rows` rows is asked for: all of them, or a random sample."""
    if every or rows <= SAMPLED_ROWS:
        return torch.arange(rows)
    # With repetitions: a permutation of a whole vocabulary would cost more than the probe.
    return torch.randint(rows, (SAMPLED_ROWS,), generator=_generator(seed, f"{module}\x1frows"))


def encode_floats(values: torch.Tensor) -> str:
    """A 1-D float32 tensor on CPU as text: little-endian, base64."""
    return base64.b64encode(values.contiguous().numpy().astype("<f4").tobytes()).decode()


def decode_floats(text: str) -> torch.Tensor:
    """The tensor that `encode_floats` was given."""
    return torch.frombuffer(bytearray(base64.b64decode(text, validate=True)), dtype=torch.float32)


def _generator(seed: int, text: str) -> torch.Generator:
    digest = hashlib.blake2b(f"{seed}\x1f{text}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "big") >> 1)
