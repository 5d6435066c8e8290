"""Read-only, one-dimensional numpy arrays with one value per token.

All token ids, log-probs, versions and masks are such arrays, from an engine's answer to the loss. Ids and versions are int64.
Log-probs and all other real numbers are float32, because engines and the trainer's forward compute them in float32. Python floats,
JSON and float64 represent each float32 value exactly. Sums over tokens use float64. A read-only array is kept without a copy. Other
values are copied once, so that the caller cannot change them afterwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import numpy as np
import numpy.typing as npt

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
        BadValues: a value is not an integer, or does not fit into int64. Values are not rounded, and text is not read as a number.
    """
    return _checked(values, np.dtype(np.int64), "iu")


def small_ids(values: Values) -> SmallIds:
    """The values as (M,) int32, read-only. It is for lists with many ids per token, to save memory.

    Raises:
        BadValues: a value is not an integer, or does not fit into int32.
    """
    if type(values) is np.ndarray and values.dtype == np.int32:
        return _checked(values, np.dtype(np.int32), "i")
    wide = whole_numbers(values)
    if len(wide) and not (np.iinfo(np.int32).min <= wide.min() and wide.max() <= np.iinfo(np.int32).max):
        raise BadValues(f"{values!r:.80} has a token id that does not fit into int32")
    return _frozen(wide.astype(np.int32))


def reals(values: Values) -> Reals:
    """The values as (N,) float32, read-only. A number that is too large for float32 becomes infinite.

    Raises:
        BadValues: a value is not a number (for example None).
    """
    return _checked(values, np.dtype(np.float32), "fiu")


def flags(values: Values) -> Flags:
    """The values as (N,) bool, read-only.

    Raises:
        BadValues: a value is neither True nor False.
    """
    return _checked(values, np.dtype(np.bool_), "b")


def filled(value: float, count: int) -> Reals:
    """(count,) float32, read-only: the same value for each token."""
    return _frozen(np.full(count, value, np.float32))


def joined(parts: Sequence[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    """Arrays of one dtype, concatenated, read-only. There must be at least one array."""
    return parts[0] if len(parts) == 1 else _frozen(np.concatenate(parts))


def cut(values: npt.NDArray[Any], lengths: Sequence[int] | npt.NDArray[Any]) -> list[npt.NDArray[Any]]:
    """Split `values` into parts of these lengths, in order. The parts are views; they are read-only if `values` is.

    Raises:
        ValueError: the sum of the lengths is not the length of `values`.
    """
    ends = np.cumsum(np.asarray(lengths, dtype=np.int64))
    if (int(ends[-1]) if len(ends) else 0) != len(values):
        raise ValueError(f"{len(values)} values are cut into parts of {int(ends[-1]) if len(ends) else 0}")
    starts = (ends - np.asarray(lengths, dtype=np.int64)).tolist()
    return [values[start:end] for start, end in zip(starts, ends.tolist(), strict=True)]


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
    if type(values) is np.ndarray and values.dtype == dtype and values.ndim == 1 and not values.flags.writeable:
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
