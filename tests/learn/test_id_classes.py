"""The classes of ids at a token are those of their definitions, id by id, and so are their masses."""

from __future__ import annotations

from unittest.mock import patch

import numpy as np
import pytest
import torch
from test_kept_logps import VOCABULARY as KEPT_VOCABULARY
from test_kept_logps import WIDTH as KEPT_WIDTH
from test_kept_logps import made_head, made_sets

from lockstep.learn import id_classes, token_logps
from lockstep.learn.id_classes import BLOCKS, CLASSES, DRAWN, REMAINDERS, Classes, TokenClasses
from lockstep.learn.sequence import TrainingSequence
from lockstep.learn.token_logps import DrawSums, kept_logits, kept_logps

_ENDS = (3, 5)


def made_sequence(seed: int, prompt: int = 5, length: int = 14, different: int = 6) -> TrainingSequence:
    """A completion of few different ids, with insertions."""
    draw = np.random.default_rng(seed)
    sampled = draw.random(length) < 0.7
    sampled[-1] = True
    return TrainingSequence(
        "a",
        draw.integers(0, different, prompt),
        draw.integers(0, different, length),
        np.zeros(int(sampled.sum())),
        sampled=sampled,
    )


def by_definition(sequence: TrainingSequence, vocabulary: int, classes: Classes) -> list[list[set[int]]]:
    """The ids of each class at each sampled token."""
    path = [*sequence.prompt_ids.tolist(), *sequence.completion_ids.tolist()]
    assert sequence.sampled is not None
    own = [False] * len(sequence.prompt_ids) + sequence.sampled.tolist()
    width, every = -(-vocabulary // BLOCKS), range(vocabulary)
    parts = [{i for i in every if i // width == n} for n in range(BLOCKS)]
    parts += [{i for i in every if i % REMAINDERS == n} for n in range(REMAINDERS)]
    parts += [{i for i in every if i % classes.divisor % DRAWN == n} for n in range(DRAWN)]
    found = []
    for t in (t for t in range(len(path)) if own[t]):
        window = range(max(0, t - id_classes.WINDOW), t)
        again, given = {path[j] for j in window if own[j]}, {path[j] for j in window if not own[j]}
        pairs = {path[j] for j in window if j and path[j - 1] == path[t - 1]}
        found.append([set(_ENDS), again, given, {path[t - 1]}, pairs, *parts])
    return found


@pytest.mark.parametrize("vocabulary", [7, 23, 300])
@pytest.mark.parametrize("window", [4, 128])
def test_classes_and_masses_are_those_of_their_definitions(vocabulary: int, window: int) -> None:
    torch.manual_seed(0)
    classes, sequences = Classes(_ENDS, seed=vocabulary), [made_sequence(0), made_sequence(1)]
    with patch.object(id_classes, "WINDOW", window):
        found = TokenClasses(classes, sequences)
        expected = [ids for s in sequences for ids in by_definition(s, vocabulary, classes)]
    p = torch.randn(len(expected), vocabulary).softmax(-1)
    for part in torch.arange(len(expected)).split(3):
        found.fill(part, p[part])
    values = found.values(found.masses)
    tokens = [int(i) for s in sequences for i in s.sampled_ids]
    for row, (ids, token) in enumerate(zip(expected, tokens, strict=True)):
        assert values.members[row].tolist() == [token in own for own in ids]
        masses = [float(p[row, sorted(own)].double().sum()) for own in ids]
        assert values.masses[row] == pytest.approx(masses, abs=2e-7)
    assert values.places.tolist() == [i for s in sequences for i in range(s.length)]
    known = [np.concatenate([np.zeros(len(s.prompt_ids), bool), s.sampled]) for s in sequences]
    assert values.first.tolist() == [not own[t - 1] for own in known for t in np.flatnonzero(own)]


def test_an_id_without_a_logit_has_no_mass() -> None:
    """Some models have an id for pictures that their head does not compute."""
    sequence = TrainingSequence("a", [1, 9], [2, 1], [0.0, 0.0])
    found = TokenClasses(Classes(_ENDS), [sequence])
    p = torch.tensor([[0.1, 0.2, 0.3, 0.15, 0.05, 0.2]] * 2)
    found.fill(torch.arange(2), p)
    given = found.values(found.masses).masses[:, id_classes.BY_IDS.index("given")]
    assert given == pytest.approx([0.2, 0.2])


def test_masses_of_a_large_vocabulary_are_exact_to_the_slack_of_a_bet() -> None:
    torch.manual_seed(0)
    p = torch.randn(4, 151_936).mul(3).softmax(-1)
    classes = Classes(seed=1)
    assert classes.masses(p).double().numpy() == pytest.approx(classes.masses(p.double()).numpy(), abs=3e-7)


@pytest.mark.parametrize("one_by_one", [False, True])
def test_the_forward_fills_in_the_classes_of_the_wanted_tokens(one_by_one: bool) -> None:
    torch.manual_seed(0)
    sequence, vocabulary = made_sequence(2), 40
    wanted = torch.arange(3 + sequence.length) >= 3
    head = torch.nn.Linear(4, vocabulary)
    hidden = torch.randn(len(wanted), 4)
    targets = torch.cat([torch.tensor([1, 2, 3]), torch.from_numpy(sequence.sampled_ids.copy())])
    found = TokenClasses(Classes(_ENDS), [sequence])
    rows = torch.arange(len(wanted)).flip(0)
    with patch.object(token_logps, "LONG_ROW", 0 if one_by_one else 99):
        token_logps.token_logps(
            head,
            hidden,
            rows,
            targets,
            temperature=0.8,
            chunk_size=5,
            entropy_gradient=False,
            draws=DrawSums(wanted, classes=found),
        )
    alone = TokenClasses(Classes(_ENDS), [sequence])
    alone.fill(torch.arange(sequence.length), (head(hidden)[rows] / 0.8).softmax(-1)[3:].detach())
    torch.testing.assert_close(found.masses, alone.masses)
    assert found.masses.shape == (sequence.length, CLASSES)


def test_among_kept_ids_the_others_have_no_mass() -> None:
    torch.manual_seed(0)
    kept, head = made_sets([3, 9, 1, 4, 6], seed=1), made_head("plain").double()
    ids = kept.ids[kept.targets].numpy()
    sequence = TrainingSequence("a", [1, 2], ids[2:], np.zeros(3))
    hidden = torch.randn(5, KEPT_WIDTH, dtype=torch.float64)
    found = TokenClasses(Classes(_ENDS, vocabulary=KEPT_VOCABULARY), [sequence])
    logits = kept_logits(head, head, hidden, kept, chunk_size=4, fp32_head=False)
    wanted = torch.arange(5) >= 2
    kept_logps(logits, kept, 0.7, entropy_gradient=False, draws=DrawSums(wanted, classes=found))
    outside = torch.full((5, KEPT_VOCABULARY), True)
    outside[kept.tokens, kept.ids] = False
    p = (head(hidden) / 0.7).masked_fill(outside, -torch.inf).softmax(-1).detach()[2:]
    alone = TokenClasses(Classes(_ENDS), [sequence])
    alone.fill(torch.arange(3), p)
    torch.testing.assert_close(found.masses, alone.masses)
