"""Sums over each token's sampling distribution, with which the draws proof judges the token (`watch/draws.py`).

The probabilities come one chunk of rows at a time, while they are in memory. The sums are never part of a gradient.
"""

from __future__ import annotations

import torch

from lockstep.to_device import sent

# Number of tokens whose rows stay in a core's cache, and number whose rows a GPU copies at a time.
_DRAWN_TOKENS, _DRAWN_TOKENS_ON_GPU = 8, 64
# From this vocabulary on, a CPU takes one token at a time: three inner products, without a copy of its row, in a third of the time.
LONG_ROW = 4096


class DrawSums:
    """Sums over the sampling distributions of N tokens. Each chunk fills in its own tokens, once.

    Args:
        wanted: (N,) bool on the host, the tokens whose sums are needed. Those of the others may stay NaN.
        device: the device of the probabilities.

    Attributes:
        variances: (N,) variance of log p under the token's own distribution p, in nats².
        below: (N,) mass of the ids that are less likely than the token.
        upto: (N,) mass of the ids that are at most as likely as the token, the token included.
    """

    def __init__(self, wanted: torch.Tensor, device: torch.device | str = "cpu") -> None:
        self.variances, self.below, self.upto = torch.full((3, len(wanted)), torch.nan, device=device).unbind()
        self._wanted = wanted
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
        places, wanted = sent(places[wanted], rows.device), sent(wanted, rows.device)
        rows, targets = rows[wanted], targets[wanted]
        own = probabilities[rows, targets]
        is_cpu = probabilities.device.type == "cpu"
        if is_cpu and probabilities.shape[-1] >= LONG_ROW:
            self._one_by_one(places, rows, own, probabilities, scaled, means)
            return
        step = _DRAWN_TOKENS if is_cpu else _DRAWN_TOKENS_ON_GPU
        for first in range(0, len(rows), step):
            part = slice(first, first + step)
            here, where = rows[part], places[part]
            p, z = probabilities[here], scaled[here]
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
        tokens: torch.Tensor,
        sizes: torch.Tensor,
        own: torch.Tensor,
        probabilities: torch.Tensor,
        scaled: torch.Tensor,
        means: torch.Tensor,
    ) -> None:
        """Fill in all N tokens, each with a set of ids of its own. The sets are one flat array, set after set.

        Args:
            tokens: (M,) the token of each id.
            sizes: (N,) number of ids of each set.
            own: (N,) place of each token's own id among the M ids.
            probabilities, scaled: (M,) distribution and logits of the sets.
            means: (N,) Σ probabilities × scaled of each set.
        """
        limits = probabilities[own][tokens]
        for found, values in (
            (self.below, probabilities * (probabilities < limits)),
            (self.upto, probabilities * (probabilities <= limits)),
            (self.variances, probabilities * (scaled - means[tokens]) * (scaled - means[tokens])),
        ):
            found.copy_(torch.segment_reduce(values, "sum", lengths=sizes, unsafe=True))
