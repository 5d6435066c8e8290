"""The draws proof: its bets are fair without a fault, and win with one."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import fields

import numpy as np
import pytest
import torch

from lockstep.errors import ProofError
from lockstep.learn.token_logps import DrawSums
from lockstep.watch.draws import (
    BETS,
    FALSE_ALARM,
    LIKELIHOOD,
    DrawEvidence,
    DrawStats,
    TokenDraws,
    measure_draws,
)

Choice = Callable[[torch.Tensor], torch.Tensor]
_LIMIT = -math.log(FALSE_ALARM)


def draws_of(logits: torch.Tensor, tokens: torch.Tensor) -> TokenDraws:
    """What the trainer's forward says of one token per row."""
    logps = logits.log_softmax(-1)
    p, rows = logps.exp(), torch.arange(len(logits))
    sums = DrawSums(torch.ones(len(logits), dtype=torch.bool))
    sums.of_rows(0, rows, rows, tokens, p, logits, (p * logits).sum(-1))
    found = logps[rows, tokens], torch.special.entr(p).sum(-1), sums.variances, sums.below, sums.upto
    return TokenDraws(*torch.stack([values.double() for values in found]).numpy())


def rows_like_text(count: int, seed: int, vocabulary: int = 500) -> torch.Tensor:
    """(count, V) logits that fall with the logarithm of the rank, some steeply, as those of language models do."""
    generator = torch.Generator().manual_seed(seed)
    slopes = 0.9 + 3 * torch.rand(count, 1, generator=generator) ** 1.5
    noise = torch.randn(count, vocabulary, generator=generator)
    return 0.7 * noise - slopes * torch.arange(1, vocabulary + 1).log()


def honest(p: torch.Tensor) -> torch.Tensor:
    return torch.multinomial(p, 1)[:, 0]


