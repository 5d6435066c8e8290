"""The second runner's draw of a token: the likeliest after noise, a function of seed, position and token id.

vLLM's Triton kernel, interpreted, takes most of the seconds of sampling. It is the reference (`stand_ins.py`): the
same hash to the bit, and the same noise up to the rounding of two logarithms.
"""

from __future__ import annotations

from typing import Any

import torch

_WORD = 0xFFFFFFFF


def patch() -> None:
    import vllm.v1.worker.gpu.sample.gumbel as module

    module.pretend_gpu_replaced = module.gumbel_sample
    module.gumbel_sample = gumbel_sample


def gumbel_sample(
    logits: torch.Tensor,
    expanded_idx_mapping: torch.Tensor,
    temperature: torch.Tensor,
    seed: torch.Tensor,
    pos: torch.Tensor,
    apply_temperature: bool,
    is_drafting: bool,
    logits_cache: Any = None,
    logits_cache_col: Any = None,
    use_fp64: bool = False,
    logits_cache_source: Any = None,
) -> torch.Tensor:
    """(rows,) the id that each row draws from its logits (rows, ids). A place of −1 is padding."""
    if is_drafting or use_fp64 or logits_cache is not None:
        raise NotImplementedError("noise for drafts, or in 64 bits")
    places = expanded_idx_mapping.long()
    heat = torch.where(places < 0, 0.0, temperature[places.clamp(min=0)].float())[:, None]
    scores = logits.float()
    if apply_temperature:
        scores = scores / torch.where(heat == 0, 1.0, heat)
    noise = gumbel(_uniform(seed[places.clamp(min=0)].long()[:, None], pos.long()[:, None], logits.shape[1]))
    return torch.where(heat == 0, scores, scores + noise).argmax(-1)


def _uniform(seed: torch.Tensor, position: torch.Tensor, ids: int) -> torch.Tensor:
    """(rows, ids) numbers between 0 and 1: MurmurHash3 of seed, position and id. Words of 32 bits stand in int64."""
    mixed = torch.zeros_like(seed)
    for word in (seed & _WORD, (seed >> 32) & _WORD, position & _WORD, torch.arange(ids, device=seed.device)):
        key = _turned(word * 0xCC9E2D51 & _WORD, 15) * 0x1B873593 & _WORD
        mixed = _turned(mixed ^ key, 13) * 5 + 0xE6546B64 & _WORD
    mixed = mixed ^ 16
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        mixed = (mixed ^ (mixed >> shift)) * factor & _WORD
    mixed = mixed ^ (mixed >> 16)
    return (mixed >> 16).float() * 2.0**-16 + ((mixed & 0xFFFF).float() + 0.5) * 2.0**-32


def gumbel(uniform: torch.Tensor) -> torch.Tensor:
    """−log(−log(1 − u)), with vLLM's series for a small u."""
    series = torch.full_like(uniform, 1 / 8)
    for term in range(7, 0, -1):
        series = 1 / term + uniform * series
    direct = -(1 - uniform).clamp(min=2.0**-24).log()
    return -torch.where(uniform < 0.25, uniform * series, direct).log()


def _turned(word: torch.Tensor, by: int) -> torch.Tensor:
    return ((word << by) | (word >> (32 - by))) & _WORD
