"""Attention by trees is dense attention with the mask, leaves out what the mask hides, and keeps nothing of T x T."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from blocks import Layer, dense, small_blocks, tree_ends
from draws import draws
from hypothesis import assume, given
from hypothesis import strategies as st
from largest import Largest
from tiny import make_model
from transformers.masking_utils import chunked_causal_mask_function, sliding_window_causal_mask_function

from lockstep import InputError
from lockstep.errors import LockstepError
from lockstep.learn import scoring
from lockstep.learn.attention import blocks as block_attention
from lockstep.learn.attention import plan as path_plan
from lockstep.learn.attention.blocks import TreeAttention
from lockstep.learn.attention.paths import PathAttention
from lockstep.learn.attention.plan import (
    CHAIN_ROWS,
    AttentionPlan,
    PathCall,
    microseconds_of,
    plan_attention,
    plan_paths,
    plan_window,
    positions,
    visible,
    window_ends,
)
from lockstep.learn.attention.tree import (
    TREE,
    adopt_tree_attention,
    no_mask,
    tree_attention_forward,
    window_or_mask,
)
from lockstep.learn.pack import Ints, pack_rows, pack_sequences
from lockstep.learn.scoring import score_pack
from lockstep.learn.sequence import TrainingSequence

CPU, GPU = torch.device("cpu"), torch.device("cuda")
NO_MASK = no_mask(CPU)


def tree_of(ends: torch.Tensor, dtype: torch.dtype = torch.float32) -> TreeAttention:
    with small_blocks(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(block_attention, "CHAIN_ROWS", 7)
        return TreeAttention.of(ends, CPU, dtype, torch.float16)


def drawn(size: int, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    """Queries, keys, values and the gradient of the result."""
    generator = torch.Generator().manual_seed(size)
    shapes = [(1, heads, size, 8) for heads in (6, 2, 2)] + [(1, size, 6, 8)]
    return [torch.randn(shape, dtype=dtype, generator=generator) for shape in shapes]


def with_gradients(attend: Any, *parts: torch.Tensor) -> list[torch.Tensor]:
    *parts, of = parts
    own = [part.clone().requires_grad_() for part in parts]
    out, _ = attend(Layer(), *own)
    return [out.detach(), *torch.autograd.grad(out, own, of)]


@draws(60)
@given(ends=tree_ends())
def test_values_and_gradients_are_those_of_the_dense_mask(ends: torch.Tensor) -> None:
    parts, mask = drawn(len(ends)), dense(ends)
    expected = with_gradients(lambda *p: tree_attention_forward(*p, mask, scaling=0.3), *parts)
    tree = tree_of(ends, torch.float64)
    found = with_gradients(lambda *p: tree_attention_forward(*p, NO_MASK, tree=tree, scaling=0.3), *parts)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


@draws(60)
@given(ends=tree_ends(), whole=st.booleans())
def test_what_other_devices_compute_is_the_same(ends: torch.Tensor, whole: bool) -> None:
    """Their way through public functions, here on a CPU."""
    parts = drawn(len(ends))
    expected = with_gradients(lambda *p: tree_attention_forward(*p, dense(ends), scaling=0.3), *parts)
    plan = plan_attention(ends.numpy(), 6)
    tree = TreeAttention(plan, tuple(block_attention._masks(plan, ends.numpy(), torch.float64, whole=whole)))

    def attend(layer: Layer, *own: torch.Tensor) -> tuple[torch.Tensor, None]:
        return block_attention.Recomputed.apply(*own, tree, 0.3, None).transpose(1, 2), None

    for one, other in zip(with_gradients(attend, *parts), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


def by_paths(ends: torch.Tensor) -> Any:
    plan = plan_paths(ends.numpy(), plan_attention(ends.numpy(), 6))
    assert plan is not None
    paths = PathAttention.of(plan, len(ends), CPU)
    return lambda layer, *own: (paths(*own, 0.3).transpose(1, 2), None)


@contextmanager
def paths_of(launch: float, room: int = 4) -> Iterator[None]:
    """A kernel's start takes `launch` microseconds where paths are computed, and very long where blocks are."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(path_plan, "OF_CALL", launch / path_plan.LAUNCH)
        patch.setattr(path_plan, "OF_BLOCK", 1e6)
        patch.setattr(path_plan, "OF_MASKED", 1e6)
        patch.setattr(path_plan, "MOST_COLUMNS", room)
        patch.setattr(path_plan, "USUAL_PACK", 1)
        yield


