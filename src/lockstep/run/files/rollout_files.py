"""Keeps the rollouts of training: one Parquet file per generation under `RUN/rollouts/`, within a limit of bytes.

The generation comes from the trainer's loop, after its first optimizer step or when a proof has failed on it. The values of
tokens go from numpy arrays into the file's columns without Python objects. `report/kept_rollouts.py` reads the files, and says
what each column is.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from lockstep.files import replacing
from lockstep.report.kept_rollouts import FACTS, FOLDER, SCORE, file_name, rollout_files
from lockstep.rollouts.group import Rollout, RolloutGroup
from lockstep.tokens.arrays import Reals
from lockstep.training.methods.objective import Scores
from lockstep.training.step.generation import Generation

_GIGABYTE = 1e9


def keep_rollouts(
    run: Path, generation: Generation, policy_logps: Scores, facts: Mapping[str, Any], limit: float
) -> Path:
    """Write the rollouts of a generation. The file is complete or absent, also after a kill.

    Args:
        policy_logps: log-probs of the trainer's forward, by name of the branch; branches may be missing.
        facts: what is true of all rollouts (`report.kept_rollouts.read_facts`), without `format`, `step` and `version`.
        limit: gigabytes that all files of the run may have (`thin_out`).

    Raises:
        OSError: the file cannot be written.
    """
    step = generation.version + 1
    facts = {"format": 1, "step": step, "version": generation.version, **facts}
    table = pa.table(_columns(generation, policy_logps, step)).replace_schema_metadata(
        {FACTS: json.dumps(facts, default=str)}
    )
    path = run / FOLDER / file_name(step)
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file:
        # Dictionaries take longer than zstd and save less.
        pq.write_table(table, file, compression="zstd", use_dictionary=False, write_statistics=False)
    thin_out(run, limit)
    return path


def thin_out(run: Path, limit: float) -> None:
    """Remove files until the run's rollouts have at most `limit` gigabytes.

    The first and the last file stay. Of the others, the one whose neighbors are closest together goes first. So the files that
    stay are spread over the training.
    """
    files = rollout_files(run)
    sizes = {step: path.stat().st_size for step, path in files}
    while len(files) > 1 and sum(sizes.values()) > limit * _GIGABYTE:
        spans = [after.step - before.step for before, after in zip(files, files[2:], strict=False)]
        gone = files.pop(1 + min(range(len(spans)), key=spans.__getitem__) if spans else 0)
        gone.path.unlink()
        del sizes[gone.step]


def remove_after(run: Path, step: int) -> None:
    """Remove the rollouts of steps after `step`, and files that a kill left unfinished."""
    later = [path for number, path in rollout_files(run) if number > step]
    for path in [*later, *(run / FOLDER).glob(".rollouts_*.new")]:
        path.unlink()


def _columns(generation: Generation, policy_logps: Scores, step: int) -> dict[str, pa.Array]:
    rows = [
        (group, rollout, number, branch)
        for group in generation.groups
        for rollout in group.rollouts
        for number, branch in enumerate(rollout.branches)
    ]
    branches, rollouts = [row[3] for row in rows], [row[1] for row in rows]
    found = {s.name: s.advantages for batch in generation.micro_batches for s in batch if len(s.advantages)}
    means = _means(rollouts, found)
    names = list(dict.fromkeys(chain.from_iterable(rollout.scores for rollout in rollouts)))
    turns = [[t for t in rollout.turns if t.branch == number] for _, rollout, number, _ in rows]

    def spread(values: Mapping[str, Reals]) -> list[Reals | None]:
        """Values of sampled ids, as values of all ids of each branch."""
        out: list[Reals | None] = []
        for branch in branches:
            own = values.get(str(branch.key))
            if own is not None and branch.sampled is not None:
                whole = np.zeros(len(branch.token_ids), np.float32)
                whole[branch.sampled] = own
                own = whole
            out.append(own)
        return out

    def sampled(branch: Any) -> Any:
        return np.ones(len(branch.token_ids), np.bool_) if branch.sampled is None else branch.sampled

    return {
        "step": pa.array(np.full(len(rows), step, np.int32)),
        "prompt_id": pa.array([group.prompt.prompt_id for group, *_ in rows]),
        "sample": pa.array([rollout.key.sample for rollout in rollouts], pa.int32()),
        "branch": pa.array([number for _, _, number, _ in rows], pa.int32()),
        "prompt": _texts(_once(rows)),
        "completion": pa.array([rollout.text for rollout in rollouts], pa.string()),
        "messages": _texts([_json(rollout.notes.get("messages")) for rollout in rollouts]),
        "prompt_ids": _lists([b.prompt_ids for b in branches], np.int32),
        "completion_ids": _lists([b.token_ids for b in branches], np.int32),
        "sampled": _lists([sampled(b) for b in branches], np.bool_),
        "logprobs": _lists([b.logprobs for b in branches], np.float32),
        "policy_logprobs": _lists(spread(policy_logps), np.float32),
        "weight_versions": _lists([b.weight_versions for b in branches], np.int32),
        "advantages": _lists(spread(found), np.float32),
        "advantage": pa.array([means.get(str(rollout.key)) for rollout in rollouts], pa.float64()),
        "reward": pa.array([rollout.reward if rollout.scored else None for rollout in rollouts], pa.float64()),
        **{f"{SCORE}{name}": pa.array([_number(r.scores.get(name)) for r in rollouts], pa.float64()) for name in names},
        "extra": _texts([_json(dict(rollout.extra)) for rollout in rollouts]),
        "finish_reason": pa.array([b.finish_reason for b in branches]),
        "finish_reasons": pa.array([[t.finish_reason for t in own] for own in turns], pa.list_(pa.string())),
        "turn_ends": pa.array([[t.end for t in own] for own in turns], pa.list_(pa.int32())),
        "failed": pa.array([rollout.failed for rollout in rollouts], pa.string()),
    }


def _means(rollouts: Iterable[Rollout], advantages: Mapping[str, Reals]) -> dict[str, float]:
    """Mean advantage of each rollout over its sampled ids, by name."""
    means = {}
    for rollout in rollouts:
        own = [advantages[str(b.key)] for b in rollout.branches if str(b.key) in advantages]
        if own:
            means[str(rollout.key)] = float(sum(float(a.sum(dtype=np.float64)) for a in own) / sum(map(len, own)))
    return means


def _once(rows: Sequence[tuple[RolloutGroup, Any, Any, Any]]) -> list[str]:
    """The prompt of each row as JSON. It is made once per group."""
    made: dict[int, str] = {}
    return [
        made.get(id(group)) or made.setdefault(id(group), json.dumps(group.prompt.source, default=kind_in_json))
        for group, *_ in rows
    ]


def _json(value: Any) -> str | None:
    return json.dumps(value, default=kind_in_json) if value else None


def kind_in_json(value: Any) -> str:
    """What stands in JSON for a value that JSON has no type for, such as a picture."""
    return f"<{type(value).__name__}>"


def _number(value: float | None) -> float | None:
    return None if value is None or value != value else float(value)


def _texts(texts: Sequence[str | None]) -> pa.Array:
    return pa.array(texts, pa.string())


def _lists(values: Sequence[Any], kind: Any) -> pa.Array:
    """One list per row, from arrays; a row without an array has null."""
    there = [np.empty(0, kind) if own is None else own for own in values]
    edges = np.concatenate([[0], np.cumsum([len(own) for own in there])]).astype(np.int32)
    flat = pa.array(np.concatenate(there).astype(kind, copy=False))
    missing = pa.array([own is None for own in values])
    return pa.ListArray.from_arrays(pa.array(edges), flat, mask=missing)
