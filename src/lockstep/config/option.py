"""How a field of a config is declared: once, with all that is said of it.

`option` makes the field of a dataclass. What is said of it stands in the field's metadata: its line and its place in
`--help`, the numbers that it may have, and whether it may change when a run goes on. Help, refusals, the list of fields
that the command line reads, the page of the reference and a run's identity are made from that.
"""

from __future__ import annotations

import dataclasses
import math
from enum import StrEnum
from typing import Any, Literal, NamedTuple, TypedDict, Unpack, get_args

from lockstep.errors import InputError

# The headings of `--help`, in their order. A field of transformers without a group stands last, under another heading.
Group = Literal[
    "verify", "model", "adapter", "data", "reward", "tools", "method", "sampling", "engine", "server", "proofs",
    "logging",
    "saving",
]  # fmt: skip
GROUPS: tuple[str, ...] = get_args(Group)
OTHERS = "transformers' Trainer"


class Bookkeeping(StrEnum):
    """What a field decides that may change when a run goes on. All other fields decide what the run learns."""

    PLACE = "where the run writes, and what it is called"
    LOGS = "when it logs, saves and evaluates, and what it prints"
    HUB = "whether and how it goes to the hub"
    # Such a field splits the same sums into other parts. The results differ only by rounding, as between two machines.
    MEMORY = "how much memory it takes"
    # The receipt notes the device at every start, and a resumed run says that it is another one.
    DEVICE = "on which device it trains"
    PATIENCE = "when it gives up"
    WAITING = "how long it waits"
    SERVERS = "where servers are, and how weights reach them"
    THREADS = "in which threads tools run"
    REHEARSAL = "what is tried before it starts"
    COMPARISON = "what is only compared"
    RESUMING = "whether it may go on with other inputs"
    OBJECT = "an object that is not comparable"


class Part(StrEnum):
    """The part of a run that a field decides. A command without that part ignores the field, and says so."""

    LEARNING = "learning"
    STEPS = "steps"
    RUN = "run"
    HELD_OUT = "held_out"
    REWARDS = "rewards"
    ACTING = "acting"


class Bounds(NamedTuple):
    """The values that a number may have, and those that are usual.

    Attributes:
        low, high: smallest and largest value; None: no limit.
        above, below: whether `low` and `high` themselves are not allowed.
        usual: smallest and largest usual value.
        infinite: whether "no bound" or "no clipping" is written as infinity.
        special: values with a meaning of their own, outside the bounds.
    """

    low: float | None = None
    high: float | None = None
    above: bool = False
    below: bool = False
    usual: tuple[float, float] = (-math.inf, math.inf)
    infinite: bool = False
    special: tuple[float, ...] = ()

    def holds(self, value: float) -> bool:
        """Whether a number is within the bounds. NaN is not."""
        low, high = self.low, self.high
        return (low is None or (value > low if self.above else value >= low)) and (
            high is None or (value < high if self.below else value <= high)
        )

    def __str__(self) -> str:
        parts = []
        if self.low is not None:
            parts.append(f"{'above' if self.above else 'at least'} {self.low:g}")
        if self.high is not None:
            parts.append(f"{'below' if self.below else 'at most'} {self.high:g}")
        return " and ".join(parts)


SEED = Bounds(0, 2**32 - 1)
SHARE = Bounds(0, 1, above=True)
# Seconds: four months. A wait of some hundred times as many is more than Python's clocks can count.
LONGEST_WAIT = 10**7
SECONDS = Bounds(0, LONGEST_WAIT, above=True)
COUNT = Bounds(1)
PORT = Bounds(1, 65535)
CONTEXT = Bounds(2)


class Said(TypedDict, total=False):
    """What can be said of a field beside its text.

    Attributes:
        group: its heading in `--help` and on the page of the reference.
        common: whether `--help` shows it without `--help-all`.
        bounds: the numbers that it may have.
        bookkeeping: what it decides, if it may change when a run goes on. Otherwise it is part of the run's identity.
        part: the part of a run that it decides; left out: what every command does.
        mapping: whether a text is read as JSON.
        also: names of types that it takes beside its declared one.
    """

    group: Group
    common: bool
    bounds: Bounds
    bookkeeping: Bookkeeping
    part: Part
    mapping: bool
    also: tuple[str, ...]


class About(dict[str, Any]):
    """All that is said of a field.

    The keys are those of `Said`, and `help`, `only`, `no_effect` and `only_with`, as far as they were given.
    """

    def copy(self) -> dict[str, Any]:
        # The parser of transformers gives a copy of a field's metadata to argparse, which knows no other key.
        return {key: self[key] for key in ("help",) if key in self}


def about(
    text: str | None = None,
    *,
    only: tuple[Any, str] | None = None,
    no_effect: tuple[Any, str] | None = None,
    only_with: str | tuple[str, ...] = (),
    **said: Unpack[Said],
) -> About:
    """What is said of a field that is declared elsewhere.

    Args:
        text: its line in `--help`; None: as it is declared.
        only: the only value that is supported, and why others are refused.
        no_effect: the value that the rest of the code sees, and why any other has no effect here.
        only_with: names of the `CONDITIONS` without which it has no effect.
    """
    conditions = ((only_with,) if isinstance(only_with, str) else only_with) or None
    given = {"help": text, "only": only, "no_effect": no_effect, "only_with": conditions}
    return About({key: value for key, value in given.items() if value is not None}, **said)


def option(
    default: Any,
    text: str,
    *,
    only: str | None = None,
    no_effect: str | None = None,
    only_with: str | tuple[str, ...] = (),
    **said: Unpack[Said],
) -> Any:
    """The field of a dataclass.

    A class that declares a field of its base again gives it another default or text. What else was said of it stays.

    Args:
        default: the default. A list is copied for each object.
        text: the field's line in `--help`.
        only: why the default is the only value that is supported.
        no_effect: why a value other than the default has no effect.
        only_with: names of the `CONDITIONS` without which it has no effect.
    """
    found = about(
        text,
        only=None if only is None else (default, only),
        no_effect=None if no_effect is None else (default, no_effect),
        only_with=only_with,
        **said,
    )
    if isinstance(default, list):
        return dataclasses.field(default_factory=lambda: list(default), metadata=found)
    return dataclasses.field(default=default, metadata=found)


def value_of(field: object) -> str:
    """The text of a field that may be a member of an enumeration."""
    return str(getattr(field, "value", field))


def refuse_other_value(name: str, given: Any, only: tuple[Any, str]) -> None:
    """Check a field that supports one value.

    Args:
        only: the value, and why others are refused.

    Raises:
        InputError: it has another value.
    """
    value, why = only
    if given != value:
        raise InputError(f"{name}={given!r} is not supported, only {value!r} is: {why}")
