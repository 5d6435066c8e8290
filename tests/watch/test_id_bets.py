"""The bets on which ids are sampled: fair without a fault, and won where an engine prefers or avoids some ids."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from made_runs import END, IDS, Fault, Moment, honest, stats_of, tokens_until_seen

from lockstep.errors import ProofError
from lockstep.learn.id_classes import Classes, TokenClasses
from lockstep.learn.sequence import TrainingSequence
from lockstep.learn.token_logps import DrawSums
from lockstep.watch.draws import (
    BETS,
    CONTEXT,
    FALSE_ALARM,
    LIKELIHOOD,
    PARTS,
    DrawEvidence,
    DrawStats,
    TokenDraws,
)

_LIMIT = -math.log(FALSE_ALARM)
# Prompt and completion before a token, and whether each id of the completion was sampled.
BEFORE = {
    "the first token": ([1, 2, 9], [], []),
    "repeated ids": ([1, 2], [5, 6, 5, 7, 5, 6], [True] * 6),
    "after an insertion": ([1, 2], [5, 6, 8, 2, 8], [True, True, False, False, False]),
    "a late token": ([1], [i % 11 for i in range(70)], [True] * 70),
}
ROWS = {
    "a flat row": torch.linspace(0.0, 1.0, 37),
    "a certain id of a class": torch.tensor([30.0 if i == 5 else 0.1 * i for i in range(37)]),
    "a certain id of no class": torch.tensor([30.0 if i == 20 else 0.1 * i for i in range(37)]),
    # As before `min_tokens`, or in a grammar.
    "banned ends": torch.tensor([-1e30 if i in (3, 5) else 0.1 * i for i in range(37)]),
    "only an end is left": torch.tensor([1.0 if i == 3 else -1e30 for i in range(37)]),
    "rounded to bf16": torch.randn(37, generator=torch.Generator().manual_seed(2)).bfloat16().float(),
}


@pytest.mark.parametrize("before", BEFORE)
@pytest.mark.parametrize("row", ROWS)
def test_a_bet_pays_one_on_average(before: str, row: str) -> None:
    """The sum over all next ids of p × pay, which is the sum of r."""
    prompt, completion, sampled = BEFORE[before]
    logits, count = ROWS[row].repeat(37, 1), sum(sampled) + 1
    own = [
        TrainingSequence(str(i), prompt, [*completion, i], np.zeros(count), sampled=[*sampled, True])
        for i in range(37)
    ]
    classes = TokenClasses(Classes((3, 5), 4), own)
    p, every = logits.softmax(-1), torch.arange(37)
    classes.fill(torch.arange(37 * count), p.repeat_interleave(count, 0))
    sums = DrawSums(torch.ones(37, dtype=torch.bool))
    sums.of_rows(0, every, every, every, p, logits, (p * logits).sum(-1))
    found = logits.log_softmax(-1)[every, every], torch.special.entr(p).sum(-1)
    columns = torch.stack([v.double() for v in (*found, sums.variances, sums.below, sums.upto)]).numpy()
    draws = TokenDraws(*columns, classes.values(classes.masses).part(slice(count - 1, None, count)))
    possible = draws.logps > -1e6
    paid = {n: np.exp(draws.logps + BETS[n].log_ratios(draws))[possible].sum() for n in (*CONTEXT, *PARTS)}
    assert paid == pytest.approx(dict.fromkeys(paid, 1.0), abs=2e-5)
    assert max(paid.values()) < 1 + 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("runs", [24, pytest.param(1200, marks=pytest.mark.release)])
def test_clean_runs_reach_an_evidence_as_rarely_as_they_may(dtype: torch.dtype, runs: int) -> None:
    """At most one run in x ever has an evidence of x."""
    highest = []
    for run in range(runs):
        evidence, found = DrawEvidence(), [0.0]
        for turn in range(3):
            evidence.add(stats_of(honest, 5, 20, 1000 * run + turn, dtype=dtype))
            found.append(evidence.log_evidence)
        highest.append(max(found))
    over = {x: sum(h >= math.log(x) for h in highest) for x in (3, 10, 100, 10_000)}
    print(
        f"{runs} clean runs in {dtype}: {over} reached these evidences, the highest 1e{max(highest) / math.log(10):.2f}"
    )
    for x, count in over.items():
        assert count <= runs / x + 4 * math.sqrt(runs / x)
    assert max(highest) < _LIMIT


def odds(ids: torch.Tensor, factor: float) -> Fault:
    """The odds of some ids are multiplied."""
    by = math.log(factor) if factor else -1e9
    return lambda logits, moment: logits + by * ids.float()


def of(chosen: object) -> torch.Tensor:
    """(IDS,) bool: these ids."""
    found = torch.zeros(IDS, dtype=torch.bool)
    found[chosen] = True  # type: ignore[index]
    return found


_EVERY = torch.arange(IDS)
_EIGHTH = torch.rand(IDS, generator=torch.Generator().manual_seed(3)) < 1 / 8


def penalty(size: float) -> Fault:
    """A repetition penalty, as transformers and vLLM define it."""

    def applied(logits: torch.Tensor, moment: Moment) -> torch.Tensor:
        return torch.where(moment.before(), torch.where(logits > 0, logits / size, logits * size), logits)

    return applied


def no_pair_twice(logits: torch.Tensor, moment: Moment) -> torch.Tensor:
    """No two ids follow each other a second time."""
    pairs = moment.ids[:, :-1] == moment.ids[:, -1:]
    followed = torch.zeros(len(logits), IDS + 1, dtype=torch.bool)
    followed.scatter_(1, torch.where(pairs, moment.ids[:, 1:], IDS), True)
    return logits.masked_fill(followed[:, :IDS], -1e9)


# Each fault: the tokens within which it is found, and what the error says of the engine.
FAULTS: dict[str, tuple[Fault, int, str]] = {
    "never ends": (odds(of(END), 0.0), 2600, "never or hardly ever ends a completion"),
    "ends twice too often": (odds(of(END), 2.0), 4500, "too often ends a completion"),
    "ends three times too often": (odds(of(END), 3.0), 2000, "too often ends a completion"),
    "leaves out odd ids": (odds(of(_EVERY % 2 == 1), 0.0), 1200, "a part of the vocabulary"),
    "leaves out a shard": (odds(of(slice(100, 150)), 0.0), 2500, "a part of the vocabulary"),
    "leaves out a random eighth": (odds(_EIGHTH, 0.0), 1500, "a part of the vocabulary"),
    "never repeats an id": (
        lambda logits, moment: logits.masked_fill(moment.before(), -1e9),
        400,
        "never or hardly ever samples an id that the completion already has",
    ),
    "a penalty of 1.3": (penalty(1.3), 2000, "too rarely samples an id that the completion already has"),
    "never the last id again": (
        lambda logits, moment: logits.masked_fill(moment.before(1), -1e9),
        2500,
        "never or hardly ever samples the last id again",
    ),
    "no pair twice": (
        no_pair_twice,
        3000,
        "never or hardly ever samples the id that followed the last id before",
    ),
    "greedy at the first token": (
        lambda logits, moment: logits * (50.0 if moment.place == 0 else 1.0),
        2000,
        "prefers likely tokens at the first tokens",
    ),
}
_SLOWER = ("ends twice too often", "leaves out a shard", "a penalty of 1.3", "no pair twice")
_IN_BF16 = ("never ends", "leaves out odd ids", "never repeats an id", "greedy at the first token")


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        pytest.param(
            name, dtype, marks=[pytest.mark.release] * (name in _SLOWER), id=f"{name}-{str(dtype)[6:]}"
        )
        for names, dtype in ((FAULTS, torch.float32), (_IN_BF16, torch.bfloat16))
        for name in names
    ],
)
def test_a_fault_of_ids_is_found_and_told(name: str, dtype: torch.dtype) -> None:
    fault, most, says = FAULTS[name]
    tokens, evidence = tokens_until_seen(fault, most, 1, dtype=dtype)
    with pytest.raises(ProofError) as failed:
        evidence.check(0, DrawStats())
    assert tokens < most
    assert failed.value.check == "draws"
    assert says in failed.value.cause


# Faults near the smallest size that a run of 20,000 drawn tokens shows.
SMALL: dict[str, Fault] = {
    "ends, odds × 1.5": odds(of(END), 1.5),
    "ends, odds × 0.5": odds(of(END), 0.5),
    "without id % 8 = 3": odds(of(_EVERY % 8 == 3), 0.0),
    "without id % 7 = 2": odds(of(_EVERY % 7 == 2), 0.0),
    "id % 16 = 3, odds × 0.5": odds(of(_EVERY % 16 == 3), 0.5),
    "a penalty of 1.2": penalty(1.2),
    "first token at T = 0.7": lambda logits, moment: logits / (0.7 if moment.place == 0 else 1.0),
}


@pytest.mark.release
@pytest.mark.parametrize("name", SMALL)
def test_a_small_fault_is_found_within_a_run(name: str) -> None:
    tokens, evidence = tokens_until_seen(SMALL[name], 20_000, 1)
    print(f"{name}: {tokens:,} tokens, by the bet {evidence.strongest}")
    assert evidence.log_evidence > _LIMIT


@pytest.mark.parametrize("name", ["never repeats an id", "ends three times too often"])
def test_a_fault_that_begins_after_a_resume_is_found(name: str) -> None:
    """The receipt is of a version that had only the bets on likelihood."""
    clean = DrawEvidence()
    for turn in range(6):
        clean.add(stats_of(honest, 8, 32, turn))
    kept = json.loads(json.dumps(clean.data()))
    kept["held"] = {bet: held for bet, held in kept["held"].items() if bet in LIKELIHOOD}
    resumed = DrawEvidence.of(kept)
    assert resumed.log_evidence < 1.0
    fault, most, says = FAULTS[name]
    for turn in range(most // 100):
        resumed.add(stats_of(fault, 8, 32, 50 + turn))
    assert resumed.log_evidence > _LIMIT
    assert says in BETS[resumed.strongest].suspicion


def test_a_bet_that_an_older_receipt_does_not_have_begins_as_if_it_had_paid_one() -> None:
    evidence = DrawEvidence.of({"generations": 4, "held": {}})
    assert evidence.log_evidence == pytest.approx(0.0, abs=1e-9)
    assert set(evidence.held) == set(BETS)


def test_the_bets_on_likelihood_keep_half_of_the_stake() -> None:
    evidence = DrawEvidence()
    evidence.add(DrawStats(tokens=1, evidence=dict.fromkeys(LIKELIHOOD, 30.0)))
    assert evidence.log_evidence == pytest.approx(30.0 - 2 * math.log(2), abs=1e-5)


def test_a_line_of_the_receipt_stays_short() -> None:
    evidence = DrawEvidence()
    for turn in range(3):
        evidence.add(stats_of(honest, 4, 16, turn))
    assert len(json.dumps(evidence.data())) < 7000
