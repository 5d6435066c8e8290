"""Computes log-probs and entropies among kept ids: the ids that top-k, top-p or min-p left for each token.

It serves completions for which the engine reported `KeptIds`. The forward computes only the rows of the output head
that a few neighbouring tokens need, and so does the backward. The logits of the kept ids are one flat array, set after
set. A (tokens × vocabulary) matrix is never in memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils.checkpoint import checkpoint

from lockstep.errors import ProofError
from lockstep.models.autocast import autocast_dtype
from lockstep.to_device import sent
from lockstep.tokens.arrays import Ids
from lockstep.tokens.kept_ids import KeptIds
from lockstep.training.forward.draw_sums import DrawSums
from lockstep.training.forward.token_logps import Head, own_cast

# Tokens whose kept ids are computed in one product. More tokens share more ids, and compute more logits that nobody needs. A GPU
# computes these faster than it starts a product.
_TOKENS, _TOKENS_ON_GPU = 32, 512
# If a product needs more than this share of the head's rows, it takes all of them without a copy.
_MOST = 0.5


@dataclass(frozen=True, slots=True)
class KeptSets:
    """The kept ids of N tokens on a device, M ids in all.

    Attributes:
        ids: (M,) int64 kept ids, set after set.
        tokens: (M,) the token of each kept id.
        sizes: (N,) number of ids of each set.
        targets: (N,) place of each token's own id among the M ids.
        host: the same sets as arrays, from which products are planned.
    """

    ids: torch.Tensor
    tokens: torch.Tensor
    sizes: torch.Tensor
    targets: torch.Tensor
    host: KeptIds

    @classmethod
    def of(cls, kept: KeptIds, token_ids: Ids, device: torch.device) -> KeptSets:
        """Sets on a device, from an engine's answers.

        Args:
            token_ids: (N,) the sampled ids.

        Raises:
            ProofError: a sampled id is not in its set.
        """
        width = int(max(kept.ids.max(initial=0), token_ids.max(initial=0))) + 1
        # Tokens and the ids of a set are both ascending, and so are these keys.
        keys, wanted = kept.tokens * width + kept.ids, np.arange(len(token_ids)) * width + token_ids
        places = np.minimum(np.searchsorted(keys, wanted), max(len(keys) - 1, 0))
        found = keys[places] == wanted if len(keys) else np.zeros(len(wanted), dtype=bool)
        if len(kept) != len(token_ids) or not found.all():
            first = int(found.argmin()) if len(kept) == len(token_ids) else min(len(kept), len(token_ids))
            raise ProofError(
                "kept_ids",
                f"token {first} of {len(token_ids)} is not among the ids that the engine kept for it",
                "the kept ids belong to another token or request, or were cut",
                "report this with the engine and its version; a run without top_k, top_p and min_p needs no kept ids",
            )
        arrays = kept.ids.astype(np.int64), kept.tokens, kept.sizes, places
        ids, tokens, sizes, targets = (sent(torch.from_numpy(values), device) for values in arrays)
        return cls(ids, tokens, sizes, targets, kept)

    def chunks(self, size: int) -> Iterator[tuple[slice, slice]]:
        """Yield `size` tokens at a time, and their ids, as slices."""
        for start in range(0, len(self.host), size):
            end = min(start + size, len(self.host))
            first = int(self.host.ends[start - 1]) if start else 0
            yield slice(start, end), slice(first, int(self.host.ends[end - 1]))


def kept_logits(
    head: torch.nn.Module, product: Head, hidden: torch.Tensor, kept: KeptSets, *, chunk_size: int, fp32_head: bool
) -> torch.Tensor:
    """(M,) logits of the kept ids, in float32 or wider, with gradient.

    Args:
        head: the output head. If it is a plain linear layer, only the rows that are needed are computed.
        product: maps (n, width) hidden states to (n, V) logits, for every other head.
        hidden: (N, width) hidden state of each token.
        chunk_size: rows of whole logits in memory at a time, for every other head.
        fp32_head: whether the head computes in float32, outside autocast.
    """
    if _is_plain(head):
        return _KeptProduct.apply(hidden, head.weight, head.bias, kept, _product_dtype(head, fp32_head))
    found = []
    for tokens, ids in kept.chunks(chunk_size):
        chunk = hidden[tokens], kept.tokens[ids] - tokens.start, kept.ids[ids]
        whole = partial(_of_whole_logits, product)
        if torch.is_grad_enabled() and tokens.stop < len(hidden):
            found.append(checkpoint(whole, *chunk, use_reentrant=False, preserve_rng_state=False))
        else:
            found.append(whole(*chunk))
    return torch.cat(found)


def kept_logps(
    logits: torch.Tensor,
    kept: KeptSets,
    temperature: float,
    *,
    entropy_gradient: bool,
    draws: DrawSums | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(N,) log-probs of the sampled ids and (N,) entropies in nats, both among the kept ids.

    Args:
        logits: (M,) logits of the kept ids.
        temperature: divides the logits.
        entropy_gradient: whether entropies are part of the loss. If not, they have no gradient.
        draws: sums over the sets, which are filled in; None: they are not computed.
    """
    logps, entropies = _KeptLogps.apply(logits, kept, temperature, draws)
    return logps, entropies if entropy_gradient else entropies.detach()


