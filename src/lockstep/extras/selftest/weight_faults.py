"""Weight faults: W1 to W13, and small ones that log-probs hardly show."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable, Iterator
from unittest.mock import patch

import torch
from torch.nn.functional import linear

import lockstep.run.source as source_module
import lockstep.watch.modules as probe_module
import lockstep.weights.push as push_module
from lockstep.contract.protocol import WeightReceiver
from lockstep.contract.tensors import Begun, LoadedWeights, TensorSpec
from lockstep.extras.selftest import seams
from lockstep.extras.selftest.seams import Fault, Named, Patch, is_vllm
from lockstep.extras.verify.stage import Stage
from lockstep.models.parameters import expert_names
from lockstep.shards.model import ShardedModel
from lockstep.weights.push import SyncRecord
from lockstep.weights.source import PlainSource, Update
from lockstep.weights.wire.stream import NO_CHANGES, Piece, apply_changes, changes_between, part_of


def _never_arrived(stage: Stage) -> Patch:
    first = seams.weights_now(stage)
    return seams.loads_instead(stage, lambda sent: [(name, first[name]) for name, _ in sent])


def _stale_head(stage: Stage) -> Patch:
    if is_vllm(stage) and _tied(stage):
        if stage.trainer.proofs.engine_dtype == torch.float32 and not torch.cuda.is_available():
            # vLLM 0.32.0 behaves like this without our fix. With other dtypes or devices the head is not packed into
            # a copy. Imported here, because `lockstep verify --engine transformers` runs without vLLM.
            import lockstep.engines.vllm.port.receive as backend

            return patch.object(backend, "repack_heads", lambda model, written: None)
        layer = seams.vllm_worker(stage).model_runner.model.lm_head
        kept = layer.weight.detach().clone()
        return patch.object(layer.quant_method, "apply", lambda layer, x, bias=None: linear(x, kept, bias))
    head = stage.model.get_output_embeddings().weight
    (name,) = [n for n, p in stage.model.named_parameters() if p is head]
    old = head.detach().clone()
    return seams.loads_instead(stage, lambda sent: [(n, old if n == name else t) for n, t in sent])


def _wrong_place(stage: Stage) -> Patch:
    """Two tensors of the same shape change places, as happens when a fused layer is filled in the wrong order."""
    one, other = _same_shape_pair(stage)

    def swapped(sent: Named) -> Named:
        by_name = dict(sent)
        by_name[one], by_name[other] = by_name[other], by_name[one]
        return [(name, by_name[name]) for name, _ in sent]

    return seams.loads_instead(stage, swapped)


def _damaged_on_the_way(stage: Stage) -> Patch:
    """One bit of one tensor flips in the transport. The engine reports the bytes that it received."""
    name, real = _same_shape_pair(stage)[0], stage.engine.load

    def flipped(tensor: torch.Tensor) -> torch.Tensor:
        copy = tensor.clone()
        copy.view(torch.uint8).flatten()[-2] ^= 1
        return copy

    def load(sent: Iterable[tuple[str, torch.Tensor]], base: str = "") -> LoadedWeights:
        return real([(n, flipped(t) if n == name else t) for n, t in sent], base)

    return patch.object(stage.engine, "load", load)


def _nothing_loaded(stage: Stage) -> Patch:
    def load(tensors: Iterable[tuple[str, torch.Tensor]], base: str = "") -> LoadedWeights:
        return LoadedWeights((), ())

    return patch.object(stage.engine, "load", load)


def _resets_nothing(answer: bool) -> Callable[[Stage], Patch]:
    return lambda stage: patch.object(stage.engine, "reset_caches", lambda: answer)


def _drift(stage: Stage) -> Patch:
    """Each sync leaves the policy itself rounded, as merging and unmerging an adapter in bf16 does."""
    real = stage.engine.commit_version

    def commit(version: int) -> None:
        real(version)
        with torch.no_grad():
            for p in stage.model.parameters():
                p.copy_((p.to(torch.bfloat16) * 1.01).to(torch.bfloat16) / 1.01)

    return patch.object(stage.engine, "commit_version", commit)


def _half_an_update(stage: Stage) -> Patch:
    real = stage.engine.load
    return patch.object(stage.engine, "load", lambda tensors, base="": real(list(tensors)[::2], base))


def _restarted(stage: Stage) -> Patch:
    """The engine restarts with its first weights, and reports the current version."""
    first, real = seams.weights_now(stage), stage.engine.commit_version

    def commit(version: int) -> None:
        stage.engine.begin_update()
        stage.engine.load(list(first.items()))
        real(version)

    return patch.object(stage.engine, "commit_version", commit)


def _layer_off(stage: Stage) -> Patch:
    name = _same_shape_pair(stage)[0]

    def off(sent: Named) -> Named:
        noise = torch.randn(dict(sent)[name].shape, generator=torch.Generator().manual_seed(0))
        return [(n, t * (1 + 1e-3 * noise.to(t)) if n == name else t) for n, t in sent]

    return seams.loads_instead(stage, off)


def _rows_swapped(stage: Stage) -> Patch:
    name = _same_shape_pair(stage)[0]

    def swapped(sent: Named) -> Named:
        order = torch.arange(len(dict(sent)[name]))
        order[[2, 5]] = order[[5, 2]]
        return [(n, t[order] if n == name else t) for n, t in sent]

    return seams.loads_instead(stage, swapped)


def _element_off(stage: Stage) -> Patch:
    """One element of one matrix is the next number of the engine's dtype."""
    name, dtype = _same_shape_pair(stage)[0], stage.trainer.proofs.engine_dtype

    def next_number(tensor: torch.Tensor) -> torch.Tensor:
        held = tensor.to(dtype, copy=True)
        held.view(torch.int32 if dtype == torch.float32 else torch.int16).view(-1)[7] += 1
        return held.to(tensor)

    return seams.loads_instead(stage, lambda sent: [(n, next_number(t) if n == name else t) for n, t in sent])


