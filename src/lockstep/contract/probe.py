"""What an engine tells of its model: the modules that the probe compares, and the fields that the handshake compares.

The engine computes the outputs of its modules for given inputs. The proof computes the same outputs from the trainer's
weights and compares them. Trainer and engine exchange only names, seeds and short vectors, so that the same probe works
within one process and over a network.

The exact probe asks for numbers instead of outputs: a linear module that is given rows of the identity matrix answers
with its weights. Each output is a sum of one weight and zeros, which no kernel rounds, in any dtype. The engine returns
digests, and the trainer makes the digests of its own weights.

The handshake compares the fields of a model's config that describe its computation, as trainer and engine have each
read them. Paths and names are not compared: they differ between machines.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch.nn.functional import hardshrink

from lockstep.contract.tensors import digests_of, tensor_digest
from lockstep.devices import on_host

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
        kind: how the module is probed. A `linear` module maps the probe vector. An `embedding` looks up rows.
            `values` (norms and other vectors) are returned as they are. `experts` map an input one by one, without
            their router.
        tensors: checkpoint names of its weights. For a fused module, they are in the order of its outputs. For
            experts, they are the gate, up and down projection of the first expert, then of the second expert, and so
            on.
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
    """The modules of an engine that the probe can test, by name, and the parameters that it cannot test."""

    probed: Mapping[str, ProbedModule]
    unreached: tuple[str, ...]


def probe_vector(seed: int, module: str, size: int) -> torch.Tensor:
    """(size,) float32 normal vector. Trainer and engine draw the same one."""
    return _SCALE * torch.randn(size, generator=_generator(seed, module))


def quantised_vector(seed: int, module: str, size: int) -> torch.Tensor:
    """(size,) float32 vector that a module quantises to the same numbers. Then its output shows its weights alone.

    Its elements are float8_e4m3 numbers, and at least every 16th one is the largest such number. Therefore the scale is
    1 in every part of at least 16 elements, as a worker with a part of a module sees it.
    """
    vector = (_SPREAD * probe_vector(seed, module, size)).clamp(-_LARGEST_CODE, _LARGEST_CODE)
    vector = vector.to(torch.float8_e4m3fn).float()
    vector[::16] = torch.where(vector[::16] < 0, -_LARGEST_CODE, _LARGEST_CODE)
    return vector


def codes_digest(codes: torch.Tensor, scales: torch.Tensor) -> str:
    """The digest of a module's (outputs, inputs) codes and of its scales, one float32 number per output."""
    return f"{tensor_digest(codes)} {tensor_digest(scales.float().flatten())}"


def probe_inputs(
    seed: int, module: str, size: int, *, has_bias: bool, quantised: bool = False
) -> torch.Tensor:
    """(1, size): the probe vector. For a module with a bias, (2, size): the probe vector and a row of zeros.

    Args:
        quantised: whether the module quantises its inputs.
    """
    vector = (quantised_vector if quantised else probe_vector)(seed, module, size)[None]
    return torch.cat([vector, torch.zeros_like(vector)]) if has_bias else vector


def probe_rows(seed: int, module: str, rows: int, *, every: bool) -> torch.Tensor:
    """Ids that the probe looks up in an embedding of `rows` rows: all, or a random sample unless `every` is true."""
    if every or rows <= SAMPLED_ROWS:
        return torch.arange(rows)
    # With repetitions, because a permutation of a whole vocabulary would cost more than the probe.
    return torch.randint(rows, (SAMPLED_ROWS,), generator=_generator(seed, f"{module}\x1frows"))


def probe_experts(seed: int, module: str, experts: int, *, every: bool) -> list[int]:
    """Indices of the experts that the probe computes, ascending: all if `every` is true, otherwise a random sample."""
    if every or experts <= SAMPLED_EXPERTS:
        return list(range(experts))
    order = torch.randperm(experts, generator=_generator(seed, f"{module}\x1fexperts"))
    return sorted(order[:SAMPLED_EXPERTS].tolist())


def expert_input(seed: int, module: str, size: int) -> torch.Tensor:
    """(size,) float32 normal vector with standard deviation 1: larger inputs would saturate an expert."""
    return probe_vector(seed, module, size) / _SCALE


