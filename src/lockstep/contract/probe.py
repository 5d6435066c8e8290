"""The module probe: a description of the engine's modules, and the inputs that engine and trainer give to them.

The engine computes the outputs of its modules for these inputs. The proof computes the same outputs from the trainer's
weights and compares them. Trainer and engine exchange only names, seeds and short vectors, so that the same probe
works within one process and over a network.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from lockstep.contract.tensors import tensor_digest
from lockstep.to_device import on_host

# Number of rows that a sampled probe looks up in an embedding.
SAMPLED_ROWS = 2048
# Rows of a weight that a probe casts or looks up at a time, so that a whole vocabulary needs little memory.
PROBED_ROWS = 8192
# Number of experts per layer that a sampled probe computes.
SAMPLED_EXPERTS = 4

# A power of two is exact in every dtype. It is large, so that a large bias does not hide the effect of a weight.
_SCALE = 64.0
# The size of the numbers in `quantised_vector`, relative to those of the probe vector. Their standard deviation is 192.
_SPREAD = 3.0
_LARGEST_CODE = 448.0

ModuleKind = Literal["linear", "embedding", "values", "experts"]


@dataclass(frozen=True, slots=True)
class ProbedModule:
    """One module of an engine.

    Attributes:
        name: the engine's name of the module.
        kind: how the module is probed. A `linear` module maps the probe vector. An `embedding` looks up rows. `values` (norms and
            other vectors) are returned as they are. `experts` map an input one by one, without their router.
        tensors: checkpoint names of its weights. For a fused module, they are in the order of its outputs. For experts, they are
            the gate, up and down projection of the first expert, then of the second expert, and so on.
        outputs: number of output values per input.
        has_bias: whether the module adds a bias. It is then also probed with an input of zeros.
        quantization: vLLM's name of the scheme in which the module computes; empty: the module is not quantised.
    """

    name: str
    kind: ModuleKind
    tensors: tuple[str, ...]
    outputs: int
    has_bias: bool = False
    quantization: str = ""


@dataclass(frozen=True, slots=True)
class EngineModules:
    """The modules of an engine that the probe can test, by name, and the names of the parameters that it cannot test."""

    probed: Mapping[str, ProbedModule]
    unreached: tuple[str, ...]


def probe_vector(seed: int, module: str, size: int) -> torch.Tensor:
    """(size,) float32 normal vector. Trainer and engine draw the same one."""
    return _SCALE * torch.randn(size, generator=_generator(seed, module))


def quantised_vector(seed: int, module: str, size: int) -> torch.Tensor:
    """(size,) float32 vector that a module quantises to the same numbers. Then the module's output shows its weights alone.

    Its elements are float8_e4m3 numbers, and at least every 16th one is the largest such number. Therefore the scale is 1 in every
    part of at least 16 elements, as a worker with a part of a module sees it.
    """
    vector = (_SPREAD * probe_vector(seed, module, size)).clamp(-_LARGEST_CODE, _LARGEST_CODE)
    vector = vector.to(torch.float8_e4m3fn).float()
    vector[::16] = torch.where(vector[::16] < 0, -_LARGEST_CODE, _LARGEST_CODE)
    return vector


def codes_digest(codes: torch.Tensor, scales: torch.Tensor) -> str:
    """The digest of a module's (outputs, inputs) codes and of its scales, one float32 number per output."""
    return f"{tensor_digest(codes)} {tensor_digest(scales.float().flatten())}"


def probe_inputs(seed: int, module: str, size: int, *, has_bias: bool, quantised: bool = False) -> torch.Tensor:
    """(1, size): the probe vector. For a module with a bias, (2, size): the probe vector and a row of zeros.

    Args:
        quantised: whether the module quantises its inputs.
    """
    vector = (quantised_vector if quantised else probe_vector)(seed, module, size)[None]
    return torch.cat([vector, torch.zeros_like(vector)]) if has_bias else vector


def probe_rows(seed: int, module: str, rows: int, *, every: bool) -> torch.Tensor:
    """Ids that the probe looks up in an embedding of `rows` rows: all ids if `every` is true, otherwise a random sample."""
    if every or rows <= SAMPLED_ROWS:
        return torch.arange(rows)
    # With repetitions, because a permutation of a whole vocabulary would cost more than the probe.
    return torch.randint(rows, (SAMPLED_ROWS,), generator=_generator(seed, f"{module}\x1frows"))


def probe_experts(seed: int, module: str, experts: int, *, every: bool) -> list[int]:
    """Indices of the experts that the probe computes, ascending: all if `every` is true, otherwise a random sample."""
    if every or experts <= SAMPLED_EXPERTS:
        return list(range(experts))
    return sorted(
        torch.randperm(experts, generator=_generator(seed, f"{module}\x1fexperts"))[:SAMPLED_EXPERTS].tolist()
    )


def expert_input(seed: int, module: str, size: int) -> torch.Tensor:
    """(size,) float32 normal vector with standard deviation 1. An expert is not linear, and larger inputs would saturate it."""
    return probe_vector(seed, module, size) / _SCALE


def sendable(outputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Outputs of modules on the host, read from their device at once. Each has memory of its own: a part of a larger tensor would
    be sent to another process with the memory of all."""
    return {name: part.clone() for name, part in zip(outputs, on_host([*outputs.values()]), strict=True)}


def encode_floats(values: torch.Tensor) -> str:
    """A 1-D float32 tensor on CPU as text: little-endian, base64."""
    return base64.b64encode(values.contiguous().numpy().astype("<f4").tobytes()).decode()


def decode_floats(text: str) -> torch.Tensor:
    """The tensor that was given to `encode_floats`."""
    return torch.frombuffer(bytearray(base64.b64decode(text, validate=True)), dtype=torch.float32)


def _generator(seed: int, text: str) -> torch.Generator:
    digest = hashlib.blake2b(f"{seed}\x1f{text}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "big") >> 1)
