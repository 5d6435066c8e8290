"""Rollouts that a user's own function makes: TRL's `rollout_func(prompts, trainer)`.

The function gets the prompts of a generation, each once per rollout, and returns columns with one row per rollout, in
the order of the prompts. This module checks the columns and makes rollout groups of them. The log-probs are then
proven like those of every other rollout: by the parity gap.

| column | |
|---|---|
| `prompt_ids`, `completion_ids` | ids before and after the start of the rollout |
| `logprobs` | log-prob of each id of `completion_ids` under the sampling distribution; any number where `env_mask` is 0 |
| `env_mask` | optional: 1 for each sampled id of `completion_ids`, 0 for an inserted one |
| `logprob_token_ids` | optional: the ids that `logprobs` belong to; they must be `completion_ids` |
| `finish_reasons` | optional, not in TRL: `stop` or `length`. Without it, as in TRL: `stop` if the last id is an end token |
| `images` | optional, not in TRL: the images whose ids are in both, in order. Without it they are those of the row |
| any other | goes to reward functions: a list has one value per rollout, anything else is the same for all rollouts |
"""  # noqa: E501

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from lockstep.contract.protocol import Completion, FinishReason, RequestKey
from lockstep.errors import InputError, ProofError
from lockstep.images.pictures import PromptPictures
from lockstep.images.prompts import PromptReader
from lockstep.rollouts.conversation import Decode
from lockstep.rollouts.group import Prompt, Rollout, RolloutGroup, seal_of
from lockstep.tokens.arrays import BadValues, Flags, Ids, Reals, flags, joined, reals, whole_numbers

_REQUIRED = ("prompt_ids", "completion_ids", "logprobs")
_OWN = (*_REQUIRED, "env_mask", "logprob_token_ids", "finish_reasons", "images")


@dataclass(frozen=True, slots=True)
class Bounds:
    """What the ids of a rollout must keep to.

    Attributes:
        vocabulary: number of tokens.
        completion: largest number of ids after the prompt, inserted ones included.
        context: largest number of ids in all.
        end_ids: ids that end a completion.
    """

    vocabulary: int
    completion: int
    context: int
    end_ids: Collection[int]


def groups_of_columns(
    columns: Any,
    prompts: Sequence[Prompt],
    num_generations: int,
    version: int,
    bounds: Bounds,
    decode: Decode,
    reader: PromptReader,
) -> list[RolloutGroup]:
    """One unscored group per prompt, in the order of `prompts`, from what a `rollout_func` returned.

    Args:
        columns: the returned mapping. Row `i × num_generations + k` is rollout k of prompt i.
        version: weight version that the engine held meanwhile.
        reader: the reader of the run's prompts.

    Raises:
        InputError: a column is missing, has a wrong length, or has a value that no rollout can have.
    """
    count = len(prompts) * num_generations
    found = _checked(columns, count)
    groups = []
    for place, prompt in enumerate(prompts):
        rows = range(place * num_generations, (place + 1) * num_generations)
        shared = version, bounds, decode, reader
        rollouts = [_rollout(found, row, prompt, k, *shared) for k, row in enumerate(rows)]
        groups.append(RolloutGroup(prompt, tuple(replace(r, seal=seal_of(r, prompt)) for r in rollouts)))
    return groups


def _checked(columns: Any, count: int) -> dict[str, Any]:
    if not isinstance(columns, Mapping):
        kind = type(columns).__name__
        raise InputError(f"rollout_func returned {kind}, not a dict with {', '.join(_REQUIRED)}")
    missing = [name for name in _REQUIRED if name not in columns]
    if missing:
        raise InputError(
            f"rollout_func must return keys {missing} in its output dict; it returned "
            f"{', '.join(map(str, columns)) or 'nothing'}"
        )
    for name, values in columns.items():
        own = name in _OWN and values is not None
        if (own or isinstance(values, list)) and (not hasattr(values, "__len__") or len(values) != count):
            length = len(values) if hasattr(values, "__len__") else "no"
            raise InputError(
                f"rollout_func returned {length} rows in {name!r} for {count} rollouts: it gets each prompt "
                "once per rollout, and returns one row for each"
            )
    return {name: values for name, values in columns.items() if values is not None}


