"""Bounds of JSON that others have written: a client of the gateway, or the model in a tool call.

Python's own reader takes values that fail later, in a chat template, in a file or in an answer.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any

# Levels of brackets. Chat templates and copies need several calls of Python per level, and Python allows 1000 in all.
_DEEPEST = 100


def read_json(text: str | bytes) -> Any:
    """The value of a JSON text.

    Raises:
        ValueError: it is no JSON, or `check_json` refuses it.
    """
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    check_json(value)
    return value


def check_json(value: Any) -> None:
    """Check a value that JSON was read to.

    Raises:
        ValueError: it is nested too deeply, or has a number that JSON cannot represent.
    """
    level = [value]
    for _ in range(_DEEPEST):
        inside: list[Any] = []
        for one in level:
            if isinstance(one, dict):
                inside += one.values()
            elif isinstance(one, list):
                inside += one
            elif isinstance(one, float) and not math.isfinite(one):
                # 1e999 is a number of JSON, and no float.
                raise ValueError("it has a number that is too large, or none at all")
        if not inside:
            return
        level = inside
    raise ValueError(_TOO_DEEP)


def is_whole(text: str) -> bool:
    """Whether a text has no half of a character: a surrogate without its pair, which no file and no tokenizer takes."""
    return text.isascii() or not _HALF.search(text)


def whole_characters(value: Any) -> Any:
    """A value that JSON was read to, with U+FFFD in place of each half of a character. It is not nested too deeply."""
    if isinstance(value, str):
        return value if is_whole(value) else _HALF.sub("\ufffd", value)
    if isinstance(value, dict):
        return {whole_characters(key): whole_characters(inside) for key, inside in value.items()}
    if isinstance(value, list):
        return [whole_characters(inside) for inside in value]
    return value


_HALF = re.compile("[\ud800-\udfff]")
_TOO_DEEP = f"it has more than {_DEEPEST} brackets inside each other"
