"""An adapter on a sharded model, on one rank: gradients, merged weights, and the proof of the merge."""

from __future__ import annotations

import peft
import pytest
import torch
from test_model import Shard, loss_of, passes, shard
from tiny import make_model

from lockstep.contract.tensors import tensor_specs
from lockstep.errors import ProofError
from lockstep.learn.attention.tree import adopt_tree_attention
from lockstep.models.adapters import add_adapter, causal_model
from lockstep.weights.merged import AdaptedSource
from lockstep.weights.push import check_live

__all__ = ["passes", "shard"]


def adapted(**fields: object) -> peft.PeftModel:
    model = make_model()
    adopt_tree_attention(model)
    config = peft.LoraConfig(
        r=4, lora_alpha=8, target_modules=["q_proj", "down_proj", "embed_tokens"], **fields
    )
    model = add_adapter(model, config)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_" in name:
                p.copy_(torch.randn(p.shape, generator=generator) * 0.1)
    return model


@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
def test_gradients_and_merged_weights_are_those_of_a_whole_model(shard: Shard, dora: bool) -> None:
    whole, model = adapted(use_dora=dora), adapted(use_dora=dora)
    shards = shard(causal_model(model))
    loss_of(causal_model(whole)).backward()
    with shards.learning():
        loss_of(causal_model(model)).backward()
    shards.check(0)
    for (name, p), (_, q) in zip(whole.named_parameters(), model.named_parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        if p.grad is not None:
            assert torch.allclose(p.grad, q.grad.full_tensor(), rtol=1e-6, atol=1e-7), name
    source, plain = AdaptedSource(model), AdaptedSource(whole)
    for (name, tensor), (other, due) in zip(source, plain, strict=True):
        assert name == other
        assert torch.equal(tensor, due), name
    if not dora:
        # The last digits of DoRA's norm differ in these models, sharded or not.
        check_live(model, source, tensor_specs(list(source)), None, 0)
    shards.check(0)


def test_a_wrong_merge_is_noticed(shard: Shard) -> None:
    model = adapted()
    shard(causal_model(model))
    source = AdaptedSource(model)
    specs = tensor_specs(list(source))
    for layer in model.modules():
        if hasattr(layer, "lora_A"):
            layer.scaling["default"] *= 1.1
    with pytest.raises(ProofError, match=r"proof '(live|merge)' failed"):
        check_live(model, source, specs, None, 0)
