"""Computes log-probs of sampled tokens and entropies from hidden states, one chunk of rows at a time.

The (rows × vocabulary) matrix exists for one chunk only. Softmax, selection of the tokens and entropy are one
operation with a custom backward. That backward needs only the chunk's probabilities. The backward of the last chunk
runs first, so the last chunk keeps its probabilities. The other chunks compute them again.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from lockstep.to_device import sent
from lockstep.training.forward.draw_sums import DrawSums
from lockstep.training.forward.filters.id_rules import is_banned
from lockstep.training.forward.filters.row_rules import Edits, RowRules

Head = Callable[[torch.Tensor], torch.Tensor]
# Called with a chunk's (R, V) probabilities, its (R, V) scaled logits, and their (R,) means.
Note = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]
# Number of rows whose product stays in a core's cache.
_ROWS = 8


def token_logps(
    head: Head,
    hidden: torch.Tensor,
    rows: torch.Tensor,
    targets: torch.Tensor,
    *,
    temperature: float,
    chunk_size: int,
    entropy_gradient: bool,
    rules: RowRules | None = None,
    draws: DrawSums | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs and entropies under the sampling distribution.

    Args:
        head: maps (n, width) hidden states to (n, V) logits.
        hidden: (R, width) hidden states.
        rows: (N,) index of the row that predicts each token, on the host. Several tokens may share a row.
        targets: (N,) ids of the tokens.
        temperature: divides the logits.
        chunk_size: rows of logits in memory at a time. Memory grows with it; results do not depend on it.
        entropy_gradient: whether entropies are part of the loss. If not, they have no gradient.
        rules: penalties, biases and bans of each row; None: the logits are used as they are.
        draws: sums over the distributions of the N tokens, which are filled in; None: they are not computed.

    Returns:
        (N,) float32 natural-log probabilities, and (R,) float32 entropies in nats (float64 from float64 logits). The log-prob of
        a banned token is −inf.
    """
    found, entropies, places = [], [], []
    there = sent(rows, hidden.device)
    for start in range(0, len(hidden), chunk_size):
        of_chunk = ((rows >= start) & (rows < start + chunk_size)).nonzero()[:, 0]
        inside = sent(of_chunk, hidden.device)
        end = min(start + chunk_size, len(hidden))
        edits = None if rules is None else partial(rules.edits, start, end, hidden.device)
        score = partial(_score_chunk, head, temperature=temperature, entropy_gradient=entropy_gradient, edits=edits)
        if draws is not None:
            score = partial(score, note=partial(draws.of_rows, start, of_chunk, there[inside] - start, targets[inside]))
        chunk = hidden[start : start + chunk_size], there[inside] - start, targets[inside]
        if torch.is_grad_enabled() and start + chunk_size < len(hidden):
            logps, entropy = checkpoint(score, *chunk, use_reentrant=False, preserve_rng_state=False)
        else:
            logps, entropy = score(*chunk)
        found.append(logps)
        entropies.append(entropy)
        places.append(of_chunk)
    return torch.cat(found)[sent(torch.cat(places).argsort(), hidden.device)], torch.cat(entropies)


def _score_chunk(
    head: Head,
    hidden: torch.Tensor,
    rows: torch.Tensor,
    targets: torch.Tensor,
    *,
    temperature: float,
    entropy_gradient: bool,
    edits: Callable[[], Edits] | None,
    note: Note | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    with own_cast(hidden.device.type):
        logits = head(hidden)
    logps, entropy = _ChosenLogps.apply(
        logits, rows, targets, temperature, edits() if edits is not None else None, note
    )
    return logps, entropy if entropy_gradient else entropy.detach()


def own_cast(device: str) -> AbstractContextManager:
    """Under autocast: make a separate half-precision copy of the head's weights for each product with a backward.

    Otherwise autocast would use one copy for all chunks. The gradients of the chunks would then be summed in half precision
    instead of the dtype of the weights.
    """
    if not torch.is_autocast_enabled(device) or not torch.is_grad_enabled():
        return nullcontext()
    return torch.autocast(device, torch.get_autocast_dtype(device), cache_enabled=False)


class _ChosenLogps(torch.autograd.Function):
    """Log-softmax, the chosen entries, and the entropy of each row. Every row has a chosen entry.

    With p the softmax of z / T, H its entropy, g and h the gradients of a row's chosen log-probs and of its entropy:
    dz = (Σ g · onehot − p · Σ g − h · p · (log p + H)) / T.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        rows: torch.Tensor,
        targets: torch.Tensor,
        temperature: float,
        edits: Edits | None,
        note: Note | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32), copy=edits is not None)
        slopes = edits.apply_(wide) if edits is not None else None
        # Autocast would round the entropy's product to bf16.
        with torch.autocast(logits.device.type, enabled=False):
            divided = wide.div_ if edits is not None else wide.div
            scaled = wide if temperature == 1.0 else divided(temperature)
            logps = torch.log_softmax(scaled, -1)
            chosen = logps[rows, targets]
            normaliser = torch.full_like(scaled[:, 0], -torch.inf)
            normaliser.scatter_reduce_(0, rows, scaled[rows, targets] - chosen, "amax")
            # In place, because a new matrix of this size costs page faults.
            probabilities = logps.exp_()
            means = _row_products(probabilities, scaled)
            entropy = normaliser - means
            if note is not None:
                note(probabilities, scaled, means)
            if edits is not None:
                chosen.masked_fill_(is_banned(scaled[rows, targets]), -torch.inf)
        ctx.save_for_backward(probabilities, entropy, rows, targets)
        ctx.edits, ctx.slopes = edits, slopes
        ctx.temperature, ctx.dtype = temperature, logits.dtype
        # If the loss does not use the entropy, the backward gets None instead of a tensor of zeros.
        ctx.set_materialize_grads(False)
        return chosen, entropy

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(
        ctx: Any, of_chosen: torch.Tensor | None, of_entropy: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, None, None, None, None, None]:
        probabilities, entropy, rows, targets = ctx.saved_tensors
        by_row = torch.zeros_like(entropy)
        if of_chosen is not None:
            by_row.index_add_(0, rows, of_chosen)
        if of_entropy is not None:
            by_row += of_entropy * entropy
        gradient = probabilities * -by_row[:, None]
        if of_entropy is not None:
            # entr(p) is −p · log p, and 0 at 0.
            gradient += of_entropy[:, None] * torch.special.entr(probabilities)
        if of_chosen is not None:
            gradient.index_put_((rows, targets), of_chosen, accumulate=True)
        if ctx.temperature != 1.0:
            gradient /= ctx.temperature
        if ctx.edits is not None:
            gradient[ctx.edits.rows, ctx.edits.ids] *= ctx.slopes
        return gradient.to(ctx.dtype), None, None, None, None, None


def _row_products(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """(R,) inner products of the rows of two (R, V) matrices. PyTorch's own method fills a third matrix in six times the time."""
    if one.device.type != "cpu":
        return torch.linalg.vecdot(one, other)
    found, scratch = one.new_empty(len(one)), torch.empty_like(one[:_ROWS])
    for start in range(0, len(one), _ROWS):
        rows = slice(start, min(start + _ROWS, len(one)))
        product = torch.mul(one[rows], other[rows], out=scratch[: rows.stop - start])
        torch.sum(product, -1, out=found[rows])
    return found
