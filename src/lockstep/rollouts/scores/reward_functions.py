"""Makes reward functions from `reward_funcs`: functions stay as they are, names and models become reward models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lockstep.errors import InputError
from lockstep.models.resolve import resolve_model
from lockstep.models.reward_model import RewardModel, load_reward_model
from lockstep.rollouts.scores.rewards import EnvironmentOf, RewardFunction, RewardScorer, check_weights
from lockstep.tokens.tokenizer import load_tokenizer

Given: TypeAlias = str | PreTrainedModel | RewardFunction
ProcessingClasses: TypeAlias = PreTrainedTokenizerBase | Sequence[PreTrainedTokenizerBase | None] | None


# The first words are TRL's (CONTRIBUTING.md).
_NO_SOURCE = "No reward source provided: give reward_funcs, or environments with a method get_reward"


def entries_of(given: Any) -> list[Any]:
    """The `reward_funcs` of a trainer, one or several, as a list."""
    return list(given) if isinstance(given, list | tuple) else [given]


def reward_scorer(
    given: Given | list[Given] | None,
    processing_classes: ProcessingClasses,
    *,
    weights: Sequence[float] | None,
    timeout: float,
    chat_template_kwargs: dict[str, Any] | None,
    device: torch.device | str | None,
    own: Sequence[str] = (),
    environment_of: EnvironmentOf | None = None,
) -> RewardScorer:
    """The scorer of a trainer's `reward_funcs`.

    Args:
        weights: one weight per function; None for 1 each.
        timeout: seconds that coroutine functions may take together.
        own, environment_of: as in `RewardScorer`. If environments give rewards, there may be no function.

    Raises:
        InputError: no function is given, the number of weights is wrong, or as in `reward_functions`.
    """
    entries = [] if own and given is None else entries_of(given)
    if (not entries and not own) or None in entries:
        raise InputError(_NO_SOURCE)
    weighted = [1.0] * len(entries) if weights is None else list(weights)
    # Before a reward model is loaded.
    check_weights(weighted, len(entries))
    functions = (
        reward_functions(entries, processing_classes, chat_template_kwargs=chat_template_kwargs, device=device)
        if entries
        else []
    )
    return RewardScorer(functions, [*weighted, *(1.0 for _ in own)], timeout, own, environment_of)


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
        processing_classes: tokenizers of the reward models: one per entry of `given` (None for functions, and for a model's own
            tokenizer), or a single one if `given` is one entry.
        chat_template_kwargs: arguments for the chat templates of reward models.
        device: device for models that are loaded here. A model that is given loaded stays on its device.

    Raises:
        InputError: there is no entry, an entry is none of these, a model is not a reward model or has no tokenizer, or the
            number of tokenizers differs from the number of entries.
    """
    entries = entries_of(given)
    if not entries:
        raise InputError("no reward function given")
    tokenizers: list[Any] = [None] * len(entries)
    if processing_classes is not None:
        tokenizers = list(processing_classes) if isinstance(processing_classes, list | tuple) else [processing_classes]
    if len(tokenizers) != len(entries):
        raise InputError(
            f"reward_processing_classes has {len(tokenizers)} entries for {len(entries)} reward functions; the numbers must match: "
            "give one per entry, None for functions"
        )
    _check_kinds(entries)
    return [
        _model(entry, tokenizer, chat_template_kwargs, device) if isinstance(entry, str | PreTrainedModel) else entry
        for entry, tokenizer in zip(entries, tokenizers, strict=True)
    ]


def _check_kinds(entries: list[Any]) -> None:
    """Check all entries before any model is loaded."""
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
        # The tokenizer first, because a missing tokenizer is found quickly.
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
