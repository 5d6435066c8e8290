"""The memory of a run: counted before the model is loaded, said in one line, and refused where it cannot fit.

The same classes that load the policy make it without memory (device `meta`). Weights, gradients, moments, reference and
engine are exact counts of bytes; activations are an estimate (docs/internals/training.md).
"""

from __future__ import annotations

import copy
import logging
import math
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForSequenceClassification, PreTrainedModel, Trainer

from lockstep.config.run import OnlineConfig
from lockstep.devices import usual_token_budgets
from lockstep.engines.vllm.arguments import cpu_cache_bytes, held_rank, usual_sequences
from lockstep.engines.vllm.start import vllm_installed
from lockstep.errors import InputError
from lockstep.model_files import build_empty, load_files
from lockstep.models.adapters import add_adapter, causal_model, is_adapted
from lockstep.models.parameters import expert_names
from lockstep.models.policy import BAD_FILES, context_length, first_line, model_class, vision_parts
from lockstep.models.quantised import is_quantised
from lockstep.models.resolve import at_revision, resolve_model

_logger = logging.getLogger(__name__)

# bitsandbytes' 4-bit codes: numbers per block, blocks per block of a quantised scale, and the two tables of values.
_BLOCK, _BLOCKS, _CODES, _SCALE_CODES = 64, 256, 16, 256
# vLLM rounds the rows of embeddings and heads up to a multiple of this number.
_VOCABULARY = 64
_FP32 = torch.float32.itemsize


# ---- bytes of tensors --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TensorSize:
    """Shape and dtype of a tensor that a device holds."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def size(self) -> int:
        """In bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    def shard(self, ranks: int) -> TensorSize:
        """The largest part if the rows are cut over ranks, as FSDP2 and ZeRO-3 do. A number alone is not cut."""
        rows = self.shape[:1]
        return TensorSize((*(math.ceil(n / ranks) for n in rows), *self.shape[1:]), self.dtype)


def sizes_of(tensors: Iterable[torch.Tensor]) -> list[TensorSize]:
    """The sizes of tensors. One tensor under several names counts once."""
    return [TensorSize(tuple(t.shape), t.dtype) for t in {id(t): t for t in tensors}.values()]


def weight_bytes(model: torch.nn.Module, ranks: int = 1) -> int:
    """Bytes of a model's parameters and buffers on one rank, if the parameters alone are cut over `ranks`."""
    codes = sum(_code_bytes(p) for p in model.parameters() if is_quantised(p))
    plain = sizes_of(p for p in model.parameters() if not is_quantised(p))
    return codes + sum(s.shard(ranks).size for s in plain) + _bytes(sizes_of(model.buffers()))


def _bytes(sizes: Iterable[TensorSize]) -> int:
    return sum(size.size for size in sizes)


def _code_bytes(parameter: Any) -> int:
    state = getattr(parameter, "quant_state", None)
    numbers = math.prod(parameter.shape if state is None else state.shape)
    blocks = math.ceil(numbers / _BLOCK)
    scales = blocks * _FP32
    if parameter.compress_statistics:
        # The scales are 8-bit codes themselves, with scales, a table and a mean of their own.
        scales = blocks + (math.ceil(blocks / _BLOCKS) + _SCALE_CODES + 1) * _FP32
    return math.ceil(numbers / 2) + scales + _CODES * _FP32


def moment_bytes(trained: Iterable[TensorSize], kind: Any, arguments: Mapping[str, Any]) -> int:
    """Bytes that an optimizer keeps between two steps. It raises what the optimizer raises without memory.

    The optimizer takes a step on tensors without memory, one of each size, so that every optimizer's own rule holds.

    Args:
        trained: sizes of the trained parameters.
        kind, arguments: the optimizer's class, and the arguments of its constructor.
    """
    # PyTorch's fused kernels exist on real devices only. They keep the same state.
    own = {name: value for name, value in arguments.items() if name != "fused"}
    total = 0
    for size, count in Counter(trained).items():
        parameter = torch.nn.Parameter(torch.empty(size.shape, dtype=size.dtype, device="meta"))
        optimizer = kind([parameter], **own)
        parameter.grad = torch.empty_like(parameter)
        optimizer.step()
        state = [value for value in optimizer.state[parameter].values() if isinstance(value, torch.Tensor)]
        total += count * sum(value.nbytes for value in state)
    return total


