"""Proof of the optimizer's settings: those that the config gives, with the changes that the user has made.

The callbacks of a run are called inside `explained`: what one of the user's callbacks changes is taken, and so is every
change of an optimizer that the user gave. Such changes stand in the receipt, and a resumed run begins with them. Any
other change is a failed proof.

Proof `optimizer`.
Shows: betas, epsilon and weight decay of every trained tensor are those of the config, which is read a second time
when the trainer is made, with the changes (docs/internals/proof.md#the-optimizers-settings) that the receipt records;
no setting changes outside of a callback of the user's; a new AdamW holds no moments; all ranks take the same changes.
Does not show: settings that the config does not have, such as the momentum of SGD, before the first step; optimizers
whose settings come from `optim_args`.
When: before the first step, also after a checkpoint was loaded; before and after every step; before every checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch

from lockstep.definitions.optimizer import SETTING_OF
from lockstep.errors import ProofError

# The settings of one group of tensors, by name, in JSON types; not the learning rate, which the scheduler changes.
Settings = dict[str, Any]
_RATE = "lr"
GIVEN = "the program that gave the optimizer"


@dataclass(frozen=True, slots=True)
class Change:
    """A change of a setting of a group that was taken.

    Attributes:
        by: who has made it.
        tensors: the tensors of this group, in words.
        place: of a learning rate, the step of the schedule at which it was set. The schedule's next step sets another.
    """

    by: str
    group: int
    tensors: str
    field: str
    before: Any
    after: Any
    place: int | None = None

    def line(self) -> dict[str, Any]:
        """The same in JSON types."""
        found = asdict(self)
        return found if self.field == _RATE else {k: v for k, v in found.items() if k != "place"}

    def __str__(self) -> str:
        name = "learning rate" if self.field in (_RATE, "initial_lr") else self.field
        return f"{name} from {self.before} to {self.after} for {self.tensors}"


@dataclass(frozen=True, slots=True)
class Taken:
    """What a run has taken so far, from its receipt.

    Attributes:
        given: each group's settings of the user's optimizer, when the run began; None: the trainer made it.
        changes: the changes since.
    """

    given: list[dict[str, Any]] | None
    changes: list[Change]


def taken_of(entries: Sequence[Mapping[str, Any]], changed_now: Sequence[str] = ()) -> Taken:
    """What the lines of a receipt, up to the checkpoint's own, say about the optimizer.

    A field of `changed_now` has another value since the run was interrupted: it counts, and not a change before.
    """
    given: list[dict[str, Any]] | None = None
    changes: list[Change] = []

    def forget(fields: Sequence[str]) -> None:
        again = {SETTING_OF[name] for name in fields if name in SETTING_OF}
        changes[:] = [c for c in changes if c.field not in again]

    for entry in entries:
        if entry["kind"] == "start":
            forget(entry.get("inputs", {}).get("changed", ()))
        if entry["kind"] == "optimizer":
            given = entry.get("given", given)
            changes += [Change(**c) for c in entry.get("changes", ())]
    forget(changed_now)
    return Taken(given, changes)


class OptimizerSettings:
    """The settings that an optimizer must have. Other settings than the config's and the receipt's are a `ProofError`.

    Args:
        optimizer: the optimizer itself, not a wrapper.
        wanted: gives the settings of a trained parameter from the config; None: the user gave the optimizer.
        taken: what the run has taken before it was interrupted.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        scheduler: Any,
        names: Mapping[torch.nn.Parameter, str],
        wanted: Callable[[str], Settings] | None,
        taken: Taken,
    ) -> None:
        self.optimizer, self._scheduler, self.by_user = optimizer, scheduler, wanted is None
        own = [[names[p] for p in group["params"] if p in names] for group in optimizer.param_groups]
        self._titles = [_title(group) for group in own]
        self._held = self._read()
        self._from_config: set[str] = set()
        # Some optimizers count their steps in their groups.
        self._counts = not type(optimizer).__module__.startswith("torch.optim")
        if wanted is not None:
            self._check_start(own, wanted, taken.changes)
        elif taken.given is not None:
            self._check_given(taken)
        # Settings with which the optimizer has just stepped, while callbacks may change those of the next step.
        self._stepped: list[Settings] | None = None
        self._stepped_rates: dict[int, float] = {}
        # Learning rates that a user has set, by group: the value, and its place as in `Change`.
        self._rates = {c.group: (c.after, c.place) for c in taken.changes if c.field == _RATE}
        self._failure: ProofError | None = None
        # Whether the receipt has the settings of a given optimizer, and the changes that it has not.
        self._told = taken.given is not None
        self._news: list[Change] = []
        self._all = list(taken.changes)

    @property
    def groups(self) -> list[Settings]:
        """The settings of each group in the latest step."""
        return self._held if self._stepped is None else self._stepped

    @contextmanager
    def explained(self, by: str) -> Iterator[None]:
        """Take what is changed in this block, by whom it is changed, in words."""
        self.look()
        rates = self._rates_now()
        yield
        for change in self._differences(by):
            self._take(change)
        for index, (before, after) in enumerate(zip(rates, self._rates_now(), strict=False)):
            if before != after:
                self.take_rate(index, before, after, by)

    def look(self) -> None:
        """Compare the settings now. A change outside of `explained` is taken only if the user gave the optimizer."""
        for change in self._differences(GIVEN):
            if self.by_user:
                self._take(change)
            elif self._failure is None:
                self._failure = ProofError(
                    "optimizer",
                    f"{change.field} of {change.tensors} is {change.after} and was {change.before}",
                    "something other than a callback of yours has changed the optimizer's settings",
                    "change settings in a callback, or give an optimizer of your own; otherwise this is a "
                    "defect of Lockstep: report it",
                )

    def note_step(self) -> None:
        """Just after the optimizer has stepped, before any callback is called."""
        if self._counts:
            for held, now in zip(self._held, self._read(), strict=False):
                known = {*self._from_config, *SETTING_OF.values()}
                held |= {k: v for k, v in now.items() if k not in known}
        self.look()
        self._stepped = [dict(group) for group in self._held]
        own = {index: self.rate_set(index) for index in self._rates}
        self._stepped_rates = {index: rate for index, rate in own.items() if rate is not None}

    def check(self) -> list[dict[str, Any]]:
        """The changes that were taken since the last call of `news`, as JSON types.

        Raises:
            ProofError: something has changed a setting outside of `explained`. The error has its name and both values.
        """
        self.look()
        if self._failure is not None:
            raise self._failure
        return [change.line() for change in self._news]

    def news(self) -> tuple[list[dict[str, Any]] | None, list[Change]]:
        """The settings of a given optimizer, and changes, that the receipt does not have. They count as written now."""
        given = None
        if self.by_user and not self._told:
            given = [{"tensors": t, **g} for t, g in zip(self._titles, self._first(), strict=True)]
        found = self._news
        self._told, self._news = True, []
        return given, found

    def so_far(self) -> Taken:
        """What was taken until now, for another run with the same optimizer. A user's optimizer is read anew."""
        kept = [] if self.by_user else [change for change in self._all if change.field != _RATE]
        return Taken(None, kept)

    def tell_again(self) -> None:
        """A new receipt begins, which has nothing of what was taken before."""
        self._told, self._news = False, list(self._all)

    # ---- learning rates ---------------------------------------------------------------------------------------------

    def first_rates(self) -> list[float]:
        """The learning rate of each group before the schedule."""
        return [float(held.get("initial_lr", g[_RATE])) for held, g in self._pairs()]

    def rate_set(self, group: int) -> float | None:
        """The learning rate of a group that a user has set for the current step; None: the schedule's counts."""
        rate, place = self._rates.get(group, (None, None))
        return rate if place == self._place() else None

    def rates_of_step(self, scheduled: Sequence[float]) -> list[float]:
        """The learning rate of each group in the latest step, from those of the schedule."""
        return [self._stepped_rates.get(index, rate) for index, rate in enumerate(scheduled)]

    def take_rate(self, group: int, before: float, after: float, by: str = GIVEN) -> None:
        """Take a learning rate that a user has set. It counts until the schedule sets another one."""
        self._rates[group] = after, self._place()
        self._note(Change(by, group, self._titles[group], _RATE, before, after, self._place()))

    def _place(self) -> int | None:
        return getattr(self._scheduler, "last_epoch", None)

    def _rates_now(self) -> list[float]:
        return [float(group[_RATE]) for group in self.optimizer.param_groups]

    # ---- reading and comparing --------------------------------------------------------------------------------------

    def _pairs(self) -> Iterator[tuple[Settings, dict[str, Any]]]:
        return zip(self._held, self.optimizer.param_groups, strict=True)

    def _read(self) -> list[Settings]:
        """The settings of each group as they are, with the learning rate before the schedule."""
        groups = self.optimizer.param_groups
        bases = getattr(self._scheduler, "base_lrs", None) or []
        plain = [{k: v for k, v in g.items() if k not in ("params", _RATE) and _is_plain(v)} for g in groups]
        found = [{k: _plain(v) for k, v in group.items()} for group in plain]
        if len(bases) == len(found):
            for group, base in zip(found, bases, strict=True):
                group["initial_lr"] = float(base)
        return found

    def _differences(self, by: str) -> list[Change]:
        now = self._read()
        if len(now) != len(self._held):
            # It is raised where all ranks compare, as every failure here, so that no rank waits for this one.
            self._failure = self._failure or ProofError(
                "optimizer",
                f"the optimizer has {len(now)} groups of tensors, and had {len(self._held)} when training began",
                "something has added or removed a group during the run",
                "give an optimizer with all its groups before training begins",
            )
            return []
        return [
            Change(by, i, self._titles[i], field, value, now[i].get(field))
            for i, held in enumerate(self._held)
            for field, value in held.items()
            if now[i].get(field) != value
        ]

    def _take(self, change: Change) -> None:
        self._held[change.group][change.field] = change.after
        self._note(change)

    def _note(self, change: Change) -> None:
        self._news.append(change)
        self._all.append(change)

    def _first(self) -> list[Settings]:
        """The settings before all changes that were noted."""
        first = [dict(group) for group in self._held]
        for change in reversed(self._all):
            if change.field != _RATE:
                first[change.group][change.field] = change.before
        return first

    def _check_start(
        self, own: Sequence[Sequence[str]], wanted: Callable[[str], Settings], changes: Sequence[Change]
    ) -> None:
        due_by_change: dict[tuple[int, str], Any] = {}
        for change in changes:
            self._check_title(change.group, change.tensors)
            if change.field != _RATE:
                due_by_change[change.group, change.field] = change.after
        # A schedule that follows metrics keeps no first rate, and has another one after its first metric.
        is_new = not self._place()
        for index, (group, found) in enumerate(zip(self.optimizer.param_groups, self._held, strict=True)):
            rate = {"initial_lr": float(group[_RATE])} if "initial_lr" not in found and is_new else {}
            for name in own[index]:
                due = wanted(name)
                self._from_config |= due.keys()
                for field, value in due.items():
                    if (index, field) not in due_by_change:
                        self._compare(name, field, {**found, **rate}, value, "the config")
            for (at, field), value in due_by_change.items():
                if at == index:
                    self._compare(self._titles[index], field, found, value, "the receipt")

    def _check_given(self, taken: Taken) -> None:
        assert taken.given is not None
        due = [dict(group) for group in taken.given]
        if len(due) != len(self._held):
            raise _other_groups(f"it has {len(self._held)} groups, and the receipt has {len(due)}")
        for index, group in enumerate(due):
            self._check_title(index, group.pop("tensors"))
        for change in taken.changes:
            if change.field != _RATE:
                due[change.group][change.field] = change.after
        for index, group in enumerate(due):
            for field, value in group.items():
                if field in SETTING_OF.values() or not self._counts:
                    self._compare(self._titles[index], field, self._held[index], value, "the receipt")

    def _check_title(self, group: int, tensors: str) -> None:
        found = self._titles[group] if group < len(self._titles) else "no such group"
        if found != tensors:
            raise _other_groups(f"its group {group + 1} has {found}, and the receipt says {tensors}")

    def _compare(self, whose: str, field: str, found: Settings, due: Any, giver: str) -> None:
        if field not in found or _equal(found[field], due):
            return
        made = "the optimizer was made or loaded with other settings"
        cause = f"{made}, or the config was changed after the trainer was made"
        if field == "initial_lr":
            raise ProofError(
                "learning_rate",
                f"the optimizer begins with a learning rate of {found[field]:g} for {whose}; {giver} gives {due:g}",
                cause,
                "give learning_rate in the config before the trainer is made, or give an optimizer of your own",
            )
        raise ProofError(
            "optimizer",
            f"{field} of {whose} is {found[field]}; {giver} gives {due}",
            cause,
            "give adam_beta1, adam_beta2, adam_epsilon and weight_decay in the config before the trainer is "
            "made, change them in a callback, or give an optimizer of your own",
        )


def _other_groups(found: str) -> ProofError:
    return ProofError(
        "optimizer",
        f"the optimizer has other groups of tensors than the run had before: {found}",
        "the optimizer was made in another way, or other parameters are trained",
        "make the same optimizer, and freeze the same parameters, as when the run began",
    )


def _title(names: Sequence[str]) -> str:
    if not names:
        return "no trained tensor"
    return names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")


def _equal(found: Any, due: Any) -> bool:
    if isinstance(found, float) and isinstance(due, int | float):
        return abs(found - due) <= 1e-12 * abs(due)
    if isinstance(found, list) and isinstance(due, list):
        return len(found) == len(due) and all(map(_equal, found, due))
    return bool(found == due)


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    if isinstance(value, torch.Tensor):
        return value.numel() == 1
    return value is None or isinstance(value, bool | int | float | str)


def _plain(value: Any) -> Any:
    """A setting as JSON types, as a receipt gives it back."""
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    return value.item() if isinstance(value, torch.Tensor) else value