class HeldPart(NamedTuple):
    """A part of what a module holds.

    Attributes:
        name: the engine's name of the module.
        start, stop: of a linear module, the inputs whose weights are asked for; of an embedding, its rows; of other
            modules, elements of all parameters one after the other. Both 0, of a linear module: its bias, which is
            the output for an input of zeros.
        first, last: of a linear module, the range of its outputs. Both 0: all.
    """

    name: str
    start: int
    stop: int
    first: int = 0
    last: int = 0

    @property
    def asks_for_bias(self) -> bool:
        return self.start == self.stop

    def __str__(self) -> str:
        outputs = f", {self.first}:{self.last}" if self.last else ""
        return f"{self.name}[{self.start}:{self.stop}{outputs}]"

    def inputs(self, size: int, like: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """(rows, size) rows of the identity matrix on the device of `like`; for a bias, one row of zeros."""
        found = torch.zeros(
            max(self.stop - self.start, 1), size, device=like.device, dtype=dtype or like.dtype
        )
        if not self.asks_for_bias:
            found[:, self.start : self.stop].fill_diagonal_(1)
        return found

    def outputs(self, found: torch.Tensor) -> torch.Tensor:
        """The asked outputs among (rows, outputs) all outputs."""
        return found[:, self.first : self.last] if self.last else found


# Kernels may compute with smaller numbers as with 0 (the instructions for bfloat16 of x86 do).
_SMALLEST = torch.finfo(torch.float32).tiny


def held_digests(
    held: Mapping[HeldPart, torch.Tensor], dtype: torch.dtype, key: int | None
) -> dict[str, str]:
    """The digest of the numbers of each part, by the part as text.

    Args:
        dtype: dtype of the engine, to which the numbers are cast.
        key: the key of the digests; None: they are xxh3 (`contract/tensors.py`).
    """
    # A sum of zeros may be −0, which becomes 0 too.
    cast = {str(part): hardshrink(values.to(dtype), _SMALLEST).contiguous() for part, values in held.items()}
    if key is None:
        # One by one: most are small.
        return {label: tensor_digest(values) for label, values in cast.items()}
    return digests_of(cast, key)


# PyTorch's names of the precisions of products that round no float32 number.
_EXACT = ("none", "ieee")


@contextmanager
def exact_products() -> Iterator[None]:
    """Inside the context PyTorch does not round float32 numbers before it multiplies them (TF32, bfloat16)."""
    places: list[Any] = [torch.backends.cuda.matmul, torch.backends.mkldnn.matmul]  # type: ignore[attr-defined]
    rounding = {place: place.fp32_precision for place in places if place.fp32_precision not in _EXACT}
    try:
        for place in rounding:
            place.fp32_precision = "ieee"
        yield
    finally:
        for place, before in rounding.items():
            place.fp32_precision = before


def sendable(outputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Outputs of modules on the host, read from their device at once.

    Each has memory of its own: a part of a larger tensor would be sent to another process with the memory of all.
    """
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


# Fields that do not change what a model computes, or that only say where it came from.
NOT_COMPARED = {
    "_attn_implementation_internal",
    "_name_or_path",
    "architectures",
    "bos_token_id",
    "chunk_size_feed_forward",
    "dtype",
    "id2label",
    "initializer_range",
    "is_encoder_decoder",
    "label2id",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "pad_token_id",
    "problem_type",
    "return_dict",
    "router_aux_loss_coef",
    "sep_token_id",
    "torch_dtype",
    "transformers_version",
    "unk_token_id",
    "use_cache",
}

# Values that say the same as a field that is not there.
_DEFAULTS = {"sliding_window": 0, "partial_rotary_factor": 1.0}
_NONE = object()


def model_fields(config: Any) -> dict[str, Any]:
    """The fields of a transformers config that describe the model's computation, as JSON types."""
    fields = {k: v for k, v in config.to_dict().items() if k not in NOT_COMPARED and "dropout" not in k}
    return json.loads(json.dumps(fields, default=str, sort_keys=True))


def one_spelling(value: Any) -> Any:
    """A config's fields in one spelling, so that two programs that mean the same have the same.

    A field with None is one that is not there, also inside `rope_parameters`. A window of 0 is none (transformers
    writes it for Qwen2-MoE, vLLM replaces it). A rotary factor of 1.0 is the default.

    Args:
        value: the result of `model_fields`, or a part of it.
    """
    if isinstance(value, list):
        return [one_spelling(part) for part in value]
    if not isinstance(value, Mapping):
        return value
    fields = {name: one_spelling(part) for name, part in value.items()}
    return {
        name: part
        for name, part in fields.items()
        if part is not None and _DEFAULTS.get(name.rpartition(".")[2], _NONE) != part
    }


def fields_of_parts(text: Any, whole: Any) -> dict[str, Any]:
    """`model_fields` of a model's language part, and of its vision tower if it has one.

    Args:
        text: config of the language part.
        whole: config of the whole model. For a model without pictures this is `text` itself.
    """
    tower = getattr(whole, "vision_config", None)
    vision = {} if tower is None else model_fields(tower)
    return model_fields(text) | {f"vision_config.{name}": value for name, value in vision.items()}
