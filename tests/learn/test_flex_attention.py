"""FlexAttention with trees equals dense attention with the mask.

It is checked before it is used, and refused if it is wrong.

All tests use PyTorch's own FlexAttention. Without a GPU it is not compiled: it computes plain products, and the tests
call the backward that PyTorch does not offer on a CPU, because PyTorch has no kernel for it there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from blocks import Layer, dense, tree_ends
from draws import draws
from hypothesis import given
from largest import Largest
from tiny import make_model
from torch.nn.attention import flex_attention as of_torch

from lockstep import GRPOConfig
from lockstep.errors import InputError, LockstepError, ProofError
from lockstep.learn import scoring
from lockstep.learn.attention import flex as flex_attention
from lockstep.learn.attention.flex import (
    FLEX,
    adopt_flex_attention,
    block_mask,
    flex_attention_forward,
)
from lockstep.learn.attention.tree import adopt_tree_attention, no_mask, tree_attention_forward
from lockstep.learn.pack import pack_sequences
from lockstep.learn.policy_and_reference import open_policy
from lockstep.learn.scoring import check_scorable, score_pack
from lockstep.learn.sequence import TrainingSequence

GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
CPU = torch.device("cpu")
NO_MASK = no_mask(CPU)


@pytest.fixture(autouse=True, scope="module")
def backward_on_a_cpu() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(of_torch, "_validate_device", lambda *parts: None)
        yield


def test_one_variant_too_many_is_an_error_and_never_computes_all_scores(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compiled = []

    def backend(graph: Any, _: Any) -> Any:
        compiled.append(graph)
        return graph

    # tests/conftest.py switches compilation off.
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "0")
    monkeypatch.setattr(flex_attention, "MOST_VARIANTS", 2)
    parts = [torch.randn(1, heads, 16, 8) for heads in (1, 2, 3)]
    with torch._dynamo.config.patch(disable=False):
        attend = flex_attention.never_plain(torch.compile(of_torch.flex_attention, backend=backend))
        for part in parts[:2]:
            attend(part, part, part)
        assert len(compiled) == 2
        with pytest.raises(LockstepError, match="compiles no more"):
            attend(parts[2], parts[2], parts[2])


@draws(40)
@given(ends=tree_ends(smallest=13))
def test_values_and_gradients_are_those_of_the_dense_mask(ends: torch.Tensor) -> None:
    size = len(ends)
    draw = torch.Generator().manual_seed(size)
    parts = [torch.randn(1, heads, size, 16, dtype=torch.float64, generator=draw) for heads in (6, 2, 2)]
    of = torch.randn(1, size, 6, 16, dtype=torch.float64, generator=draw)
    results = []
    for mask, tree, attend in (
        (dense(ends), None, tree_attention_forward),
        (NO_MASK, block_mask(ends, CPU), flex_attention_forward),
    ):
        own = [part.clone().requires_grad_() for part in parts]
        out, _ = attend(Layer(), *own, mask, tree=tree, scaling=0.3)
        out.backward(of)
        results.append([out.detach(), *(part.grad for part in own)])
    for expected, flex in zip(*results, strict=True):
        torch.testing.assert_close(flex, expected, rtol=1e-10, atol=1e-12)


@draws(20)
@given(ends=tree_ends(smallest=13))
def test_blocks_are_left_out_computed_whole_or_masked_as_the_dense_mask_says(ends: torch.Tensor) -> None:
    wide = torch.cat([ends + len(ends) * i for i in range(7)])
    # A beginning that all of them see, so that there are blocks without anything hidden.
    wide = torch.cat([torch.full((256,), 256 + len(wide)), 256 + wide])
    mask, found = dense(wide)[0, 0], block_mask(wide, CPU)
    assert torch.equal(found.to_dense()[0, 0].bool(), blocks_seen(mask))
    assert found.full_kv_num_blocks is not None
    hidden = torch.ones_like(mask) ^ mask
    inner = len(wide) // 128
    whole = ~blocks_seen(hidden)[:inner, :inner]
    assert torch.equal(found.full_kv_num_blocks[0, 0, :inner], whole.sum(1, dtype=torch.int32))


@pytest.mark.parametrize("edge", [127, 128, 129, 256, 257])
def test_a_text_that_ends_at_the_edge_of_a_block_is_seen_as_far_as_it_goes(edge: int) -> None:
    ends = torch.tensor([edge] * edge + [400] * (400 - edge))
    assert torch.equal(block_mask(ends, CPU).to_dense()[0, 0].bool(), blocks_seen(dense(ends)[0, 0]))


def test_no_mask_of_all_pairs_is_made() -> None:
    """PyTorch's own way to make the blocks asks for every pair at once."""
    with Largest() as seen:
        block_mask(torch.full((4096,), 4096), CPU)
    assert seen.elements <= 2 * 4096


