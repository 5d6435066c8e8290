"""Rollouts in a report: of training, with a color per token for its gap or its advantage; held-out ones before and after training.

`training/run_files/shown_rollouts.py` and `saved_evaluation.py` make the values. `ROOM` bounds what stands in the page: a report
stays below a megabyte however long completions are.
"""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from typing import Any

from lockstep.report.page.pictures import render_pictures

Line = dict[str, Any]

# Gaps from 1e-7 nats or less to 1 nat or more, one color per factor of ten.
_SMALLEST, _GAP_COLORS = -7, 8
# Tokens of all shown rollouts, and characters of one completion in the table of evaluations.
ROOM, _CHARACTERS = 7000, 700
# Characters of one token. Some vocabularies have tokens of a hundred spaces.
_TOKEN = 128
_RANKS = 5


def training_section(shown: Sequence[Line], share: float = 1.0) -> str:
    """One group of some generations of training; empty if there is none.

    Args:
        share: how much of `ROOM` may be used.
    """
    if not shown:
        return ""
    rollouts = sum(len(line["rollouts"]) for line in shown)
    room = max(int(share * ROOM) // max(rollouts, 1), 20)
    groups = "".join(
        f"<details{' open' if place in (0, len(shown) - 1) else ''}><summary>step {line['step']}"
        f"{', where a proof failed' if line.get('failed') else ''}: {_rewards(line['rewards'])}</summary>"
        f"{''.join(_rollout(r, line['rewards'], room) for r in line['rollouts'])}</details>"
        for place, line in enumerate(shown)
    )
    return f"<h2 id='rollouts'>Rollouts through training</h2>{_SCALES}{groups}"


def turns_section(turns: Sequence[Line], share: float = 1.0) -> str:
    """Held-out rollouts after training, turn by turn; empty without any."""
    if not turns:
        return ""
    room = max(int(share * ROOM) // 2 // len(turns), 20)
    return f"<h2>Turns of held-out rollouts, after training</h2>{_SCALES}" + "".join(
        _rollout(r, (), room) for r in turns
    )


def evaluations_section(before: Line | None, after: Line | None, share: float = 1.0) -> str:
    """Held-out completions of the same prompts before and after training; of one evaluation, if there is only one."""
    given = [(name, found["rollouts"]) for name, found in (("before", before), ("after", after)) if found]
    if not given:
        return ""
    heads = "".join(f"<th>{name}</th>" for name, _ in given)
    by_prompt = [{_key(entry): entry for entry in entries} for _, entries in given]
    room = int(share * _CHARACTERS)
    rows = "".join(
        f"<tr><td class='said' data-name='prompt'>{render_pictures(entry)}{_cut(entry['prompt'], room)}</td>"
        f"{''.join(_cell(name, own[key], room) for (name, _), own in zip(given, by_prompt, strict=True))}</tr>"
        for key, entry in by_prompt[0].items()
        if all(key in own for own in by_prompt)
    )
    return (
        "<h2 id='evaluation'>Held-out rollouts</h2><p>The color of a score is its rank within the group of its prompt: "
        f"{_ranks_legend()}</p><div class='wide'><table class='evaluations'><tr><th>prompt</th>{heads}</tr>{rows}</table></div>"
    )


def _key(entry: Line) -> tuple[str, ...]:
    """What tells prompts apart: the text and the images. Many data sets ask one question about all images."""
    return (str(entry["prompt"]), *map(str, entry.get("images") or ()))


def rank_class(reward: float | None, rewards: Sequence[float | None]) -> str:
    """The style of a score by its rank within its group: `r0` (worst) to `r4` (best); `re`: all are equal; `rn`: no score."""
    given = [r for r in rewards if r is not None and not math.isnan(r)]
    if reward is None or math.isnan(reward):
        return "rn"
    if len(set(given)) < 2:
        return "re"
    # Equal scores have the mean of their ranks.
    below, same = sum(r < reward for r in given), sum(r == reward for r in given)
    share = (below + (same - 1) / 2) / (len(given) - 1)
    return f"r{min(int(share * _RANKS), _RANKS - 1)}"


def score(reward: float | None, rewards: Sequence[float | None]) -> str:
    """A score, colored by its rank."""
    text = "no score" if reward is None else f"{reward:.4g}"
    return f"<span class='score {rank_class(reward, rewards)}'>{text}</span>"


def _rewards(rewards: Sequence[float | None]) -> str:
    shown = " ".join(score(reward, rewards) for reward in rewards[:16])
    return shown + (f" and {len(rewards) - 16} more" if len(rewards) > 16 else "")


def _rollout(rollout: Line, rewards: Sequence[float | None], room: int) -> str:
    failed = f" <b class='badtext'>failed: {html.escape(str(rollout['failed']))}</b>" if rollout["failed"] else ""
    calls = "".join(f"<li>{_cut(line, _CHARACTERS)}</li>" for line in rollout["calls"][:20])
    count = len(rollout["branches"])
    branches = "".join(
        _branch(branch, f"branch {n + 1} of {count}" if count > 1 else "prompt", max(room // count, 20))
        for n, branch in enumerate(rollout["branches"][:8])
    )
    reasons = ", ".join(map(str, rollout["finish_reasons"])) or "none"
    return (
        f"<div class='rollout'><b>{html.escape(rollout['name'])}</b> {score(rollout['reward'], rewards or [rollout['reward']])} "
        f"<small>finish reason of each answer: {html.escape(reasons)}</small>{failed}{render_pictures(rollout)}{branches}"
        f"{f'<small>tool calls and results</small><ul>{calls}</ul>' if calls else ''}</div>"
    )


def _branch(branch: Line, title: str, room: int) -> str:
    parts = [f"<small>{title}</small><pre class='inserted'>{_cut(branch['prompt'], 2 * _CHARACTERS)}</pre>"]
    turn, left = 0, int(branch.get("left_out", 0))
    for span in branch["spans"]:
        if "text" in span:
            parts.append(f"<small>inserted</small><pre class='inserted'>{_cut(span['text'], _CHARACTERS)}</pre>")
            continue
        turn += 1
        tokens, gaps, advantages = span["tokens"], span.get("gaps"), span.get("advantages")
        about = [f"turn {turn}, sampled: {len(tokens)} tokens"]
        if gaps:
            about.append(f"largest gap {max(map(abs, gaps)):.1e}")
        about.append(f"finish reason {span['finish_reason'] or 'unknown'}")
        shown = tokens[: max(room, 0)]
        left += len(tokens) - len(shown)
        room -= len(shown)
        marked = "".join(
            _token(text, gaps[i] if gaps else None, advantages[i] if advantages else None)
            for i, text in enumerate(shown)
        )
        parts.append(f"<small>{html.escape(', '.join(about))}</small><pre class='sampled'>{marked}</pre>")
    more = f"; {left} more ids are not shown" if left else ""
    return f"<div>{''.join(parts)}<small>ends with: {html.escape(str(branch['finish_reason']))}{more}</small></div>"


def _token(text: str, gap: float | None, advantage: float | None) -> str:
    kinds, words = [], []
    if gap is not None:
        kinds.append(f"g{gap_color(gap)}")
        words.append(f"gap {gap:.2e}")
    if advantage is not None:
        kinds.append(f"a{_advantage_color(advantage)}")
        words.append(f"advantage {advantage:.3g}")
    title = f" title='{', '.join(words)}'" if words else ""
    return f"<i class='{' '.join(kinds)}'{title}>{html.escape(text[:_TOKEN])}</i>"


def gap_color(gap: float) -> int:
    """The number of the color of a gap: 0 for 1e-7 nats or less, 7 for 1 nat or more."""
    if not math.isfinite(gap):
        return _GAP_COLORS - 1
    size = math.floor(math.log10(abs(gap))) if gap else _SMALLEST
    return min(max(size - _SMALLEST, 0), _GAP_COLORS - 1)


def _advantage_color(advantage: float) -> int:
    """0 to 8; 4 is no advantage, 8 is an advantage of 1 or more. Advantages are of this order in all methods."""
    return 4 + round(4 * max(min(advantage, 1.0), -1.0)) if math.isfinite(advantage) else 4


def _cell(name: str, entry: Line, room: int) -> str:
    return f"<td data-name='{name}'>{_completions(entry, room)}</td>"


def _completions(entry: Line, room: int) -> str:
    rewards = entry["rewards"]
    pairs = list(zip(entry["completions"], rewards, strict=False))
    shown = "".join(f"<div class='said'>{score(r, rewards)} {_cut(text, room)}</div>" for text, r in pairs[:8])
    return shown + (f"<small>and {len(pairs) - 8} more</small>" if len(pairs) > 8 else "")


def _cut(text: Any, room: int) -> str:
    text = str(text)
    if len(text) <= room:
        return html.escape(text)
    return f"{html.escape(text[:room])}<small> … {len(text) - room} more characters</small>"


def _ranks_legend() -> str:
    words = ("worst", "", "middle", "", "best")
    steps = "".join(f"<span class='score r{n}'>{word or '·'}</span> " for n, word in enumerate(words))
    return f"{steps}<span class='score re'>all equal</span>"


_SCALES = (
    "<p class='scale by-gap'>gap |g| in nats: "
    + "".join(f"<i class='g{n}'>1e{_SMALLEST + n:+d}</i>" for n in range(_GAP_COLORS))
    + "</p><p class='scale by-advantage'>advantage: "
    + "".join(f"<i class='a{n}'>{(n - 4) / 4:+.2g}</i>" for n in range(0, 9, 2))
    + "</p><p><small>Colored text was sampled; point at a token for its values. Grey text is a prompt or was inserted: the policy "
    "does not learn from it.</small></p>"
)
