"""Rollouts as plain values for `report/`: turns with their tokens and gaps, inserted text, tool calls and results.

`training/run.py` makes them from evaluated groups, whose tokens the policy of that moment has sampled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from lockstep.engines.protocol import Completion
from lockstep.images.reading import text_of_content
from lockstep.images.thumbnails import thumbnails_of_messages
from lockstep.rollouts.group import Rollout, RolloutGroup

# Gives the gap of each sampled token.
Gaps = Callable[[Completion], list[float]]


def shown_rollout(
    rollout: Rollout, tokenizer: PreTrainedTokenizerBase, gaps: Gaps, *, images: bool = True
) -> dict[str, Any]:
    """One rollout: `name`, `reward` (None: it has none), `failed`, `finish_reasons`, `calls`, `images`, and `branches`.

    A branch has its `prompt` as text, its `finish_reason`, and `spans`: a sampled span is one turn and has `tokens`, one gap for
    each in `gaps`, and the `finish_reason` of the turn; an inserted span has `text`. `images` are small copies of those that tools
    gave, if they are wanted.
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
                "spans": list(_spans(rollout, number, tokenizer, gaps)),
            }
            for number, branch in enumerate(rollout.branches)
        ],
    }


def live_sample(group: RolloutGroup | None) -> tuple[float, list[tuple[str, str]]] | None:
    """Reward and text of one rollout for the live view; a conversation is cut into what the model and the tools said.

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
        _said(message, next(reasons, None) if message["role"] == "assistant" else None) for message in messages
    ]


def _spans(rollout: Rollout, number: int, tokenizer: PreTrainedTokenizerBase, gaps: Gaps) -> Iterator[dict[str, Any]]:
    branch = rollout.branches[number]
    ids = branch.token_ids.tolist()
    if not ids:
        return
    sampled = np.ones(len(ids), np.bool_) if branch.sampled is None else branch.sampled
    found = gaps(branch) if sampled.any() else []
    reasons = {turn.end: turn.finish_reason for turn in rollout.turns if turn.branch == number}
    # Two turns may follow each other without anything between them.
    edges = {0, *(np.flatnonzero(np.diff(sampled)) + 1).tolist(), len(ids), *reasons}
    done = 0
    for start, end in pairwise(sorted(edges)):
        part = ids[start:end]
        if sampled[start]:
            tokens, own = [tokenizer.decode([i]) for i in part], found[done : done + len(part)]
            yield {"tokens": tokens, "gaps": own, "finish_reason": reasons.get(end)}
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
