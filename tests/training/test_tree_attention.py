"""Tree attention equals dense attention with the mask, and does not compute what the mask hides."""

from __future__ import annotations

import torch
from blocks import Layer, small_blocks, tree_masks
from draws import draws
from hypothesis import given
from tiny import make_model

from lockstep.training.batch.pack import pack_sequences
from lockstep.training.batch.sequence import TrainingSequence
from lockstep.training.forward.tree_attention import (
    TREE,
    TreePlan,
    adopt_tree_attention,
    plan_attention,
    tree_attention_forward,
)


def plan_of(mask: torch.Tensor) -> TreePlan:
    with small_blocks():
        plan = plan_attention(mask)
    assert plan is not None
    return plan


def computed(plan: TreePlan) -> int:
    return sum(block.mask.numel() for block in plan.blocks)


@draws(60)
@given(mask=tree_masks())
def test_values_and_gradients_are_those_of_the_dense_mask(mask: torch.Tensor) -> None:
    plan = plan_of(mask)
    size = len(mask)
    generator = torch.Generator().manual_seed(size)
    parts = [torch.randn(1, heads, size, 8, dtype=torch.float64, generator=generator) for heads in (6, 2, 2)]
    of = torch.randn(1, size, 6, 8, dtype=torch.float64, generator=generator)
    results = []
    for tree in (None, plan, plan.added(torch.float64)):
        own = [part.clone().requires_grad_() for part in parts]
        out, _ = tree_attention_forward(Layer(), *own, mask[None, None], tree=tree, scaling=0.3)
        out.backward(of)
        results.append([out.detach(), *(part.grad for part in own)])
    for dense, cut, added in zip(*results, strict=True):
        torch.testing.assert_close(cut, dense, rtol=1e-10, atol=1e-12)
        assert torch.equal(added, cut)


def test_under_autocast_a_cpu_attends_in_float32() -> None:
    mask = torch.ones(40, 40, dtype=torch.bool).tril()
    parts = [torch.randn(1, heads, 40, 8) for heads in (6, 2, 2)]
    # Under autocast rotated queries and keys are in float32, and values in bf16.
    parts[2] = parts[2].bfloat16()
    results = []
    for half in (False, True):
        own = [part.clone().requires_grad_() for part in parts]
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            out, _ = tree_attention_forward(Layer(), *own, mask[None, None], tree=plan_of(mask), scaling=0.3)
        out.float().square().sum().backward()
        results.append([out.detach(), *(part.grad for part in own)])
    assert [part.dtype for part in results[1]] == [torch.bfloat16, torch.float32, torch.float32, torch.bfloat16]
    for single, half in zip(*results, strict=True):
        assert torch.equal(half, single)


@draws(60)
@given(mask=tree_masks())
def test_every_pair_that_sees_each_other_is_computed_once(mask: torch.Tensor) -> None:
    plan = plan_of(mask)
    starts = [sum(plan.sizes[:i]) for i in range(len(plan.sizes))]
    counted = torch.zeros(mask.shape, dtype=torch.int)
    for block in plan.blocks:
        columns = torch.cat([torch.arange(starts[i], starts[i] + plan.sizes[i]) for i in block.pieces])
        counted[block.start : block.end, columns] += block.mask[0, 0].int()
    assert torch.equal(counted, mask.int())
    assert sum(plan.sizes) == len(mask)


def test_a_long_prompt_with_many_completions_leaves_most_pairs_out() -> None:
    sequences = [
        TrainingSequence(f"a#{i}", tuple(range(512)), tuple(range(1000 * i, 1000 * i + 64)), (0.0,) * 64)
        for i in range(1, 17)
    ]
    (pack,) = pack_sequences(sequences, 2048)
    assert pack.tree is not None
    visible = int(pack.attention_mask.sum())
    assert computed(pack.tree) < 0.4 * pack.attention_mask.numel()
    assert computed(pack.tree) < 1.5 * visible


def test_what_is_small_or_hides_little_is_not_cut() -> None:
    assert plan_attention(torch.ones(200, 200, dtype=torch.bool).tril()) is None
    assert plan_attention(torch.ones(2048, 2048, dtype=torch.bool).tril()) is None


def test_blocks_are_few_however_long_the_pack() -> None:
    mask = torch.eye(4096, dtype=torch.bool)
    plan = plan_attention(mask)
    assert plan is not None
    assert len(plan.blocks) == 16


def test_a_layer_with_a_mask_of_its_own_keeps_it() -> None:
    mask = torch.ones(40, 40, dtype=torch.bool).tril()
    mask[20:, 2:20] = False
    plan = plan_of(mask)
    parts = [torch.randn(1, heads, 40, 8) for heads in (6, 2, 2)]
    own = torch.where(mask, torch.randn(40, 40), -torch.inf)[None, None]
    found, _ = tree_attention_forward(Layer(), *parts, own, tree=plan, scaling=0.3)
    expected, _ = tree_attention_forward(Layer(), *parts, own, scaling=0.3)
    assert torch.equal(found, expected)


def test_a_model_computes_the_same_with_and_without_it() -> None:
    model = make_model("qwen2").double()
    sequences = [
        TrainingSequence(f"a#{i}", tuple(range(4, 24)), (30 + i, 31, 32 + i, 33), (0.0,) * 4) for i in range(5)
    ]
    with small_blocks():
        (pack,) = pack_sequences(sequences, 100)
    assert pack.tree is not None
    inputs = {"input_ids": pack.input_ids, "position_ids": pack.position_ids, "attention_mask": pack.attention_mask}
    with torch.no_grad():
        dense = model.base_model(**inputs, use_cache=False).last_hidden_state
        adopt_tree_attention(model)
        assert model.config._attn_implementation == TREE
        without = model.base_model(**inputs, use_cache=False).last_hidden_state
        cut = model.base_model(**inputs, use_cache=False, tree=pack.tree).last_hidden_state
    assert torch.equal(without, dense)
    torch.testing.assert_close(cut, dense, rtol=1e-10, atol=1e-12)


def test_an_adopted_model_generates_as_before() -> None:
    model = make_model("llama")
    prompt = torch.tensor([[5, 6, 7], [8, 9, 10]])
    before = model.generate(prompt, max_new_tokens=6, do_sample=False, pad_token_id=0)
    adopt_tree_attention(model)
    assert torch.equal(model.generate(prompt, max_new_tokens=6, do_sample=False, pad_token_id=0), before)
