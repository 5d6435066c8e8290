"""The proof of a run's inputs: its data, reward functions, settings and model files are those with which it began.

A run writes their digests into the receipt's first line (`watch/engine.py`). A resumed run compares them before it
loads anything.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import xxhash

from lockstep.errors import InputError
from lockstep.images.pictures import PromptPictures
from lockstep.watch.model_inputs import changed_meaning
from lockstep.watch.surroundings import same_readers

_logger = logging.getLogger(__name__)

_NAMED = 5


class Row(Protocol):
    """A prompt with the row that it was made of."""

    @property
    def prompt_id(self) -> str: ...
    @property
    def ids(self) -> Any: ...
    @property
    def source(self) -> Any: ...
    @property
    def columns(self) -> Mapping[str, Any]: ...
    @property
    def pictures(self) -> PromptPictures | None: ...


def data_digest(rows: Iterable[Row]) -> str:
    """Hex digest of prompts in their order: names, token ids, and every column that reward functions can read."""
    digest = xxhash.xxh3_128()
    for row in rows:
        digest.update(row.prompt_id.encode())
        digest.update(row.ids.tobytes())
        digest.update(json.dumps([row.source, dict(row.columns)], default=_text, sort_keys=True).encode())
        if row.pictures is not None:
            digest.update("".join(row.pictures.digests).encode())
    return digest.hexdigest()


def _text(value: Any) -> str:
    # The text of a PIL image has its address. The digests of the processed pictures stand beside it.
    return "picture" if type(value).__module__.startswith("PIL.") else repr(value)


def changed_digests(earlier: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Names whose digests differ, or that only one of the two has."""
    return sorted(name for name in earlier.keys() | now.keys() if earlier.get(name) != now.get(name))


def changed_inputs(earlier: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What of a run's data, code and model differs from the start before, in words.

    Args:
        earlier, now: the inputs of a run, as its receipt has them. An older Lockstep has digested code in
            another way, and no model.
    """
    changed = changed_digests(earlier["data"], now["data"])
    if "model" not in earlier:
        _logger.warning("an older Lockstep began this run; its code and its model's files are not compared")
        return changed
    before, after = earlier["model"], now["model"]
    same = same_readers(earlier["surroundings"], now["surroundings"])
    return [
        *changed,
        *changed_digests(earlier["code"], now["code"]),
        *changed_digests(before["weights"], after["weights"]),
        *changed_meaning(before["files"], after["files"], same_libraries=same),
    ]


def check_inputs(changed: Sequence[str], *, accept: bool, hint: str = "") -> None:
    """Refuse to resume with other inputs, unless that is wanted.

    Args:
        changed: names of the inputs that have changed since the run was interrupted.
        accept: whether changed inputs are wanted.
        hint: what is known of the cause; empty, or a sentence with a space at its end.

    Raises:
        InputError: an input has changed, and `accept` is False.
    """
    if changed and not accept:
        more = f" and {len(changed) - _NAMED} more" if len(changed) > _NAMED else ""
        raise InputError(
            f"the run cannot go on as it began, because these have changed since: {', '.join(changed[:_NAMED])}{more}. {hint}Put "
            "the old ones back, set resume_with_changes=true to go on with the new ones (the receipt will say so), or give another "
            "output_dir to start from the beginning"
        )