def _is_plain(head: torch.nn.Module) -> bool:
    """Whether a head is only a product with its own weight: it has no adapter, no quantisation and no hook."""
    hooks = head._forward_hooks or head._forward_pre_hooks or "forward" in vars(head)
    return type(head) is torch.nn.Linear and type(head.weight) is torch.nn.Parameter and not hooks


def _product_dtype(head: torch.nn.Module, fp32_head: bool) -> torch.dtype:
    """The dtype in which a plain head would compute here."""
    weight: torch.Tensor = head.weight  # type: ignore[assignment]
    device = weight.device.type
    if fp32_head:
        return torch.float32
    return autocast_dtype(device, weight.dtype)


def _of_whole_logits(product: Head, hidden: torch.Tensor, rows: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    with own_cast(hidden.device.type):
        logits = product(hidden)
    chosen = logits[rows, ids]
    return chosen.to(torch.promote_types(chosen.dtype, torch.float32))


@dataclass(frozen=True, slots=True)
class _Part:
    """A few tokens, and the rows of the head that they need.

    Attributes:
        tokens, ids: the slices of the N tokens and of the M kept ids.
        needed: (U,) ids whose logits are computed; None: all ids of the vocabulary.
        rows, columns: place of each kept id in the (tokens, U) matrix of logits.
    """

    tokens: slice
    ids: slice
    needed: torch.Tensor | None
    rows: torch.Tensor
    columns: torch.Tensor

    def weight(self, whole: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The needed rows of the head's weight or bias."""
        return (whole if self.needed is None else whole[self.needed]).to(dtype)

    def add(self, total: torch.Tensor, part: torch.Tensor) -> None:
        """Add a gradient of the needed rows to that of all rows."""
        if self.needed is None:
            total += part
        else:
            # Each row occurs once. `index_add_` would be slower.
            total[self.needed] += part.to(total.dtype)


def _parts(kept: KeptSets, vocabulary: int) -> Iterator[_Part]:
    device = kept.ids.device
    for tokens, ids in kept.chunks(_TOKENS if device.type == "cpu" else _TOKENS_ON_GPU):
        rows = kept.tokens[ids] - tokens.start
        needed, columns = np.unique(kept.host.ids[ids], return_inverse=True)
        if len(needed) > _MOST * vocabulary:
            yield _Part(tokens, ids, None, rows, kept.ids[ids])
        else:
            here, columns_here = (sent(torch.from_numpy(found.astype(np.int64)), device) for found in (needed, columns))
            yield _Part(tokens, ids, here, rows, columns_here)


class _KeptProduct(torch.autograd.Function):
    """The product of hidden states and the head's rows, at the kept ids only."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        kept: KeptSets,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        ctx.save_for_backward(hidden, weight, bias)
        ctx.kept, ctx.dtype = kept, dtype
        found = hidden.new_empty(len(kept.ids), dtype=torch.promote_types(dtype, torch.float32))
        with torch.autocast(hidden.device.type, enabled=False):
            for part in _parts(kept, len(weight)):
                own_bias = None if bias is None else part.weight(bias, dtype)
                logits = torch.nn.functional.linear(hidden[part.tokens].to(dtype), part.weight(weight, dtype), own_bias)
                found[part.ids] = logits[part.rows, part.columns].to(found.dtype)
        return found

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, of_logits: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, bias = ctx.saved_tensors
        wanted = ctx.needs_input_grad
        of_hidden = torch.empty_like(hidden) if wanted[0] else None
        of_weight = torch.zeros_like(weight) if wanted[1] else None
        of_bias = torch.zeros_like(bias) if bias is not None and wanted[2] else None
        for part in _parts(ctx.kept, len(weight)):
            states = hidden[part.tokens].to(ctx.dtype)
            needed = len(weight) if part.needed is None else len(part.needed)
            spread = states.new_zeros(len(states), needed)
            spread[part.rows, part.columns] = of_logits[part.ids].to(ctx.dtype)
            if of_hidden is not None:
                of_hidden[part.tokens] = (spread @ part.weight(weight, ctx.dtype)).to(hidden.dtype)
            if of_weight is not None:
                part.add(of_weight, spread.T @ states)
            if of_bias is not None:
                part.add(of_bias, spread.sum(0))
        return of_hidden, of_weight, of_bias, None, None


class _KeptLogps(torch.autograd.Function):
    """Log-softmax within each set, the sampled entry of each set, and the entropy of each set.

    The backward is that of `training/forward/token_logps.py`, with sets in place of rows.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, kept: KeptSets, temperature: float, draws: DrawSums | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        scaled = logits / temperature
        largest = scaled.new_full((len(kept.sizes),), -torch.inf).scatter_reduce_(0, kept.tokens, scaled, "amax")
        powers = (scaled - largest[kept.tokens]).exp_()
        normaliser = largest + _sums(powers, kept).log_()
        probabilities = (scaled - normaliser[kept.tokens]).exp_()
        means = _sums(probabilities * scaled, kept)
        entropy = normaliser - means
        if draws is not None:
            draws.of_sets(kept.tokens, kept.sizes, kept.targets, probabilities, scaled, means)
        ctx.save_for_backward(probabilities, entropy)
        ctx.kept, ctx.temperature = kept, temperature
        ctx.set_materialize_grads(False)
        return scaled[kept.targets] - normaliser, entropy

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(
        ctx: Any, of_logps: torch.Tensor | None, of_entropy: torch.Tensor | None
    ) -> tuple[torch.Tensor, None, None, None]:
        probabilities, entropy = ctx.saved_tensors
        kept, by_token = ctx.kept, torch.zeros_like(entropy)
        if of_logps is not None:
            by_token += of_logps
        if of_entropy is not None:
            by_token += of_entropy * entropy
        gradient = probabilities * -by_token[kept.tokens]
        if of_entropy is not None:
            # entr(p) is −p · log p, and 0 at 0.
            gradient += of_entropy[kept.tokens] * torch.special.entr(probabilities)
        if of_logps is not None:
            gradient[kept.targets] += of_logps
        return gradient / ctx.temperature, None, None, None


def _sums(values: torch.Tensor, kept: KeptSets) -> torch.Tensor:
    """(N,) sum of the values of each set, in a fixed order."""
    return torch.segment_reduce(values, "sum", lengths=kept.sizes, unsafe=True)
