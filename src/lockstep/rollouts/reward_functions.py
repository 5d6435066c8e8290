"""What a user gives as `reward_funcs` becomes reward functions: functions stay, names and models become reward models.

Comes from: a trainer's constructor. Goes to: `rollouts/rewards.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lockstep.errors import InputError
from lockstep.models.resolve import resolve_model
from lockstep.models.reward_model import RewardModel, load_reward_model
from lockstep.rollouts.rewards import RewardFunction
from lockstep.tokens.tokenizer import load_tokenizer

Given: TypeAlias = str | PreTrainedModel | RewardFunction
ProcessingClasses: TypeAlias = PreTrainedTokenizerBase | Sequence[PreTrainedTokenizerBase | None] | None


def entries_of(given: Any) -> list[Any]:
    """What a trainer was given as `reward_funcs`, one or several, as a list."""
    return list(given) if isinstance(given, list | tuple) else [given]


def reward_functions(
    given: Given | Sequence[Given],
    processing_classes: ProcessingClasses = None,
    *,
    chat_template_kwargs: dict[str, Any] | None = None,
    device: torch.device | str | None = None,
) -> list[RewardFunction]:
    """Reward functions from a mixed list, in its order.

    Args:
        given: one or several of: a function; a loaded sequence classifier with one output; a directory or hub id of one.
        processing_classes: the tokenizers of the reward models, one an entry of `given` (None: the model's own, and for
            functions), or a single one where `given` is one entry.
        chat_template_kwargs: for reward models' chat templates.
        device: where models that are loaded here go; a model that is given loaded stays where it is.

    Raises:
        InputError: nothing given, an entry that is none of these, a model that is no reward model, one that has no tokenizer, or
            another number of tokenizers than entries.
    """
    entries = entries_of(given)
    if not entries:
        raise InputError("no reward function given")
    tokenizers: list[Any] = [None] * len(entries)
    if processing_classes is not None:
        tokenizers = list(processing_classes) if isinstance(processing_classes, list | tuple) else [processing_classes]
    if len(tokenizers) != len(entries):
        raise InputError(
            f"reward_processing_classes has {len(tokenizers)} entries for {len(entries)} reward functions; give one an entry, None "
            "for functions"
        )
    _check_kinds(entries)
    return [
        _model(entry, tokenizer, chat_template_kwargs, device) if isinstance(entry, str | PreTrainedModel) else entry
        for entry, tokenizer in zip(entries, tokenizers, strict=True)
    ]


def _check_kinds(entries: list[Any]) -> None:
    """All of them before any model is loaded."""
    for entry in entries:
        module = isinstance(entry, torch.nn.Module) and not isinstance(entry, PreTrainedModel)
        if module or not (isinstance(entry, str | PreTrainedModel) or callable(entry)):
            raise InputError(
                f"reward function {entry!r:.80} ({type(entry).__name__}) is neither a function nor a reward model (a transformers "
                "sequence classifier, its directory or its hub id)"
            )


def _model(
    entry: str | PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    chat_template_kwargs: dict[str, Any] | None,
    device: torch.device | str | None,
) -> RewardModel:
    if isinstance(entry, str):
        path = resolve_model(entry)
        # The tokenizer first: it is found missing in no time.
        tokenizer = tokenizer if tokenizer is not None else load_tokenizer(path)
        model = load_reward_model(path)
        return RewardModel(
            model.to(device) if device is not None else model, tokenizer, chat_template_kwargs=chat_template_kwargs
        )
    if tokenizer is None:
        name = entry.config._name_or_path
        if not name:
            raise InputError(
                "a reward model that was not loaded from anywhere needs its tokenizer in reward_processing_classes"
            )
        tokenizer = load_tokenizer(name)
    return RewardModel(entry, tokenizer, chat_template_kwargs=chat_template_kwargs)
