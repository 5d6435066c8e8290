"""The rollouts that a run keeps: of training, of evaluations, and in the form that reports show.

Training leaves one Parquet file per generation under `RUN/rollouts/`, within a limit of bytes
(`report/kept_rollouts.py` says what each column is). Values of tokens go from numpy arrays into columns without Python
objects. `before.json` and `after.json` have the evaluations before and after training, with a few rollouts.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from transformers import PreTrainedTokenizerBase

from lockstep.contract.protocol import Completion
from lockstep.files import as_json, check_regular, from_json, replace_text, replacing, set_aside
from lockstep.images.reading import text_of_content, thumbnails_of_messages, thumbnails_of_row
from lockstep.learn.generation import Generation
from lockstep.learn.methods.objective import Scores
from lockstep.report.kept_rollouts import FACTS, FOLDER, SCORE, file_name, rollout_files
from lockstep.report.page.run_record import with_nan
from lockstep.rollouts.group import Rollout, RolloutGroup
from lockstep.tokens.arrays import Reals
from lockstep.watch.receipt import RECEIPT, text_digest

_GIGABYTE = 1e9


def keep_rollouts(
    run: Path, generation: Generation, policy_logps: Scores, facts: Mapping[str, Any], limit: float
) -> Path:
    """Write the rollouts of a generation. The file is complete or absent, also after a kill.

    Args:
        policy_logps: log-probs of the trainer's forward, by name of the branch; branches may be missing.
        facts: what is true of all rollouts (`report.kept_rollouts.read_facts`), without `format`, `step` and `version`.
        limit: gigabytes that all files of the run may have (`thin_out`).
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

    The first and the last file stay. Of the others, the one whose neighbors are closest together goes first, so that
    the files that stay are spread over the training.
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
        "reward": pa.array(
            [rollout.reward if rollout.scored else None for rollout in rollouts], pa.float64()
        ),
        **{
            f"{SCORE}{name}": pa.array([_number(r.scores.get(name)) for r in rollouts], pa.float64())
            for name in names
        },
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
            means[str(rollout.key)] = float(
                sum(float(a.sum(dtype=np.float64)) for a in own) / sum(map(len, own))
            )
    return means


