"""A made-up engine with a made-up language, for tests of the draws proof: many completions are sampled at once.

A token's logits are those of its position, of the ids before it and of noise. Ids are as frequent as words are, an id
that was there is likelier, and a completion ends at one id in fifty tokens or so. The engine reports the right
log-probs and may sample otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from lockstep.learn.id_classes import Classes, TokenClasses
from lockstep.learn.sequence import TrainingSequence
from lockstep.learn.token_logps import DrawSums
from lockstep.watch.draws import DrawEvidence, DrawStats, TokenDraws, measure_draws

IDS, END, PROMPT = 400, 7, 6


@dataclass(frozen=True)
class Moment:
    """What an engine may look at when it samples one token of B completions.

    Attributes:
        ids: (B, t) prompt and completion so far.
        place: number of sampled ids so far.
    """

    ids: torch.Tensor
    place: int

    def before(self, count: int | None = None) -> torch.Tensor:
        """(B, IDS) whether an id is among the sampled ids, or among the last few ids."""
        known = self.ids[:, PROMPT:] if count is None else self.ids[:, -count:]
        found = torch.zeros(len(known), IDS, dtype=torch.bool)
        return found.scatter_(1, known, torch.ones_like(known, dtype=torch.bool))


# Gives the (B, IDS) logits from which a faulty engine samples.
Fault = Callable[[torch.Tensor, Moment], torch.Tensor]


def honest(logits: torch.Tensor, moment: Moment) -> torch.Tensor:
    return logits


class Language:
    """The model: the logits of the next token."""

    def __init__(self) -> None:
        draw = torch.Generator().manual_seed(11)
        # Frequent ids are anywhere in the vocabulary.
        self._frequent = -torch.arange(1.0, IDS + 1)[torch.randperm(IDS, generator=draw)].log()
        self._after = torch.randn(IDS, IDS, generator=draw)

    def logits(self, moment: Moment) -> torch.Tensor:
        found = 1.2 * self._frequent + self._after[moment.ids[:, -1]] + 1.5 * moment.before().float()
        found[:, END] = found.logsumexp(-1) - 3.9
        return found


LANGUAGE = Language()


def generations(
    fault: Fault, completions: int, length: int, seed: int, *, dtype: torch.dtype = torch.float32
) -> tuple[list[TrainingSequence], TokenDraws, torch.Tensor]:
    """Sampled completions, what the trainer says of their tokens, and the (N,) reported log-probs.

    Args:
        dtype: to which both sides round their logits, each after noise of its own.
    """
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(IDS, (completions, PROMPT), generator=draw)
    going = torch.ones(completions, dtype=torch.bool)
    reported, logits, lengths = [], [], torch.zeros(completions, dtype=torch.long)
    for place in range(length):
        moment = Moment(ids, place)
        true = LANGUAGE.logits(moment)

        def of_a_side(true: torch.Tensor = true) -> torch.Tensor:
            noise = 0.0 if dtype == torch.float32 else 0.01 * torch.randn(true.shape, generator=draw)
            return (true + noise).to(dtype).float()

        of_engine, of_trainer = of_a_side(), of_a_side()
        chosen = torch.multinomial(fault(of_engine.clone(), moment).softmax(-1), 1, generator=draw)
        reported.append(of_engine.log_softmax(-1).gather(1, chosen)[:, 0])
        logits.append(of_trainer)
        ids = torch.cat([ids, chosen], 1)
        lengths += going
        going = going & (chosen[:, 0] != END)
    sequences = [
        TrainingSequence(str(i), own[:PROMPT].numpy(), own[PROMPT : PROMPT + n].numpy(), np.zeros(n))
        for i, (own, n) in enumerate(zip(ids, lengths.tolist(), strict=True))
    ]
    inside = torch.arange(length) < lengths[:, None]
    rows, behaviour = torch.stack(logits, 1)[inside], torch.stack(reported, 1)[inside]
    return sequences, _trainer(sequences, rows, seed), behaviour


def _trainer(sequences: list[TrainingSequence], logits: torch.Tensor, seed: int) -> TokenDraws:
    logps, here = logits.log_softmax(-1), torch.arange(len(logits))
    p, tokens = logps.exp(), torch.from_numpy(np.concatenate([s.sampled_ids for s in sequences]))
    sums = DrawSums(
        torch.ones(len(logits), dtype=torch.bool), classes=TokenClasses(Classes((END,), seed), sequences)
    )
    sums.of_rows(0, here, here, tokens, p, logits, (p * logits).sum(-1))
    found = logps[here, tokens], torch.special.entr(p).sum(-1), sums.variances, sums.below, sums.upto
    assert sums.classes is not None
    return TokenDraws(
        *torch.stack([v.double() for v in found]).numpy(), sums.classes.values(sums.classes.masses)
    )


def stats_of(fault: Fault, completions: int, length: int, seed: int, **more: torch.dtype) -> DrawStats:
    """A generation of such an engine."""
    sequences, draws, behaviour = generations(fault, completions, length, seed, **more)
    return measure_draws(draws, behaviour, [s.length for s in sequences])


def tokens_until_seen(fault: Fault, most: int, seed: int, **more: torch.dtype) -> tuple[int, DrawEvidence]:
    """How many tokens a run has sampled when its evidence is believed, or `most`; and the evidence."""
    evidence, tokens, turn = DrawEvidence(), 0, 0
    while tokens < most and evidence.log_evidence < 13.9:
        stats = stats_of(fault, 8, 32, 1000 * seed + turn, **more)
        evidence.add(stats)
        tokens, turn = tokens + stats.tokens, turn + 1
    return tokens, evidence
