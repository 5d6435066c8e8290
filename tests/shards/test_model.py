"""A model sharded over one rank, by FSDP2 and DeepSpeed ZeRO-3: what is gathered, freed and refused.

Several ranks: `tests/run/`.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist
from tiny import make_model
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from lockstep.contract.tensors import LoadedWeights, tensor_specs
from lockstep.errors import InputError, LockstepError, ProofError
from lockstep.extras.deepspeed import deepspeed_parts
from lockstep.extras.deepspeed.weights import ZeroWeights
from lockstep.learn.attention.tree import adopt_tree_attention
from lockstep.learn.pack import pack_sequences
from lockstep.learn.scoring import TokenScores, in_passes, score_pack
from lockstep.learn.sequence import TrainingSequence
from lockstep.shards.fsdp import FsdpWeights
from lockstep.shards.model import ShardedModel, sharded
from lockstep.shards.passes import Passes
from lockstep.watch.elements import AccumulationProof
from lockstep.watch.plain_forward import sequence_logits
from lockstep.weights.push import push_weights
from lockstep.weights.source import PlainSource

IDS = [3, 1, 4, 1, 5]
Shard = Callable[..., ShardedModel]


@pytest.fixture
def passes() -> Iterator[Passes]:
    dist.init_process_group(
        "gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=60)
    )
    yield Passes(60.0)
    dist.destroy_process_group()


@pytest.fixture(params=[False, True], ids=["untied", "tied"])
def make(request: pytest.FixtureRequest) -> Callable[[], PreTrainedModel]:
    def made() -> PreTrainedModel:
        torch.manual_seed(0)
        model = make_model(tied=request.param)
        adopt_tree_attention(model)
        return model

    return made


KINDS = {"fsdp": FsdpWeights, "zero": ZeroWeights}


@pytest.fixture(params=KINDS)
def shard(request: pytest.FixtureRequest, passes: Passes) -> Shard:
    """Shards a model with FSDP2, or with DeepSpeed ZeRO-3."""
    if request.param == "zero":
        pytest.importorskip("deepspeed")
    return partial(ShardedModel, passes=passes, device=torch.device("cpu"), shard=KINDS[request.param])


def loss_of(model: PreTrainedModel) -> torch.Tensor:
    one = TrainingSequence("a/0", [3, 1], [4, 1, 5], [0.0] * 3)  # type: ignore[arg-type]
    (pack,) = pack_sequences([one], 64)
    shards = sharded(model)

    def compute() -> TokenScores:
        return score_pack(model, pack, 1.0, 2)

    return (compute() if shards is None else in_passes(shards, compute)).logps.sum()


def test_a_pytorch_that_cannot_sum_gradients_which_some_ranks_lack_is_refused(
    make: Callable[[], PreTrainedModel], passes: Passes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(FSDPModule, "set_reduce_scatter_unused_params")
    with pytest.raises(InputError, match=r"FSDP2 needs PyTorch 2\.13"):
        ShardedModel(make(), passes=passes, device=torch.device("cpu"), shard=FsdpWeights)


def test_forward_and_gradients_are_those_of_the_whole_model(
    make: Callable[[], PreTrainedModel], shard: Shard
) -> None:
    whole, model = make(), make()
    before = sequence_logits(whole, IDS)
    loss_of(whole).backward()
    shards = shard(model)
    assert torch.equal(sequence_logits(model, IDS), before)
    with shards.learning():
        loss_of(model).backward()
    shards.check(0)
    for (name, p), (other, q) in zip(whole.named_parameters(), model.named_parameters(), strict=True):
        assert name == other
        assert torch.equal(p.grad, q.grad.full_tensor()), name


def test_the_gradients_of_two_backwards_are_added(make: Callable[[], PreTrainedModel], shard: Shard) -> None:
    whole, model = make(), make()
    shards = shard(model)
    for _ in range(2):
        loss_of(whole).backward()
        with shards.learning():
            loss_of(model).backward()
    for (name, p), q in zip(whole.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad.full_tensor()), name


def test_a_push_reads_what_the_optimizer_has_made(make: Callable[[], PreTrainedModel], shard: Shard) -> None:
    model = make()
    shards = shard(model)
    sequence_logits(model, IDS)
    with torch.no_grad():
        for p in model.parameters():
            p.to_local().add_(1.0)  # type: ignore[operator]
    source, plain = PlainSource(model), PlainSource(make())
    assert source.names == plain.names
    assert [(n, t.shape, t.dtype) for n, t in source.meta_tensors()] == [
        (n, t.shape, t.dtype) for n, t in plain.meta_tensors()
    ]
    for (name, tensor), (other, old) in zip(source, plain, strict=True):
        assert name == other
        assert torch.equal(tensor, old + 1.0)
    assert sharded(model) is shards
    assert not source.is_model_memory


def test_a_model_that_is_left_gathered_is_refused(make: Callable[[], PreTrainedModel], shard: Shard) -> None:
    model = make()
    shards = shard(model)
    for group in (0, 2):
        shards.weights.gather(group)
        with pytest.raises(ProofError, match="proof 'shards' failed"):
            shards.check(3)
        shards.weights.end()
        shards.check(3)


def test_a_model_that_is_moved_keeps_its_parts(make: Callable[[], PreTrainedModel], shard: Shard) -> None:
    model = make()
    shards = shard(model)
    before = sequence_logits(model, IDS)
    # Accelerate names the device with its number. torch then copies the parameters.
    model.to("cpu:0")
    shards.check(0)
    with torch.no_grad():
        for p in model.parameters():
            p.to_local().mul_(0.5)  # type: ignore[operator]
    assert not torch.equal(sequence_logits(model, IDS), before)


def test_a_parameter_whose_memory_is_no_longer_the_partition_is_refused(
    make: Callable[[], PreTrainedModel], passes: Passes
) -> None:
    pytest.importorskip("deepspeed")
    model = make()
    shards = ShardedModel(model, passes, torch.device("cpu"), shard=ZeroWeights)
    with pytest.raises(LockstepError, match="another dtype"):
        model.bfloat16()
    shards.check(0)
    weight = model.get_input_embeddings().weight
    weight._local_tensor = weight._local_tensor.clone()
    with pytest.raises(ProofError, match="embed_tokens"):
        shards.check(0)


def test_a_parameter_that_is_added_later_is_refused(
    make: Callable[[], PreTrainedModel], shard: Shard
) -> None:
    model = make()
    shards = shard(model)
    model.base_model.layers[0].extra = torch.nn.Parameter(torch.zeros(2))
    with pytest.raises(ProofError, match=r"layers\.0\.extra"):
        shards.check(0)


@pytest.mark.parametrize("after", [False, True], ids=["in the forward", "after the forward"])
def test_a_failure_leaves_nothing_gathered(
    make: Callable[[], PreTrainedModel], shard: Shard, after: bool
) -> None:
    model = make()
    shards = shard(model)

    def fail() -> None:
        with shards.learning():
            if after:
                loss_of(model)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    shards.check(0)
    # The backward of a failed forward was played without weight.
    grads = [p.grad for p in model.parameters()]
    assert (
        all(g is not None and not g.to_local().any() for g in grads)
        if after
        else not any(g is not None for g in grads)
    )


def test_what_a_backward_adds_is_compared_with_the_gradient(
    make: Callable[[], PreTrainedModel], shard: Shard, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make()
    shards = shard(model)
    sequence_logits(model, IDS)
    named = dict(model.named_parameters())

    def proven() -> None:
        proof = AccumulationProof(named, 1, 2, tuple(named), shards.gathered_parameter)
        with shards.learning():
            loss_of(model).backward()
        proof.check([proof.added()])
        model.zero_grad()

    proven()
    for unit in model.modules():
        if hasattr(unit, "set_gradient_divide_factor"):
            unit.set_gradient_divide_factor(2.0)
    real = deepspeed_parts.reduce_scatter
    monkeypatch.setattr(deepspeed_parts, "reduce_scatter", lambda *given: real(*given) / 2.0)
    with pytest.raises(ProofError, match="proof 'accumulation' failed"):
        proven()


def test_a_number_alone_cannot_be_sharded(make: Callable[[], PreTrainedModel], shard: Shard) -> None:
    model = make()
    model.base_model.scale = torch.nn.Parameter(torch.zeros(()))
    with pytest.raises(InputError, match=r"model\.scale cannot be sharded"):
        shard(model)


def test_gradient_checkpointing_changes_no_gradient(
    make: Callable[[], PreTrainedModel], shard: Shard
) -> None:
    whole, model = make(), make()
    shards = shard(model)
    for one in (whole, model):
        one.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        one.train()
    loss_of(whole).backward()
    with shards.learning():
        loss_of(model).backward()
    shards.check(0)
    for (name, p), q in zip(whole.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad.full_tensor()), name


def test_with_autocast_layers_are_gathered_in_its_dtype_and_gradients_stay_in_float32(
    make: Callable[[], PreTrainedModel], shard: Shard
) -> None:
    whole, model = make(), make()
    shards = shard(model, autocast=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        loss_of(whole).backward()
        with shards.learning():
            loss_of(model).backward()
    layer, head = model.base_model.layers[0].self_attn.q_proj.weight, model.get_output_embeddings().weight
    assert shards.gathered_parameter(layer).dtype == torch.bfloat16
    assert shards.gathered_parameter(head).dtype == torch.float32
    for (name, p), q in zip(whole.named_parameters(), model.parameters(), strict=True):
        assert q.grad.dtype == q.dtype == torch.float32
        # Norms are rounded to bf16 too, as an engine in bf16 rounds them.
        assert (p.grad - q.grad.full_tensor()).norm() <= 0.05 * p.grad.norm(), name


def alive(references: Iterable[weakref.ref[torch.Tensor]]) -> int:
    """Number of elements of the tensors that are still there."""
    return sum(tensor.numel() for reference in references if (tensor := reference()) is not None)


class Receiver:
    """Takes a push and counts the elements of gathered tensors that are alive at the same time."""

    wire_dtype = None

    def __init__(self, allowed: int) -> None:
        self.allowed, self.most = allowed, 0

    def begin_update(self) -> None: ...

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]], base: str = "") -> LoadedWeights:
        seen: list[weakref.ref[torch.Tensor]] = []

        def specs() -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in tensors:
                seen.append(weakref.ref(tensor))
                # A thread that has read a tensor lets go of it a moment after its result is there.
                counts = [alive(seen)]
                while counts[-1] > self.allowed and len(counts) < 1000:
                    time.sleep(0.001)
                    counts.append(alive(seen))
                self.most = max(self.most, counts[-1])
                yield name, tensor

        return LoadedWeights(tuple(spec for pair in specs() for spec in tensor_specs([pair])), ())

    def reset_caches(self) -> bool:
        return True

    def commit_version(self, version: int) -> None: ...


def test_a_push_holds_two_gathered_tensors_at_most(make: Callable[[], PreTrainedModel], shard: Shard) -> None:
    model = make()
    largest = sorted(p.numel() for p in model.parameters())[-2:]
    receiver = Receiver(sum(largest))
    shard(model)
    record = push_weights(model, receiver, 1)  # type: ignore[arg-type]
    assert record.tensors == len(list(PlainSource(model)))
    assert 0 < receiver.most <= sum(largest)
    assert receiver.most < sum(p.numel() for p in model.parameters()) / 2
