"""Each stand-in of this folder beside its reference. `runs.py` runs them, and `test_vllm_runs.py` has the limits.

| stand-in | reference |
|---|---|
| FlashAttention over packed keys, a paged cache, a window, capped scores | the formula in float64 |
| the kernel of TRITON_ATTN | vLLM's Triton kernel, interpreted |
| writes to the cache | vLLM's Triton kernel, interpreted |
| rotation | the formula in float64, by complex numbers |
| rotation on three axes | vLLM's Triton kernel, interpreted |
| top-k and top-p | the definition in float64 (`by_the_book.py`) |
| the second runner's noise, and what it draws | vLLM's Triton kernel, interpreted; for the noise alone, the formula in float64 |
| products of adapters | the formula in float64 |
| fp8 quantiser | vLLM's own plain form (`QuantFP8.forward_native`) |
| product of codes; product with another dtype | the formula in float64 |
| norms, also of a view | the formula in float64 |
| embedding of one rank | the rows of both ranks together are the whole embedding's |
| experts: softmax, sorting, sum | the formula in float64, with vLLM's Triton kernel between them, interpreted |
| memory that sleeps | the runs with sleep: the bytes before are the bytes after, and NaN between |

A figure is the largest difference, divided by the largest value of the reference; or a count of rows that differ.
"""  # noqa: E501

from __future__ import annotations

from typing import Any

import torch
from by_the_book import kept_set

from lockstep.contract.sampling import Sampling

GPU = torch.device("cuda")


def drawn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator).to(dtype).to(GPU)