def engine_weight_bytes(
    model: torch.nn.Module, dtype: torch.dtype, quantization: str | None, *, vllm: bool
) -> int:
    """Bytes of the weights of an engine.

    Args:
        model: the base model, without an adapter.
        quantization: vLLM's name of the scheme in which it holds linear layers in 8 bits; None: in `dtype`.
        vllm: whether vLLM holds them, or transformers.
    """
    inner = causal_model(model)
    if not vllm:
        numbers = sum(math.prod(s.shape) for s in sizes_of(inner.parameters()))
        return numbers * dtype.itemsize + _bytes(sizes_of(inner.buffers()))
    ends = inner.get_input_embeddings(), inner.get_output_embeddings()
    vocabulary = {id(module.weight) for module in ends if module is not None}
    total = 0
    for parameter in inner.parameters():
        shape = parameter.shape
        if id(parameter) in vocabulary:
            total += math.ceil(shape[0] / _VOCABULARY) * _VOCABULARY * shape[1] * dtype.itemsize
        elif quantization is not None and len(shape) == 2:
            # One byte per weight, and a scale per output.
            total += shape.numel() + shape[0] * _FP32
        else:
            total += shape.numel() * dtype.itemsize
    return total


def adapter_bytes(adapted: torch.nn.Module, dtype: torch.dtype) -> int:
    """Bytes that vLLM keeps for one adapter (`vllm_enable_lora`): two factors per layer, of its next larger rank."""
    total = 0
    for name, parameter in adapted.named_parameters():
        if ".lora_A." in name or ".lora_B." in name:
            rank = min(parameter.shape)
            total += parameter.numel() // rank * held_rank(rank) * dtype.itemsize
    return total


# ---- activations -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LayerShape:
    """Sizes of a language model that decide what its activations need.

    Attributes:
        queries, keys: heads × their width.
        inner: width inside the feed-forward part, or inside one expert.
        experts: number of experts per token; 0: none.
        normed_heads: whether queries and keys have norms of their own.
        products: elements of the weights of one layer's products, without experts.
    """

    layers: int
    hidden: int
    queries: int
    keys: int
    inner: int
    experts: int
    vocabulary: int
    normed_heads: bool
    products: int


def layer_shape(model: PreTrainedModel) -> LayerShape | None:
    """The sizes of a causal language model; None: its config does not have them, as where layers keep a state."""
    config = model.config.get_text_config()
    heads, layers = getattr(config, "num_attention_heads", None), getattr(config, "num_hidden_layers", None)
    routed = getattr(config, "num_experts_per_tok", None) if expert_names(model) else None
    inner = getattr(config, "moe_intermediate_size", None) if routed else None
    inner = inner or getattr(config, "intermediate_size", None)
    if not (isinstance(heads, int) and isinstance(layers, int) and isinstance(inner, int)):
        return None
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    names = [name for name, _ in model.named_parameters()]
    vocabulary = {id(model.get_input_embeddings().weight), id(model.get_output_embeddings().weight)}
    products = sum(p.numel() for p in model.parameters() if p.dim() == 2 and id(p) not in vocabulary)
    return LayerShape(
        layers,
        config.hidden_size,
        heads * width,
        (getattr(config, "num_key_value_heads", None) or heads) * width,
        inner,
        routed or 0,
        config.vocab_size,
        any(".q_norm." in name for name in names),
        products // layers,
    )


@dataclass(frozen=True, slots=True)
class LargestForward:
    """How a forward and its backward compute.

    Attributes:
        positions: largest number of positions of a pack.
        stream: bytes per number of the hidden states between the layers.
        computed: bytes per number in products: 2 with bf16.
        chunk: rows of logits in memory at a time.
        checkpointing: whether the backward computes each layer again.
        room: bytes that layers may keep before later layers keep only their products (`learn/recomputation.py`); None:
            no layer computes anything again by itself.
    """

    positions: int
    stream: int
    computed: int
    chunk: int
    checkpointing: bool = False
    room: int | None = None


