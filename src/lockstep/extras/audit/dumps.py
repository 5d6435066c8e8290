"""Reads rollouts that other programs have written: JSON Lines, JSON, Parquet, or the directory of a Lockstep run.

Each program names its columns in its own way (`FORMATS`). Padding is removed here, so that what follows sees prompt
ids, completion ids and one log-prob per sampled id.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lockstep.errors import InputError, one_line, reason
from lockstep.files import check_regular, from_json, read_json, what_is_at
from lockstep.report.page.kinds import Kind, a_count, a_number, list_of, one_of, or_none


@dataclass(frozen=True, slots=True)
class AuditedRollout:
    """One rollout.

    Attributes:
        name: where it stands in the file.
        prompt_ids: P ids.
        completion_ids: C ids.
        sampled: (C,) bool; the other ids were inserted (results of tools, turns of the user).
        logprobs: (C,) the log-probs that the engine reported; NaN where there is none.
        temperature: the temperature that the row names; None if it names none.
    """

    name: str
    prompt_ids: list[int]
    completion_ids: list[int]
    sampled: NDArray[np.bool_]
    logprobs: NDArray[np.float64]
    temperature: float | None = None

    @property
    def tokens(self) -> int:
        """Number of sampled ids."""
        return int(self.sampled.sum())


Row = Mapping[str, Any]


def read_dump(path: Path) -> list[AuditedRollout]:
    """Every rollout of a file or directory. Refuses a row that lacks a column, or whose columns do not fit together."""
    found = []
    for number, row in enumerate(_rows(path)):
        name = f"{path.name}, row {number}"
        try:
            found.append(_read(name, row))
        except (TypeError, ValueError, KeyError, OverflowError) as error:
            raise InputError(f"{name}: {one_line(error)[:300]}") from error
    if not found:
        raise InputError(f"{path} holds no rollouts")
    return found


# ---- the columns of each program ---------------------------------------------------------------------------------


# A log-prob may be NaN or infinite: `findings.py` says so.
_a_value = or_none(one_of(int, float, bool))


def _column(row: Row, name: str, kind: Kind) -> list[Any]:
    """A column of a row, of which every entry must be of a kind.

    Raises:
        KeyError: there is no such column.
        ValueError: an entry is of another kind.
    """
    wrong = list_of(kind)(row[name])
    if wrong is not None:
        what = "ids" if kind is a_count else "numbers"
        raise ValueError(f"{name} is no list of {what} (entry {wrong or 0})")
    return list(row[name])


def _ids_and_logprobs(name: str, row: Row, logprobs: Sequence[str], masks: Sequence[str]) -> AuditedRollout:
    completion = _column(row, "completion_ids", a_count)
    mask = next((_column(row, m, _a_value) for m in masks if row.get(m) is not None), [1] * len(completion))
    found = next((_column(row, key, _a_value) for key in logprobs if row.get(key) is not None), None)
    if found is None:
        raise ValueError(f"it has no log-probs ({' or '.join(logprobs)})")
    return _whole(name, _column(row, "prompt_ids", a_count), completion, mask, found, _temperature(row))


def _lockstep_or_trl(name: str, row: Row) -> AuditedRollout:
    keys = ("logprobs", "sampling_per_token_logps", "old_per_token_logps")
    return _ids_and_logprobs(name, row, keys, ("sampled", "env_mask", "tool_mask", "completion_mask"))


def _prime_rl(name: str, row: Row) -> AuditedRollout:
    return _ids_and_logprobs(name, row, ("completion_logprobs",), ("completion_mask",))


def _verl(name: str, row: Row) -> AuditedRollout:
    prompts, responses = _column(row, "prompts", a_count), _column(row, "responses", a_count)
    real = None if row.get("attention_mask") is None else _column(row, "attention_mask", _a_value)
    if real is None or len(real) != len(prompts) + len(responses):
        raise ValueError("attention_mask must cover prompts and responses: it says which ids are padding")
    kept = np.asarray(real[len(prompts) :], dtype=bool)
    given = "response_mask" in row
    mask = np.asarray(_column(row, "response_mask", _a_value) if given else kept, dtype=bool)
    logprobs = np.asarray(_column(row, "rollout_log_probs", _a_value), dtype=float)
    if not len(kept) == len(mask) == len(logprobs):
        raise ValueError("responses, response_mask and rollout_log_probs must have the same length")
    prompt = [i for i, own in zip(prompts, real, strict=False) if own]
    completion = [i for i, own in zip(responses, kept, strict=True) if own]
    return _whole(name, prompt, completion, mask[kept], logprobs[kept], _temperature(row))


def _openrlhf(name: str, row: Row) -> AuditedRollout:
    ids = _column(row, "sequences", a_count)
    given = "attention_mask" in row
    real = np.asarray(_column(row, "attention_mask", _a_value) if given else [1] * len(ids), dtype=bool)
    # Both stand one place before their token, as the log-probs of a forward do.
    both = "action_mask", "rollout_log_probs"
    action, logprobs = (_at_tokens(_column(row, key, _a_value), len(ids)) for key in both)
    if not len(ids) == len(real) == len(action) == len(logprobs):
        raise ValueError(
            "sequences, attention_mask, action_mask and rollout_log_probs must have the same length"
        )
    mask = action[real] > 0
    kept, logprobs = [i for i, own in zip(ids, real, strict=True) if own], logprobs[real]
    if not mask.any():
        raise ValueError("action_mask names no sampled id")
    first = int(np.argmax(mask))
    return _whole(name, kept[:first], kept[first:], mask[first:], logprobs[first:], _temperature(row))


def _at_tokens(values: Sequence[float], tokens: int) -> NDArray[np.float64]:
    found = np.asarray(values, dtype=float)
    return np.concatenate([[0.0], found]) if len(found) == tokens - 1 else found


# Which columns tell a program's rows, and what reads them. The first that fits is used.
FORMATS: dict[str, tuple[tuple[str, ...], Callable[[str, Row], AuditedRollout]]] = {
    "OpenRLHF": (("sequences", "action_mask", "rollout_log_probs"), _openrlhf),
    "verl": (("prompts", "responses", "rollout_log_probs"), _verl),
    "prime-rl": (("prompt_ids", "completion_ids", "completion_logprobs"), _prime_rl),
    "Lockstep or TRL": (("prompt_ids", "completion_ids"), _lockstep_or_trl),
}


def _read(name: str, row: Row) -> AuditedRollout:
    if not isinstance(row, Mapping):
        raise ValueError(f"it is a {type(row).__name__}, and must be a mapping from columns to values")
    for columns, reader in FORMATS.values():
        if all(row.get(column) is not None for column in columns):
            return reader(name, row)
    needed = "; ".join(f"{program}: {', '.join(columns)}" for program, (columns, _) in FORMATS.items())
    found = ", ".join(map(str, row))[:150] or "none"
    raise InputError(f"{name} has the columns {found}, which are of no known program ({needed})")


def _whole(
    name: str, prompt: list[int], completion: list[int], mask: Any, logprobs: Any, temperature: float | None
) -> AuditedRollout:
    values = np.array([np.nan if value is None else float(value) for value in logprobs], dtype=float)
    sampled = np.asarray(mask, dtype=bool)
    if not len(completion) == len(sampled) == len(values):
        counts = f"{len(completion)} completion ids, {len(sampled)} mask values and {len(values)} log-probs"
        raise ValueError(counts)
    if not prompt:
        raise ValueError("its prompt has no ids")
    return AuditedRollout(name, prompt, completion, sampled, values, temperature)


def _temperature(row: Row) -> float | None:
    value = row.get("temperature")
    if value is None:
        return None
    if a_number(value) is not None or value <= 0:
        raise ValueError(f"temperature is {str(value)[:40]}; it must be a number above 0")
    return float(value)


# ---- files -------------------------------------------------------------------------------------------------------


def _rows(path: Path) -> Iterator[Row]:
    if path.is_dir():
        path = path / "rollouts" if (path / "rollouts").is_dir() else path
        files = sorted(path.glob("*.parquet"))
        if not files:
            raise InputError(f"{path} holds no Parquet files with rollouts")
        for file in files:
            yield from _rows(file)
        return
    if not path.exists():
        raise InputError(f"{path} {what_is_at(path)}")
    try:
        if path.suffix == ".parquet":
            import pyarrow.parquet as pq

            check_regular(path)
            for batch in pq.ParquetFile(path).iter_batches(256):
                yield from batch.to_pylist()
        elif path.suffix == ".json":
            yield from _of_json(read_json(path))
        else:
            # Not `splitlines`: a text may contain other ends of lines than "\n", such as U+2028.
            with path.open(encoding="utf-8", newline="\n") as lines:
                yield from (from_json(line) for line in lines if line.strip())
    except (ValueError, OSError) as error:
        raise InputError(f"{path} cannot be read: {reason(error)[:300]}") from error


def _of_json(content: Any) -> Iterator[Row]:
    """The rows of a list of rows, or of a mapping from columns to lists (what a `rollout_func` of TRL returns)."""
    columns = content.values() if isinstance(content, dict) else ()
    if isinstance(content, list):
        yield from content
    elif columns and all(isinstance(column, list) for column in columns):
        for values in zip(*content.values(), strict=True):
            yield dict(zip(content, values, strict=True))
    else:
        raise ValueError("it must be a list of rows, or a mapping from columns to lists of the same length")
