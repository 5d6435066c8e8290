"""Log-probs and entropies of sampled tokens from hidden states: of the whole distribution, or among kept ids.

Whole rows of logits exist for one chunk of rows at a time. Softmax, selection of the tokens and entropy are one
operation with a custom backward, which needs only the chunk's probabilities. The backward of the last chunk runs first,
so the last chunk keeps its probabilities. The other chunks compute them again.

Kept ids are those that top-k, top-p or min-p left for each token (`KeptIds`). The forward and the backward compute only
the rows of the output head that a few neighbouring tokens need. The logits of the kept ids are one flat array, set
after set.

Sums over each token's distribution, with which the draws proof judges the token, are taken while its probabilities are
in memory. They are never part of a gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils.checkpoint import checkpoint

from lockstep.devices import sent
from lockstep.errors import ProofError
from lockstep.learn.filters import Edits, RowRules, is_banned
from lockstep.learn.id_classes import TokenClasses
from lockstep.models.arithmetic import autocast_dtype
from lockstep.tokens.arrays import Ids, KeptIds

# Number of tokens whose rows stay in a core's cache, and number whose rows a GPU copies at a time.
_TOKENS_AT_ONCE, _TOKENS_AT_ONCE_ON_GPU = 8, 64
# From this vocabulary on, a CPU takes one token at a time: inner products without a copy, in a third of the time.
LONG_ROW = 4096


class DrawSums:
    """Sums over the sampling distributions of N tokens. Each chunk fills in its own tokens, once.

    Args:
        wanted: (N,) bool on the host, the tokens whose sums are needed. Those of the others may stay NaN.
        classes: of the wanted tokens, which are filled in too; None: they are not needed.

    Attributes:
        variances: (N,) variance of log p under the token's own distribution p, in nats².
        below: (N,) mass of the ids that are less likely than the token.
        upto: (N,) mass of the ids that are at most as likely as the token, the token included.
    """

    def __init__(
        self,
        wanted: torch.Tensor,
        device: torch.device | str = "cpu",
        classes: TokenClasses | None = None,
    ) -> None:
        self.variances, self.below, self.upto = torch.full(
            (3, len(wanted)), torch.nan, device=device
        ).unbind()
        self.classes = classes
        self._wanted = wanted
        # The number of each wanted token among them.
        self._numbers = wanted.cumsum(0) - 1
        self._known: set[int] = set()

    @torch.no_grad()
    def of_rows(
        self,
        start: int,
        places: torch.Tensor,
        rows: torch.Tensor,
        targets: torch.Tensor,
        probabilities: torch.Tensor,
        scaled: torch.Tensor,
        means: torch.Tensor,
    ) -> None:
        """Fill in the tokens of one chunk. A second call for a chunk, when its forward is computed again, does nothing.

        Args:
            start: names the chunk.
            places: (n,) the chunk's tokens among the N tokens, on the host.
            rows: (n,) row of each of these tokens.
            targets: (n,) ids of these tokens.
            probabilities: (R, V) distribution of each row.
            scaled: (R, V) its logits.
            means: (R,) Σ probabilities × scaled.
        """
        if start in self._known:
            return
        self._known.add(start)
        wanted = self._wanted[places].nonzero()[:, 0]
        numbers = sent(self._numbers[places[wanted]], rows.device)
        places, wanted = sent(places[wanted], rows.device), sent(wanted, rows.device)
        rows, targets = rows[wanted], targets[wanted]
        own = probabilities[rows, targets]
        is_cpu = probabilities.device.type == "cpu"
        if is_cpu and probabilities.shape[-1] >= LONG_ROW:
            self._one_by_one(places, rows, own, probabilities, scaled, means)
            if self.classes is not None:
                for few in torch.arange(len(rows)).split(_TOKENS_AT_ONCE):
                    self.classes.fill(numbers[few], probabilities[rows[few]])
            return
        step = _TOKENS_AT_ONCE if is_cpu else _TOKENS_AT_ONCE_ON_GPU
        for first in range(0, len(rows), step):
            part = slice(first, first + step)
            here, where = rows[part], places[part]
            p, z = probabilities[here], scaled[here]
            if self.classes is not None:
                self.classes.fill(numbers[part], p)
            mask = torch.empty_like(p)
            self.below[where] = torch.lt(p, own[part, None], out=mask).mul_(p).sum(-1).to(self.below)
            self.upto[where] = torch.le(p, own[part, None], out=mask).mul_(p).sum(-1).to(self.below)
            z -= means[here, None]
            # Not p × z²: a banned id has p = 0, and the square of its logit would be infinite.
            self.variances[where] = torch.mul(p, z, out=mask).mul_(z).sum(-1).to(self.below)

    def _one_by_one(
        self,
        places: torch.Tensor,
        rows: torch.Tensor,
        own: torch.Tensor,
        probabilities: torch.Tensor,
        scaled: torch.Tensor,
        means: torch.Tensor,
    ) -> None:
        mask, z = torch.empty_like(probabilities[0]), torch.empty_like(probabilities[0])
        found = []
        for token, row in enumerate(rows.tolist()):
            p = probabilities[row]
            found.append(torch.dot(torch.lt(p, own[token], out=mask), p))
            found.append(torch.dot(torch.le(p, own[token], out=mask), p))
            torch.sub(scaled[row], means[row], out=z)
            found.append(torch.dot(torch.mul(p, z, out=mask), z))
        if found:
            sums = torch.stack(found).view(-1, 3).to(self.below)
            self.below[places], self.upto[places], self.variances[places] = sums.unbind(1)

    @torch.no_grad()
    def of_sets(
        self,
        kept: KeptSets,
        probabilities: torch.Tensor,
        scaled: torch.Tensor,
        means: torch.Tensor,
    ) -> None:
        """Fill in all N tokens, each with a set of ids of its own. The sets are one flat array, set after set.

        Args:
            probabilities, scaled: (M,) distribution and logits of the sets.
            means: (N,) Σ probabilities × scaled of each set.
        """
        tokens, sizes = kept.tokens, kept.sizes
        limits = probabilities[kept.targets][tokens]
        for found, values in (
            (self.below, probabilities * (probabilities < limits)),
            (self.upto, probabilities * (probabilities <= limits)),
            (self.variances, probabilities * (scaled - means[tokens]) * (scaled - means[tokens])),
        ):
            found.copy_(torch.segment_reduce(values, "sum", lengths=sizes, unsafe=True))
        if self.classes is not None:
            self._classes_of_sets(self.classes, kept, probabilities)

    def _classes_of_sets(self, classes: TokenClasses, kept: KeptSets, probabilities: torch.Tensor) -> None:
        """Fill in the classes from whole rows, a few at a time, in which ids outside of a set have no mass."""
        wanted, device = self._wanted.nonzero()[:, 0].numpy(), probabilities.device
        ends, sizes = kept.host.ends, kept.host.sizes
        for first in range(0, len(wanted), _TOKENS_AT_ONCE_ON_GPU):
            own = wanted[first : first + _TOKENS_AT_ONCE_ON_GPU]
            places = np.concatenate([np.arange(ends[i] - sizes[i], ends[i]) for i in own])
            here = sent(torch.from_numpy(places), device)
            rows = sent(torch.from_numpy(np.repeat(np.arange(len(own)), sizes[own])), device)
            p = probabilities.new_zeros(len(own), classes.vocabulary)
            p[rows, kept.ids[here]] = probabilities[here]
            classes.fill(torch.arange(first, first + len(own), device=device), p)


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
        (N,) float32 natural-log probabilities, −inf for a banned token, and (R,) float32 entropies in nats (float64
        from float64 logits).
    """
    found, entropies, places = [], [], []
    there = sent(rows, hidden.device)
    for start in range(0, len(hidden), chunk_size):
        of_chunk = ((rows >= start) & (rows < start + chunk_size)).nonzero()[:, 0]
        inside = sent(of_chunk, hidden.device)
        end = min(start + chunk_size, len(hidden))
        edits = None if rules is None else partial(rules.edits, start, end, hidden.device)
        score = partial(
            _score_chunk, head, temperature=temperature, entropy_gradient=entropy_gradient, edits=edits
        )
        if draws is not None:
            score = partial(
                score, note=partial(draws.of_rows, start, of_chunk, there[inside] - start, targets[inside])
            )
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

    With one copy for all chunks, their gradients would be summed in half precision instead of the dtype of the weights.
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
    """(R,) inner products of the rows of two (R, V) matrices. PyTorch's own method takes six times as long."""
    if one.device.type != "cpu":
        return torch.linalg.vecdot(one, other)
    found, scratch = one.new_empty(len(one)), torch.empty_like(one[:_ROWS])
    for start in range(0, len(one), _ROWS):
        rows = slice(start, min(start + _ROWS, len(one)))
        product = torch.mul(one[rows], other[rows], out=scratch[: rows.stop - start])
        torch.sum(product, -1, out=found[rows])
    return found