def _once(rows: Sequence[tuple[RolloutGroup, Any, Any, Any]]) -> list[str]:
    """The prompt of each row as JSON. It is made once per group."""
    made: dict[int, str] = {}
    return [
        made.get(id(group))
        or made.setdefault(id(group), json.dumps(group.prompt.source, default=kind_in_json))
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


# Gives one value per sampled token of a branch; None: the values are not known.
PerToken = Callable[[Completion], list[float] | None]
_SHOWN_ROLLOUTS = 4
# Ids of a branch that are shown.
_LONGEST = 1000


def shown_rollout(
    rollout: Rollout,
    tokenizer: PreTrainedTokenizerBase,
    gaps: PerToken,
    advantages: PerToken = lambda branch: None,
    *,
    images: bool = True,
) -> dict[str, Any]:
    """One rollout as plain values for `report/`.

    A branch has its `prompt` as text, its `finish_reason`, `left_out` (the number of ids after the last shown one)
    and `spans`. A sampled span is one turn: `tokens`, with one value per token in `gaps` and `advantages` (None: not
    known). An inserted span has `text`. `images` are small copies of those that tools gave.
    """
    return {
        "name": str(rollout.key),
        "reward": rollout.reward if rollout.scored else None,
        "failed": rollout.failed,
        "finish_reasons": list(rollout.finish_reasons),
        "calls": list(_calls(rollout)),
        "images": thumbnails_of_messages(rollout.notes.get("messages") or ()) if images else [],
        "branches": [
            {
                "prompt": tokenizer.decode(branch.prompt_ids.tolist()),
                "finish_reason": branch.finish_reason,
                "spans": list(_spans(rollout, number, tokenizer, gaps, advantages)),
                "left_out": max(len(branch.token_ids) - _LONGEST, 0),
            }
            for number, branch in enumerate(rollout.branches)
        ],
    }


def shown_generation(
    generation: Generation,
    tokenizer: PreTrainedTokenizerBase,
    policy_logps: Scores,
    *,
    failed: bool = False,
    images: bool = True,
) -> dict[str, Any]:
    """Rollouts of one group of a generation; `step` is the optimizer step that learns from them first.

    If a proof has failed, it is the group with the largest gap; else the first whose rewards differ.

    Args:
        policy_logps: log-probs of the trainer, by name of the branch; branches may be missing.
    """
    advantages = {
        s.name: s.advantages for batch in generation.micro_batches for s in batch if len(s.advantages)
    }

    def gaps(branch: Completion) -> list[float] | None:
        own = policy_logps.get(str(branch.key))
        return None if own is None else (branch.sampled_logprobs - own).tolist()

    def learned(branch: Completion) -> list[float] | None:
        own = advantages.get(str(branch.key))
        return None if own is None else own.tolist()

    group = next((g for g in generation.groups if len(set(g.given_rewards)) > 1), generation.groups[0])
    rollouts = list(group.rollouts)
    if failed:
        largest = {
            id(r): max((abs(gap) for b in r.branches for gap in gaps(b) or ()), default=0.0)
            for g in generation.groups
            for r in g.rollouts
        }
        group = max(generation.groups, key=lambda g: max(largest[id(r)] for r in g.rollouts))
        rollouts = sorted(group.rollouts, key=lambda r: -largest[id(r)])
    return {
        "step": generation.version + 1,
        "failed": failed,
        "rewards": [rollout.reward if rollout.scored else None for rollout in group.rollouts],
        "rollouts": [
            shown_rollout(r, tokenizer, gaps, learned, images=images) for r in rollouts[:_SHOWN_ROLLOUTS]
        ],
    }


def live_sample(group: RolloutGroup | None) -> tuple[float, list[tuple[str, str]]] | None:
    """Reward and text of one rollout for the live view; a conversation is cut into what each side said.

    A label names who said a text and, for a sampled turn, its finish reason.
    """
    if group is None:
        return None
    rollout = group.rollouts[0]
    messages = rollout.notes.get("messages") or ()
    if len(messages) < 2:
        return rollout.reward, [(f"sample, {rollout.finish_reason}", rollout.text)]
    reasons = iter(rollout.notes.get("finish_reasons") or ())
    return rollout.reward, [
        _said(message, next(reasons, None) if message["role"] == "assistant" else None)
        for message in messages
    ]


def _spans(
    rollout: Rollout, number: int, tokenizer: PreTrainedTokenizerBase, gaps: PerToken, advantages: PerToken
) -> Iterator[dict[str, Any]]:
    branch = rollout.branches[number]
    ids = branch.token_ids[:_LONGEST].tolist()
    if not ids:
        return
    sampled = np.ones(len(ids), np.bool_) if branch.sampled is None else branch.sampled[: len(ids)]
    values = {"gaps": gaps(branch), "advantages": advantages(branch)} if sampled.any() else {}
    reasons = {t.end: t.finish_reason for t in rollout.turns if t.branch == number and t.end <= len(ids)}
    # Two turns may follow each other without anything between them.
    edges = {0, *(np.flatnonzero(np.diff(sampled)) + 1).tolist(), len(ids), *reasons}
    done = 0
    for start, end in pairwise(sorted(edges)):
        part = ids[start:end]
        if sampled[start]:
            tokens = [tokenizer.decode([i]) for i in part]
            own = {name: found and found[done : done + len(part)] for name, found in values.items()}
            yield {"tokens": tokens, **own, "finish_reason": reasons.get(end)}
            done += len(part)
        else:
            yield {"text": tokenizer.decode(part)}


def _calls(rollout: Rollout) -> Iterator[str]:
    """One line per tool call and per result, in order."""
    for message in rollout.notes.get("messages") or ():
        for call in message.get("tool_calls") or ():
            function = call["function"]
            yield f"call {function['name']}({function['arguments']})"
        if message["role"] == "tool":
            yield f"result {message.get('name', '')}: {text_of_content(message['content'])}"


def _said(message: dict[str, Any], finish_reason: str | None) -> tuple[str, str]:
    calls = " ".join(
        f"→ {c['function']['name']}({c['function']['arguments']})" for c in message.get("tool_calls") or ()
    )
    label = ", ".join(filter(None, [message["role"], finish_reason]))
    return label, f"{text_of_content(message.get('content'))} {calls}".strip()


_logger = logging.getLogger(__name__)

# The kind of the receipt's line.
EVALUATION = "evaluation"
_SHOWN_GROUPS = 12


def save_evaluation(
    path: Path,
    metrics: Mapping[str, float],
    groups: Sequence[RolloutGroup],
    turns: Sequence[Mapping[str, Any]] = (),
    *,
    images: bool = True,
) -> None:
    """Write an evaluation: its metrics, its first groups, and `turns`, rollouts turn by turn."""
    found = {
        "metrics": dict(metrics),
        "rollouts": [_shown(group, images=images) for group in groups[:_SHOWN_GROUPS]],
        "turns": list(turns),
    }
    replace_text(path, as_json(found, indent=1) + "\n")


def proven_evaluation(path: Path, receipt: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A saved evaluation, as the run wrote it; empty if there is none.

    A file that cannot be read or was changed is renamed. Then the metrics are those of the receipt's line
    (`evaluation_line`), which a run of an earlier version does not have: its file is taken if it can be read.
    """
    line = next(
        (e for e in reversed(receipt) if e.get("kind") == EVALUATION and e.get("file") == path.name), None
    )
    text = _text(path)
    found = _evaluation(text)
    restored = line and as_json({"metrics": line["metrics"], "rollouts": [], "turns": []}, indent=1) + "\n"
    if found and (line is None or text == restored or text_digest(text or "") == line["digest"]):
        return found
    if os.path.lexists(path):
        set_aside(path, "is not as the run wrote it" if found else "cannot be read")
    if restored is None:
        return {}
    replace_text(path, restored)
    _logger.info(f"the metrics of {path.name} were restored from {RECEIPT}; it has no rollouts")
    return _evaluation(restored)


def evaluation_line(path: Path, step: int) -> dict[str, Any] | None:
    """The receipt's line of a saved evaluation: its metrics, and the digest of its file; None: there is no file."""
    text = _text(path)
    found = _evaluation(text)
    if not found:
        return None
    digest = text_digest(text or "")
    return {
        "kind": EVALUATION,
        "step": step,
        "file": path.name,
        "digest": digest,
        "metrics": found["metrics"],
    }


def _text(path: Path) -> str | None:
    try:
        check_regular(path)
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None


def _evaluation(text: str | None) -> dict[str, Any]:
    """The content of a file; empty if it holds no evaluation."""
    try:
        found: dict[str, Any] = from_json(text or "")
        if not found["metrics"] or not isinstance(found["rollouts"], list):
            return {}
        return {**found, "metrics": with_nan(found["metrics"])}
    except (ValueError, KeyError, TypeError):
        return {}


def _shown(group: RolloutGroup, *, images: bool) -> dict[str, Any]:
    source = group.prompt.source
    return {
        "prompt": source if isinstance(source, str) else text_of_content(source[-1]["content"]),
        "images": thumbnails_of_row(source, group.prompt.columns) if images else [],
        "completions": [rollout.text for rollout in group.rollouts],
        # JSON has no NaN.
        "rewards": [rollout.reward if rollout.scored else None for rollout in group.rollouts],
    }