def _cut_instead_of_rounded(stage: Stage) -> Patch:
    """The engine cuts the last bits of each number: those that its dtype does not have, and in fp32 one bit."""
    mask = -2 if stage.trainer.proofs.engine_dtype == torch.float32 else ~0xFFFF

    def cut(tensor: torch.Tensor) -> torch.Tensor:
        bits = tensor.float().clone().view(torch.int32)
        return bits.bitwise_and_(mask).view(torch.float32).to(tensor)

    return seams.loads_instead(stage, lambda sent: [(n, cut(t)) for n, t in sent])


def _keeps_a_share(stage: Stage) -> Patch:
    """The engine mixes a thousandth of its old weights into the new ones, as a moving average does."""
    held = seams.weights_now(stage)

    def mixed(sent: Named) -> Named:
        now = dict(sent)
        held.update({n: t.detach() * 0.999 + held[n] * 0.001 for n, t in now.items()})
        return [(n, held[n]) for n in now]

    return seams.loads_instead(stage, mixed)


@contextlib.contextmanager
def _one_push_late(stage: Stage) -> Iterator[None]:
    """One matrix is that of the push before, while weights change by less than a probe of outputs can see."""
    name, real = _same_shape_pair(stage)[0], source_module.push_weights
    size = 1e-5 if stage.trainer.proofs.engine_dtype == torch.float32 else 2.0**-9
    before = seams.weights_now(stage)

    def pushed(model: torch.nn.Module, engine: WeightReceiver, version: int) -> SyncRecord:
        with torch.no_grad():
            for p in stage.model.parameters():
                p *= 1 + size
        with seams.loads_instead(stage, lambda sent: [(n, before[n] if n == name else t) for n, t in sent]):
            record = real(model, engine, version)
        before.update(seams.weights_now(stage))
        return record

    # The self-test changes the weights by far more before each step. Here only this small change counts.
    with patch.object(source_module, "push_weights", pushed), patch.object(stage, "scale", 0.0):
        yield