def apart(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """NaN if something is not finite."""
    found, wanted = found.detach().cpu().double(), wanted.detach().cpu().double()
    return float((found - wanted).abs().max() / wanted.abs().max())


def whole_numbers(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device=GPU)


# Three sequences: tokens that are new, and tokens in all. Heads of 16, two of which share their keys.
NEW, SEEN, HEADS, WIDTH, BLOCK = (5, 1, 7), (5, 37, 20), 4, 16, 16
TABLE = ((3, 0, 0), (7, 1, 5), (2, 6, 0))


def _attention() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, and keys and values in a cache whose other places hold large numbers."""
    keys, values = drawn(8, BLOCK, 2, WIDTH), drawn(8, BLOCK, 2, WIDTH, seed=1)
    for row, seen in zip(TABLE, SEEN, strict=True):
        last = row[-(-seen // BLOCK) - 1]
        keys[last, seen % BLOCK or BLOCK :] = 50.0
    return drawn(sum(NEW), HEADS, WIDTH), keys, values, torch.tensor(TABLE, dtype=torch.int32, device=GPU)


def _attended(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, window: int | None = None, cap: float = 0.0
) -> torch.Tensor:
    """The formula: query by query, key by key."""
    q, k, v = (x.cpu().double() for x in (q, k, v))
    rows, start = [], 0
    for new, seen, blocks in zip(NEW, SEEN, TABLE, strict=True):
        places = [(blocks[i // BLOCK], i % BLOCK) for i in range(seen)]
        for i in range(new):
            own = seen - new + i
            first = 0 if window is None else max(0, own - window)
            for head in range(HEADS):
                keys = torch.stack([k[b, p, head // 2] for b, p in places[first : own + 1]])
                scores = keys @ q[start + i, head] / WIDTH**0.5
                weights = (cap * (scores / cap).tanh() if cap else scores).softmax(0)
                rows.append(weights @ torch.stack([v[b, p, head // 2] for b, p in places[first : own + 1]]))
        start += new
    return torch.stack(rows).reshape(-1, HEADS, WIDTH)


def _lengths() -> dict[str, Any]:
    ends = [sum(NEW[:i]) for i in range(len(NEW) + 1)]
    return {"cu_seqlens_q": whole_numbers(*ends), "seqused_k": whole_numbers(*SEEN)}


def attention() -> dict[str, float]:
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    q, k, v, table = _attention()
    found = {}
    for name, window in (("whole", None), ("window", 6)):
        given = {"causal": True, "window_size": None if window is None else (window, 0), "block_table": table}
        out = flash_attn_varlen_func(q, k, v, **_lengths(), **given)
        found[name] = apart(out, _attended(q, k, v, window=window))
    capped = flash_attn_varlen_func(q, k, v, **_lengths(), causal=True, block_table=table, softcap=0.5)
    found["capped"] = apart(capped, _attended(q, k, v, cap=0.5))
    half = flash_attn_varlen_func(
        *(x.bfloat16() for x in (q, k, v)), **_lengths(), causal=True, block_table=table
    )
    found["bfloat16"] = apart(half, _attended(*(x.bfloat16() for x in (q, k, v))))
    # Packed keys, as in a tower of pictures: each query sees the keys of its own picture, also later ones.
    keys, values = k.flatten(0, 1)[: sum(NEW)], v.flatten(0, 1)[: sum(NEW)]
    starts = _lengths()["cu_seqlens_q"]
    out = flash_attn_varlen_func(q, keys, values, cu_seqlens_q=starts, cu_seqlens_k=starts)
    wanted, start = [], 0
    for new in NEW:
        own = [x[start : start + new].cpu().double() for x in (q, keys, values)]
        own[1:] = [x.repeat_interleave(2, 1) for x in own[1:]]
        weights = (torch.einsum("qhd,khd->hqk", *own[:2]) / WIDTH**0.5).softmax(-1)
        wanted.append(torch.einsum("hqk,khd->qhd", weights, own[2]))
        start += new
    found["packed"] = apart(out, torch.cat(wanted))
    return found


def triton_attention() -> dict[str, float]:
    """The stand-in beside the kernel that it takes the place of."""
    import vllm.v1.attention.ops.triton_unified_attention as module

    q, k, v, table = _attention()
    found = {}
    for name, window, cap in (("whole", (-1, -1), 0), ("window", (6, 0), 0), ("capped", (-1, -1), 0.5)):
        outs = []
        for function in (module.unified_attention, module.pretend_gpu_replaced):
            out = torch.empty_like(q)
            function(
                q, k, v, out, max_seqlen_q=max(NEW), max_seqlen_k=max(SEEN), softmax_scale=WIDTH**-0.5, causal=True,
                window_size=window, block_table=table, softcap=cap, q_descale=None, k_descale=None, v_descale=None,
                **_lengths(),
            )  # fmt: skip
            outs.append(out)
        found[name] = apart(*outs)
    return found


def cache() -> dict[str, float]:
    import vllm.v1.attention.ops.triton_reshape_and_cache_flash as module

    keys, values = drawn(6, 2, WIDTH), drawn(6, 2, WIDTH, seed=1)
    slots = torch.tensor([3, 17, -1, 0, 31, -1], device=GPU)
    one = torch.ones((), device=GPU)
    written = []
    for write in (torch.ops._C_cache_ops.reshape_and_cache_flash, module.pretend_gpu_replaced):
        places = [torch.zeros(2, BLOCK, 2, WIDTH, device=GPU) for _ in range(2)]
        write(keys, values, *places, slots, "auto", one, one)
        written.append(torch.stack(places).cpu())
    return {"elements": int((written[0] != written[1]).sum()), "written": int((written[1] != 0).sum())}


def rotation() -> dict[str, float]:
    from vllm.vllm_flash_attn.layers.rotary import apply_rotary_emb

    x, angles = drawn(1, 5, 2, 8), drawn(5, 4)
    turn = torch.polar(torch.ones(5, 1, 4, dtype=torch.float64), angles.cpu().double()[:, None])
    halves, pairs = x.cpu().double().chunk(2, -1), x.cpu().double().unflatten(-1, (4, 2)).unbind(-1)
    by_halves = torch.complex(*halves) * turn
    by_pairs = torch.complex(*pairs) * turn
    return {
        "halves": apart(
            apply_rotary_emb(x, angles.cos(), angles.sin()), torch.cat([by_halves.real, by_halves.imag], -1)
        ),
        "pairs": apart(
            apply_rotary_emb(x, angles.cos(), angles.sin(), True),
            torch.stack([by_pairs.real, by_pairs.imag], -1).flatten(-2),
        ),
    }


def rotation_on_axes() -> dict[str, float]:
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.rotary_embedding.mrope import MRotaryEmbedding

    with set_current_vllm_config(VllmConfig()):
        layer = MRotaryEmbedding(16, 16, 64, 1e4, True, torch.float32, mrope_section=[2, 3, 3]).to(GPU)
    positions = torch.tensor([[0, 1, 2, 5], [0, 1, 3, 9], [0, 2, 1, 30]], device=GPU)
    queries, keys = drawn(4, 32), drawn(4, 16)
    pairs = zip(
        layer.forward_cuda(positions, queries.clone(), keys.clone()),
        layer.pretend_gpu_replaced(positions, queries.clone(), keys.clone()),
        strict=True,
    )
    return dict(zip(("queries", "keys"), (apart(*pair) for pair in pairs), strict=True))


def filters() -> dict[str, float]:
    """V2 gives every batch to this function, whatever its size."""
    import vllm.v1.sample.ops.topk_topp_sampler as module

    logits = drawn(12, 384) * 2
    k = torch.tensor([5, 384, 20] * 4, device=GPU, dtype=torch.int32)
    p = torch.tensor([1.0, 0.8, 0.9] * 4, device=GPU)
    kept = module.apply_top_k_top_p_triton(logits.clone(), k, p) > -torch.inf
    wrong = 0
    for i, row in enumerate(kept.cpu()):
        sampling = Sampling(1, top_k=int(k[i]), top_p=float(p[i]))
        wrong += set(row.nonzero()[:, 0].tolist()) != kept_set(logits[i].cpu().double(), sampling)
    return {"rows": wrong, "kept": int(kept.sum())}


def noise() -> dict[str, float]:
    """Draws of requests with temperatures, of greedy ones, and of padding. Equal logits show the noise alone."""
    import vllm.v1.worker.gpu.sample.gumbel as module

    from pretend_cuda.vllm.noise import gumbel as own_noise

    places = whole_numbers(3, 0, -1, 2, 1, *[2] * 15)
    heat = torch.tensor([1.0, 0.0, 0.7, 2.5], device=GPU)
    seeds = torch.tensor([5, -3, 1 << 40, (1 << 62) + 17], device=GPU)
    positions = torch.arange(20, device=GPU) * 999_983
    uniform = torch.linspace(1e-6, 1 - 1e-6, 1001)
    found: dict[str, float] = {
        "noise": apart(own_noise(uniform.to(GPU)), -(-(-uniform.double()).log1p()).log())
    }
    found |= {"rows": 0, "drawn": 0}
    for logits in (drawn(20, 1300) * 2, torch.zeros(20, 1300, device=GPU)):
        for applies in (True, False):
            given = (logits, places, heat, seeds, positions, applies, False)
            own, wanted = module.gumbel_sample(*given), module.pretend_gpu_replaced(*given)
            found["rows"] += int((own != wanted).sum())
            found["drawn"] += len(set(own.tolist()))
    return found


def adapters() -> dict[str, float]:
    """Rows with the adapters of two slots, and rows without one."""
    import vllm.lora.punica_wrapper.punica_gpu as punica

    x = drawn(6, 32, dtype=torch.bfloat16)
    downs = [drawn(2, 1, 8, 32, dtype=torch.bfloat16, seed=i) for i in range(2)]
    ups = [drawn(2, 1, n, 8, dtype=torch.bfloat16, seed=i) for i, n in enumerate((24, 16))]
    slots = whole_numbers(1, -1, 0, 0, -1, 1)
    rest = (None,) * 4
    some = torch.tensor([False])
    low = torch.zeros(2, 6, 8, device=GPU)
    punica.lora_shrink(x, downs, low, slots, *rest, some, None, 0.5)
    base = drawn(6, 44, dtype=torch.bfloat16)
    out = base.clone()
    punica.lora_expand(low, ups, out, slots, *rest, some, None, offset_start=4, add_inputs=True)
    wanted_low, wanted = torch.zeros(2, 6, 8, dtype=torch.float64), base.cpu().double()
    for row, slot in enumerate(slots.tolist()):
        if slot < 0:
            continue
        for part, columns in ((0, slice(4, 28)), (1, slice(28, 44))):
            a, b = downs[part][slot, 0].cpu().double(), ups[part][slot, 0].cpu().double()
            wanted_low[part, row] = 0.5 * a @ x[row].cpu().double()
            wanted[row, columns] += b @ wanted_low[part, row]
    untouched = out.clone()
    punica.lora_expand(
        low, ups, untouched, slots, *rest, torch.tensor([True]), None, offset_start=4, add_inputs=True
    )
    return {
        "down": apart(low, wanted_low),
        "up": apart(out, wanted),
        "without_an_adapter": apart(untouched, out),
    }


def quantiser() -> dict[str, float]:
    import vllm._custom_ops as custom_ops
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.quantization.input_quant_fp8 import QuantFP8
    from vllm.model_executor.layers.quantization.utils.quant_utils import GroupShape

    x = drawn(9, 64, dtype=torch.bfloat16) * torch.logspace(-3, 2, 9, device=GPU)[:, None].bfloat16()
    found = {}
    for name, shape in (("rows", GroupShape.PER_TOKEN), ("whole", GroupShape.PER_TENSOR)):
        with set_current_vllm_config(VllmConfig()):
            codes, scale = QuantFP8(static=False, group_shape=shape).forward_native(x)
        own, own_scale = custom_ops.scaled_fp8_quant(x, use_per_token_if_dynamic=name == "rows")
        found[f"scale_{name}"] = apart(own_scale.flatten(), scale.flatten())
        # A code may differ where a quotient lies between two codes: the reference multiplies by 1 / scale.
        found[f"codes_{name}"] = float((own.float() != codes.float()).float().mean())
    return found


def products() -> dict[str, float]:
    a, b = drawn(5, 32), drawn(7, 32, seed=1)
    codes = [x.to(torch.float8_e4m3fn) for x in (a, b)]
    scales = drawn(5, 1).abs(), drawn(1, 7).abs()
    exact = (
        codes[0].cpu().double()
        @ codes[1].cpu().double().T
        * scales[0].cpu().double()
        * scales[1].cpu().double()
    )
    out = torch._scaled_mm(codes[0], codes[1].T, scales[0], scales[1], out_dtype=torch.bfloat16)
    halves = a.bfloat16(), b.bfloat16()
    wide = torch.mm(halves[0], halves[1].T, out_dtype=torch.float32)
    return {
        "codes": apart(out, exact),
        "wide": apart(wide, halves[0].cpu().double() @ halves[1].cpu().double().T),
    }


def norms() -> dict[str, float]:
    """Of whole rows, and of the heads of queries that stand beside keys in one matrix."""
    x, weight, both = drawn(5, 48), drawn(16), drawn(5, 48, seed=1)
    view = x[:, :32].unflatten(-1, (2, 16))

    def wanted(x: torch.Tensor) -> torch.Tensor:
        x = x.cpu().double()
        return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.cpu().double()

    out = torch.empty(5, 2, 16, device=GPU)
    torch.ops._C.rms_norm(out, view, weight, 1e-6)
    rows, residual = both.unflatten(-1, (3, 16)).clone(), x.unflatten(-1, (3, 16)).clone()
    total = rows + residual
    torch.ops._C.fused_add_rms_norm(rows, residual, weight, 1e-6)
    return {
        "view": apart(out, wanted(view)),
        "sum": apart(rows, wanted(total)),
        "residual": apart(residual, total),
    }


def embedding() -> dict[str, float]:
    """Two ranks with two words each, one added word each, and a row of padding between them."""
    import vllm._custom_ops as custom_ops

    words, added = drawn(4, 3), drawn(2, 3, seed=1)
    ids = torch.tensor([0, 1, 2, 3, 4, 5, 3, 0], device=GPU)
    parts = []
    for rank in range(2):
        own = slice(2 * rank, 2 * rank + 2)
        weight = torch.cat([words[own], torch.full((1, 3), 9.0, device=GPU), added[rank : rank + 1]])
        parts.append(
            custom_ops.vocab_parallel_embedding(ids, weight, own.start, own.stop, 1, 4 + rank, 5 + rank)
        )
    return {"rows": apart(parts[0] + parts[1], torch.cat([words, added])[ids])}


def experts() -> dict[str, float]:
    """A layer of experts as vLLM computes it on a GPU: routing, sorting, two products and an activation, sum."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.fused_moe import fused_experts
    from vllm.model_executor.layers.fused_moe.router.fused_topk_router import vllm_topk_softmax

    count, k, size, inner = 4, 2, 32, 16
    x, scores = drawn(11, size), drawn(11, count)
    up, down = drawn(count, 2 * inner, size) / 6, drawn(count, size, inner) / 4
    weights, ids = torch.empty(11, k, device=GPU), torch.empty(11, k, dtype=torch.int32, device=GPU)
    vllm_topk_softmax(weights, ids, torch.empty_like(ids), scores, True)
    probabilities = scores.cpu().double().softmax(-1)
    chosen = probabilities.topk(k)
    wanted_weights = chosen.values / chosen.values.sum(-1, keepdim=True)

    def by_the_formula(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        x, up, down = (tensor.cpu().double() for tensor in (x, up, down))
        wanted = torch.zeros(11, size, dtype=torch.float64)
        for row in range(11):
            for place in range(k):
                expert = int(chosen.indices[row, place])
                gate, value = (up[expert] @ x[row]).chunk(2)
                hidden = torch.nn.functional.silu(gate) * value
                wanted[row] += wanted_weights[row, place] * (down[expert] @ hidden)
        return wanted

    half = [tensor.bfloat16() for tensor in (x, up, down)]
    with set_current_vllm_config(VllmConfig()):
        out, out_in_half = fused_experts(x, up, down, weights, ids), fused_experts(*half, weights, ids)
    return {
        "ids": int((ids.cpu() != chosen.indices).sum()),
        "weights": apart(weights, wanted_weights),
        "outputs": apart(out, by_the_formula(x, up, down)),
        "bfloat16": apart(out_in_half, by_the_formula(*half)),
    }


STAND_INS = {
    check.__name__: check
    for check in (
        attention,
        triton_attention,
        cache,
        rotation,
        rotation_on_axes,
        filters,
        noise,
        adapters,
        quantiser,
        products,
        norms,
        embedding,
        experts,
    )
}
