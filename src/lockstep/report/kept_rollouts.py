"""Reads the rollouts that a run keeps: one Parquet file per generation under `RUN/rollouts/`.

`read_rollouts` reads them. docs/reference/report.md describes every column. `datasets.load_dataset("parquet",
data_files="RUN/rollouts/*.parquet")` reads them too.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from lockstep.errors import InputError, one_line, reason
from lockstep.files import check_regular
from lockstep.report.page.kinds import Kind, a_prompt, mapping, messages, or_none

FOLDER = "rollouts"
# The key of a file's metadata under which the facts of its generation stand, as JSON.
FACTS = b"lockstep"
# Columns that are not read as they stand: arrays per token, and texts that are JSON.
PER_TOKEN = {
    "prompt_ids": np.dtype(np.int32),
    "completion_ids": np.dtype(np.int32),
    "sampled": np.dtype(np.bool_),
    "logprobs": np.dtype(np.float32),
    "policy_logprobs": np.dtype(np.float32),
    "weight_versions": np.dtype(np.int32),
    "advantages": np.dtype(np.float32),
}
JSON_COLUMNS: Mapping[str, Kind] = {
    "prompt": a_prompt, "messages": or_none(messages), "extra": or_none(mapping()),
}  # fmt: skip
# The types of the others.
_TYPES = {
    **dict.fromkeys(("step", "sample", "branch"), pa.types.is_integer),
    **dict.fromkeys(("prompt_id", "completion", "finish_reason", "failed"), pa.types.is_string),
    **dict.fromkeys(("advantage", "reward"), pa.types.is_floating),
    **dict.fromkeys(("finish_reasons", "turn_ends"), pa.types.is_list),
}
# The columns that have a value in every row.
_WHOLE = (
    "step", "sample", "branch", "prompt_id", "completion", "prompt", "prompt_ids", "completion_ids", "sampled",
    "logprobs", "weight_versions",
)  # fmt: skip
# The columns of scores begin so, as the metrics of reward functions do.
SCORE = "rewards/"


@dataclass(frozen=True, slots=True)
class KeptRollout:
    """One branch of a rollout. The branches of one rollout have the same prompt id and sample; most have one branch.

    The C ids of the completion are sampled ones, and inserted ones between them (results of tools, turns of the user).

    Attributes:
        step: the optimizer step that learned from the rollout first.
        prompt_id, sample: which prompt, and which of its rollouts.
        branch: index of the branch in its rollout.
        prompt: text, or messages.
        completion: the text of the whole rollout.
        messages: what was said after the prompt, in a conversation; else None.
        prompt_ids: (P,) int32.
        completion_ids: (C,) int32.
        sampled: (C,) bool; the other ids were inserted.
        logprobs: (C,) float32 natural-log probability of each sampled id, from the engine; 0 at inserted ids.
        policy_logprobs: (C,) float32, the same from the trainer's forward, before the policy changed. None: that
            forward was not made on the rank that wrote the file, or the tokens were left aside.
        weight_versions: (C,) int32, the version of the weights that sampled each id.
        advantages: (C,) float32; 0 at inserted ids. None: nothing could be learned from the rollout.
        advantage: mean advantage of the rollout's sampled ids; None if it has none.
        reward: weighted sum of the scores; None: there is none.
        scores: score per reward function, by name; None: the function gave none.
        extra: values that reward functions logged with `log_extra`.
        finish_reason: why the branch ended: `stop` or `length`.
        finish_reasons: the reason of each sampled turn of this branch; `turn_ends` are the numbers of completion ids
            up to the end of each.
        failed: why the rollout could not be finished; None if it was.
    """

    step: int
    prompt_id: str
    sample: int
    branch: int
    prompt: Any
    completion: str
    messages: list[dict[str, Any]] | None
    prompt_ids: npt.NDArray[np.int32]
    completion_ids: npt.NDArray[np.int32]
    sampled: npt.NDArray[np.bool_]
    logprobs: npt.NDArray[np.float32]
    policy_logprobs: npt.NDArray[np.float32] | None
    weight_versions: npt.NDArray[np.int32]
    advantages: npt.NDArray[np.float32] | None
    advantage: float | None
    reward: float | None
    scores: Mapping[str, float | None]
    extra: Mapping[str, Any]
    finish_reason: str
    finish_reasons: Sequence[str]
    turn_ends: Sequence[int]
    failed: str | None

    @property
    def name(self) -> str:
        """Prompt id and sample, as proofs name the rollout."""
        return f"{self.prompt_id}#{self.sample}"

    @property
    def gaps(self) -> npt.NDArray[np.float32] | None:
        """(C,) parity gap of each id: the engine's log-prob minus the trainer's. None: the trainer's are not known."""
        return None if self.policy_logprobs is None else self.logprobs - self.policy_logprobs


class RolloutFile(NamedTuple):
    """A file of rollouts, and the optimizer step that learned from them first."""

    step: int
    path: Path


def file_name(step: int) -> str:
    """Name of the file with the rollouts that optimizer step `step` (counted from 1) learned from first."""
    return f"rollouts_{step:06d}.parquet"


def rollout_files(run: Path) -> list[RolloutFile]:
    """The files of a run, ordered by step. Files that are still being written are not among them."""
    found = []
    for path in (run / FOLDER).glob("rollouts_*.parquet"):
        number = path.stem.removeprefix("rollouts_")
        if number.isdigit():
            found.append(RolloutFile(int(number), path))
    return sorted(found)