# Tokens whose kept ids are computed in one product. More tokens share more ids, and compute more logits that nobody
# needs. A GPU computes these faster than it starts a product.
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
        """Sets on a device, from an engine's answers; a ProofError if one of the (N,) sampled ids is not in its set."""
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
    head: torch.nn.Module,
    product: Head,
    hidden: torch.Tensor,
    kept: KeptSets,
    *,
    chunk_size: int,
    fp32_head: bool,
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


def _of_whole_logits(
    product: Head, hidden: torch.Tensor, rows: torch.Tensor, ids: torch.Tensor
) -> torch.Tensor:
    with own_cast(hidden.device.type):
        logits = product(hidden)
    chosen = logits[rows, ids]
    return chosen.to(torch.promote_types(chosen.dtype, torch.float32))


@dataclass(frozen=True, slots=True)
class _NeededRows:
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


def _needed_rows(kept: KeptSets, vocabulary: int) -> Iterator[_NeededRows]:
    device = kept.ids.device
    for tokens, ids in kept.chunks(_TOKENS if device.type == "cpu" else _TOKENS_ON_GPU):
        rows = kept.tokens[ids] - tokens.start
        needed, columns = np.unique(kept.host.ids[ids], return_inverse=True)
        if len(needed) > _MOST * vocabulary:
            yield _NeededRows(tokens, ids, None, rows, kept.ids[ids])
        else:
            here, columns_here = (
                sent(torch.from_numpy(found.astype(np.int64)), device) for found in (needed, columns)
            )
            yield _NeededRows(tokens, ids, here, rows, columns_here)


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
            for part in _needed_rows(kept, len(weight)):
                own_bias = None if bias is None else part.weight(bias, dtype)
                logits = torch.nn.functional.linear(
                    hidden[part.tokens].to(dtype), part.weight(weight, dtype), own_bias
                )
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
        for part in _needed_rows(ctx.kept, len(weight)):
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

    The backward is that of `_ChosenLogps`, with sets in place of rows.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, kept: KeptSets, temperature: float, draws: DrawSums | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        scaled = logits / temperature
        largest = scaled.new_full((len(kept.sizes),), -torch.inf).scatter_reduce_(
            0, kept.tokens, scaled, "amax"
        )
        powers = (scaled - largest[kept.tokens]).exp_()
        normaliser = largest + _sums(powers, kept).log_()
        probabilities = (scaled - normaliser[kept.tokens]).exp_()
        means = _sums(probabilities * scaled, kept)
        entropy = normaliser - means
        if draws is not None:
            draws.of_sets(kept, probabilities, scaled, means)
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
