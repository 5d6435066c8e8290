"""Converts values of JSON types and arrays to bytes and back: a JSON header, then the memory of each array.

No pickle is involved. The header has the dtype, shape and offset of each array. Only a few dtypes are allowed. If the
length of the bytes does not match the header exactly, `decode` refuses them.
"""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np

from lockstep.errors import LockstepError

_DTYPES = {name: np.dtype(name).newbyteorder("<") for name in ("int64", "int32", "float32", "float64", "bool")}
# The header's length comes before the header. Arrays also begin at multiples of this size, so that they need no copy.
_WORD = 8


def encode(value: Any) -> bytearray:
    """The bytes of a value.

    Args:
        value: JSON types and numpy arrays, nested to any depth. Tuples arrive as lists. Numbers arrive exactly.

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
            f"a message between ranks is malformed ({str(error)[:200]}): every rank must run the same version of Lockstep"
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
    sizes = [*shape, offset]
    if name not in _DTYPES or offset != expected or not all(type(size) is int and size >= 0 for size in sizes):
        raise ValueError(f"an array of {name!r:.40} {shape!r:.40} at {offset!r:.40}")
    count = math.prod(shape)
    found = np.frombuffer(data, _DTYPES[name], count, offset) if count else np.empty(0, _DTYPES[name])
    if name == "bool" and count and found.view(np.uint8).max() > 1:
        raise ValueError("a mask with values that are neither 0 nor 1")
    found.flags.writeable = False
    return found.reshape(shape)


def _whole_words(size: int) -> int:
    return -(-size // _WORD) * _WORD
