"""How tokens are given to experts: three compiled operations of the CUDA wheel, in plain PyTorch.

The products of the experts themselves are vLLM's Triton kernel, interpreted. References: `stand_ins.py`.
"""

from __future__ import annotations

import torch

_KEPT: list[torch.library.Library] = []
_OPERATIONS = {
    "topk_softmax": "(Tensor(a!) weights, Tensor(b!) ids, Tensor(c!) indices, Tensor scores, bool "
    "renormalize, Tensor? bias, "
    "Tensor? is_padding) -> ()",
    "moe_align_block_size": "(Tensor ids, int experts, int block, Tensor(a!) rows, Tensor(b!) block_experts, "
    "Tensor(c!) padded, Tensor? map, Tensor(d!)? scatter) -> ()",
    "moe_sum": "(Tensor input, Tensor(a!) output, Tensor? ids, Tensor? map) -> ()",
}


def patch() -> None:
    library = torch.library.Library("_moe_C", "FRAGMENT")
    for name, schema in _OPERATIONS.items():
        library.define(name + schema)
        library.impl(name, globals()[name], "CUDA")
    _KEPT.append(library)


def topk_softmax(
    weights: torch.Tensor,
    ids: torch.Tensor,
    indices: torch.Tensor,
    scores: torch.Tensor,
    renormalize: bool,
    bias: torch.Tensor | None,
    is_padding: torch.Tensor | None,
) -> None:
    """The most probable experts of each token and their probabilities, in descending order.

    Args:
        weights, ids: (tokens, k) results.
        scores: (tokens, experts) logits of the router.
        renormalize: whether the weights of a token are divided by their sum.
        is_padding: (tokens,) tokens that go to no expert: their ids become −1 and their weights 0.
    """
    if bias is not None:
        raise NotImplementedError("experts with a bias")
    found = scores.float().softmax(-1).topk(ids.shape[1], dim=-1)
    weights.copy_(found.values / found.values.sum(-1, keepdim=True) if renormalize else found.values)
    ids.copy_(found.indices)
    if is_padding is not None:
        weights.masked_fill_(is_padding[:, None], 0)
        ids.masked_fill_(is_padding[:, None], -1)
    tokens = torch.arange(len(ids), device=ids.device)[:, None]
    indices.copy_(torch.arange(ids.shape[1], device=ids.device) * len(ids) + tokens)


def moe_align_block_size(
    ids: torch.Tensor,
    experts: int,
    block: int,
    rows: torch.Tensor,
    block_experts: torch.Tensor,
    padded: torch.Tensor,
    map: torch.Tensor | None,
    scatter: torch.Tensor | None,
) -> None:
    """Sort the routes by expert, and fill up each expert's to whole blocks.

    The place of a padding row is the number of routes.

    Args:
        ids: (tokens, k) expert of each route.
        rows: result, (at least `padded`,) the route of each row.
        block_experts: result, (at least `padded` / `block`,) the expert of each block.
        padded: result, (1,) rows in use.
    """
    if map is not None or scatter is not None:
        raise NotImplementedError("experts on several devices")
    routes = ids.flatten()
    rows.fill_(len(routes))
    # Blocks that are not in use are not computed.
    block_experts.fill_(-1)
    start = 0
    for expert in range(experts):
        own = (routes == expert).nonzero()[:, 0]
        end = start + -(-len(own) // block) * block
        rows[start : start + len(own)] = own.to(rows.dtype)
        block_experts[start // block : end // block] = expert
        start = end
    padded.fill_(start)


def moe_sum(
    input: torch.Tensor, output: torch.Tensor, ids: torch.Tensor | None, map: torch.Tensor | None
) -> None:
    """(tokens, k, n) → (tokens, n): the sum over a token's experts, in float32."""
    if map is not None:
        raise NotImplementedError("experts on several devices")
    output.copy_(input.float().sum(1))
