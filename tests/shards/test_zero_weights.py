"""What DeepSpeed gathers during a step, and when it is freed, on one rank.

The results: `tests/shards/test_model.py`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest
import torch
from test_model import loss_of, passes
from tiny import make_model
from torch.utils.checkpoint import set_checkpoint_early_stop
from transformers import PreTrainedModel

from lockstep.errors import InputError
from lockstep.extras.deepspeed import deepspeed_parts
from lockstep.extras.deepspeed import weights as weights_module
from lockstep.extras.deepspeed.weights import ZeroWeights
from lockstep.learn.attention.tree import adopt_tree_attention
from lockstep.shards.model import ShardedModel
from lockstep.shards.passes import Passes

pytest.importorskip("deepspeed")
__all__ = ["passes"]


def sharded_model(passes: Passes) -> tuple[PreTrainedModel, ShardedModel]:
    model = make_model()
    adopt_tree_attention(model)
    return model, ShardedModel(model, passes, torch.device("cpu"), shard=ZeroWeights)


@pytest.fixture
def held(passes: Passes, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """After each gather: how many groups are whole, the model's own among them."""
    found: list[int] = []
    whole: set[int] = set()
    gather, free = weights_module.WeightGroup.gather, weights_module.WeightGroup.free

    def gathered(self: weights_module.WeightGroup) -> None:
        if not self.whole:
            gather(self)
            whole.add(id(self))
            found.append(len(whole))

    def freed(self: weights_module.WeightGroup) -> None:
        free(self)
        whole.discard(id(self))

    monkeypatch.setattr(weights_module.WeightGroup, "gather", gathered)
    monkeypatch.setattr(weights_module.WeightGroup, "free", freed)
    yield found
    assert not whole


@pytest.mark.parametrize("kind", ["plain", "checkpointed", "checkpointed to the end"])
def test_one_layer_is_gathered_at_a_time_once_for_the_forward_and_once_for_the_backward(
    held: list[int], passes: Passes, kind: str
) -> None:
    model, shards = sharded_model(passes)
    if kind != "plain":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.train()
    # Usually the second forward of a layer ends early, and its hook is not called.
    with set_checkpoint_early_stop(kind != "checkpointed to the end"), shards.learning():
        loss_of(model).backward()
    layers = len(model.base_model.layers)
    assert held == [1, *[2] * (2 * layers)]


def test_checkpointing_of_the_older_kind_changes_no_gradient(passes: Passes) -> None:
    (model, shards), (whole, others) = sharded_model(passes), sharded_model(passes)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    for one, context in ((model, shards), (whole, others)):
        one.train()
        with context.learning():
            loss_of(one).backward()
    shards.check(0)
    for (name, p), q in zip(whole.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(p.grad.to_local(), q.grad.to_local()), name


def test_between_forward_and_backward_a_layer_has_no_memory(passes: Passes) -> None:
    model, shards = sharded_model(passes)
    layer = model.base_model.layers[0].mlp.up_proj.weight
    with shards.learning():
        loss = loss_of(model)
        assert shards.gathered_parameter(layer).untyped_storage().size() == 0
        loss.backward()


def test_what_deepspeed_holds_is_what_the_optimizer_changes(passes: Passes) -> None:
    model, shards = sharded_model(passes)
    for name, weight in shards.weights.named.items():  # type: ignore[attr-defined]
        own, theirs = model.get_parameter(name).to_local(), deepspeed_parts.part_of(weight.source)  # type: ignore[operator]
        assert own.data_ptr() == theirs.data_ptr(), name
        assert own.numel() == theirs.numel(), name


def test_frozen_weights_get_no_gradient_and_are_not_reduced(
    passes: Passes, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, shards = sharded_model(passes)
    reduced: list[int] = []
    real = deepspeed_parts.reduce_scatter

    def counted(summands: torch.Tensor, group: object) -> torch.Tensor:
        reduced.append(summands.numel())
        return real(summands, group)  # type: ignore[arg-type]

    monkeypatch.setattr(deepspeed_parts, "reduce_scatter", counted)
    head = model.get_output_embeddings().weight
    for p in model.parameters():
        p.requires_grad_(p is head)
    with shards.learning():
        loss_of(model).backward()
    assert [p is head for p in model.parameters() if p.grad is not None] == [True]
    assert sum(reduced) == head.numel()


def test_deepspeed_s_kernels_and_its_own_linear_layer_are_left_out(passes: Passes) -> None:
    linear: Callable[..., torch.Tensor] = torch.nn.functional.linear
    sharded_model(passes)
    assert torch.nn.functional.linear is linear
    import deepspeed

    assert deepspeed.comm.comm.cdb.shm_comm_op is None


def test_the_environment_stays_as_it_is(passes: Passes) -> None:
    before = dict(os.environ)
    sharded_model(passes)
    assert dict(os.environ) == before


def test_another_device_than_deepspeed_s_is_refused(passes: Passes, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="DS_ACCELERATOR=meta"):
        deepspeed_parts.begin(torch.device("meta"))
