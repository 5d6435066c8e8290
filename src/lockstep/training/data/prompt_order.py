"""Which prompts each generation gets, and the loader that hands them to the loop, one item a micro-step.

Comes from: `training/data/prompts.py`, and, where solved prompts leave the data, the scored groups. Goes to: the trainer's loop.
The order is a pure function of the seed and of which prompt was solved in which generation, so that a resumed run gets the
prompts that it would have got.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from lockstep.errors import InputError
from lockstep.rollouts.group import Prompt, RolloutGroup
from lockstep.training.config.online_config import OnlineConfig


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """What the loop hands to one micro-step: the generation it belongs to, and which part of it.

    Attributes:
        prompts: the prompts of the whole generation.
        part: index of this micro-step within the generation; 0 generates.
    """

    prompts: tuple[Prompt, ...]
    part: int


@dataclass(slots=True)
class _Pass:
    """One pass over the prompts that are left, in its order.

    Attributes:
        number: of passes before it.
        start: its first generation.
        left: places of prompts, as many as fill its generations.
    """

    number: int
    start: int
    left: list[int]


class PromptOrder:
    """Pass after pass over the prompts, each in an order of its own; what does not fill a generation is left out of a pass.

    Args:
        names: of the prompts in the dataset.
        size: prompts a generation.
        solved_at: mean reward of a group at which its prompt is in no later pass ("no positive resampling" of ScaleRL, arXiv
            2510.13786); None: every pass has them all.
        ahead: generations that are begun before the one at hand is noted; what is solved in them leaves so much later.

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
        """Begin anew: nothing is solved."""
        # By name: the generation that solved it.
        self._solved: dict[str, int] = {}
        # Generations whose groups have been noted.
        self._noted = 0
        self._pass = self._passed(0, 0)

    def places(self, generation: int) -> list[int]:
        """Places in the dataset of a generation's prompts.

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
        """Take in what became of a generation's prompts."""
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
        """Prompts that are in no later pass."""
        return len(self._solved)

    def metrics(self) -> dict[str, float]:
        """What is logged: `prompts/solved`, where solved prompts leave."""
        return {} if self._solved_at is None else {"prompts/solved": float(self.solved)}

    def state(self) -> dict[str, Any]:
        """What a resumed run needs, in JSON types; empty where the seed is enough."""
        if self._solved_at is None:
            return {}
        return {"noted": self._noted, "solved": self._solved, "ahead": self._ahead}

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from `state`.

        Raises:
            InputError: it is of a run with other generations ahead, whose passes were not these.
        """
        if state.get("ahead", 0) != self._ahead:
            raise InputError(
                f"the checkpoint is of a run with {state.get('ahead', 0)} generations ahead, this one has {self._ahead}: with "
                "no_positive_resampling its prompts would be others; give it the same max_staleness"
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
        # What was known when the pass's first generation was begun: the same whenever it is asked.
        known = start - self._ahead
        left = [place for place in order if self._solved.get(self._names[place], known) >= known]
        return _Pass(number, start, left[: len(left) // self.size * self.size])


class GenerationBatches:
    """Batch sampler: the same prompts for every micro-step of a generation, then the next ones.

    An epoch is as many generations as the whole dataset fills, whatever is left of it; it ends early where too few prompts are.
    """

    def __init__(self, order: PromptOrder, parts: int) -> None:
        """
        Args:
            parts: micro-steps a generation.
        """
        self._order, self._parts, self._epoch = order, parts, 0

    def set_epoch(self, epoch: int) -> None:
        """The epoch whose generations the next iteration gives."""
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


class _Prompts(Dataset):
    """Gives a prompt with the part that the sampler asked it for."""

    def __init__(self, prompts: list[Prompt]) -> None:
        self._prompts = prompts

    def __len__(self) -> int:
        return len(self._prompts)

    def __getitem__(self, place: tuple[int, int]) -> tuple[Prompt, int]:
        index, part = place
        return self._prompts[index], part


class PromptLoader(DataLoader):
    """Dataloader of micro-batches that passes `set_epoch` on to its batch sampler."""

    def set_epoch(self, epoch: int) -> None:
        self.batch_sampler.set_epoch(epoch)  # type: ignore[union-attr]


def order_of(prompts: Sequence[Prompt], config: OnlineConfig) -> PromptOrder:
    """The order of a run's training prompts.

    Raises:
        InputError: they do not fill one generation.
    """
    return PromptOrder(
        [prompt.prompt_id for prompt in prompts],
        config.prompts_per_generation,
        shuffle=config.shuffle_dataset,
        seed=config.data_seed if config.data_seed is not None else config.seed,
        solved_at=getattr(config, "no_positive_resampling", None),
        ahead=config.generations_ahead,
    )


def generations_from(
    order: PromptOrder, prompts: Sequence[Prompt], first: int, last: int
) -> Iterator[tuple[int, list[Prompt]]]:
    """Generations by number, with their prompts, from `first` to `last`; fewer where too few prompts are left."""
    for generation in range(first, last + 1):
        if order.used_up(generation):
            return
        yield generation, [prompts[place] for place in order.places(generation)]


def make_loader(prompts: list[Prompt], order: PromptOrder, config: OnlineConfig) -> PromptLoader:
    """The training dataloader; one item is one micro-step."""
    batches = GenerationBatches(order, config.micro_batches_per_generation)
    return PromptLoader(_Prompts(prompts), batch_sampler=batches, collate_fn=_collate)


def _collate(items: list[tuple[Prompt, int]]) -> MicroBatch:
    return MicroBatch(tuple(prompt for prompt, _ in items), items[0][1])
