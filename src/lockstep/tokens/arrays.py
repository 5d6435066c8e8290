"""One value for each token: one-dimensional numpy arrays that nobody changes.

Every sequence of token ids, log-probs, versions or masks is such an array from an engine's answer to the loss. Ids and versions are
int64. Log-probs and all other reals are float32: engines and the trainer's forward compute them in it, and a Python float, JSON
and float64 hold each of its values exactly. Sums over tokens are taken in float64. An array that is read-only already is kept as
it is and never copied; anything else is copied once, so that whoever gave it cannot change it afterwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import numpy as np
import numpy.typing as npt

from lockstep.errors import LockstepError

Ids = npt.NDArray[np.int64]
Reals = npt.NDArray[np.float32]
Flags = npt.NDArray[np.bool_]
# What a constructor takes for one of them.
Values = npt.NDArray[Any] | Sequence[Any]


class BadValues(LockstepError, ValueError):
    """Values that are not of the kind that was asked for."""


def whole_numbers(values: Values) -> Ids:
    """(N,) int64, read-only.

    Raises:
        BadValues: a value is no integer, or does not fit; nothing is rounded and no text is read as a number.
    """
    return _held(values, np.dtype(np.int64), "iu")


def reals(values: Values) -> Reals:
    """(N,) float32, read-only; a number that is too large for it becomes infinite.

    Raises:
        BadValues: a value is no number (None among them).
    """
    return _held(values, np.dtype(np.float32), "fiu")


def flags(values: Values) -> Flags:
    """(N,) bool, read-only.

    Raises:
        BadValues: a value is neither True nor False.
    """
    return _held(values, np.dtype(np.bool_), "b")


def filled(value: float, count: int) -> Reals:
    """(count,) float32, read-only: one value for each token."""
    return _frozen(np.full(count, value, np.float32))


def joined(parts: Sequence[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    """Arrays of one dtype, one after the other, read-only. There must be at least one."""
    return parts[0] if len(parts) == 1 else _frozen(np.concatenate(parts))


def cut(values: npt.NDArray[Any], lengths: Sequence[int] | npt.NDArray[Any]) -> list[npt.NDArray[Any]]:
    """The parts of these lengths, in their order: read-only views where `values` is read-only.

    Raises:
        ValueError: the lengths do not add up to those of `values`.
    """
    ends = np.cumsum(np.asarray(lengths, dtype=np.int64))
    if (int(ends[-1]) if len(ends) else 0) != len(values):
        raise ValueError(f"{len(values)} values are cut into parts of {int(ends[-1]) if len(ends) else 0}")
    starts = (ends - np.asarray(lengths, dtype=np.int64)).tolist()
    return [values[start:end] for start, end in zip(starts, ends.tolist(), strict=True)]


def places_of(sampled: Flags | None, length: int) -> Ids:
    """Where a mask over so many tokens is true; everywhere where there is none."""
    return np.arange(length) if sampled is None else np.flatnonzero(sampled)


def chosen(values: npt.NDArray[Any], sampled: Flags | None) -> npt.NDArray[Any]:
    """The values at which a mask is true, read-only; all of them where there is none."""
    return values if sampled is None else _frozen(values[sampled])


class ArrayFields:
    """For dataclasses that hold arrays: two are equal if all of their fields are. Such an object cannot be hashed."""

    __slots__ = ()
    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        if type(self) is not type(other):
            return NotImplemented
        return all(_equal(getattr(self, f.name), getattr(other, f.name)) for f in fields(self))  # type: ignore[arg-type]

    def _set(self, name: str, value: Any) -> None:
        """Set a field of a frozen dataclass while it is made."""
        object.__setattr__(self, name, value)


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        return one is other or np.array_equal(one, other)
    if isinstance(one, np.ndarray) or isinstance(other, np.ndarray):
        return False
    return bool(one == other)


def _held(values: Values, dtype: np.dtype[Any], kinds: str) -> npt.NDArray[Any]:
    if type(values) is np.ndarray and values.dtype == dtype and values.ndim == 1 and not values.flags.writeable:
        return values
    try:
        found = np.array(values)
    except (ValueError, TypeError, OverflowError) as error:
        raise BadValues(f"{values!r:.80} is no sequence of {dtype} values") from error
    if found.ndim == 1 and len(found) == 0:
        return _frozen(np.empty(0, dtype))
    if found.ndim != 1 or found.dtype.kind not in kinds or (found.dtype == np.uint64 and dtype != np.float32):
        raise BadValues(f"{values!r:.80} is no sequence of {dtype} values")
    with np.errstate(over="ignore"):
        return _frozen(found.astype(dtype, copy=False))


def _frozen(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    array.flags.writeable = False
    return array
