"""The prompts of each generation, and the loader that gives them to the loop, one item per micro-step.

The prompts come from `training/data/prompts.py`. If solved prompts are left out, the order also depends on the scored groups.
The order is a pure function of the seed and of which prompt was solved in which generation. So a resumed run gets the same
prompts as an uninterrupted one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader
from torch.utils.data import Dataset as TorchDataset

from lockstep.errors import InputError
from lockstep.rollouts.group import Prompt, RolloutGroup
from lockstep.training.config.online_config import OnlineConfig


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """The input of one micro-step: the prompts of its generation, and its part of that generation.

    Attributes:
        prompts: the prompts of the whole generation.
        part: index of this micro-step within the generation. Part 0 samples the generation.
    """

    prompts: tuple[Prompt, ...]
    part: int


@dataclass(slots=True)
class _Pass:
    """One pass over the remaining prompts, in order.

    Attributes:
        number: index of the pass, from 0.
        start: number of its first generation.
        left: dataset indices of its prompts, as many as fill whole generations.
    """

    number: int
    start: int
    left: list[int]


class PromptOrder:
    """Passes over the prompts, each in its own order. Prompts that do not fill a whole generation are left out of a pass.

    Args:
        names: names of the prompts in the dataset.
        size: prompts per generation.
        solved_at: mean reward of a group from which its prompt is left out of later passes ("no positive resampling" of ScaleRL,
            arXiv 2510.13786). None: every pass has all prompts.
        ahead: number of generations that are begun before the current one is noted. A prompt that is solved in one of them is
            left out correspondingly later.

    Raises:
        InputError: the dataset does not fill one generation.
    """

    def __init__(
        self,
        names: Sequence[str],
        size: int,
        *,
        shuffle: bool,
        seed: int,
        solved_at: float | None = None,
        ahead: int = 0,
    ) -> None:
        if len(names) < size:
            raise InputError(f"the train dataset has {len(names)} prompts, one generation needs {size}")
        self.size, self.per_epoch = size, len(names) // size
        self._names, self._shuffle, self._seed, self._solved_at = tuple(names), shuffle, seed, solved_at
        self._ahead = ahead
        self.forget()

    def forget(self) -> None:
        """Start again: no prompt is solved."""
        # Per solved prompt: the generation in which it was solved.
        self._solved: dict[str, int] = {}
        # Number of generations whose groups have been noted.
        self._noted = 0
        self._pass = self._passed(0, 0)

    def places(self, generation: int) -> list[int]:
        """TorchDataset indices of a generation's prompts.

        Raises:
            InputError: too few prompts are left, or an earlier generation has not been noted.
        """
        found = self._pass_of(generation)
        if not found.left:
            raise InputError(
                f"all prompts but {len(self._names) - self.solved} are solved (no_positive_resampling={self._solved_at}) and one "
                f"generation needs {self.size}: there is nothing left to learn from"
            )
        first = (generation - found.start) * self.size
        return found.left[first : first + self.size]

    def note(self, generation: int, groups: Sequence[RolloutGroup]) -> None:
        """Record the rewards of a generation: which of its prompts are solved."""
        if self._solved_at is None:
            return
        self._noted = generation + 1
        for group in groups:
            rewards = group.given_rewards
            if rewards and sum(rewards) / len(rewards) >= self._solved_at:
                self._solved.setdefault(group.prompt.prompt_id, generation)

    def used_up(self, generation: int) -> bool:
        """Whether too few prompts are left for a generation.

        Raises:
            InputError: an earlier generation has not been noted.
        """
        return self._solved_at is not None and not self._pass_of(generation).left

    @property
    def solved(self) -> int:
        """Number of prompts that are left out of later passes."""
        return len(self._solved)

    def metrics(self) -> dict[str, float]:
        """The metric `prompts/solved`, if solved prompts are left out; otherwise nothing."""
        return {} if self._solved_at is None else {"prompts/solved": float(self.solved)}

    def state(self) -> dict[str, Any]:
        """The state that a resumed run needs, in JSON types. It is empty if the seed is enough."""
        if self._solved_at is None:
            return {}
        return {"noted": self._noted, "solved": self._solved, "ahead": self._ahead}

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue from a saved `state`.

        Raises:
            InputError: the state is of a run with another number of generations ahead, whose passes were different.
        """
        if state.get("ahead", 0) != self._ahead:
            raise InputError(
                f"the checkpoint is of a run with {state.get('ahead', 0)} generations ahead, this one has {self._ahead}: with "
                "no_positive_resampling the prompts would differ; use the same max_staleness"
            )
        self.forget()
        self._noted, self._solved = state["noted"], dict(state["solved"])

    def _pass_of(self, generation: int) -> _Pass:
        if self._solved_at is not None and generation > self._noted + self._ahead:
            raise InputError(f"generation {generation} is asked for before generation {self._noted} was scored")
        found = self._pass if self._pass.start <= generation else self._passed(0, 0)
        while found.left and generation >= found.start + len(found.left) // self.size:
            found = self._passed(found.number + 1, found.start + len(found.left) // self.size)
        self._pass = found
        return found

    def _passed(self, number: int, start: int) -> _Pass:
        order = list(range(len(self._names)))
        if self._shuffle:
            generator = torch.Generator().manual_seed(self._seed + number)
            order = torch.randperm(len(order), generator=generator).tolist()
        # Prompts that were known to be solved when the pass's first generation was begun: the same at every call.
        known = start - self._ahead
        left = [place for place in order if self._solved.get(self._names[place], known) >= known]
        return _Pass(number, start, left[: len(left) // self.size * self.size])


class GenerationBatches:
    """Batch sampler: the same prompts for every micro-step of a generation, then the next generation's.

    An epoch has as many generations as the whole dataset fills, even if prompts are left out. It ends early if too few
    prompts are left.
    """

    def __init__(self, order: PromptOrder, parts: int) -> None:
        """
        Args:
            parts: micro-steps per generation.
        """
        self._order, self._parts, self._epoch = order, parts, 0

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch whose generations the next iteration yields."""
        self._epoch = epoch

    def __len__(self) -> int:
        return self._order.per_epoch * self._parts

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        first = self._epoch * self._order.per_epoch
        for generation in range(first, first + self._order.per_epoch):
            if self._order.used_up(generation):
                return
            places = self._order.places(generation)
            for part in range(self._parts):
                yield [(place, part) for place in places]


class _Prompts(TorchDataset):
    """Returns a prompt together with the part that the sampler requested."""

    def __init__(self, prompts: list[Prompt]) -> None:
        self._prompts = prompts

    def __len__(self) -> int:
        return len(self._prompts)

    def __getitem__(self, place: tuple[int, int]) -> tuple[Prompt, int]:
        index, part = place
        return self._prompts[index], part


class PromptLoader(DataLoader):
    """Dataloader of micro-batches. It passes `set_epoch` on to its batch sampler."""

    def set_epoch(self, epoch: int) -> None:
        self.batch_sampler.set_epoch(epoch)  # type: ignore[union-attr]


def order_of(prompts: Sequence[Prompt], config: OnlineConfig, *, shuffle: bool) -> PromptOrder:
    """The order of a run's training prompts.

    Raises:
        InputError: the prompts do not fill one generation.
    """
    return PromptOrder(
        [prompt.prompt_id for prompt in prompts],
        config.prompts_per_generation,
        shuffle=shuffle,
        seed=config.data_seed if config.data_seed is not None else config.seed,
        solved_at=getattr(config, "no_positive_resampling", None),
        ahead=config.generations_ahead,
    )


def generations_from(
    order: PromptOrder, prompts: Sequence[Prompt], first: int, last: int
) -> Iterator[tuple[int, list[Prompt]]]:
    """Generations from `first` to `last`, by number, with their prompts. It ends early if too few prompts are left."""
    for generation in range(first, last + 1):
        if order.used_up(generation):
            return
        yield generation, [prompts[place] for place in order.places(generation)]


def make_loader(prompts: list[Prompt], order: PromptOrder, config: OnlineConfig) -> PromptLoader:
    """The training dataloader. One item is one micro-step."""
    batches = GenerationBatches(order, config.micro_batches_per_generation)
    return PromptLoader(_Prompts(prompts), batch_sampler=batches, collate_fn=_collate)


def _collate(items: list[tuple[Prompt, int]]) -> MicroBatch:
    return MicroBatch(tuple(prompt for prompt, _ in items), items[0][1])
