"""Arrays with one value per token, their digests, and the ids that a sampling filter kept.

All token ids, log-probs, versions and masks are read-only, one-dimensional numpy arrays, from an engine's answer to the
loss. Ids and versions are int64. Log-probs and all other real numbers are float32, because engines and the trainer's
forward compute them in float32. Python floats, JSON and float64 represent each float32 value exactly. Sums over tokens
use float64. A read-only array is kept without a copy. Other values are copied once, so that the caller cannot change
them afterwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from lockstep.errors import LockstepError

Ids = npt.NDArray[np.int64]
SmallIds = npt.NDArray[np.int32]
Reals = npt.NDArray[np.float32]
Flags = npt.NDArray[np.bool_]
# The values that a constructor accepts for such an array.
Values = npt.NDArray[Any] | Sequence[Any]


class BadValues(LockstepError, ValueError):
    """The values have another type or shape than required."""


def whole_numbers(values: Values) -> Ids:
    """The values as (N,) int64, read-only.

    Raises:
        BadValues: a value is not an integer, or does not fit into int64. Values are not rounded, and no text is read.
    """
    return _checked(values, np.dtype(np.int64), "iu")


def small_ids(values: Values) -> SmallIds:
    """The values as (M,) int32, read-only, for lists with many ids per token. Raises as `whole_numbers`."""
    if type(values) is np.ndarray and values.dtype == np.int32:
        return _checked(values, np.dtype(np.int32), "i")
    wide = whole_numbers(values)
    if len(wide) and not (np.iinfo(np.int32).min <= wide.min() and wide.max() <= np.iinfo(np.int32).max):
        raise BadValues(f"{values!r:.80} has a token id that does not fit into int32")
    return _frozen(wide.astype(np.int32))


def reals(values: Values) -> Reals:
    """The values as (N,) float32, read-only; a `BadValues` for what is no number. Too large ones become infinite."""
    return _checked(values, np.dtype(np.float32), "fiu")


def flags(values: Values) -> Flags:
    """The values as (N,) bool, read-only; a `BadValues` for what is neither True nor False."""
    return _checked(values, np.dtype(np.bool_), "b")


def filled(value: float, count: int) -> Reals:
    """(count,) float32, read-only: the same value for each token."""
    return _frozen(np.full(count, value, np.float32))


def joined(parts: Sequence[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    """Arrays of one dtype, concatenated, read-only. There must be at least one array."""
    return parts[0] if len(parts) == 1 else _frozen(np.concatenate(parts))


def cut(values: npt.NDArray[Any], lengths: Sequence[int] | npt.NDArray[Any]) -> list[npt.NDArray[Any]]:
    """Views of `values` with these lengths, in order; a `ValueError` if they do not add up to that of `values`."""
    sizes = np.asarray(lengths, dtype=np.int64)
    ends, whole = np.cumsum(sizes), int(sizes.sum())
    if whole != len(values):
        raise ValueError(f"{len(values)} values are cut into parts of {whole}")
    return [values[start:end] for start, end in zip((ends - sizes).tolist(), ends.tolist(), strict=True)]


def places_of(sampled: Flags | None, length: int) -> Ids:
    """Positions at which a mask over `length` tokens is true. If there is no mask, all positions."""
    return np.arange(length) if sampled is None else np.flatnonzero(sampled)


def chosen(values: npt.NDArray[Any], sampled: Flags | None) -> npt.NDArray[Any]:
    """Values at the positions at which a mask is true, read-only. If there is no mask, all values."""
    return values if sampled is None else _frozen(values[sampled])


class ArrayFields:
    """Base of dataclasses with arrays. Two objects are equal if all their fields are equal. They cannot be hashed."""

    __slots__ = ()
    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        if type(self) is not type(other):
            return NotImplemented
        return all(_equal(getattr(self, f.name), getattr(other, f.name)) for f in fields(self))  # type: ignore[arg-type]

    def _set(self, name: str, value: Any) -> None:
        """Set a field of a frozen dataclass during its construction."""
        object.__setattr__(self, name, value)


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        return one is other or np.array_equal(one, other)
    if isinstance(one, np.ndarray) or isinstance(other, np.ndarray):
        return False
    return bool(one == other)


def _checked(values: Values, dtype: np.dtype[Any], kinds: str) -> npt.NDArray[Any]:
    if (
        type(values) is np.ndarray
        and values.dtype == dtype
        and values.ndim == 1
        and not values.flags.writeable
    ):
        return values
    try:
        found = np.array(values)
    except (ValueError, TypeError, OverflowError) as error:
        raise BadValues(f"{values!r:.80} is not a sequence of {dtype} values") from error
    if found.ndim == 1 and len(found) == 0:
        return _frozen(np.empty(0, dtype))
    if found.ndim != 1 or found.dtype.kind not in kinds or (found.dtype == np.uint64 and dtype != np.float32):
        raise BadValues(f"{values!r:.80} is not a sequence of {dtype} values")
    with np.errstate(over="ignore"):
        return _frozen(found.astype(dtype, copy=False))


def _frozen(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    array.flags.writeable = False
    return array


def digest_of(*parts: str | npt.NDArray[Any]) -> str:
    """Hex xxh3-128 of texts and arrays in their order, and of the number of bytes of each.

    It costs about as much as reading the memory once. It finds faults, and does not protect against forgery.
    """
    digest = xxhash.xxh3_128()
    for part in parts:
        # xxhash reads the memory of an array itself, without a copy.
        data = memoryview(part.encode()) if isinstance(part, str) else np.ascontiguousarray(part).data
        digest.update(data.nbytes.to_bytes(8, "little"))
        digest.update(data)
    return digest.hexdigest()


@dataclass(frozen=True, slots=True, eq=False)
class KeptIds(ArrayFields):
    """The ids that a sampling filter (top-k, top-p, min-p) of the engine kept: one set for each of N sampled tokens.

    The trainer does not compute the filter itself, because rounding could keep an id on one machine and remove it on
    another. It scores each sampled token among the engine's ids.

    Attributes:
        ids: (M,) int32, read-only: the ids of all sets, one set after the other, ascending within each set.
        ends: (N,) int64, read-only: the position in `ids` at which each set ends. The first set begins at 0.

    Raises:
        BadValues: a value is not an integer, the ends decrease, or the last end is not M.
    """

    ids: SmallIds
    ends: Ids

    def __post_init__(self) -> None:
        self._set("ids", small_ids(self.ids))
        self._set("ends", whole_numbers(self.ends))
        last = int(self.ends[-1]) if len(self.ends) else 0
        if last != len(self.ids) or (self.sizes < 0).any():
            raise BadValues(f"{len(self.ids)} kept ids do not fit {len(self.ends)} sets")

    def __len__(self) -> int:
        """N: number of sets."""
        return len(self.ends)

    @property
    def sizes(self) -> Ids:
        """(N,) number of ids in each set."""
        return np.diff(self.ends, prepend=0)

    @property
    def tokens(self) -> Ids:
        """(M,) for each id, the index of the token (from 0 to N - 1) to whose set it belongs."""
        return np.repeat(np.arange(len(self)), self.sizes)

    def part(self, start: int, end: int) -> KeptIds:
        """The sets of the tokens from `start` up to `end`, without `end`."""
        first = int(self.ends[start - 1]) if start else 0
        last = int(self.ends[end - 1]) if end > start else first
        return KeptIds(self.ids[first:last], self.ends[start:end] - first)

    def where(self, chosen: Flags) -> KeptIds:
        """The sets of the tokens at which a mask over the N tokens is true."""
        return KeptIds(self.ids[np.repeat(chosen, self.sizes)], np.cumsum(self.sizes[chosen]))


def joined_kept_ids(parts: Sequence[KeptIds]) -> KeptIds:
    """The sets of all parts, in order. There must be at least one part."""
    offsets = np.cumsum([0, *(len(part.ids) for part in parts[:-1])]).tolist()
    ends = [part.ends + offset for part, offset in zip(parts, offsets, strict=True)]
    return KeptIds(joined([part.ids for part in parts]), joined(ends))
