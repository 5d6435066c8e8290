"""Rows of a dataset become prompts, and prompts become the batches of one generation after the other.

Comes from: a `datasets.Dataset` with a `prompt` column. Goes to: the trainer's loop. Order is a pure function of
(seed, epoch), so that an interrupted run continues with the prompts it would have seen.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from datasets import Dataset
from torch.utils.data import DataLoader
from transformers import PreTrainedTokenizerBase

from lockstep.errors import InputError
from lockstep.rollouts.group import Prompt
from lockstep.tokens.chat import render_prompt
from lockstep.training.config import OnlineConfig


def check_dataset(dataset: Any, name: str) -> None:
    """Refuse a dataset that cannot be trained on, before a model is loaded.

    Raises:
        InputError: no `prompt` column, no rows, images, or not a map-style dataset.
    """
    if not isinstance(dataset, Dataset):
        raise InputError(f"the {name} dataset must be a datasets.Dataset, got {type(dataset).__name__}")
    if len(dataset) == 0:
        raise InputError(f"the {name} dataset is empty")
    if "prompt" not in dataset.column_names:
        raise InputError(f"the {name} dataset has no 'prompt' column, only {dataset.column_names}")
    images = {"image", "images"} & set(dataset.column_names)
    if images:
        # TRL would show them to the model; passed over in silence, the model would answer without having seen them.
        raise InputError(
            f"the {name} dataset has a column {min(images)!r}: images are not supported yet; drop the column"
        )


def load_prompts(
    dataset: Dataset,
    name: str,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_prompt_length: int,
    chat_template_kwargs: dict[str, Any] | None = None,
) -> list[Prompt]:
    """Every row as a prompt, named `<name>/<row>`.

    Args:
        max_prompt_length: tokens that the model's context leaves for a prompt.

    Raises:
        InputError: a prompt cannot be rendered, or is too long; the message names the row.
    """
    prompts = []
    for index, row in enumerate(dataset):
        prompt_id = f"{name}/{index}"
        source = row["prompt"]
        try:
            ids = render_prompt(source, tokenizer, chat_template_kwargs)
        except InputError as error:
            raise InputError(f"prompt {prompt_id}: {error}") from error
        if len(ids) > max_prompt_length:
            raise InputError(
                f"prompt {prompt_id} has {len(ids)} tokens; the model's context leaves {max_prompt_length} beside "
                "max_completion_length: shorten or drop the row"
            )
        prompts.append(Prompt(prompt_id, ids, source, {k: v for k, v in row.items() if k != "prompt"}))
    return prompts


def read_prompts(
    train: Dataset, evaluation: Dataset | None, tokenizer: PreTrainedTokenizerBase, context: int, config: OnlineConfig
) -> tuple[list[Prompt], list[Prompt]]:
    """The prompts of both datasets.

    Args:
        context: tokens that the model can attend to.

    Raises:
        InputError: as `load_prompts`.
    """
    room, arguments = context - config.completion_limit, config.chat_template_kwargs
    both = [("train", train), ("eval", evaluation)]
    found = [
        []
        if data is None
        else load_prompts(data, name, tokenizer, max_prompt_length=room, chat_template_kwargs=arguments)  # type: ignore[arg-type]
        for name, data in both
    ]
    return found[0], found[1]


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """What the loop hands to one micro-step: the generation it belongs to, and which part of it.

    Attributes:
        prompts: the prompts of the whole generation.
        part: index of this micro-step within the generation; 0 generates.
    """

    prompts: tuple[Prompt, ...]
    part: int


class GenerationBatches:
    """Batch sampler: the same prompts for every micro-step of a generation, then the next ones."""

    def __init__(self, size: int, prompts: int, parts: int, *, shuffle: bool, seed: int) -> None:
        """
        Args:
            size: prompts in the dataset.
            prompts: prompts a generation; what is left at the end of an epoch is left out.
            parts: micro-steps a generation.
        """
        if size < prompts:
            raise InputError(f"the train dataset has {size} prompts, one generation needs {prompts}")
        self._size, self._prompts, self._parts = size, prompts, parts
        self._shuffle, self._seed, self._epoch = shuffle, seed, 0

    def set_epoch(self, epoch: int) -> None:
        """The epoch whose order the next iteration gives."""
        self._epoch = epoch

    def __len__(self) -> int:
        return self._size // self._prompts * self._parts

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        order = list(range(self._size))
        if self._shuffle:
            generator = torch.Generator().manual_seed(self._seed + self._epoch)
            order = torch.randperm(self._size, generator=generator).tolist()
        for start in range(0, self._size - self._prompts + 1, self._prompts):
            chunk = order[start : start + self._prompts]
            for part in range(self._parts):
                yield [(index, part) for index in chunk]


class _Prompts(torch.utils.data.Dataset):
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


def make_loader(prompts: list[Prompt], config: OnlineConfig) -> PromptLoader:
    """The training dataloader; one item is one micro-step."""
    batches = GenerationBatches(
        len(prompts),
        config.prompts_per_generation,
        config.micro_batches_per_generation,
        shuffle=config.shuffle_dataset,
        seed=config.data_seed if config.data_seed is not None else config.seed,
    )
    return PromptLoader(_Prompts(prompts), batch_sampler=batches, collate_fn=_collate)


def _collate(items: list[tuple[Prompt, int]]) -> MicroBatch:
    return MicroBatch(tuple(prompt for prompt, _ in items), items[0][1])