def activation_bytes(shape: LayerShape, work: LargestForward) -> int:
    """An estimate of the bytes that a forward and its backward need beside weights and gradients.

    It adds up what PyTorch keeps of a gated layer with two norms (Llama, Qwen and their like), and the largest of
    what exists for a moment. docs/internals/training.md has the terms, and how far they were from what was measured.
    """
    positions, hidden = work.positions, shape.hidden
    layer = positions * kept_per_position(shape, work)
    casts = shape.products * work.computed if work.computed < work.stream else 0
    inner = shape.inner * max(shape.experts, 1)
    passing = 3 * positions * inner * work.computed + casts
    # Logits, their scaled copy, probabilities and gradient; and the gradient of the head's weight, before it is added.
    elements = min(work.chunk, positions) * shape.vocabulary
    of_head = work.stream + (work.computed if casts else 0)
    head = elements * (3 * _FP32 + work.computed) + shape.vocabulary * hidden * of_head
    ends = positions * hidden * (2 * max(work.stream, _FP32) + work.stream)
    if work.checkpointing:
        # Autocast holds its copies of all weights until the forward ends.
        forward = shape.layers * casts + elements * (2 * _FP32 + work.computed)
        return shape.layers * positions * hidden * work.stream + ends + max(forward, head, layer + passing)
    whole = shape.layers
    thin = 0
    if work.room is not None and shape.layers * layer > work.room:
        whole = min(shape.layers, max(int(work.room // layer), 1))
        products = 2 * shape.queries + 4 * shape.keys + shape.queries + 2 * hidden + 2 * inner
        thin = positions * (products * work.computed + hidden * work.stream)
    kept = whole * layer + (shape.layers - whole) * thin + shape.layers * casts
    return kept + ends + max(head, passing + (layer if whole < shape.layers else 0))


def kept_per_position(shape: LayerShape, work: LargestForward) -> int:
    """Bytes per position that a layer keeps for its backward if it recomputes nothing."""
    stream, computed, hidden = work.stream, work.computed, shape.hidden
    # A norm computes in float32, and keeps its input (widened, with half-precision weights) and what it has normed.
    normed = 2 * _FP32 if stream == _FP32 else _FP32 + stream
    # Autocast copies the hidden states for each product. Otherwise all products of a norm keep the same tensor.
    casts = computed < stream
    copies = 5 if casts else 2
    attention = shape.queries + 2 * shape.keys + shape.queries
    total = 2 * hidden * normed + copies * hidden * computed + attention * computed
    if shape.normed_heads:
        total += (shape.queries + shape.keys) * (_FP32 + computed)
    if not shape.experts:
        return total + 4 * shape.inner * computed
    # Each expert's input is gathered, and its output is weighted.
    routed = (2 if casts else 1) * hidden * (stream + computed) + 4 * shape.inner * computed
    return total + shape.experts * routed - (hidden * computed if casts else 0)


# ---- models without memory ---------------------------------------------------------------------------------


def empty_base(path: str, config: OnlineConfig, quantization_config: Any = None) -> PreTrainedModel:
    """The policy's base model as `models/policy.py` would load it, on the device `meta`.

    It raises many kinds of errors if the files or the arguments do not describe a model. Loading it says what is wrong.
    """
    given: dict[str, Any] = dict(config.model_init_kwargs or {})  # type: ignore[arg-type]
    wanted = given.pop("dtype", torch.float32)
    quantization_config = given.pop("quantization_config", quantization_config)
    for name in ("revision", "attn_implementation", "device_map"):
        given.pop(name, None)
    # transformers takes further arguments for fields of the config.
    found, _ = load_files(AutoConfig, path, return_unused_kwargs=True, **given)
    return _empty(model_class(found), found, _dtype(wanted, found), quantization_config)


def _empty(kind: Any, config: Any, dtype: torch.dtype, quantization_config: Any = None) -> PreTrainedModel:
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        model = build_empty(kind, config, dtype=dtype)
        if dtype != torch.float32:
            _keep_in_float32(model)
        if quantization_config is not None:
            from transformers.quantizers.quantizer_bnb_4bit import Bnb4BitHfQuantizer

            quantizer = Bnb4BitHfQuantizer(quantization_config, pre_quantized=False)
            quantizer.preprocess_model(model, device_map=None)
    return model


def _dtype(wanted: Any, config: Any) -> torch.dtype:
    if wanted == "auto":
        wanted = config.dtype
    return wanted if isinstance(wanted, torch.dtype) else getattr(torch, wanted)


def _keep_in_float32(model: PreTrainedModel) -> None:
    """Widen the parameters that transformers loads in float32 whatever dtype is asked for."""
    kept = set(model._keep_in_fp32_modules_strict or ())
    for name, parameter in model.named_parameters():
        if kept & set(name.split(".")):
            parameter.data = parameter.data.float()


# ---- devices -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Room:
    """The memory of a device.

    Attributes:
        name: as messages name it.
        size: in bytes.
        beyond: bytes of swap, which a run can use slowly; None: its size is not known.
    """

    device: torch.device
    name: str
    size: int
    beyond: int | None = 0

    @property
    def on_gpu(self) -> bool:
        """Whether the device is a GPU."""
        return self.device.type == "cuda"


def room_of(device: torch.device) -> Room:
    """The memory of the whole GPU, or of the machine within the limits of its control groups."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return Room(device, f"{device} ({properties.name})", properties.total_memory)
    size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        info = Path("/proc/meminfo").read_text(encoding="ascii")
    except OSError:
        return Room(device, "this machine", size, None)
    swap = 1024 * sum(int(found) for found in re.findall(r"^SwapTotal:\s+(\d+) kB$", info, re.MULTILINE))
    for memory, more in group_limits():
        size, swap = min(size, memory), min(swap, more)
    return Room(device, "this machine", size, swap)


def group_limits(
    root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")
) -> Iterator[tuple[Any, Any]]:
    """The limits of memory and of swap of every control group that this process is in; infinite where there is none."""
    try:
        lines = own.read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        base = root / "memory" if controllers else root
        place = base / path.strip("/")
        while place.is_relative_to(base):
            if controllers:
                # The first version of control groups limits swap together with memory: take swap as unlimited.
                yield _limit(place / "memory.limit_in_bytes"), math.inf
            else:
                yield _limit(place / "memory.max"), _limit(place / "memory.swap.max")
            place = place.parent


def _limit(file: Path) -> float:
    try:
        return int(file.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return math.inf


# ---- a run -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Part:
    """One part of the memory of a run.

    Attributes:
        size: in bytes.
        when: whether it exists always, only while the trainer learns, or only while the engine samples.
        mapped: whether it may be a view of the model's files, which the system can drop and read again.
        detail: more about it, for the message.
        least: bytes that must fit into it.
    """

    name: str
    size: int
    when: str = "always"
    mapped: bool = False
    detail: str = ""
    least: int = 0

    def __str__(self) -> str:
        return f"{self.name} {in_gib(self.size)}" + (f" ({self.detail})" if self.detail else "")


@dataclass(frozen=True, slots=True)
class RunMemory:
    """The memory that a run needs on one device.

    Attributes:
        parts: what is counted exactly.
        activations: an estimate for a forward and its backward, beside the parts; None: the family is not known.
        unknown: what could not be counted.
    """

    parts: tuple[Part, ...]
    activations: int | None = None
    unknown: tuple[str, ...] = ()

    def exact(self, *, mapped: bool = True) -> int:
        """Bytes of the parts that exist at one time; without `mapped`, what may be a view of files does not count."""
        counted = [part for part in self.parts if mapped or not part.mapped]
        return max(sum(p.size for p in counted if p.when != other) for other in (LEARNING, SAMPLING))

    @property
    def whole(self) -> int:
        """Bytes with the activations: while the trainer learns, or while the engine samples."""
        learning = sum(p.size for p in self.parts if p.when != SAMPLING) + (self.activations or 0)
        return max(learning, self.exact())

    def without(self, *names: str) -> int:
        """Bytes that a run saves without these parts."""
        left = RunMemory(tuple(p for p in self.parts if p.name not in names))
        return self.exact() - (left.exact() if left.parts else 0)

    def __str__(self) -> str:
        return ", ".join(str(part) for part in self.parts if part.size)


LEARNING, SAMPLING = "learning", "sampling"
WEIGHTS, FROZEN, VALUES = "weights", "frozen weights", "value head"
GRADIENTS, MOMENTS, REFERENCE = "gradients", "moments", "reference"
REWARDS, ENGINE, CACHE = "reward models", "engine", "cache"


def in_gib(size: float) -> str:
    """Bytes as a person reads them."""
    return f"{size / 2**30:.2f} GiB" if size < 10 * 2**30 else f"{size / 2**30:.1f} GiB"


@dataclass(frozen=True, slots=True)
class RunModels:
    """What a trainer was given beside its config.

    Attributes:
        model: name, directory or hub id of the policy, or the loaded model.
        rewards: reward functions, and names or models of reward models.
        uses_reference: whether the method needs a reference model.
        make_critic: makes the value head for a policy; returns None if the method has none.
        own_optimizer, own_engine: whether the program makes them itself.
    """

    model: str | PreTrainedModel
    peft_config: Any = None
    quantization_config: Any = None
    ref_model: PreTrainedModel | None = None
    rewards: Sequence[Any] = ()
    uses_reference: bool = False
    make_critic: Callable[[Any], torch.nn.Module | None] = lambda policy: None
    own_optimizer: bool = False
    own_engine: bool = False


def memory_of_run(config: OnlineConfig, given: RunModels, room: Room) -> RunMemory:
    """The memory that a run needs on the trainer's device; on a CPU, that of all its processes on this machine.

    It raises what `empty_base` raises.
    """
    # Processes on one machine share its memory. Each has a GPU of its own.
    copies = 1 if room.on_gpu else int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    ranks = config.world_size if config.sharded_by is not None else 1
    path = resolve_model(given.model if isinstance(given.model, str) else given.model.config.name_or_path)
    path = at_revision(path, (config.model_init_kwargs or {}).get("revision"))  # type: ignore[union-attr]
    base, policy = _models(path, config, given)
    unknown: list[str] = []

    gradients = [size.shard(ranks) for size in sizes_of(p for p in policy.parameters() if p.requires_grad)]
    whole = weight_bytes(policy, ranks)
    trained = _bytes([*gradients, *sizes_of(policy.buffers())])
    frozen = Part(FROZEN, copies * (whole - trained), mapped=not room.on_gpu)
    parts = [Part(WEIGHTS, copies * trained), frozen]
    with torch.device("meta"):
        critic = given.make_critic(policy)
    if critic is not None:
        head = sizes_of(critic.parameters())
        gradients += head
        parts.append(Part(VALUES, copies * _bytes(head)))
    parts.append(Part(GRADIENTS, copies * _bytes(gradients), LEARNING))
    moments = _moments(config, given, policy, gradients)
    if moments is None:
        unknown.append("the optimizer's state")
    else:
        # bitsandbytes' paged optimizers may leave the GPU.
        paged = "paged" in optimizer_name(config)
        parts.append(Part(MOMENTS, copies * moments, mapped=paged, detail=optimizer_name(config)))
    if given.ref_model is not None:
        parts.append(Part(REFERENCE, copies * weight_bytes(given.ref_model, ranks)))
    elif given.uses_reference and not is_adapted(policy):
        parts.append(Part(REFERENCE, copies * whole))
    rewards = [_reward_bytes(entry, room) for entry in given.rewards]
    if None in rewards:
        unknown.append("a reward model")
    parts.append(Part(REWARDS, copies * sum(size for size in rewards if size), mapped=not room.on_gpu))
    parts += _engine_parts(config, given, path, base, policy, room)
    shape = layer_shape(base)
    activations = (
        None if shape is None else copies * activation_bytes(shape, largest_forward(config, base, room))
    )
    return RunMemory(tuple(part for part in parts if part.size), activations, tuple(unknown))


def largest_forward(config: OnlineConfig, model: PreTrainedModel, room: Room) -> LargestForward:
    """The largest forward and backward of a run. `model` is the base model, for the dtype of its weights."""
    limits = [n for n in (config.context_limit, context_length(model.config)) if n is not None]
    budget = config.token_budget or max(usual_token_budgets())
    # A pack has at most the completions of a micro-batch. A sequence that is longer than the budget is a pack alone.
    most = config.completions_per_micro_batch * min(limits) if limits else budget
    weights = next(p.dtype for p in model.parameters() if p.is_floating_point())
    return LargestForward(
        max(min(budget, most), config.completion_limit),
        weights.itemsize,
        min(weights.itemsize, config.trainer_dtype.itemsize),
        config.logits_chunk_size,
        bool(config.gradient_checkpointing),
        None if room.on_gpu else weight_bytes(model),
    )


def _models(path: str, config: OnlineConfig, given: RunModels) -> tuple[PreTrainedModel, torch.nn.Module]:
    """The base model that engines load, and the policy: both without memory, unless a loaded policy was given."""
    if not isinstance(given.model, str):
        base = causal_model(given.model) if not is_adapted(given.model) else empty_base(path, config)
        return base, given.model
    base = empty_base(path, config)
    quantised = (config.model_init_kwargs or {}).get("quantization_config", given.quantization_config)  # type: ignore[union-attr]
    policy: Any = empty_base(path, config, given.quantization_config) if quantised is not None else base
    if given.peft_config is not None:
        policy = policy if policy is not base else empty_base(path, config)
        with torch.device("meta"):
            # PEFT writes the names of the layers into the configuration.
            policy = add_adapter(policy, copy.deepcopy(given.peft_config))
    if config.freeze_vision_tower:
        policy = policy if policy is not base else empty_base(path, config)
        for part in vision_parts(causal_model(policy)):
            part.requires_grad_(False)
    return base, policy


def optimizer_name(config: OnlineConfig) -> str:
    """The optimizer's name, as transformers knows it."""
    return str(getattr(config.optim, "value", config.optim))


def _moments(config: OnlineConfig, given: RunModels, policy: Any, sizes: Sequence[TensorSize]) -> int | None:
    """Bytes of the optimizer's state; None if they cannot be counted."""
    if given.own_optimizer:
        return None
    try:
        kind, arguments = Trainer.get_optimizer_cls_and_kwargs(config, policy)
        if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)) or "params" in arguments:
            return None
        wide: list[TensorSize] = []
        if arguments.get("optim_bits") == 8:
            # transformers keeps the state of embeddings in 32 bits.
            embeddings = [m.weight for m in policy.modules() if isinstance(m, torch.nn.Embedding)]
            wide = sizes_of(weight for weight in embeddings if weight.requires_grad)
        narrow = list((Counter(sizes) - Counter(wide)).elements())
        of_wide = moment_bytes(wide, kind, {**arguments, "optim_bits": 32})
        return moment_bytes(narrow, kind, arguments) + of_wide
    except (*BAD_FILES, NotImplementedError) as error:
        _logger.debug(f"the state of {optimizer_name(config)} cannot be counted: {error}")
        return None


def _reward_bytes(entry: Any, room: Room) -> int | None:
    """Bytes of a reward model on the trainer's device; 0 for a function; None if they cannot be counted."""
    if isinstance(entry, PreTrainedModel):
        return weight_bytes(entry) if entry.device.type == room.device.type else 0
    if not isinstance(entry, str):
        return 0
    try:
        found = load_files(AutoConfig, resolve_model(entry), num_labels=1)
        return weight_bytes(_empty(AutoModelForSequenceClassification, found, _dtype("auto", found)))
    except BAD_FILES:
        return None


def _engine_parts(
    config: OnlineConfig,
    given: RunModels,
    path: str,
    base: PreTrainedModel,
    policy: torch.nn.Module,
    room: Room,
) -> list[Part]:
    """What an engine in this process, or in its worker processes, takes of the trainer's device."""
    # Beside a trainer that was told to use the CPU, an engine still takes a GPU.
    elsewhere = torch.cuda.is_available() and not room.on_gpu
    if given.own_engine or config.vllm_mode == "server" or elsewhere:
        return []
    vllm = vllm_installed() if config.use_vllm is None else config.use_vllm
    dtype = config.engine_torch_dtype
    weights = engine_weight_bytes(base, dtype, config.vllm_quantization if vllm else None, vllm=vllm)
    if not vllm:
        return [Part(ENGINE, weights, mapped=not room.on_gpu, detail="its weights")]
    if config.vllm_enable_lora:
        weights += adapter_bytes(policy, dtype)
    settings: dict[str, Any] = dict(config.vllm_engine_kwargs or {})  # type: ignore[arg-type]
    cache, workers = settings.get("kv_cache_memory_bytes"), config.vllm_tensor_parallel_size
    when = SAMPLING if config.engine_sleeps else "always"
    if room.on_gpu and cache is None:
        share = settings.get("gpu_memory_utilization", config.vllm_gpu_memory_utilization)
        own, taken = weights // workers, math.ceil(room.size * share)
        return [Part(ENGINE, taken, when, detail=f"{in_gib(own)} of it weights", least=own)]
    if cache is None:
        limits = [n for n in (config.context_limit, context_length(base.config)) if n is not None]
        # The prompts are not read yet. Without a length from the user, the cache of the completions alone is counted.
        longest = min(limits) if config.context_limit else min(config.completion_limit + 2, *limits)
        cache = cpu_cache_bytes(path, dtype, longest, config.vllm_max_num_seqs or usual_sequences())
    if room.on_gpu:
        taken = math.ceil(weights / workers) + cache
        return [Part(ENGINE, taken, when, detail=f"{in_gib(cache)} of it cache")]
    more = "" if config.context_limit or "kv_cache_memory_bytes" in settings else "at least, without prompts"
    return [Part(ENGINE, weights, detail="its weights"), Part(CACHE, cache * workers, detail=more)]


# ---- what a user is told -----------------------------------------------------------------------------------


def check_memory(config: OnlineConfig, given: RunModels) -> None:
    """Say what memory a run needs, before its models are loaded.

    Raises:
        InputError: what is counted exactly does not fit into the memory of the device. The message says what to change.
    """
    if (config.model_init_kwargs or {}).get("device_map") is not None:  # type: ignore[union-attr]
        # The model is then not where the trainer would put it.
        return
    room = room_of(config.device)
    if _stored_bytes(given.model) * WORTH_COUNTING < room.size:
        return
    try:
        memory = memory_of_run(config, given, room)
    except (*BAD_FILES, NotImplementedError) as error:
        # Loading the model says what is wrong with its files.
        _logger.info(f"the memory of the run is not known before the model is loaded: {first_line(error)}")
        return
    for part in memory.parts:
        if part.least > part.size:
            raise InputError(
                f"vLLM does not fit into its share of {room.name}: the share has {in_gib(part.size)}, and "
                f"the engine's weights alone have {in_gib(part.least)}. Raise vllm_gpu_memory_utilization, "
                "set vllm_tensor_parallel_size to split the engine, or start 'lockstep serve' on other "
                "devices and set vllm_mode: server"
            )
    needed, first = f"{in_gib(memory.exact())} ({memory})", "What to change, what saves most first:"
    if room.beyond is not None and memory.exact(mapped=False) > room.size + room.beyond:
        changes = changes_of(config, given, replace(memory, activations=None), room)
        raise InputError(
            f"the run does not fit into the memory of {room.name}: before any activations it needs "
            f"{needed}, and there are {in_gib(room.size)}. {first} {changes}"
        )
    unknown = f"; not counted: {', '.join(memory.unknown)}" if memory.unknown else ""
    more = "" if memory.activations is None else f"; activations need about {in_gib(memory.activations)} more"
    _logger.info(f"memory: the run needs {needed} of {in_gib(room.size)} on {room.name}{more}{unknown}")
    if memory.whole > room.size:
        _logger.warning(
            f"with its activations (an estimate) the run needs about {in_gib(memory.whole)}, and {room.name} has "
            f"{in_gib(room.size)}: it may run out of memory. {first} {changes_of(config, given, memory, room)}"
        )


def changes_of(config: OnlineConfig, given: RunModels, memory: RunMemory, room: Room) -> str:
    """What makes a run smaller, with the bytes that it saves: what saves most is first."""
    sizes = {part.name: part for part in memory.parts}

    def size(*names: str) -> int:
        return sum(sizes[name].size for name in names if name in sizes)

    whole, alone, engine = FROZEN not in sizes, config.sharded_by is None, sizes.get(ENGINE)
    elsewhere = "start the engine on another device ('lockstep serve', vllm_mode: server)"
    found = {elsewhere: memory.without(ENGINE, CACHE)}
    if whole:
        found["train an adapter (peft_config, or use_peft)"] = size(GRADIENTS, MOMENTS, REFERENCE)
    elif given.quantization_config is None:
        found["hold the base model in 4 bits (load_in_4bit)"] = size(FROZEN) * 7 // 8
    if alone and room.on_gpu:
        trainer = size(WEIGHTS, FROZEN, GRADIENTS, MOMENTS, REFERENCE)
        found["cut the model over two or more devices (fsdp: true, with torchrun)"] = trainer // 2
    if alone and optimizer_name(config).startswith("adamw_torch"):
        saved = size(MOMENTS) * 3 // 4
        found["let the optimizer keep its moments in 8 bits (optim: adamw_8bit)"] = saved
    if given.ref_model is None:
        found["leave the reference model out (beta: 0)"] = memory.without(REFERENCE)
    if engine is not None and engine.least:
        unused = (engine.size - engine.least) // 2
        found["lower vllm_gpu_memory_utilization"] = min(memory.without(ENGINE), unused)
        if engine.when == "always":
            saved = memory.exact() - replace_when(memory, ENGINE, SAMPLING).exact()
            found["let vLLM sleep while the trainer learns (vllm_enable_sleep_mode: true)"] = saved
    if not room.on_gpu:
        found["lower vllm_max_num_seqs"] = size(CACHE) // 2
        if config.engine_torch_dtype == torch.float32:
            found["let the engine compute in bfloat16 (engine_dtype: bfloat16)"] = size(ENGINE, CACHE) // 2
    if memory.activations:
        found |= _smaller_activations(config, memory.activations)
    ordered = sorted(((saved, change) for change, saved in found.items() if saved > 0), reverse=True)
    said = [f"{change} saves about {in_gib(saved)}" for saved, change in ordered[:_CHANGES]]
    return "; ".join(said) or "a smaller model"


def _smaller_activations(config: OnlineConfig, size: int) -> dict[str, int]:
    usual = f"set token_budget to {max(usual_token_budgets()) // 2}"
    found = {usual if config.token_budget is None else "halve token_budget": size // 2}
    if not config.gradient_checkpointing:
        found["compute layers again in the backward (gradient_checkpointing: true)"] = size * 3 // 4
    if not config.bf16:
        found["compute in bfloat16 (bf16: true)"] = size // 3
    return found


def replace_when(memory: RunMemory, name: str, when: str) -> RunMemory:
    """The same memory, if one part existed at another time."""
    return RunMemory(tuple(replace(part, when=when) if part.name == name else part for part in memory.parts))


# Changes that a message names.
_CHANGES = 5
# A model whose files have less than this part of the memory is too small to be counted.
WORTH_COUNTING = 1000


def _stored_bytes(model: str | PreTrainedModel) -> float:
    """Bytes of a loaded model, or of the files of a directory; infinite if they are not on this machine."""
    if not isinstance(model, str):
        return sum(p.nbytes for p in model.parameters())
    folder = Path(resolve_model(model))
    return sum(file.stat().st_size for file in folder.iterdir()) if folder.is_dir() else math.inf
