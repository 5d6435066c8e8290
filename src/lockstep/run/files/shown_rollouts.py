"""Rollouts as plain values for `report/`: turns with their tokens, gaps and advantages, inserted text, tool calls and results.

They are made from evaluated groups, whose tokens the policy of that moment has sampled, and from one group of some
generations of training.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from lockstep.contract.protocol import Completion
from lockstep.images.reading import text_of_content
from lockstep.images.thumbnails import thumbnails_of_messages
from lockstep.rollouts.group import Rollout, RolloutGroup
from lockstep.training.methods.objective import Scores
from lockstep.training.step.generation import Generation

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
    """One rollout: `name`, `reward` (None: it has none), `failed`, `finish_reasons`, `calls`, `images`, and `branches`.

    A branch has its `prompt` as text, its `finish_reason`, `left_out` (the number of ids after the last shown one) and `spans`. A
    sampled span is one turn. It has `tokens`, `gaps` and `advantages` with one value per token (None: they are not known), and the
    `finish_reason` of the turn. An inserted span has `text`. `images` are small copies of those that tools gave, if they are
    wanted.
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
    """Rollouts of one group of a generation.

    Args:
        policy_logps: log-probs of the trainer, by name of the branch; branches may be missing.
        failed: whether a proof has failed on it. Then the group has the largest gap; else it is the first whose rewards differ.
        images: whether small copies of the images that tools gave are wanted.

    Returns:
        `step`: the optimizer step that learns from them first. `failed`. `rewards`: of the whole group. `rollouts`: as of
        `shown_rollout`.
    """
    advantages = {s.name: s.advantages for batch in generation.micro_batches for s in batch if len(s.advantages)}

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
        "rollouts": [shown_rollout(r, tokenizer, gaps, learned, images=images) for r in rollouts[:_SHOWN_ROLLOUTS]],
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
