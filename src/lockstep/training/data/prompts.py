"""Makes prompts from the rows of a dataset: checks them, tokenizes them and measures their length.

The input is a `datasets.Dataset` with a `prompt` column. `training/data/prompt_order.py` orders the prompts; evaluation uses
them in the dataset's order.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from lockstep.errors import InputError
from lockstep.rollouts.group import Prompt
from lockstep.rollouts.ranks import Ranks
from lockstep.tokens.arrays import whole_numbers
from lockstep.tokens.chat import render_prompt
from lockstep.training.config.online_config import OnlineConfig


def check_dataset(dataset: Any, name: str) -> None:
    """Refuse a dataset that cannot be trained on, before a model is loaded.

    Raises:
        InputError: there is no `prompt` column, there are no rows or there are images, or it is not a map-style dataset.
    """
    if not isinstance(dataset, Dataset):
        raise InputError(f"the {name} dataset must be a datasets.Dataset, got {type(dataset).__name__}")
    if len(dataset) == 0:
        raise InputError(f"the {name} dataset is empty")
    if "prompt" not in dataset.column_names:
        raise InputError(f"the {name} dataset has no 'prompt' column, only {dataset.column_names}")
    images = {"image", "images"} & set(dataset.column_names)
    if images:
        # TRL would show the images to the model. If they were ignored, the model would answer without having seen them.
        raise InputError(
            f"the {name} dataset has a column {min(images)!r}: images are not supported yet; drop the column"
        )


def check_datasets(train: Any, evaluation: Any | None) -> None:
    """Call `check_dataset` for the training dataset, and for the evaluation dataset if there is one."""
    check_dataset(train, "train")
    if evaluation is not None:
        check_dataset(evaluation, "eval")


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
        max_prompt_length: number of tokens that the model's context leaves for a prompt.

    Raises:
        InputError: a prompt cannot be tokenized, or is too long. The message names the row.
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
        prompts.append(Prompt(prompt_id, whole_numbers(ids), source, {k: v for k, v in row.items() if k != "prompt"}))
    return prompts


def read_prompts(
    train: Dataset,
    evaluation: Dataset | None,
    tokenizer: PreTrainedTokenizerBase,
    context: int,
    config: OnlineConfig,
    ranks: Ranks,
) -> tuple[list[Prompt], list[Prompt]]:
    """The prompts of both datasets. Every rank calls this and reads them; the ranks compare what they have read.

    Ranks must have equal prompts, because rollouts travel between ranks with the names of their prompts only.

    Args:
        context: number of tokens that the model can attend to.

    Raises:
        InputError: on every rank; a rank cannot use its data (see `load_prompts`), or two ranks have different prompts.
    """
    room, arguments = context - config.completion_limit, config.chat_template_kwargs
    found: list[list[Prompt]] = []

    def read() -> list[Any]:
        for name, data in (("train", train), ("eval", evaluation)):
            prompts = (
                []
                if data is None
                else load_prompts(
                    data,
                    name,
                    tokenizer,
                    max_prompt_length=room,
                    chat_template_kwargs=arguments,  # type: ignore[arg-type]
                )
            )
            found.append(prompts)
        return _digest([p for prompts in found for p in prompts])

    parts = [read()] if ranks.count == 1 else ranks.share("prompts", read)
    odd = [rank for rank, part in enumerate(parts) if part != parts[0]]
    if odd:
        raise InputError(
            f"rank {odd[0]} has other prompts than rank 0 ({parts[odd[0]][0]} and {parts[0][0]} of them): give every rank the same "
            "dataset, in the same order"
        )
    return found[0], found[1]


def _digest(prompts: Sequence[Prompt]) -> list[Any]:
    """The number of prompts, and a digest of their names and ids."""
    digest = hashlib.blake2b(digest_size=16)
    for prompt in prompts:
        name = prompt.prompt_id.encode()
        digest.update(b"%d %d " % (len(name), len(prompt.ids)) + name + prompt.ids.tobytes())
    return [len(prompts), digest.hexdigest()]
