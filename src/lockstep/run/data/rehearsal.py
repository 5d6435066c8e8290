"""Calls reward functions and judges once before any model is loaded, so that their errors are reported at the start.

The completions are made up: each is the text of the first row's prompt, which any policy could sample. The answers are
checked and thrown away.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from datasets import Dataset
from transformers import TrainerState

from lockstep.config.run import OnlineConfig
from lockstep.contract.protocol import Completion, RequestKey
from lockstep.errors import InputError
from lockstep.rollouts.group import Prompt, Rollout, RolloutGroup
from lockstep.rollouts.judges import PairwiseJudge, judge_pairs
from lockstep.rollouts.rewards import EnvironmentOf, RewardRaised, call_functions, reward_name
from lockstep.tokens.arrays import filled, whole_numbers
from lockstep.tokens.chat import with_joined_text

_logger = logging.getLogger(__name__)


def tell_unanswered(entries: Sequence[Any], datasets: Mapping[str, Dataset]) -> None:
    """Say in one line per function and dataset how many rows have no right answer for a built-in reward function.

    Args:
        entries: the functions; those of Lockstep name their columns in an attribute `answer_columns`.
        datasets: by name.
    """
    for entry in entries:
        for name, data in datasets.items():
            known = [c for c in getattr(entry, "answer_columns", ()) if c in data.column_names]
            if not known:
                continue
            column = data.with_format("arrow").select_columns(known[0])[:][known[0]]
            cells = column.to_pylist()
            none = sum(cell is None for cell in cells)
            empty = sum(isinstance(cell, str) and not cell.strip() for cell in cells)
            parts = [f"{none} with null, which get no score"] if none else []
            parts += [f"{empty} with an empty text, which only an empty completion equals"] if empty else []
            if parts:
                _logger.warning(
                    f"reward function {reward_name(entry)}: {none + empty} of {len(data)} rows of the {name} dataset "
                    f"have no answer in column {known[0]!r}: {' and '.join(parts)}"
                )


def rehearse_functions(
    entries: Sequence[Any],
    dataset: Dataset,
    config: OnlineConfig,
    environment_of: EnvironmentOf | None = None,
) -> None:
    """Call the functions in a trainer's `reward_funcs`. Reward models are not called.

    Args:
        environment_of: gives an environment for the functions; None if there are no environments.

    If a function raises, the error is only printed, because the made-up text may be the reason. A TypeError is
    raised, because it usually shows that a function takes other arguments; so is an exception that would end the
    program (SystemExit).

    Raises:
        InputError: a function returned a wrong number of scores, or values that are not numbers; or it raised a
            TypeError or an exception that would end the program.
    """
    functions = [entry for entry in entries if callable(entry) and not isinstance(entry, torch.nn.Module)]
    group = made_up_group(dataset, config)
    if functions and group is not None:
        with _named():
            state = first_state(dataset, config)
            call_functions([group], functions, state, config.reward_timeout, environment_of=environment_of)


def rehearse_judge(judge: PairwiseJudge, dataset: Dataset, config: OnlineConfig) -> None:
    """Call the judge, if the object is one.

    Raises:
        InputError: the judge returned an invalid verdict, or a wrong number of them; or it raised a TypeError.
    """
    pair = made_up_group(dataset, config)
    if callable(getattr(judge, "judge", None)) and pair is not None:
        with _named():
            judge_pairs([pair], judge, config.reward_timeout)


def made_up_group(dataset: Dataset, config: OnlineConfig) -> RolloutGroup | None:
    """A group for the first row's prompt, of the size that the run samples. Every completion is the prompt's own text.

    Returns:
        The group; None if the row is not a valid prompt, which another check reports later.
    """
    row = dataset[0]
    source = with_joined_text(row["prompt"])
    text = _text(source)
    if text is None:
        return None
    zero = whole_numbers([0])
    prompt = Prompt("rehearsal", zero, source, {k: v for k, v in row.items() if k != "prompt"})
    keys = [RequestKey(prompt.prompt_id, i) for i in range(config.group_size)]
    completions = [Completion(key, zero, zero, filled(0.0, 1), zero, "stop") for key in keys]
    return RolloutGroup(prompt, tuple(Rollout(c, text) for c in completions))


def first_state(dataset: Dataset, config: OnlineConfig) -> TrainerState:
    """The trainer's state at the first call of a run's reward functions."""
    per_epoch = len(dataset) // config.prompts_per_generation * config.optimizer_steps_per_generation
    steps = config.max_steps if config.max_steps > 0 else math.ceil(config.num_train_epochs * per_epoch)
    epochs = math.ceil(steps / max(per_epoch, 1))
    return TrainerState(
        epoch=0.0, max_steps=steps, num_train_epochs=epochs, train_batch_size=config.train_batch_size
    )


@contextmanager
def _named() -> Iterator[None]:
    where = "in a rehearsal before any model is loaded, on made-up completions"
    try:
        yield
    except InputError as error:
        told = isinstance(error, RewardRaised) and isinstance(error.__cause__, Exception)
        if not told or isinstance(error.__cause__, TypeError):
            raise InputError(f"{error} ({where}; rehearse_rewards=False skips this)") from error
        _logger.warning(f"{error} ({where}); raised in training, it ends the run")


def _text(source: Any) -> str | None:
    """The text of a prompt, or of its last message; None if it is neither text nor messages."""
    if isinstance(source, str):
        return source
    if (
        not isinstance(source, list)
        or not source
        or not all(isinstance(m, dict) and "role" in m for m in source)
    ):
        return None
    content = source[-1].get("content")
    return content if isinstance(content, str) else None