def blocks_seen(mask: torch.Tensor, size: int = 128) -> torch.Tensor:
    count = -(-len(mask) // size)
    padded = torch.zeros(count * size, count * size, dtype=torch.bool)
    padded[: len(mask), : len(mask)] = mask
    return padded.view(count, size, count, size).any(3).any(1)


@pytest.mark.parametrize("kind", ["qwen2", "llama"])
def test_a_model_scores_and_learns_the_same_as_by_trees(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sequences = [
        TrainingSequence(f"a#{i}", tuple(range(4, 24)), (30 + i, 31, 32 + i, 33), (0.0,) * 4)
        for i in range(5)
    ]
    (pack,) = pack_sequences(sequences, 100)
    used = counted(monkeypatch)
    # Recomputation saves memory on a CPU only, and FlexAttention is never used there.
    monkeypatch.setattr(scoring, "products_kept", lambda model: nullcontext())
    results = []
    for flex in (False, True):
        model = make_model(kind).double()
        if flex:
            model.set_attn_implementation(FLEX)
            check_scorable(model)
        else:
            adopt_tree_attention(model)
        scores = score_pack(model, pack, 0.7, 64)
        scores.logps.sum().backward()
        results.append([scores.logps.detach(), *(p.grad for p in model.parameters() if p.grad is not None)])
    assert used[0] == model.config.num_hidden_layers
    for by_trees, by_flex in zip(*results, strict=True):
        torch.testing.assert_close(by_flex, by_trees, rtol=1e-10, atol=1e-12)


def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    used, real = [0], flex_attention._attend

    def attend(*args: Any) -> torch.Tensor:
        used[0] += 1
        return real(*args)

    monkeypatch.setattr(flex_attention, "_attend", attend)
    return used


def test_a_layer_that_adds_to_its_attention_is_refused() -> None:
    parts = [torch.randn(1, heads, 40, 16) for heads in (6, 2, 2)]
    tree = block_mask(torch.full((40,), 40), CPU)
    with pytest.raises(InputError, match="Layer gives its attention a mask of its own"):
        flex_attention_forward(Layer(), *parts, torch.zeros(1, 1, 40, 40), tree=tree)


def test_under_autocast_it_attends_in_autocasts_dtype() -> None:
    query, key = torch.randn(1, 6, 40, 16), torch.randn(1, 2, 40, 16)
    with torch.autocast("cpu", torch.bfloat16):
        tree = block_mask(torch.full((40,), 40), CPU)
        out, _ = flex_attention_forward(Layer(), query, key, key.bfloat16(), NO_MASK, tree=tree)
    assert out.dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_right_kernel_is_far_within_the_proofs_limit(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(flex_attention.LIMITS, dtype, flex_attention.LIMITS[dtype] / 2)
    flex_attention.prove_flex_attention((6, 2), 64, CPU, dtype)


def sees_one_more(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    """Wrong attention: the last row sees columns that it must not see."""
    out = of_torch.flex_attention(query, key, value, **kwargs)
    other = of_torch.flex_attention(query, key, value, scale=kwargs["scale"], enable_gqa=kwargs["enable_gqa"])
    return torch.cat([out[:, :, :-8], other[:, :, -8:]], 2)


class _Wrong(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: torch.Tensor) -> torch.Tensor:
        return part.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        gradient = gradient.clone()
        gradient[:, :, :4] = 0
        return gradient


def loses_a_gradient(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **kwargs: Any
) -> torch.Tensor:
    """Right values, but the first keys get no gradient."""
    return of_torch.flex_attention(query, _Wrong.apply(key), value, **kwargs)


def gives_nan(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    return of_torch.flex_attention(query, key, value, **kwargs) * torch.nan


@pytest.mark.parametrize("kernel", [sees_one_more, loses_a_gradient, gives_nan])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_kernel_that_is_wrong_in_a_few_rows_is_refused(
    kernel: Any, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flex_attention, "_kernel", lambda kind: kernel)
    with pytest.raises(ProofError, match=r"FlexAttention is .* from SDPA over a tree of 333 tokens"):
        flex_attention.prove_flex_attention((6, 2), 64, CPU, dtype)


def test_a_kernel_that_does_not_run_is_named_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: Any, **kwargs: Any) -> torch.Tensor:
        raise RuntimeError("no valid triton configs")

    monkeypatch.setattr(flex_attention, "_kernel", lambda kind: fails)
    with pytest.raises(InputError, match=r"does not run on cpu .*no valid triton configs; leave it out"):
        flex_attention.prove_flex_attention((6, 2), 64, CPU, torch.float32)


def test_on_a_cpu_it_is_refused_at_start(untied_dir: str, tmp_path: Path) -> None:
    config = GRPOConfig(
        output_dir=str(tmp_path / "run"),
        use_cpu=True,
        model_init_kwargs={"attn_implementation": "flex_attention"},
    )
    with pytest.raises(
        InputError, match=r"attn_implementation is 'flex_attention', which PyTorch cannot train with on a CPU"
    ):
        open_policy(untied_dir, None, None, config)


@GPU
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_gpu_it_is_proven_and_a_model_learns_by_it_as_by_trees(dtype: torch.dtype) -> None:
    device = torch.device("cuda")
    sequences = [
        TrainingSequence(f"a#{i}", tuple(range(4, 304)), tuple(range(i, i + 40)), (0.0,) * 40)
        for i in range(4, 20)
    ]
    (pack,) = pack_sequences(sequences, 2000)
    gradients = []
    for adopt in (adopt_tree_attention, lambda model: adopt_flex_attention(model, device, dtype)):
        model = make_model("qwen2", head_dim=64, max_position_embeddings=1024).to(device, dtype)
        adopt(model)
        score_pack(model, pack.to(device), 1.0, 256).logps.sum().backward()
        gradients.append(
            torch.cat([p.grad.float().flatten() for p in model.parameters() if p.grad is not None])
        )
    assert float((gradients[1] - gradients[0]).norm() / gradients[0].norm()) < {torch.float32: 3e-3}.get(
        dtype, 5e-2
    )
