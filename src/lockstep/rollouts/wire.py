"""Rollout groups and their scores as bytes, and back, for ranks that did not sample or score them.

The bytes are a JSON header, then the memory of each array; no pickle is involved. Prompts and their pictures are not
sent: every rank has read them (`run/data/prompts.py` compares them). A completion whose pictures are not those of its
prompt sends them, each picture once for all completions.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from lockstep.contract.protocol import Completion, RequestKey
from lockstep.errors import InputError, LockstepError, ProofError
from lockstep.images.pictures import pictures_from_wire, pictures_to_wire
from lockstep.rollouts.group import Prompt, Rollout, RolloutGroup, Seal, TurnEnd
from lockstep.tokens.arrays import KeptIds, cut, flags, joined, joined_kept_ids, small_ids, whole_numbers

# Each column is one array: the values of all branches of all rollouts, concatenated.
_COLUMNS = ("token_ids", "logprobs", "weight_versions")


def groups_to_wire(groups: Sequence[RolloutGroup]) -> dict[str, Any]:
    """Groups, by the ids of their prompts. Each column of values per token is one array for all branches.

    Raises:
        InputError: the notes of a rollout cannot be sent.
    """
    pairs = [(group.prompt, rollout) for group in groups for rollout in group.rollouts]
    rollouts = [rollout for _, rollout in pairs]
    branches = [completion for rollout in rollouts for completion in rollout.branches]
    masks = [c.sampled for c in branches if c.sampled is not None]
    # A first branch usually has the prompt of the data set. Every other prompt is sent.
    shown = [(prompt, rollout, c) for prompt, rollout in pairs for c in rollout.branches]
    own = [c is not r.completion or not np.array_equal(c.prompt_ids, p.ids) for p, r, c in shown]
    prompts = [c.prompt_ids for c, is_own in zip(branches, own, strict=True) if is_own]
    notes = [dict(rollout.notes) for rollout in rollouts]
    _check_json(notes, "conversation.notes")
    return {
        "prompts": [[group.prompt.prompt_id, len(group.rollouts)] for group in groups],
        "samples": [rollout.key.sample for rollout in rollouts],
        "texts": [rollout.text for rollout in rollouts],
        "turns": [list(map(list, rollout.turns)) for rollout in rollouts],
        "notes": notes,
        "seals": [None if r.seal is None else [r.seal.words, dict(r.seal.tokens)] for r in rollouts],
        "branches": [len(rollout.branches) for rollout in rollouts],
        "calls": [c.key.call for c in branches],
        "finish_reasons": [c.finish_reason for c in branches],
        "masked": [c.sampled is not None for c in branches],
        "lengths": np.array([len(c.token_ids) for c in branches], dtype=np.int64),
        "sampled": joined(masks) if masks else flags([]),
        "own_prompts": own,
        "prompt_lengths": np.array([len(ids) for ids in prompts], dtype=np.int64),
        "prompt_ids": joined(prompts) if prompts else whole_numbers([]),
        **pictures_to_wire([(c.pictures, prompt.pictures) for prompt, _, c in shown]),
        **_kept_to_wire([c.kept_ids for c in branches]),
        **({name: joined([getattr(c, name) for c in branches]) for name in _COLUMNS} if branches else {}),
    }


def groups_from_wire(data: Mapping[str, Any], prompts: Sequence[Prompt]) -> list[RolloutGroup]:
    """The groups of these prompts, in their order.

    Raises:
        ProofError: the data belongs to other prompts, or does not have one value per token.
    """
    known = {prompt.prompt_id: prompt for prompt in prompts}
    names = [name for name, _ in data["prompts"]]
    if sorted(names) != sorted(known) or len(known) != len(prompts):
        raise ProofError(
            "keys",
            "rollouts arrived for other prompts than those of this rank",
            "the ranks do not read the same data in the same order",
            "give every rank the same dataset, seed and configuration",
        )
    try:
        rollouts = list(_rollouts(data, [known[name] for name, size in data["prompts"] for _ in range(size)]))
    except ValueError as error:
        raise ProofError(
            "keys",
            f"rollouts have come whose parts do not fit each other ({error})",
            "the ranks run different versions of Lockstep",
            "install the same version for every rank; otherwise this is a defect of Lockstep: report it",
        ) from error
    left = iter(rollouts)
    of = {name: tuple(itertools.islice(left, size)) for name, size in data["prompts"]}
    return [RolloutGroup(prompt, of[prompt.prompt_id]) for prompt in prompts]


def _kept_to_wire(kept: Sequence[KeptIds | None]) -> dict[str, Any]:
    """The number of sets of each completion (None: it has none), and all sets, one after the other."""
    found = [sets for sets in kept if sets is not None]
    whole = joined_kept_ids(found) if found else None
    return {
        "sets": [None if sets is None else len(sets) for sets in kept],
        "kept_ids": small_ids([]) if whole is None else whole.ids,
        "kept_ends": whole_numbers([]) if whole is None else whole.ends,
    }


def _kept_from_wire(data: Mapping[str, Any]) -> Iterator[KeptIds | None]:
    """The sets of each completion, in order."""
    whole, end = KeptIds(data["kept_ids"], data["kept_ends"]), 0
    if sum(count or 0 for count in data["sets"]) != len(whole):
        raise ValueError(f"{len(whole)} sets of kept ids")
    for count in data["sets"]:
        yield None if count is None else whole.part(end, end + count)
        end += count or 0


def _rollouts(data: Mapping[str, Any], prompts: Sequence[Prompt]) -> Iterator[Rollout]:
    """One rollout per entry of `prompts`, in which each prompt is repeated once per rollout."""
    if not prompts:
        return
    lengths, masked = data["lengths"], np.array(data["masked"], dtype=np.bool_)
    masks = iter(cut(data["sampled"], lengths[masked]))
    own_prompts = iter(cut(data["prompt_ids"], data["prompt_lengths"]))
    columns = zip(*(cut(data[name], lengths) for name in _COLUMNS), strict=True)
    owns = [p.pictures for p, count in zip(prompts, data["branches"], strict=True) for _ in range(count)]
    rest = zip(masked.tolist(), _kept_from_wire(data), pictures_from_wire(data, owns), columns, strict=True)
    branches = zip(data["calls"], data["finish_reasons"], data["own_prompts"], rest, strict=True)
    names = ("samples", "texts", "turns", "notes", "seals", "branches")
    entries = zip(prompts, *(data[name] for name in names), strict=True)
    for prompt, sample, text, turns, notes, seal, count in entries:
        own: list[Completion] = []
        for call, reason, has_prompt, more in itertools.islice(branches, count):
            has_mask, sets, shown, (ids, logprobs, versions) = more
            before, mask = next(own_prompts) if has_prompt else prompt.ids, next(masks) if has_mask else None
            key = RequestKey(prompt.prompt_id, sample, call)
            own.append(Completion(key, before, ids, logprobs, versions, reason, mask, sets, shown))
        ends, further = tuple(TurnEnd(*turn) for turn in turns), tuple(own[1:])
        yield Rollout(own[0], text, further=further, turns=ends, notes=notes, seal=_seal_from(seal))
    if next(branches, None) is not None:
        raise ValueError("there are more branches than the rollouts have")


def _seal_from(data: Any) -> Seal | None:
    return data and Seal(data[0], {name: (ids, logps) for name, (ids, logps) in data[1].items()})


def scores_to_wire(groups: Sequence[RolloutGroup]) -> dict[str, dict[str, Any]]:
    """Scores, reward and extras of each rollout, by its key; an `InputError` if an extra cannot be sent."""
    found = {
        str(r.key): {"scores": dict(r.scores), "reward": r.reward, "extra": dict(r.extra)}
        for group in groups
        for r in group.rollouts
    }
    _check_json(found, "log_extra")
    return found


def scores_from_wire(data: Sequence[Mapping[str, Any]], groups: Sequence[RolloutGroup]) -> list[RolloutGroup]:
    """The groups with the scores from all ranks.

    Raises:
        ProofError: a rollout was scored on no rank, or on several.
    """
    found = {name: scored for part in data for name, scored in part.items()}
    names = sorted(str(r.key) for group in groups for r in group.rollouts)
    if sorted(name for part in data for name in part) != names:
        raise ProofError(
            "keys",
            f"{len(found)} scores arrived for {len(names)} rollouts",
            "the ranks disagree on which rank scores which rollouts",
            "this is a defect of Lockstep: report it",
        )
    return [replace(g, rollouts=tuple(replace(r, **found[str(r.key)]) for r in g.rollouts)) for g in groups]


def _check_json(values: Any, what: str) -> None:
    try:
        json.dumps(values)
    except (TypeError, ValueError) as error:
        kinds = "numbers, text, lists or mappings of these"
        raise InputError(f"{what}: with several processes, values must be {kinds} ({error})") from error


_NAMES = ("int64", "int32", "float32", "float64", "bool")
_DTYPES = {name: np.dtype(name).newbyteorder("<") for name in _NAMES}
# The header's length comes before the header. Arrays also begin at multiples of this size, so that they need no copy.
_WORD = 8


def encode(value: Any) -> bytearray:
    """The bytes of JSON types and numpy arrays, nested to any depth. Tuples arrive as lists, numbers exactly.

    Raises:
        TypeError, ValueError: the value contains another type.
    """
    arrays: list[np.ndarray] = []
    tag, body = "array", _dumped(value, "array", arrays)
    # A mapping in the value may have the same key.
    while body.count(json.dumps(tag)) != len(arrays):
        arrays, tag = [], f"{tag}'"
        body = _dumped(value, tag, arrays)
    entries: list[tuple[str, list[int], int]] = []
    offset = 0
    for array in arrays:
        entries.append((array.dtype.name, list(array.shape), offset))
        offset += _whole_words(array.nbytes)
    header = f'{{"tag": {json.dumps(tag)}, "arrays": {json.dumps(entries)}, "value": {body}}}'.encode()
    start = _WORD + _whole_words(len(header))
    frame = bytearray(start + offset)
    frame[:_WORD] = len(header).to_bytes(_WORD, "little")
    frame[_WORD : _WORD + len(header)] = header
    for array, (_, _, place) in zip(arrays, entries, strict=True):
        little = np.ascontiguousarray(array, _DTYPES[array.dtype.name])
        frame[start + place : start + place + array.nbytes] = little.reshape(-1).view(np.uint8).data
    return frame


def decode(frame: bytes | bytearray | memoryview | np.ndarray) -> Any:
    """The value that was given to `encode`. Its arrays are read-only views of `frame`.

    Raises:
        LockstepError: the bytes are not a complete frame of `encode`, or their length has changed.
    """
    try:
        return _decoded(memoryview(frame).toreadonly())  # type: ignore[arg-type]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise LockstepError(
            f"a message between ranks is malformed ({str(error)[:200]}): every rank must run the same version "
            f"of Lockstep"
        ) from error


def _dumped(value: Any, tag: str, arrays: list[np.ndarray]) -> str:
    def placeholder(found: Any) -> dict[str, int]:
        if not isinstance(found, np.ndarray) or found.dtype.name not in _DTYPES:
            kind = f"an array of {found.dtype}" if isinstance(found, np.ndarray) else type(found).__name__
            raise TypeError(f"{kind} cannot be sent to another rank")
        arrays.append(found)
        return {tag: len(arrays) - 1}

    return json.dumps(value, default=placeholder)


def _decoded(frame: memoryview) -> Any:
    length = int.from_bytes(frame[:_WORD], "little")
    start = _WORD + _whole_words(length)
    if len(frame) < start:
        raise ValueError(f"a header of {length} bytes in a message of {len(frame)}")
    text = frame[_WORD : _WORD + length].tobytes().decode()
    # First without the arrays: the name of the placeholders is part of the header.
    outline = json.loads(text)
    if not isinstance(outline, dict) or outline.keys() != {"tag", "arrays", "value"}:
        raise ValueError("the header has other parts than it should")
    arrays, end = [], 0
    for name, shape, offset in outline["arrays"]:
        array = _array(frame[start:], name, shape, offset, end)
        arrays.append(array)
        end += _whole_words(array.nbytes)
    if len(frame) != start + end:
        raise ValueError(f"{len(frame)} bytes instead of {start + end}")
    if not arrays:
        return outline["value"]
    left = dict(enumerate(arrays))

    def filled_in(found: dict[str, Any]) -> Any:
        return left.pop(found[outline["tag"]]) if found.keys() == {outline["tag"]} else found

    value = json.loads(text, object_hook=filled_in)["value"]
    if left:
        raise ValueError(f"{len(left)} arrays have no place")
    return value


def _array(data: memoryview, name: Any, shape: Any, offset: Any, expected: int) -> np.ndarray:
    fits = all(type(size) is int and size >= 0 for size in [*shape, offset])
    if name not in _DTYPES or offset != expected or not fits:
        raise ValueError(f"an array of {name!r:.40} {shape!r:.40} at {offset!r:.40}")
    count = math.prod(shape)
    found = np.frombuffer(data, _DTYPES[name], count, offset) if count else np.empty(0, _DTYPES[name])
    if name == "bool" and count and found.view(np.uint8).max() > 1:
        raise ValueError("a mask with values that are neither 0 nor 1")
    found.flags.writeable = False
    return found.reshape(shape)


def _whole_words(size: int) -> int:
    return -(-size // _WORD) * _WORD