def _in_8_bits(stage: Stage) -> str:
    return "8 bits hide it; their codes are compared" if stage.config.vllm_quantization is not None else ""


def _experts_not_packed(stage: Stage) -> Patch:
    # vLLM 0.32.0 behaves like this without our fix.
    import lockstep.engines.vllm.port.receive as backend

    return patch.object(backend, "remove_expert_kernels", lambda model: {})


def _needs_packed_experts(stage: Stage) -> str:
    if not expert_names(stage.model):
        return "the model has no experts"
    packs = is_vllm(stage) and not torch.cuda.is_available()
    return "" if packs else "only vLLM's kernels for CPUs pack experts"


@contextlib.contextmanager
def _sync_skipped(stage: Stage) -> Iterator[None]:
    """Every second push is skipped, after a change of the weights so small (1e-6) that no log-prob shows it."""
    real, calls = source_module.push_weights, iter(range(1_000_000))

    def every_second(model: torch.nn.Module, engine: WeightReceiver, version: int) -> SyncRecord:
        with torch.no_grad():
            for p in stage.model.parameters():
                p += 1e-6 * p.sign()
        return SyncRecord(version, "", 0, 0, 0.0) if next(calls) % 2 else real(model, engine, version)

    # The self-test changes the weights by far more before each step. Here only this small change counts.
    with patch.object(source_module, "push_weights", every_second), patch.object(stage, "scale", 0.0):
        yield


@contextlib.contextmanager
def _stale_source(stage: Stage) -> Iterator[None]:
    """Push and probe read weights that are two pushes old. Both agree with the engine; only the trainer moves on."""
    held = [seams.weights_now(stage)] * 3

    class Old(PlainSource):
        def tensor(self, name: str) -> torch.Tensor:
            return held[0][self.first_name(name)]

    def pushed(model: torch.nn.Module) -> PlainSource:
        held.append(seams.weights_now(stage))
        del held[0]
        return Old(model)

    with patch.object(push_module, "weights_of", pushed), patch.object(probe_module, "weights_of", Old):
        yield


def _left_out(stage: Stage) -> Patch:
    """Pushes leave out a part of a layer that changed. Their manifests have its old digests, as the engine has."""
    part, real = part_of(_same_shape_pair(stage)[0]), Update._changed_part

    def without(self: Update, names: list[str], specs: list[TensorSpec | Begun]) -> Iterator[Piece]:
        if part_of(names[0]) != part:
            return real(self, names, specs)
        specs += [self._before[name] for name in names]
        return iter([(name, NO_CHANGES) for name in names])

    return patch.object(Update, "_changed_part", without)


@contextlib.contextmanager
def _older_base(stage: Stage) -> Iterator[None]:
    """Every push changes one element in 97, others each time.

    The engine writes them into weights that are one push older than it says, and acknowledges what was sent.
    """
    held, real = [_in_main_memory(stage)] * 2, source_module.push_weights

    def put_together(sent: Named) -> Named:
        before, now, found = held[1], dict(sent), []
        for name, tensor in now.items():
            _, changes = changes_between(before[name], tensor.cpu())
            if changes is not None:
                tensor = held[0][name].clone()
                apply_changes(tensor, changes)
            found.append((name, tensor))
        return found

    def pushed(model: torch.nn.Module, engine: WeightReceiver, version: int) -> SyncRecord:
        with torch.no_grad():
            for p in stage.model.parameters():
                p.view(-1)[version % 97 :: 97] *= 2
        with seams.loads_instead(stage, put_together):
            record = real(model, engine, version)
        held.append(_in_main_memory(stage))
        del held[0]
        return record

    # The self-test changes every element before each step.
    with patch.object(source_module, "push_weights", pushed), patch.object(stage, "scale", 0.0):
        yield


