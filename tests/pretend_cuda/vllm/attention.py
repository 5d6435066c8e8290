"""FlashAttention, its rotation and the writes to its cache, in plain PyTorch.

TRITON_ATTN's kernel has the same form here.

Caches are (blocks, tokens per block, heads, width). References: `stand_ins.py`.
"""

from __future__ import annotations

import os
import sys
import types
from itertools import pairwise
from typing import Any

import torch

_KEPT: list[torch.library.Library] = []


def patch() -> None:
    library = torch.library.Library("_C_cache_ops", "FRAGMENT")
    library.define(
        "reshape_and_cache_flash(Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, "
        "Tensor slot_mapping, str kv_cache_dtype, Tensor k_scale, Tensor v_scale) -> ()"
    )
    library.impl("reshape_and_cache_flash", write_to_cache, "CUDA")
    _KEPT.append(library)
    _give_package()
    if not os.environ.get("PRETEND_TRITON_ATTENTION"):
        # Nine tenths of the seconds of a tiny model would be these kernels', interpreted.
        import vllm.v1.attention.ops.triton_reshape_and_cache_flash as triton_cache
        import vllm.v1.attention.ops.triton_unified_attention as triton_attention

        for module, stand_in, name in (
            (triton_attention, unified_attention, "unified_attention"),
            (triton_cache, write_to_cache, "triton_reshape_and_cache_flash"),
        ):
            module.pretend_gpu_replaced = getattr(module, name)
            setattr(module, name, stand_in)


def write_to_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_cache_dtype: str,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
) -> None:
    """Put the keys and values of each token into its slot. A slot of −1 is padding."""
    if kv_cache_dtype != "auto":
        raise NotImplementedError(f"a cache of {kv_cache_dtype}")
    rows = (slot_mapping >= 0).nonzero()[:, 0]
    blocks, places = slot_mapping[rows] // key_cache.shape[1], slot_mapping[rows] % key_cache.shape[1]
    key_cache[blocks, places] = key[rows].to(key_cache.dtype)
    value_cache[blocks, places] = value[rows].to(value_cache.dtype)


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    max_seqlen_q: int | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    max_seqlen_k: int | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    q_v: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Any = None,
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: torch.Tensor | None = None,
    return_softmax_lse: bool = False,
    out: torch.Tensor | None = None,
    **_: Any,
) -> Any:
    """Attention of packed queries over packed or paged keys, sequence by sequence.

    Args:
        q: (tokens, heads, width) the queries of all sequences, one after the other; `cu_seqlens_q` holds where each
            begins.
        k, v: the cache if there is a `block_table`; otherwise packed like the queries, at `cu_seqlens_k`.
        seqused_k: (sequences,) keys of each sequence. Its queries are those of its last tokens.
        window_size: tokens that a query sees to the left and to the right; −1: all of them.
        softcap: no score is larger; 0: none is changed.
    """
    if alibi_slopes is not None or q_v is not None or dropout_p or cu_seqlens_q is None:
        raise NotImplementedError("attention with slopes, dropout or without packing")
    ends = cu_seqlens_q.tolist()
    starts = [0] if cu_seqlens_k is None else cu_seqlens_k.tolist()
    lengths = seqused_k.tolist() if seqused_k is not None else [b - a for a, b in pairwise(starts)]
    out = torch.empty_like(q) if out is None else out
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    sums = torch.zeros(q.shape[1], q.shape[0], dtype=torch.float32, device=q.device)
    for i, (begin, end) in enumerate(pairwise(ends)):
        seen = lengths[i]
        if begin == end or seen == 0:
            out[begin:end] = 0
            continue
        if block_table is None:
            keys, values = (x[starts[i] : starts[i] + seen] for x in (k, v))
        else:
            blocks = block_table[i, : -(-seen // k.shape[1])].long()
            keys, values = (x[blocks].flatten(0, 1)[:seen] for x in (k, v))
        groups = q.shape[1] // keys.shape[1]
        keys, values = (
            x.float().repeat_interleave(groups, 1, output_size=q.shape[1]) for x in (keys, values)
        )
        scores = torch.einsum("qhd,khd->hqk", q[begin:end].float(), keys) * scale
        if softcap:
            scores = softcap * (scores / softcap).tanh()
        scores = scores.masked_fill(_hidden(end - begin, seen, causal, window_size, q.device), -torch.inf)
        sums[:, begin:end] = scores.logsumexp(-1)
        out[begin:end] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values).to(out.dtype)
    return (out, sums) if return_softmax_lse else out


def _hidden(queries: int, keys: int, causal: bool, window: Any, device: torch.device) -> torch.Tensor:
    """(queries, keys) whether a query may not see a key. The queries are those of the last tokens."""
    left, right = window or (-1, -1)
    distance = torch.arange(keys - queries, keys, device=device)[:, None] - torch.arange(keys, device=device)
    hidden = torch.zeros(queries, keys, dtype=torch.bool, device=device)
    if causal:
        hidden |= distance < 0
    if left >= 0:
        hidden |= distance > left
    if right >= 0:
        hidden |= distance < -right
    return hidden


def unified_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    max_seqlen_q: int,
    seqused_k: torch.Tensor,
    max_seqlen_k: int,
    softmax_scale: float,
    causal: bool,
    window_size: Any,
    block_table: torch.Tensor,
    softcap: float,
    q_descale: Any,
    k_descale: Any,
    v_descale: Any,
    alibi_slopes: Any = None,
    sinks: Any = None,
    **_: Any,
) -> None:
    """The kernel of TRITON_ATTN, with which vLLM computes attention in float32."""
    if sinks is not None:
        raise NotImplementedError("attention with sinks")
    flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens_q=cu_seqlens_q,
        seqused_k=seqused_k,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        block_table=block_table,
        out=out,
    )


def _give_package() -> None:
    """Put the names of vLLM's package of FlashAttention in place of it.

    It is compiled, and the CPU wheel has it empty.
    """
    name = "vllm.vllm_flash_attn"
    package, interface, layers, rotary = (
        types.ModuleType(name + part) for part in ("", ".flash_attn_interface", ".layers", ".layers.rotary")
    )
    package.__path__, layers.__path__ = [], []
    names = {
        "FA2_AVAILABLE": True,
        "FA3_AVAILABLE": True,
        "flash_attn_varlen_func": flash_attn_varlen_func,
        "get_scheduler_metadata": lambda **_: None,
        "compile_flash_attn_varlen_func_from_specs": lambda *_, **__: None,
        "fa_version_unsupported_reason": lambda version: (
            None if version in (2, 3) else "not on the pretend GPU"
        ),
        "is_fa_version_supported": lambda version: version in (2, 3),
    }
    for module in (package, interface):
        vars(module).update(names)
    rotary.apply_rotary_emb = apply_rotary_emb  # type: ignore[attr-defined]
    sys.modules.update({module.__name__: module for module in (package, interface, layers, rotary)})
    package.flash_attn_interface = interface  # type: ignore[attr-defined]


def apply_rotary_emb(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool = False
) -> torch.Tensor:
    """Rotate (…, tokens, heads, width) by angles of (tokens, half the width), as models of pictures do."""
    from vllm.model_executor.layers.rotary_embedding.common import ApplyRotaryEmb

    return ApplyRotaryEmb.forward_static(x, cos, sin, not interleaved)