def read_facts(path: Path) -> dict[str, Any]:
    """What is true of all rollouts of one file.

    Returns:
        `format` (1), `step`, `version` (the engine's weight version at that step), `method`, `model`, `sampling`
        (temperature, filters, stop strings, …, as the engine got them), and `seed`.

    Raises:
        InputError: the file is damaged, or was not written by Lockstep.
    """
    with _readable(path) as file:
        facts = (file.schema_arrow.metadata or {}).get(FACTS)
    if facts is None:
        raise InputError(f"{path} was not written by Lockstep: it has no facts about its rollouts")
    found: dict[str, Any] = json.loads(facts)
    return found


def read_rollouts(run: Path, steps: Iterable[int] | None = None) -> Iterator[KeptRollout]:
    """The rollouts of a run, in the order of steps, prompts, samples and branches. One file at a time is in memory.

    Args:
        run: the run's output directory.
        steps: only the files of these steps; None: all.

    Raises:
        InputError: a file is damaged or is not of this format, or a step was asked for that is not there.
    """
    files = rollout_files(run)
    for _, path in files if steps is None else check_steps(run, files, steps):
        yield from read_file(path)


def check_steps(run: Path, files: Sequence[RolloutFile], steps: Iterable[int]) -> list[RolloutFile]:
    """The files of these steps. Refuses a step without a file."""
    by_step, wanted = dict(files), list(steps)
    if missing := [step for step in wanted if step not in by_step]:
        known = f"it has those of {_steps(by_step)}"
        raise InputError(f"{run / FOLDER} has no rollouts of step {missing[0]}; {known}")
    return [RolloutFile(step, by_step[step]) for step in wanted]


_UNREADABLE = (pa.ArrowException, LookupError, TypeError, ValueError, AttributeError, RecursionError)


def read_file(path: Path) -> Iterator[KeptRollout]:
    """The rollouts of one file. Refuses a file that is damaged, or is not of this format."""
    with _readable(path) as file:
        try:
            table = file.read()
            _check_columns(table)
            arrays = {n: _per_token(table[n].combine_chunks(), kind) for n, kind in PER_TOKEN.items()}
            plain = {name: table[name].to_pylist() for name in table.column_names if name not in PER_TOKEN}
            for name, kind in JSON_COLUMNS.items():
                plain[name] = [None if text is None else json.loads(text) for text in plain[name]]
                if wrong := [value for value in plain[name] if kind(value) is not None]:
                    raise TypeError(f"{name} is {str(wrong[0])[:40]}")
        except _UNREADABLE as error:
            why = one_line(error)[:200]
            raise InputError(
                f"{path} is not a file of rollouts that this version can read ({why})"
            ) from error
    scores = {name.removeprefix(SCORE): plain.pop(name) for name in list(plain) if name.startswith(SCORE)}
    plain["extra"] = [logged or {} for logged in plain["extra"]]
    for row in range(table.num_rows):
        fields = {name: values[row] for name, values in {**plain, **arrays}.items()}
        yield KeptRollout(**fields, scores={name: given[row] for name, given in scores.items()})


def _check_columns(table: pa.Table) -> None:
    """Check types, that no value is missing where one must be, and that arrays per id are of one length.

    Raises:
        TypeError, KeyError: they are not those that Lockstep writes.
    """
    scores = {name: pa.types.is_floating for name in table.column_names if name.startswith(SCORE)}
    for name, is_right in {**_TYPES, **scores}.items():
        if not is_right(table[name].type):
            raise TypeError(f"{name} has the type {table[name].type}")
    known = {*_TYPES, *scores, *PER_TOKEN, *JSON_COLUMNS}
    if others := [name for name in table.column_names if name not in known]:
        raise TypeError(f"{others[0]} is no column of it")
    for name in _WHOLE:
        if table[name].null_count:
            raise TypeError(f"{name} lacks a value")
    lengths = pc.list_value_length(table["completion_ids"])
    for name in PER_TOKEN.keys() - {"prompt_ids"}:
        own = pc.list_value_length(table[name])
        if not pc.all(pc.fill_null(pc.equal(own, lengths), True)).as_py():
            raise TypeError(f"{name} and completion_ids have different lengths")


def _per_token(column: Any, kind: np.dtype[Any]) -> list[npt.NDArray[Any] | None]:
    """A column of lists as one array per row; None for a row without a list."""
    column = column.chunk(0) if isinstance(column, pa.ChunkedArray) else column
    values = column.values.to_numpy(zero_copy_only=False).astype(kind, copy=False)
    values.flags.writeable = False
    edges, given = column.offsets.to_numpy(), column.is_valid().to_numpy(zero_copy_only=False)
    return [values[edges[i] : edges[i + 1]] if there else None for i, there in enumerate(given)]


def _readable(path: Path) -> pq.ParquetFile:
    try:
        check_regular(path)
        return pq.ParquetFile(path)
    except (OSError, pa.ArrowException) as error:
        why = reason(error)[:200]
        raise InputError(f"{path} cannot be read ({why}); without it the others can be read") from error


def _steps(files: Iterable[int]) -> str:
    known = sorted(files)
    return f"{len(known)} steps, {known[0]} to {known[-1]}" if known else "no step"