def stats_of(choose: Choice, tokens: int, seed: int, rounding: float = 0.0) -> DrawStats:
    """A generation of an engine that chooses so. The trainer's logits differ from the engine's by `rounding`."""
    torch.manual_seed(seed)
    logits = rows_like_text(tokens, seed)
    chosen = choose(logits.softmax(-1))
    behaviour = logits.log_softmax(-1)[torch.arange(tokens), chosen]
    trainers = logits + rounding * torch.randn(logits.shape)
    return measure_draws(draws_of(trainers, chosen), behaviour, [tokens // 4] * 4)


ROWS = {
    "a few ids": torch.tensor([[0.3, -1.2, 2.0]]),
    "equal ids": torch.zeros(1, 7),
    "nearly certain": torch.tensor([[40.0, 0.0, 1.0, -3.0]]),
    "groups of equal ids": torch.tensor([[3.0, 3.0, 1.0, 1.0, 1.0, -2.0]]),
    "banned ids": torch.tensor([[1.0, -1e30, 0.5, -1e30, 0.2]]),
    "like text": rows_like_text(1, 0),
    "rounded to bf16": rows_like_text(1, 1).bfloat16().float(),
}


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("bet", LIKELIHOOD)
def test_a_bet_pays_one_on_average(name: str, bet: str) -> None:
    """The sum over the whole vocabulary of p × pay, which is the sum of r."""
    vocabulary = ROWS[name].shape[1]
    draws = draws_of(ROWS[name].expand(vocabulary, -1).contiguous(), torch.arange(vocabulary))
    possible = draws.logps > -1e6
    paid = np.exp(draws.logps + BETS[bet].log_ratios(draws))[possible].sum()
    assert paid == pytest.approx(1.0, abs=2e-5)


def test_the_evidence_of_a_run_has_mean_one() -> None:
    """All runs of three generations of one token each, weighted with their probabilities."""
    logits = torch.tensor([[1.0, 0.0, -2.0], [0.0, 0.1, 0.2], [2.0, 2.0, -1.0]])
    p = logits.double().softmax(-1)
    mean = 0.0
    for run in np.ndindex(3, 3, 3):
        evidence = DrawEvidence()
        for row, token in enumerate(run):
            draws = draws_of(logits[row : row + 1], torch.tensor([token]))
            evidence.add(measure_draws(draws, torch.tensor(draws.logps), [1]))
        chance = math.prod(float(p[row, token]) for row, token in enumerate(run))
        mean += chance * math.exp(evidence.log_evidence)
    assert mean == pytest.approx(1.0, abs=1e-4)
    assert mean <= 1.0 + 1e-6


@pytest.mark.parametrize("rounding", [0.0, 0.05, 0.3])
def test_a_clean_run_raises_no_alarm_however_its_trainer_rounds(rounding: float) -> None:
    evidence = DrawEvidence()
    highest = -math.inf
    for seed in range(12):
        evidence.add(stats_of(honest, 800, seed, rounding))
        highest = max(highest, evidence.log_evidence)
    assert highest < _LIMIT / 3


def test_a_difference_between_trainer_and_engine_is_no_fault_of_the_draws() -> None:
    """The bets are compared with what the engine reported.

    Compared with the trainer's own log-probs they would win here.
    """
    torch.manual_seed(0)
    logits = rows_like_text(8000, 0)
    chosen = honest(logits.softmax(-1))
    trainers = logits / 1.06
    own = trainers.log_softmax(-1)[torch.arange(8000), chosen]
    behaviour = logits.log_softmax(-1)[torch.arange(8000), chosen]
    against_itself, against_engine = DrawEvidence(), DrawEvidence()
    against_itself.add(measure_draws(draws_of(trainers, chosen), own, [8000]))
    against_engine.add(measure_draws(draws_of(trainers, chosen), behaviour, [8000]))
    assert against_engine.log_evidence < 1 < _LIMIT < against_itself.log_evidence


def cut(keep: Callable[[torch.Tensor], torch.Tensor]) -> Choice:
    return lambda p: honest(p * keep(p))


def top_p(p: torch.Tensor) -> torch.Tensor:
    values, ids = p.sort(descending=True)
    inside = values.cumsum(-1) - values < 0.99
    return torch.zeros_like(p).scatter_(-1, ids, inside.float())


def best_of_two(p: torch.Tensor) -> torch.Tensor:
    two = torch.multinomial(p, 2, replacement=True)
    return two.gather(1, p.gather(1, two).argmax(-1, keepdim=True))[:, 0]


# Each fault, and the number of tokens within which it is found.
FAULTS: dict[str, tuple[Choice, int]] = {
    "greedy": (lambda p: p.argmax(-1), 80),
    "best of two tokens": (best_of_two, 400),
    "top-k": (cut(lambda p: p >= p.topk(20).values[:, -1:]), 800),
    "min-p": (cut(lambda p: p >= 0.02 * p.amax(-1, keepdim=True)), 800),
    "hotter": (lambda p: honest(p.log().div(1.2).softmax(-1)), 800),
    "slightly hotter": (lambda p: honest(p.log().div(1.05).softmax(-1)), 8000),
    "slightly colder": (lambda p: honest(p.log().div(0.95).softmax(-1)), 8000),
    "top-p": (cut(top_p), 8000),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_sampling_is_found(name: str) -> None:
    choose, tokens = FAULTS[name]
    evidence = DrawEvidence()
    stats = stats_of(choose, tokens, 0)
    evidence.add(stats)
    with pytest.raises(ProofError, match="draws"):
        evidence.check(0, stats)


def test_a_fault_that_begins_late_is_found() -> None:
    evidence = DrawEvidence()
    clean = [stats_of(honest, 400, seed) for seed in range(10)]
    for turn in range(300):
        evidence.add(clean[turn % 10])
    assert evidence.log_evidence < _LIMIT / 3
    for seed in range(4):
        evidence.add(stats_of(best_of_two, 400, seed))
    assert evidence.log_evidence > _LIMIT


def test_a_generation_of_which_nothing_is_drawn_changes_no_evidence_and_takes_no_stake() -> None:
    every, some = DrawEvidence(), DrawEvidence()
    for seed in range(4):
        stats = stats_of(honest, 40, seed)
        every.add(stats)
        for _ in range(7):
            some.add(DrawStats())
        some.add(stats)
        assert some.data() == every.data()
        some.add(DrawStats())
        assert some.log_evidence == every.log_evidence


def test_evidence_that_a_receipt_kept_goes_on_as_it_was() -> None:
    first = [stats_of(honest, 100, seed) for seed in range(3)]
    whole, kept = DrawEvidence(), DrawEvidence()
    for stats in first:
        whole.add(stats)
        kept.add(stats)
    resumed = DrawEvidence.of(json.loads(json.dumps(kept.data())))
    last = stats_of(honest, 100, 9)
    whole.add(last)
    resumed.add(last)
    assert resumed.log_evidence == whole.log_evidence
    assert resumed.data() == whole.data()


def test_the_parts_of_a_generation_add_up_to_the_whole() -> None:
    torch.manual_seed(3)
    logits = rows_like_text(40, 3)
    chosen = honest(logits.softmax(-1))
    behaviour = logits.log_softmax(-1)[torch.arange(40), chosen]
    draws = draws_of(logits, chosen)
    fresh = np.arange(40) % 3 > 0
    whole = measure_draws(draws, behaviour, [10, 20, 10], fresh)
    parts = DrawStats()
    for start, end in ((0, 10), (10, 40)):
        part = TokenDraws(*(getattr(draws, f.name)[start:end] for f in fields(TokenDraws)[:5]))
        lengths = [10] if start == 0 else [20, 10]
        parts = parts + measure_draws(part, behaviour[start:end], lengths, fresh[start:end])
    assert (parts.tokens, parts.fresh, parts.completions) == (whole.tokens, whole.fresh, whole.completions)
    assert (whole.tokens, whole.fresh, whole.completions) == (40, int(fresh.sum()), 3)
    for name in ("surprise", "variance", "squares"):
        assert getattr(parts, name) == pytest.approx(getattr(whole, name))
    assert parts.evidence == pytest.approx(whole.evidence)


def test_z_counts_in_standard_deviations() -> None:
    values = np.array([stats_of(honest, 200, seed).z for seed in range(40)])
    assert abs(values.mean()) < 0.6
    assert 0.6 < values.std() < 1.5
    assert stats_of(best_of_two, 400, 0).z > 5
    assert stats_of(lambda p: honest(p.log().div(1.2).softmax(-1)), 800, 0).z < -4