def _rollout(
    columns: Mapping[str, Any],
    row: int,
    prompt: Prompt,
    sample: int,
    version: int,
    bounds: Bounds,
    decode: Decode,
    reader: PromptReader,
) -> Rollout:
    key = RequestKey(prompt.prompt_id, sample)
    where = f"rollout_func: row {row} (rollout {key})"
    prompt_ids = _ids(columns["prompt_ids"][row], f"{where}: prompt_ids", bounds.vocabulary)
    token_ids = _ids(columns["completion_ids"][row], f"{where}: completion_ids", bounds.vocabulary)
    if len(token_ids) > bounds.completion or len(prompt_ids) + len(token_ids) > bounds.context:
        raise InputError(
            f"{where} has {len(prompt_ids)} prompt ids and {len(token_ids)} completion ids; at most "
            f"{bounds.completion} completion ids and {bounds.context} ids in all are possible: sample fewer, "
            "or raise max_completion_length and vllm_max_model_length"
        )
    mask = _mask(columns, row, where, len(token_ids))
    logprobs = _logprobs(columns, row, where, token_ids, mask)
    pictures = _pictures(columns, row, where, prompt, (prompt_ids, token_ids, mask), reader)
    completion = Completion(
        key,
        prompt_ids,
        token_ids,
        logprobs,
        np.full(len(token_ids), version),
        _finish_reason(columns, row, where, token_ids, bounds),
        None if mask is None or mask.all() else mask,
        pictures=pictures,
    )
    own = {name: values for name, values in columns.items() if name not in _OWN}
    given = {name: values[row] if isinstance(values, list) else values for name, values in own.items()}
    return Rollout(completion, decode(token_ids), notes={"columns": given} if given else {})


def _pictures(
    columns: Mapping[str, Any],
    row: int,
    where: str,
    prompt: Prompt,
    parts: tuple[Ids, Ids, Flags | None],
    reader: PromptReader,
) -> PromptPictures:
    """The images of a rollout, with their places in its ids."""
    prompt_ids, token_ids, mask = parts
    last = len(token_ids) - 1 if mask is None else int(np.flatnonzero(mask)[-1])
    # An image after the last sampled id was not seen by anything that is learned from.
    ids = joined([prompt_ids, token_ids[: last + 1]])
    try:
        if "images" in columns:
            shown = reader.pictures(list(columns["images"][row] or ()))
        else:
            shown = list(prompt.pictures.pictures)
        reader.check_count(len(shown))
        return reader.placed(ids, shown)
    except (InputError, ProofError) as error:
        said = error.found if isinstance(error, ProofError) else str(error)
        raise InputError(
            f"{where}: {said}; return in 'images' the images whose ids are in prompt_ids and completion_ids, "
            "up to the last sampled id"
        ) from error


def _ids(values: Any, where: str, vocabulary: int) -> Ids:
    try:
        ids = whole_numbers(_plain(values))
    except BadValues as error:
        raise InputError(f"{where}: {error}; give a list of token ids") from error
    if not len(ids):
        raise InputError(f"{where}: there are no ids")
    if ids.min() < 0 or ids.max() >= vocabulary:
        wrong = int(ids[(ids < 0) | (ids >= vocabulary)][0])
        raise InputError(f"{where}: {wrong} is not a token of this model, which has {vocabulary}")
    return ids


def _mask(columns: Mapping[str, Any], row: int, where: str, length: int) -> Flags | None:
    if "env_mask" not in columns:
        return None
    values = np.asarray(_plain(columns["env_mask"][row]))
    if values.shape != (length,) or not np.isin(values, (0, 1)).all():
        raise InputError(f"{where}: env_mask must have a 1 or a 0 for each of the {length} completion ids")
    if not values.any():
        raise InputError(f"{where}: env_mask says that nothing was sampled; every rollout needs a sampled id")
    return flags(values.astype(np.bool_))


def _logprobs(columns: Mapping[str, Any], row: int, where: str, token_ids: Ids, mask: Flags | None) -> Reals:
    sampled = mask if mask is not None else np.ones(len(token_ids), np.bool_)
    given = _plain(columns["logprobs"][row])
    try:
        if len(given) != len(token_ids):
            raise ValueError(f"it has {len(given)}")
        if mask is not None:
            # An inserted id has no log-prob; whatever stands there is not read.
            given = np.where(mask, np.array(given, dtype=object), 0.0).tolist()
        found = reals(given)
    except (ValueError, TypeError) as error:
        raise InputError(
            f"{where}: logprobs must have one number for each of the {len(token_ids)} completion ids ({error})"
        ) from error
    if not np.isfinite(found).all() or found.max() > 1e-4:
        wrong = float(found[~(np.isfinite(found) & (found <= 1e-4))][0])
        advice = "every sampled id needs the one that the engine gave it"
        raise InputError(f"{where}: {wrong} is not a log-prob; {advice}")
    if "logprob_token_ids" in columns:
        named = np.asarray(_plain(columns["logprob_token_ids"][row]))
        if named.shape != token_ids.shape or (named[sampled] != token_ids[sampled]).any():
            why = "the log-probs belong to other tokens"
            raise InputError(f"{where}: logprob_token_ids are not completion_ids: {why}")
    return found


def _finish_reason(
    columns: Mapping[str, Any], row: int, where: str, token_ids: Ids, bounds: Bounds
) -> FinishReason:
    if "finish_reasons" not in columns:
        return "stop" if int(token_ids[-1]) in bounds.end_ids else "length"
    reason = columns["finish_reasons"][row]
    if reason not in ("stop", "length"):
        raise InputError(f"{where}: finish_reasons has {reason!r:.40}; it must be 'stop' or 'length'")
    return reason


def _plain(values: Any) -> Any:
    """Values as a list or an array: tensors become lists."""
    return values.tolist() if hasattr(values, "tolist") else values