@draws(90)
@given(
    ends=tree_ends(),
    launch=st.sampled_from([0.0, 0.3, 1e3]),
    room=st.sampled_from([1, 4, 100]),
    width=st.sampled_from([8, 5]),
)
def test_paths_compute_what_the_dense_mask_gives(
    ends: torch.Tensor, launch: float, room: int, width: int
) -> None:
    """However they are parted into calls, and with values of another width than keys; here on a CPU."""
    assume(int((ends == torch.arange(1, len(ends) + 1)).sum()) > 1)
    query, key, value, of = drawn(len(ends))
    parts = query, key, value[..., :width], of[..., :width]
    expected = with_gradients(lambda *p: tree_attention_forward(*p, dense(ends), scaling=0.3), *parts)
    with paths_of(launch, room):
        found = with_gradients(by_paths(ends), *parts)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


def gpu_plans(ends: torch.Tensor) -> tuple[AttentionPlan, tuple[PathCall, ...] | None]:
    """The two plans of a GPU: by blocks, and by paths if these are cheaper."""
    blocks = plan_attention(ends.numpy(), block_attention._rows(len(ends), GPU))
    return blocks, plan_paths(ends.numpy(), blocks)


@pytest.mark.parametrize(
    ("prompt", "count", "length", "calls", "share"),
    [
        (256, 2, 1899, 1, 1.0),
        (512, 4, 895, 1, 0.9),
        (256, 8, 479, 1, 0.6),
        (200, 64, 59, 2, 0.2),
        (512, 64, 59, 3, 0.3),
    ],
)
def test_a_gpu_computes_usual_packs_in_few_calls_that_take_less_time_by_arithmetic(
    prompt: int, count: int, length: int, calls: int, share: float
) -> None:
    blocks, paths = gpu_plans(chains(prompt, count, length))
    assert paths is not None
    assert len(paths) == calls
    assert microseconds_of(paths) < share * microseconds_of(blocks)


@pytest.mark.parametrize(("prompt", "count", "length"), [(4000, 0, 0), (2048, 1024, 1)])
def test_a_gpu_computes_blocks_where_paths_would_not_take_less_time(
    prompt: int, count: int, length: int
) -> None:
    assert gpu_plans(chains(prompt, count, length))[1] is None


@pytest.mark.parametrize(("prompt", "count", "length"), [(200, 64, 59), (1024, 8, 3900), (16, 4080, 1)])
def test_a_call_of_paths_grows_with_the_pack(prompt: int, count: int, length: int) -> None:
    """All paths together have up to 17 times as many columns as the pack has positions."""
    ends = chains(prompt, count, length)
    paths = gpu_plans(ends)[1]
    assert paths is not None
    assert all(call.columns.size <= 4 * max(len(ends), 4096) for call in paths)
    assert sum(int(call.used.sum()) for call in paths) == len(ends)


