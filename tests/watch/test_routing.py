"""The share of tokens that rounding sends to other experts is counted as it is, and only where it can be."""

from __future__ import annotations

import torch
from model_families import make_family
from tiny import make_model

from lockstep.contract.protocol import Completion, RequestKey
from lockstep.models.arithmetic import Precision
from lockstep.tokens.arrays import filled, whole_numbers
from lockstep.watch.gap_explained import experts_of, routing_differences

HALF = Precision(torch.bfloat16)


def completion(size: int) -> Completion:
    ids = torch.randint(4, 380, (size,), generator=torch.Generator().manual_seed(0)).tolist()
    versions = whole_numbers([0] * (size - 10))
    return Completion(RequestKey("a", 0), ids[:10], ids[10:], filled(0.0, size - 10), versions, "length")


def test_the_share_counts_positions_and_layers_whose_experts_differ() -> None:
    # With many experts, some are always close to the border.
    model, answer = make_family("qwen3_moe", num_experts=32, num_experts_per_tok=8), completion(120)
    ids = [*answer.prompt_ids.tolist(), *answer.token_ids.tolist()][:-1]
    with torch.no_grad():
        single = model(input_ids=torch.tensor([ids]), output_router_logits=True).router_logits
        with torch.autocast("cpu", torch.bfloat16):
            half = model(input_ids=torch.tensor([ids]), output_router_logits=True).router_logits
    differing = [
        set(one.topk(8).indices.tolist()) != set(other.topk(8).indices.tolist())
        for layers in zip(single, half, strict=True)
        for one, other in zip(*layers, strict=True)
    ]
    assert len(differing) == 2 * 119
    share = routing_differences(model, [answer], HALF)
    assert share == sum(differing) / len(differing)
    assert share > 0
    assert experts_of(model, ids, Precision()).shape == (2, 119, 8)


def test_there_is_no_share_in_one_precision_or_without_routers() -> None:
    assert routing_differences(make_family("qwen3_moe"), [completion(20)], Precision()) is None
    assert routing_differences(make_model(), [completion(20)], HALF) is None
