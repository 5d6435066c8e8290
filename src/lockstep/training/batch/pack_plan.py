"""Where a micro-batch is cut into packs: as few as the budget allows, no prompt twice without need, and about equal in size.

Comes from: the token tree of `training/batch/pack.py`. Goes to: the same, which makes tensors of each pack. Nothing here knows what
is learned from a path. Filling one pack after the other would leave a small rest, and the largest pack, and with it a step's
memory, as large as the budget where two packs of little more than half of it do.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

# Nodes of a tree from its root on: paths with the same beginning begin with the same nodes.
Path = Sequence[int]
# Packs so far, positions that go through the model more than once, positions of the largest pack; and where the last pack begins.
_Cut = tuple[int, int, int, int]


def cut_tree(units: Sequence[Sequence[Path]], prompts: Sequence[int], budget: int) -> list[range]:
    """Runs of units, each a pack whose paths form one tree.

    Of all cuts of the units in this order the one with the fewest packs; of those, the one whose packs repeat the fewest prompt
    positions of the pack before; of those, the one whose largest pack is smallest.

    Args:
        units: paths of each, which stay in one pack.
        prompts: nodes of each unit's first path that are its prompt's.
        budget: most nodes of a pack, those that paths share counted once; a unit that is larger gets a pack of its own.
    """
    fresh = _fresh(units)
    if sum(counts[-1] for counts in fresh) <= budget:
        return [range(len(units))] if units else []

    def repeated(start: int) -> int:
        return min(_shared(units[start - 1][-1], units[start][0]), prompts[start])

    def packs(start: int) -> Iterator[tuple[int, int]]:
        waste, size = repeated(start) if start else 0, 0
        for counts in fresh[start:]:
            size += sum(count for last, count in counts.items() if last < start)
            yield size, waste

    return _best(len(units), budget, packs)


def cut_rows(lengths: Sequence[Sequence[int]], budget: int) -> list[range]:
    """Runs of units, each a pack with a row a path, padded to its longest.

    Of all cuts of the units in this order the one with the fewest packs; of those, the one with the least padding; of those, the
    one whose largest pack is smallest.

    Args:
        lengths: of the paths of each unit, which stay in one pack.
        budget: most positions of a pack, padding included; a unit that is larger gets a pack of its own.
    """

    def packs(start: int) -> Iterator[tuple[int, int]]:
        rows = longest = filled = 0
        for unit in lengths[start:]:
            rows, longest, filled = rows + len(unit), max(longest, *unit), filled + sum(unit)
            yield rows * longest, rows * longest - filled

    return _best(len(lengths), budget, packs)


def _best(count: int, budget: int, packs: Callable[[int], Iterator[tuple[int, int]]]) -> list[range]:
    """The best cut of `count` units.

    Args:
        packs: size and waste of a pack that begins at a unit, for each end in turn; sizes do not fall.
    """
    best: list[_Cut | None] = [(0, 0, 0, 0)] + [None] * count
    for start in range(count):
        so_far = best[start]
        assert so_far is not None
        for end, (size, waste) in enumerate(packs(start), start + 1):
            if size > budget and end > start + 1:
                break
            cut = (so_far[0] + 1, so_far[1] + waste, max(so_far[2], size), start)
            known = best[end]
            if known is None or cut < known:
                best[end] = cut
    runs, end = [], count
    while end:
        last = best[end]
        assert last is not None
        runs.append(range(last[3], end))
        end = last[3]
    return runs[::-1]


def _fresh(units: Sequence[Sequence[Path]]) -> list[Counter[int]]:
    """For each unit, how many of its nodes were last met in which unit before; in none: -1."""
    met: dict[int, int] = {}
    found = []
    for place, unit in enumerate(units):
        counts: Counter[int] = Counter()
        for path in unit:
            for node in path:
                last = met.get(node, -1)
                if last != place:
                    counts[last] += 1
                    met[node] = place
        found.append(counts)
    return found


def _shared(one: Path, other: Path) -> int:
    """Nodes at the beginning that two paths have in common."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