def _in_main_memory(stage: Stage) -> dict[str, torch.Tensor]:
    return {name: tensor.cpu() for name, tensor in seams.weights_now(stage).items()}


def _trained_copy(stage: Stage) -> Patch:
    return patch.object(stage.trainer, "model", copy.deepcopy(stage.model))


def _stays_gathered(stage: Stage) -> Patch:
    return patch.object(ShardedModel, "_end", lambda self: None)


def _needs_shards(stage: Stage) -> str:
    return "" if stage.trainer.ranks.passes is not None else "the model is whole on this rank (no shards)"


def _tied(stage: Stage) -> bool:
    return stage.model.get_output_embeddings().weight is stage.model.get_input_embeddings().weight


def _same_shape_pair(stage: Stage) -> tuple[str, str]:
    """Two matrices of the same shape in the middle of the model, which an engine may mix up."""
    named = [(name, p.shape) for name, p in stage.model.named_parameters()]
    layers = [(n, shape) for n, shape in named if (len(shape) == 2 and ".layers." in n) or ".h." in n]
    middle = layers[len(layers) // 2 :] + layers
    for i, (name, shape) in enumerate(middle):
        for other, other_shape in middle[i + 1 :]:
            if shape == other_shape and other != name and name.split(".")[2] == other.split(".")[2]:
                return name, other
    return middle[0][0], middle[1][0]


def _needs_cache(stage: Stage) -> str:
    if stage.config.vllm_quantization is not None:
        return "8 bits change more than one update does"
    return "" if stage.engine.settings().prefix_caching else "this engine keeps no cache between calls"


WEIGHT_FAULTS = (
    Fault("W1", "weights acknowledged and never put to use", _never_arrived),
    Fault("W2", "the output head keeps an older copy", _stale_head),
    Fault("W3", "two tensors of one layer in each other's place", _wrong_place, check="module probe"),
    Fault("W3b", "one bit of one tensor flips on the way", _damaged_on_the_way),
    Fault("W4", "an empty load taken for a success", _nothing_loaded),
    Fault("W4b", "a refused cache reset taken for a success", _resets_nothing(False)),
    Fault("W5", "each sync leaves the policy itself rounded", _drift),
    Fault("W6", "the prefix cache survives the update", _resets_nothing(True), needs=_needs_cache),
    Fault("W7", "half an update goes into service", _half_an_update),
    Fault("W8", "a restarted engine serves its first weights under the current version", _restarted),
    Fault("W9", "the source of a push gives weights that are two pushes old", _stale_source),
    Fault("W9b", "the trainer learns a copy of the model that it pushes", _trained_copy),
    Fault("W10", "an update leaves experts unpacked", _experts_not_packed, needs=_needs_packed_experts),
    Fault(
        "W11",
        "a sharded model stays gathered after a forward, and later forwards read its old weights",
        _stays_gathered,
        needs=_needs_shards,
        learns=True,
    ),
    Fault("W12", "a push leaves out a tensor that changed, and its manifest has the old digest", _left_out),
    Fault("W13", "changes are written into older weights", _older_base, check="module probe"),
    Fault("small-1", "one layer off by 1e-3 of its size", _layer_off, needs=_in_8_bits, check="module probe"),
    Fault("small-2", "two rows of one matrix swapped", _rows_swapped, check="module probe"),
    Fault("small-3", "one sync skipped at a learning rate of 1e-6", _sync_skipped),
    *(
        Fault(name, what, inject, needs=_in_8_bits, check="module probe")
        for name, what, inject in (
            ("small-4", "one element of one matrix is one step of the dtype off", _element_off),
            ("small-5", "the last bits of weights are cut instead of rounded", _cut_instead_of_rounded),
            ("small-6", "the engine keeps a thousandth of its old weights", _keeps_a_share),
            ("small-7", "one matrix is one push late, by less than outputs show", _one_push_late),
        )
    ),
)
