"""Cuts of a micro-batch into packs: within the budget, no more packs than filling in turn, and no cut is better."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import combinations, pairwise

import numpy as np
from draws import draws
from hypothesis import given
from hypothesis import strategies as st
from python_steps import steps_of_python

from lockstep.learn.pack import SortedPaths, cut_rows, cut_tree

Paths = list[tuple[int, ...]]
# Gives the size of a pack that is made of a range of units.
Size = Callable[[range], int]


def positions(units: Sequence[Paths]) -> int:
    """The size of the tree of all paths: every shared beginning counts once."""
    return len({path[: i + 1] for unit in units for path in unit for i in range(len(path))})


def cut(units: Sequence[Paths], prompts: list[int], budget: int, for_group: int = 0) -> list[range]:
    paths = SortedPaths.of([path for unit in units for path in unit])
    return cut_tree(paths, list(map(len, units)), prompts, budget, for_group)


def greedy(count: int, size: Size, budget: int) -> list[range]:
    """Fill one pack after the other, each as far as possible."""
    runs, start = [], 0
    for end in range(1, count + 1):
        if end == count or size(range(start, end + 1)) > budget:
            runs.append(range(start, end))
            start = end
    return runs


def all_cuts(count: int) -> Iterator[list[range]]:
    for number in range(count):
        for edges in combinations(range(1, count), number):
            yield [range(a, b) for a, b in pairwise([0, *edges, count])]


def assert_best(
    runs: list[range],
    count: int,
    size: Size,
    waste: Callable[[range], int],
    budget: int,
    may_be_larger: Callable[[range], bool] = lambda run: False,
) -> None:
    """Assert that every unit occurs once and in order, that packs are within the budget, and that no cut is better."""

    def allowed(cut: list[range]) -> bool:
        return all(size(run) <= budget or len(run) == 1 or may_be_larger(run) for run in cut)

    def cost(cut: list[range]) -> tuple[int, int, int]:
        return len(cut), sum(map(waste, cut)), max(map(size, cut))

    assert [i for run in runs for i in run] == list(range(count))
    assert allowed(runs)
    assert cost(runs)[0] <= cost(greedy(count, size, budget))[0]
    assert cost(runs) == min(cost(c) for c in all_cuts(count) if allowed(c))


@st.composite
def prompts_with_completions(draw: st.DrawFn) -> tuple[list[Paths], list[int]]:
    """Units of one or two paths. Prompts may share beginnings, be equal, or be the beginning of another prompt."""
    units, lengths = [], []
    while len(units) < 7 and (not units or draw(st.booleans())):
        prompt = tuple(draw(st.lists(st.integers(1, 2), min_size=1, max_size=6)))
        for _ in range(draw(st.integers(1, 4))):
            completions = draw(st.lists(st.lists(st.integers(3, 5), max_size=4), min_size=1, max_size=2))
            units.append([(*prompt, *completion) for completion in completions])
            lengths.append(len(prompt))
    return units[:9], lengths[:9]


@draws(100)
@given(prompts_with_completions(), st.integers(1, 40), st.integers(0, 30))
def test_no_cut_of_trees_is_better(drawn: tuple[list[Paths], list[int]], budget: int, more: int) -> None:
    units, prompts = drawn
    for_group = budget + more if more else 0

    def size(run: range) -> int:
        return positions([units[i] for i in run])

    def repeated(run: range) -> int:
        if run.start == 0:
            return 0
        pairs = zip(units[run.start - 1][-1], units[run.start][0], strict=False)
        same = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
        shortest = min(len(units[run.start - 1][-1]), len(units[run.start][0]))
        return min(shortest if same is None else same, prompts[run.start])

    def one_long_prompt(run: range) -> bool:
        beginnings = {units[i][0][: prompts[i]] for i in run}
        return len(beginnings) == 1 and prompts[run.start] >= budget / 10 and size(run) <= for_group

    assert_best(cut(units, prompts, budget, for_group), len(units), size, repeated, budget, one_long_prompt)


@draws(100)
@given(
    st.lists(st.lists(st.integers(1, 12), min_size=1, max_size=2), min_size=1, max_size=9), st.integers(1, 60)
)
def test_no_cut_of_rows_is_better(lengths: list[list[int]], budget: int) -> None:
    def size(run: range) -> int:
        rows = [length for i in run for length in lengths[i]]
        return len(rows) * max(rows)

    def padding(run: range) -> int:
        return size(run) - sum(length for i in run for length in lengths[i])

    assert_best(cut_rows(lengths, budget), len(lengths), size, padding, budget)


@draws(100)
@given(
    prompt=st.integers(1, 50), length=st.integers(1, 20), count=st.integers(1, 40), room=st.integers(1, 12)
)
def test_packs_of_one_prompt_are_as_equal_as_whole_completions_allow(
    prompt: int, length: int, count: int, room: int
) -> None:
    beginning = tuple(range(prompt))
    units: list[Paths] = [
        [(*beginning, *(1000 * i + j for j in range(1, length + 1)))] for i in range(1, count + 1)
    ]
    runs = cut(units, [prompt] * count, prompt + room * length)
    assert len(runs) == -(-count // room)
    assert max(map(len, runs)) == -(-count // len(runs))


def test_a_prompt_that_fits_into_a_pack_is_not_cut_apart_for_balance() -> None:
    """A cut inside the second prompt would make two packs of 25 positions, and repeat 10."""

    def group(prompt: int, completions: int) -> list[Paths]:
        return [[(*range(prompt, prompt + 10), 100 * prompt + i)] for i in range(completions)]

    units = group(0, 2) + group(20, 6) + group(40, 2)
    assert cut(units, [10] * 10, 30) == [range(2), range(2, 10)]
    assert cut(units, [10] * 10, 27) == [range(5), range(5, 10)]


def agent(prompt: int, completions: int, length: int) -> tuple[list[Paths], list[int]]:
    """A group of completions that share only their prompt."""
    beginning = tuple(range(prompt))
    units: list[Paths] = [
        [(*beginning, *range(1000 * i, 1000 * i + length))] for i in range(1, completions + 1)
    ]
    return units, [prompt] * completions


def test_a_group_takes_more_than_the_budget_if_it_would_repeat_a_long_prompt() -> None:
    assert cut(*agent(57, 8, 45), 205, 512) == [range(8)]
    assert cut(*agent(57, 8, 45), 205) == [range(2), range(2, 5), range(5, 8)]
    # A short prompt costs less than the memory of the larger pack.
    assert len(cut(*agent(20, 8, 45), 205, 512)) == 2
    # The group does not fit even so: its parts need as many packs.
    assert max(map(len, cut(*agent(57, 16, 45), 205, 512))) <= 10


def test_groups_that_fit_into_the_budget_stay_apart() -> None:
    first, second = agent(57, 3, 45), agent(57, 3, 46)
    units = [*first[0], *([(path[0] + 1, *path[1:])] for (path,) in second[0])]
    assert cut(units, [57] * 6, 205, 512) == [range(3), range(3, 6)]


def test_python_does_the_same_work_however_long_the_completions_are() -> None:
    def work(length: int) -> Callable[[], None]:
        draw = np.random.default_rng(0)
        prompts = [draw.integers(4, 1000, length // 4) for _ in range(4)]
        drawn = [
            np.concatenate([prompt, draw.integers(4, 1000, length)]) for prompt in prompts for _ in range(6)
        ]

        def packed() -> None:
            paths = SortedPaths.of(drawn)
            for run in cut_tree(paths, [1] * 24, [length // 4] * 24, 10 * length):
                paths.tree(run)

        return packed

    assert steps_of_python(work(4096)) < 1.05 * steps_of_python(work(64))


def test_nothing_is_cut_into_nothing() -> None:
    assert cut([], [], 5) == []
    assert cut_rows([], 5) == []