@pytest.mark.parametrize(("dtype", "shared"), [(torch.float32, False), (torch.bfloat16, True)])
def test_on_other_devices_only_half_precision_leaves_fewer_key_heads_to_the_kernel(
    dtype: torch.dtype, shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float32 no GPU kernel takes fewer key heads without a matrix of all scores."""
    asked, real = [], torch.nn.functional.scaled_dot_product_attention

    def attend(*parts: torch.Tensor, **settings: Any) -> torch.Tensor:
        asked.append((settings.get("enable_gqa", False), parts[1].shape[1], settings.get("attn_mask")))
        return real(*parts, **settings)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", attend)
    query, key, value, _ = (part.to(dtype) for part in drawn(30))
    one_chain = TreeAttention(plan_attention(np.full(30, 30)), (None,))
    block_attention.Recomputed.apply(query, key, value, one_chain, 0.3, None)
    assert asked == [(shared, key.shape[1] if shared else query.shape[1], None)]


@pytest.mark.parametrize("width", [5, 11])
def test_values_may_have_another_width_than_keys(width: int) -> None:
    ends = torch.tensor([30] * 20 + [25] * 5 + [30] * 5)
    query, key, *_ = drawn(30)
    value = torch.randn(1, 2, 30, width, dtype=torch.float64)
    of = torch.ones(1, 30, 6, width, dtype=torch.float64)
    expected = with_gradients(lambda *p: tree_attention_forward(*p, dense(ends)), query, key, value, of)
    tree = tree_of(ends, torch.float64)
    found = with_gradients(lambda *p: tree_attention_forward(*p, NO_MASK, tree=tree), query, key, value, of)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


def test_under_autocast_a_cpu_attends_in_float32() -> None:
    ends = torch.tensor([40] * 20 + [30] * 10 + [40] * 10)
    parts = [part.float() for part in drawn(40)[:3]]
    # As autocast leaves them: rotated queries and keys in float32, values in bf16.
    parts[2] = parts[2].bfloat16()
    results = []
    for half in (False, True):
        own = [part.clone().requires_grad_() for part in parts]
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            out, _ = tree_attention_forward(Layer(), *own, NO_MASK, tree=tree_of(ends), scaling=0.3)
        out.float().square().sum().backward()
        results.append([out.detach(), *(part.grad for part in own)])
    assert [part.dtype for part in results[1]] == [
        torch.bfloat16,
        torch.float32,
        torch.float32,
        torch.bfloat16,
    ]
    for single, half in zip(*results, strict=True):
        assert torch.equal(half, single)


def computed(plan: AttentionPlan) -> int:
    """Pairs that a kernel computes; of a chain's square the half that is seen."""
    total = sum((part.stop - part.start) * len(positions(part.columns)) for part in plan.shared)
    for block in plan.blocks:
        rows = block.stop - block.start
        total += (
            rows * (rows + 1) // 2 if block.chain else rows * (rows + sum(b - a for a, b in block.partly))
        )
    return total


def assert_each_pair_once(plan: AttentionPlan, ends: Ints, rows: int) -> None:
    size = len(ends)
    counted = np.zeros((size, size), dtype=int)
    for block in plan.blocks:
        own = (block.start, block.stop)
        columns = positions((*block.partly, own))
        seen = visible(ends, own, columns)
        assert not block.chain or (seen == np.tri(*seen.shape)).all()
        # A mask has few rows, and few columns beside them.
        assert block.chain or (len(seen) <= rows and len(columns) <= 2 * rows)
        counted[slice(*own), columns] += seen
    for part in plan.shared:
        counted[part.start : part.stop, positions(part.columns)] += 1
    assert (counted == dense(torch.from_numpy(ends))[0, 0].numpy()).all()


@draws(60)
@given(ends=tree_ends(), chain_rows=st.sampled_from([None, 1, 7]))
def test_every_pair_that_sees_each_other_is_computed_once(ends: torch.Tensor, chain_rows: int | None) -> None:
    plan = plan_attention(ends.numpy(), 6, chain_rows)
    assert_each_pair_once(plan, ends.numpy(), 6)
    for block in plan.blocks:
        before = positions((*block.above, *block.partly, (block.start, block.stop)))
        seen = dense(ends)[0, 0, block.start : block.stop].any(0)
        assert before.tolist() == seen.nonzero()[:, 0].tolist()


def chains(prompt: int, count: int, length: int) -> torch.Tensor:
    """`ends` of a prompt and completions that part at their first token."""
    size = prompt + count * length
    return torch.tensor(
        [size] * prompt + [prompt + (i + 1) * length for i in range(count) for _ in range(length)]
    )


def test_a_long_prompt_with_many_completions_leaves_most_pairs_out() -> None:
    ends = chains(512, 16, 63)
    plan = plan_attention(ends.numpy())
    assert computed(plan) < 1.15 * int(dense(ends).sum()) < 0.35 * len(ends) ** 2
    # All completions but the first, which goes on where the prompt ends, attend to the prompt at once.
    assert [(part.start, part.stop, part.columns) for part in plan.shared] == [(575, len(ends), ((0, 512),))]


def test_a_text_without_branches_is_one_causal_block() -> None:
    (block,) = plan_attention(np.full(32768, 32768)).blocks
    assert (block.start, block.stop, block.above, block.partly, block.chain) == (0, 32768, (), (), True)


@pytest.mark.parametrize(("length", "most"), [(129, 0.76), (448, 0.63), (512, 0.63), (4096, 0.54)])
def test_a_cpu_computes_little_more_than_the_half_of_a_chain_that_is_seen(length: int, most: float) -> None:
    """Its kernel computes the whole square of a short causal block."""
    plan = plan_attention(np.full(length, length), chain_rows=CHAIN_ROWS)
    assert all(block.chain for block in plan.blocks)
    squares = sum((block.stop - block.start) ** 2 for block in plan.blocks)
    assert (
        squares + sum((part.stop - part.start) * len(positions(part.columns)) for part in plan.shared)
        < most * length**2
    )
    assert len(plan.blocks) <= 16


def test_long_completions_take_no_mask() -> None:
    plan = plan_attention(chains(1024, 8, 4096).numpy())
    assert all(block.chain for block in plan.blocks)
    assert len(plan.blocks) == 8
    assert len(plan.shared) == 1


@pytest.mark.parametrize(
    ("prompt", "count", "length"), [(4096, 0, 0), (2048, 8, 256), (2048, 128, 16), (16, 4080, 1)]
)
def test_no_tensor_grows_faster_than_the_pack(prompt: int, count: int, length: int) -> None:
    """Forward and backward, with what is kept in between; a dense mask would have 17 million elements."""
    ends = chains(prompt, count, length)
    parts = [torch.randn(1, heads, len(ends), 8, requires_grad=True) for heads in (2, 1, 1)]
    with Largest() as seen:
        tree = TreeAttention.of(ends, CPU, torch.float32)
        out, _ = tree_attention_forward(Layer(), *parts, NO_MASK, tree=tree)
        out.sum().backward()
    assert seen.elements <= len(ends) * 2 * 8
    assert sum(mask.numel() for mask in tree.masks if mask is not None) <= 2 * block_attention.ROWS * len(
        ends
    )


@pytest.mark.parametrize(("half", "blocks"), [(False, 1), (True, 3)])
def test_chains_are_cut_where_a_cpu_computes_in_half_precision(
    half: bool, blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float32 the rounding of the parts would count."""
    model = make_model("llama").train()
    adopt_tree_attention(model)
    (pack,) = pack_sequences(
        [TrainingSequence("a", (5, *range(4, 104)), tuple(range(4, 204)), (0.0,) * 200)], 10**6
    )
    made, plan = [], scoring.TreeAttention.of
    monkeypatch.setattr(
        scoring.TreeAttention, "of", lambda *given, **named: made.append(plan(*given, **named)) or made[-1]
    )
    with torch.autocast("cpu", torch.bfloat16, enabled=half):
        score_pack(model, pack, 1.0, 64)
    assert [len(tree.plan.blocks) for tree in made] == [blocks]


def test_a_model_of_4096_tokens_makes_no_tensor_of_their_square() -> None:
    model = make_model("llama", max_position_embeddings=8192).train()
    adopt_tree_attention(model)
    text = (*range(4, 384), *range(4, 384), *range(4, 384))
    sequences = [TrainingSequence(f"a#{i}", text[:1024], (i, *text[:768]), (0.0,) * 769) for i in range(4, 8)]
    (pack,) = pack_sequences(sequences, 10**6)
    assert pack.input_ids.shape == (1, 4096)
    with Largest() as seen:
        score_pack(model, pack, 1.0, 512).logps.sum().backward()
    assert seen.elements < 4096**2 // 16


@draws(60)
@given(size=st.integers(1, 60), window=st.integers(1, 70), rows=st.integers(1, 9))
def test_of_a_window_every_pair_is_computed_once(size: int, window: int, rows: int) -> None:
    ends, plan = window_ends(size, window), plan_window(size, window, rows)
    assert_each_pair_once(plan, ends, rows)
    nodes = np.arange(size)
    expected = (nodes <= nodes[:, None]) & (nodes > nodes[:, None] - window)
    assert (dense(torch.from_numpy(ends))[0, 0].numpy() == expected).all()


@pytest.mark.parametrize("window", [1, 5, 6, 7, 23])
def test_rows_within_a_window_attend_as_transformers_has_it(window: int) -> None:
    model, plain = (make_model("mistral", sliding_window=window).double() for _ in range(2))
    adopt_tree_attention(model)
    ids = torch.arange(4, 76).view(3, 24)
    with small_blocks():
        losses = [of(ids, use_cache=False).logits[:, :, 7].square().sum() for of in (model, plain)]
        for loss in losses:
            loss.backward()
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-10, atol=1e-12)
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-8, atol=1e-10)


def test_rows_within_a_window_make_no_tensor_of_the_square_of_their_length() -> None:
    model = make_model("mistral", sliding_window=512, max_position_embeddings=8192).train()
    adopt_tree_attention(model)
    text = (*range(4, 384),) * 11
    (pack,) = pack_rows([TrainingSequence("a#0", text[:4096], (5,), (0.0,))], 10**6)
    with Largest() as seen:
        score_pack(model, pack, 1.0, 512).logps.sum().backward()
    assert seen.elements < 4096**2 // 16


def test_a_chunk_is_not_taken_for_a_window() -> None:
    """Both hide what is far away; transformers names the size of either the same way."""
    shape: dict[str, Any] = {"batch_size": 1, "q_length": 12, "kv_length": 12, "local_size": 4}
    chunked = window_or_mask(
        mask_function=chunked_causal_mask_function(4, torch.zeros(1, dtype=torch.int)), **shape
    )
    assert chunked is not None
    assert chunked[0, 0].sum(1).tolist() == [1, 2, 3, 4] * 3
    window = window_or_mask(mask_function=sliding_window_causal_mask_function(4), **shape)
    assert window is not None
    assert window.shape == (1, 1, 0, 4)
    padded = torch.tensor([[False] * 2 + [True] * 10])
    mask = window_or_mask(
        mask_function=sliding_window_causal_mask_function(4), attention_mask=padded, **shape
    )
    assert mask is not None
    assert mask.shape == (1, 1, 12, 12)


@pytest.mark.parametrize(
    ("added", "named"),
    [
        ({"position_bias": torch.zeros(1, 6, 40, 40)}, "a bias of its own"),
        ({"dropout": 0.1}, "dropout"),
        ({"attention_mask": torch.zeros(1, 1, 40, 40)}, "a mask of its own"),
        ({"attention_mask": None}, "a mask of its own"),
    ],
)
def test_a_layer_that_adds_to_its_attention_is_refused(added: dict[str, Any], named: str) -> None:
    tree = tree_of(torch.tensor([40] * 20 + [30] * 10 + [40] * 10))
    given_ = {"attention_mask": NO_MASK, **added}
    with pytest.raises(InputError, match=f"Layer gives its attention {named}, which packed sequences cannot"):
        tree_attention_forward(Layer(), *drawn(40)[:3], tree=tree, **given_)


def test_a_layer_that_ignores_the_tree_fails() -> None:
    """It is not left to attend to everything."""
    query, key, _, _ = drawn(40)
    with pytest.raises(RuntimeError, match="size"):
        torch.nn.functional.scaled_dot_product_attention(query[:, :2], key, key, attn_mask=NO_MASK)


def test_a_model_that_was_given_no_such_attention_is_named() -> None:
    (pack,) = pack_sequences([TrainingSequence("a#0", (5, 6), (7, 8), (0.0, 0.0))], 10)
    with pytest.raises(LockstepError, match="attention is 'sdpa', which takes no tree"):
        score_pack(make_model("llama"), pack, 1.0, 64)


def test_a_model_computes_the_same_as_with_the_dense_mask() -> None:
    model = make_model("qwen2").double()
    sequences = [
        TrainingSequence(f"a#{i}", tuple(range(4, 24)), (30 + i, 31, 32 + i, 33), (0.0,) * 4)
        for i in range(5)
    ]
    (pack,) = pack_sequences(sequences, 100)
    assert pack.ends is not None
    inputs = {"input_ids": pack.input_ids, "position_ids": pack.position_ids, "use_cache": False}
    with torch.no_grad():
        expected = model.base_model(**inputs, attention_mask=dense(pack.ends)).last_hidden_state
        adopt_tree_attention(model)
        assert model.config._attn_implementation == TREE
        without = model.base_model(**inputs, attention_mask=dense(pack.ends)).last_hidden_state
        cut = model.base_model(**inputs, attention_mask=NO_MASK, tree=tree_of(pack.ends)).last_hidden_state
    assert torch.equal(without, expected)
    torch.testing.assert_close(cut, expected, rtol=1e-10, atol=1e-12)


def test_an_adopted_model_generates_as_before() -> None:
    model = make_model("llama")
    prompt = torch.tensor([[5, 6, 7], [8, 9, 10]])
    before = model.generate(prompt, max_new_tokens=6, do_sample=False, pad_token_id=0)
    adopt_tree_attention(model)
    assert torch.equal(model.generate(prompt, max_new_tokens=6, do_sample=False, pad_token_id=0), before)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gpu_computes_what_the_dense_mask_gives(dtype: torch.dtype) -> None:
    ends = torch.cat([chains(300, 12, 40), 780 + chains(200, 2, 150)])
    parts = [part.to(GPU) for part in drawn(len(ends), torch.float32)]
    expected = with_gradients(lambda *p: tree_attention_forward(*p, dense(ends).to(GPU)), *parts)
    tree = TreeAttention.of(ends, GPU, dtype)
    halved = [part.to(dtype) for part in parts]
    found = with_gradients(lambda *p: tree_attention_forward(*p, no_mask(GPU), tree=tree), *halved)
    for one, other in zip(found, expected, strict=True):
        assert float((one.float() - other).norm() / other.norm()) < {torch.float32: 3e-3}.get(dtype, 2e-2)
