"""Rollouts in a report: of training, with a color per token for its gap or its advantage, and held-out ones.

Thumbnails of images stand inside the page, beside the prompt or the rollout that shows them. `ROOM` bounds what stands
in the page: a report stays below a megabyte however long completions are.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from lockstep.report.page.markup import NOTHING, Html, html, together

STYLE = ".pictures img { max-width: 96px; max-height: 96px; margin: 0 .3em .3em 0; border: 1px solid var(--edge); }\n"
# Nothing else becomes a part of the page: no address, and no markup.
_INLINE = re.compile(r"data:image/(?:jpeg|png);base64,[A-Za-z0-9+/=]+")


def render_pictures(entry: Mapping[str, Any]) -> Html:
    """The images of an entry as HTML; empty if it has none."""
    urls = [url for url in entry.get("images") or () if isinstance(url, str) and _INLINE.fullmatch(url)]
    shown = together(html("<img src='{}' alt='image {}'>", url, n + 1) for n, url in enumerate(urls))
    return html("<div class='pictures'>{}</div>", shown) if shown else NOTHING


Line = dict[str, Any]

# Gaps from 1e-7 nats or less to 1 nat or more, one color per factor of ten.
_SMALLEST, _GAP_COLORS = -7, 8
# Tokens of all shown rollouts, and characters of one completion in the table of evaluations.
ROOM, _CHARACTERS = 7000, 700
# Characters of one token. Some vocabularies have tokens of a hundred spaces.
_TOKEN = 128
_RANKS = 5


def training_section(shown: Sequence[Line], share: float = 1.0) -> Html:
    """One group of some generations of training, within a share of `ROOM`; empty if there is none."""
    if not shown:
        return NOTHING
    rollouts = sum(len(line["rollouts"]) for line in shown)
    room = max(int(share * ROOM) // max(rollouts, 1), 20)
    groups = []
    for place, line in enumerate(shown):
        is_open = " open" if place in (0, len(shown) - 1) else ""
        failed = ", where a proof failed" if line.get("failed") else ""
        said = together(_rollout(r, line["rewards"], room) for r in line["rollouts"])
        form = "<details{}><summary>step {}{}: {}</summary>{}</details>"
        groups.append(html(form, is_open, line["step"], failed, _rewards(line["rewards"]), said))
    return html("<h2 id='rollouts'>Rollouts through training</h2>{}{}", _SCALES, together(groups))


def turns_section(turns: Sequence[Line], share: float = 1.0) -> Html:
    """Held-out rollouts after training, turn by turn; empty without any."""
    if not turns:
        return NOTHING
    room = max(int(share * ROOM) // 2 // len(turns), 20)
    shown = together(_rollout(r, (), room) for r in turns)
    return html("<h2>Turns of held-out rollouts, after training</h2>{}{}", _SCALES, shown)


def evaluations_section(before: Line | None, after: Line | None, share: float = 1.0) -> Html:
    """Held-out completions of the same prompts before and after training; of one evaluation, if there is only one."""
    given = [(name, found["rollouts"]) for name, found in (("before", before), ("after", after)) if found]
    if not given:
        return NOTHING
    heads = together(html("<th>{}</th>", name) for name, _ in given)
    by_prompt = [{_key(entry): entry for entry in entries} for _, entries in given]
    room = int(share * _CHARACTERS)
    rows = []
    for key in (key for key in by_prompt[0] if all(key in own for own in by_prompt)):
        entry = by_prompt[0][key]
        cells = together(_cell(name, own[key], room) for (name, _), own in zip(given, by_prompt, strict=True))
        form = "<tr><td class='said' data-name='prompt'>{}{}</td>{}</tr>"
        rows.append(html(form, render_pictures(entry), _cut(entry["prompt"], room), cells))
    return html(
        "<h2 id='evaluation'>Held-out rollouts</h2><p>The color of a score is its rank within the group of its prompt: "
        "{}</p><div class='wide'><table class='evaluations'><tr><th>prompt</th>{}</tr>{}</table></div>",
        _ranks_legend(),
        heads,
        together(rows),
    )


def _key(entry: Line) -> tuple[str, ...]:
    """What tells prompts apart: the text and the images. Many data sets ask one question about all images."""
    return (str(entry["prompt"]), *map(str, entry.get("images") or ()))


def rank_class(reward: float | None, rewards: Sequence[float | None]) -> str:
    """The style of a score by its rank in its group: `r0` (worst) to `r4` (best); `re`: all equal; `rn`: no score."""
    given = [r for r in rewards if r is not None and not math.isnan(r)]
    if reward is None or math.isnan(reward):
        return "rn"
    if len(set(given)) < 2:
        return "re"
    # Equal scores have the mean of their ranks.
    below, same = sum(r < reward for r in given), sum(r == reward for r in given)
    share = (below + (same - 1) / 2) / (len(given) - 1)
    return f"r{min(int(share * _RANKS), _RANKS - 1)}"


def score(reward: float | None, rewards: Sequence[float | None]) -> Html:
    """A score, colored by its rank."""
    text = "no score" if reward is None else f"{reward:.4g}"
    return html("<span class='score {}'>{}</span>", rank_class(reward, rewards), text)


def _rewards(rewards: Sequence[float | None]) -> Html:
    shown = together((score(reward, rewards) for reward in rewards[:16]), " ")
    return shown + (f" and {len(rewards) - 16} more" if len(rewards) > 16 else "")


def _rollout(rollout: Line, rewards: Sequence[float | None], room: int) -> Html:
    failed = html(" <b class='badtext'>failed: {}</b>", rollout["failed"]) if rollout["failed"] else NOTHING
    calls = together(html("<li>{}</li>", _cut(line, _CHARACTERS)) for line in rollout["calls"][:20])
    count = len(rollout["branches"])
    branches = together(
        _branch(branch, f"branch {n + 1} of {count}" if count > 1 else "prompt", max(room // count, 20))
        for n, branch in enumerate(rollout["branches"][:8])
    )
    reasons = ", ".join(map(str, rollout["finish_reasons"])) or "none"
    return html(
        "<div class='rollout'><b>{}</b> {} <small>finish reason of each answer: {}</small>{}{}{}{}</div>",
        rollout["name"],
        score(rollout["reward"], rewards or [rollout["reward"]]),
        reasons,
        failed,
        render_pictures(rollout),
        branches,
        html("<small>tool calls and results</small><ul>{}</ul>", calls) if calls else NOTHING,
    )


def _branch(branch: Line, title: str, room: int) -> Html:
    inserted = "<small>{}</small><pre class='inserted'>{}</pre>"
    parts = [html(inserted, title, _cut(branch["prompt"], 2 * _CHARACTERS))]
    turn, left = 0, int(branch.get("left_out", 0))
    for span in branch["spans"]:
        if "text" in span:
            parts.append(html(inserted, "inserted", _cut(span["text"], _CHARACTERS)))
            continue
        turn += 1
        tokens = span["tokens"]
        gaps, advantages = _with_nan(span.get("gaps")), _with_nan(span.get("advantages"))
        about = [f"turn {turn}, sampled: {len(tokens)} tokens"]
        if gaps:
            about.append(f"largest gap {max(map(abs, gaps)):.1e}")
        about.append(f"finish reason {span['finish_reason'] or 'unknown'}")
        shown = tokens[: max(room, 0)]
        left += len(tokens) - len(shown)
        room -= len(shown)
        marked = together(
            _token(text, gaps[i] if gaps else None, advantages[i] if advantages else None)
            for i, text in enumerate(shown)
        )
        parts.append(html("<small>{}</small><pre class='sampled'>{}</pre>", ", ".join(about), marked))
    more = f"; {left} more ids are not shown" if left else ""
    return html("<div>{}<small>ends with: {}{}</small></div>", together(parts), branch["finish_reason"], more)


def _with_nan(values: Sequence[float | None] | None) -> list[float]:
    """Values per token with NaN where the file has null; empty if they are not known."""
    return [math.nan if value is None else value for value in values or ()]


def _token(text: str, gap: float | None, advantage: float | None) -> Html:
    kinds, words = [], []
    if gap is not None:
        kinds.append(f"g{gap_color(gap)}")
        words.append(f"gap {gap:.2e}")
    if advantage is not None:
        kinds.append(f"a{_advantage_color(advantage)}")
        words.append(f"advantage {advantage:.3g}")
    form = "<i class='{kinds}' title='{words}'>{text}</i>" if words else "<i class='{kinds}'>{text}</i>"
    return html(form, kinds=" ".join(kinds), words=", ".join(words), text=text[:_TOKEN])


def gap_color(gap: float) -> int:
    """The number of the color of a gap: 0 for 1e-7 nats or less, 7 for 1 nat or more."""
    if not math.isfinite(gap):
        return _GAP_COLORS - 1
    size = math.floor(math.log10(abs(gap))) if gap else _SMALLEST
    return min(max(size - _SMALLEST, 0), _GAP_COLORS - 1)


def _advantage_color(advantage: float) -> int:
    """0 to 8; 4 is no advantage, 8 is an advantage of 1 or more. Advantages are of this order in all methods."""
    return 4 + round(4 * max(min(advantage, 1.0), -1.0)) if math.isfinite(advantage) else 4


def _cell(name: str, entry: Line, room: int) -> Html:
    rewards = entry["rewards"]
    pairs = list(zip(entry["completions"], rewards, strict=False))
    form = "<div class='said'>{} {}</div>"
    shown = together(html(form, score(r, rewards), _cut(text, room)) for text, r in pairs[:8])
    more = html("<small>and {} more</small>", len(pairs) - 8) if len(pairs) > 8 else NOTHING
    return html("<td data-name='{}'>{}{}</td>", name, shown, more)


def _cut(text: Any, room: int) -> Html:
    text = str(text)
    more = html("<small> … {} more characters</small>", len(text) - room) if len(text) > room else NOTHING
    return html("{}{}", text[:room], more)


def _ranks_legend() -> Html:
    words = ("worst", "", "middle", "", "best")
    form = "<span class='score r{}'>{}</span> "
    steps = together(html(form, n, word or "·") for n, word in enumerate(words))
    return html("{}<span class='score re'>all equal</span>", steps)


_SCALES = html(
    "<p class='scale by-gap'>gap |g| in nats: {}</p><p class='scale by-advantage'>advantage: {}</p>"
    "<p><small>Colored text was sampled; point at a token for its values. Grey text is a prompt or was inserted: "
    "the policy does not learn from it.</small></p>",
    together(html("<i class='g{}'>1e{:+d}</i>", n, _SMALLEST + n) for n in range(_GAP_COLORS)),
    together(html("<i class='a{}'>{:+.2g}</i>", n, (n - 4) / 4) for n in range(0, 9, 2)),
)
