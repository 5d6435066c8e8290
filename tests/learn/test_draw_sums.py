"""The sums of the draws proof are those of each token's whole distribution, however the forward is cut."""

from __future__ import annotations

from unittest.mock import patch

import numpy as np
import pytest
import torch
from draws import draws
from hypothesis import given
from hypothesis import strategies as st
from test_kept_logps import VOCABULARY as KEPT_VOCABULARY
from test_kept_logps import WIDTH as KEPT_WIDTH
from test_kept_logps import made_head, made_sets

from lockstep.learn import token_logps as draw_sums
from lockstep.learn.token_logps import DrawSums, kept_logits, kept_logps, token_logps

WIDTH, VOCABULARY = 5, 11


def plain(p: torch.Tensor, token: int) -> list[float]:
    """Variance of log p, mass of less likely ids, mass of ids at most as likely: by their definitions, id by id."""
    own, possible = float(p[token]), [float(value) for value in p if value > 0]
    mean = sum(q * np.log(q) for q in possible)
    variance = sum(q * (np.log(q) - mean) ** 2 for q in possible)
    return [variance, sum(q for q in possible if q < own), sum(q for q in possible if q <= own)]


def check(
    sums: DrawSums, distributions: torch.Tensor, targets: torch.Tensor, wanted: torch.Tensor | None = None
) -> None:
    """Compare the sums of the wanted tokens; None: of all. The sums of the others are NaN."""
    expected = [plain(p, int(token)) for p, token in zip(distributions, targets, strict=True)]
    found = torch.stack([sums.variances, sums.below, sums.upto], 1)
    if wanted is not None:
        assert found[~wanted].isnan().all()
        expected, found = [own for own, due in zip(expected, wanted, strict=True) if due], found[wanted]
    torch.testing.assert_close(found, torch.tensor(expected, dtype=found.dtype), rtol=1e-5, atol=1e-6)


@draws(40)
@given(
    count=st.integers(1, 12),
    more=st.lists(st.integers(0, 11), max_size=8),
    chunk=st.integers(1, 14),
    temperature=st.sampled_from([1.0, 0.7, 1.3]),
    equal=st.booleans(),
    one_by_one=st.booleans(),
    some=st.booleans(),
    seed=st.integers(0, 99),
)
def test_the_sums_are_those_of_whole_logits(
    count: int,
    more: list[int],
    chunk: int,
    temperature: float,
    equal: bool,
    one_by_one: bool,
    some: bool,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    head = torch.nn.Linear(WIDTH, VOCABULARY).double()
    if equal:
        # Three ids of equal probability.
        with torch.no_grad():
            head.weight[1:3], head.bias[1:3] = head.weight[0].clone(), head.bias[0].clone()
    hidden = torch.randn(count, WIDTH, dtype=torch.float64, requires_grad=True)
    rows = torch.tensor([*range(count), *(row % count for row in more)])[torch.randperm(count + len(more))]
    targets = torch.randint(VOCABULARY, rows.shape)
    wanted = torch.rand(len(rows)) < (0.5 if some else 2.0)
    sums = DrawSums(wanted)
    with patch.object(draw_sums, "LONG_ROW", 0 if one_by_one else 99):
        logps, entropies = token_logps(
            head,
            hidden,
            rows,
            targets,
            temperature=temperature,
            chunk_size=chunk,
            entropy_gradient=True,
            draws=sums,
        )
    check(sums, (head(hidden) / temperature).softmax(-1)[rows].detach(), targets, wanted)
    before = [sums.variances.clone(), sums.below.clone(), sums.upto.clone()]
    (logps.sum() + entropies.sum()).backward()
    # The backward computes chunks again, and must leave the sums alone.
    for kept, now in zip(before, (sums.variances, sums.below, sums.upto), strict=True):
        assert torch.equal(kept.nan_to_num(9.0), now.nan_to_num(9.0))


@pytest.mark.parametrize("sizes", [[1, 4, 9], [KEPT_VOCABULARY], [3, 3, 1, 2]])
def test_the_sums_among_kept_ids_are_those_of_the_sets(sizes: list[int]) -> None:
    torch.manual_seed(0)
    head, kept = made_head("plain").double(), made_sets(sizes, seed=1)
    hidden = torch.randn(len(sizes), KEPT_WIDTH, dtype=torch.float64)
    sums = DrawSums(torch.ones(len(sizes), dtype=torch.bool))
    logits = kept_logits(head, head, hidden, kept, chunk_size=4, fp32_head=False)
    kept_logps(logits, kept, 0.7, entropy_gradient=False, draws=sums)
    outside = torch.full((len(sizes), KEPT_VOCABULARY), True)
    outside[kept.tokens, kept.ids] = False
    p = (head(hidden) / 0.7).masked_fill(outside, -torch.inf).softmax(-1).detach()
    check(sums, p, kept.ids[kept.targets])


def test_banned_ids_are_no_part_of_the_sums() -> None:
    logits = torch.tensor([[1.0, -1e30, 0.5, -1e30]])
    p, here = logits.softmax(-1), torch.zeros(1, dtype=torch.int64)
    sums = DrawSums(torch.ones(1, dtype=torch.bool))
    sums.of_rows(0, here, here, here, p, logits, (p * logits).sum(-1))
    check(sums, p, here)
