"""The page of a run, `report.html`, and the page that compares several runs.

The page is one file below a megabyte. It loads nothing and runs no script. `markup.py` escapes all texts of models
and users.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple

from lockstep.progress import clock
from lockstep.report.page.drawing import charts_of, charts_of_several, number
from lockstep.report.page.markup import NOTHING, Html, html, together
from lockstep.report.page.proofs import failure_section, proofs_section
from lockstep.report.page.rollouts import evaluations_section, training_section, turns_section
from lockstep.report.page.run_record import RECEIPT, Line, RunRecord, closest, largest_gaps
from lockstep.report.page.style import STYLE

LARGEST = 1_000_000
# Shares of the usual room for rollouts, tried in this order until the page is small enough.
_SHARES = (1.0, 0.2, 0.0)
_VALUE = 300


class Verdict(NamedTuple):
    """How a run has ended: `good`, `near` (not at its end) or `bad`, in one line and one more."""

    kind: str
    line: str
    more: str


def render_report(run: RunRecord) -> str:
    """The page about a run as HTML text."""
    first, last = _before_rollouts(run), _settings(run)
    for share in _SHARES:
        page = page_of(title_of(run), together([first, _rollouts(run, share), last]))
        if len(page.encode()) < LARGEST:
            break
    return page


def page_of(title: str, body: Html) -> str:
    """A whole page around a body."""
    # The two switches of the tokens' colors work by the style sheet alone.
    page = html(
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width, initial-scale=1'>"
        "<meta http-equiv='Content-Security-Policy' content=\"default-src 'none'; style-src 'unsafe-inline'; "
        'img-src data:">'
        "<title>{}</title><style>{}</style></head><body>{}</body></html>",
        title,
        Html(STYLE),
        body,
    )
    return str(page)


def title_of(run: RunRecord) -> str:
    """The run's own name, or its method and model."""
    about = run.about
    named = f"{about['method']} on {name_of(about['model'])}" if "method" in about else run.folder.name
    return f"{about['name']}: {named}" if about.get("name") else named


def name_of(path: str) -> str:
    """The last part of a path or a hub id."""
    return str(path).rstrip("/").rpartition("/")[2]


def verdict_of(run: RunRecord) -> Verdict:
    """How the run has ended, and what its proofs say."""
    end, proven = run.end, run.proven
    steps = run.last_step
    passed = f"All proofs of {_generations(len(proven))} passed" if proven else "No step has been proven"
    total = end.get("max_steps") or run.about.get("max_steps")
    of = f" of {total}" if total else ""
    if end.get("ended") == "failed" and "check" in end:
        line = f"Stopped by proof “{end['check']}” before optimizer step {end['step'] + 1}{of}"
        return Verdict("bad", line, f"{passed} before. The step in question was not taken.")
    if end.get("ended") == "failed":
        line = f"Failed after step {end['step']}{of}: {end.get('error', 'error')}"
        return Verdict("bad", line, f"{passed}; no proof has failed.")
    if end.get("ended") == "interrupted":
        line = f"Interrupted ({end.get('signal', 'a signal')}) after step {end['step']}{of}"
        return Verdict("near", line, f"{passed}. The run can go on from its last checkpoint.")
    if end.get("ended") == "finished":
        if any(RECEIPT in part for part in run.left_out):
            return Verdict("bad", f"Finished after {steps} steps, but its receipt is damaged", f"{passed}.")
        unproven = run.summary.get("parity", {}).get("failed", 0)
        if unproven or not proven:
            line = f"Finished after {steps} steps, but not all of them are proven"
            return Verdict("bad", line, f"{passed}.")
        tokens = sum(line["checked_tokens"] for line in proven)
        more = f"{passed}; {tokens:,} tokens were compared with the trainer."
        return Verdict("good", f"All proofs passed; finished after {steps} steps", more)
    more = f"{passed}. This page was written while the run trained; a killed run stays so."
    return Verdict("near", f"Not at its end: step {steps}{of}", more)


def _generations(count: int) -> str:
    return "1 generation" if count == 1 else f"{count} generations"


def _before_rollouts(run: RunRecord) -> Html:
    left_out = "<p class='said'>Left out, because it is damaged: {}.</p>"
    # A further section, for example of pictures, is one more function of the record in this list.
    sections = [
        html("<h1>{}</h1><p><small>{}</small></p>", title_of(run), _subtitle(run)),
        html("<p class='verdict {}'>{}<small>{}</small></p>", *verdict_of(run)),
        together(html(left_out, part) for part in run.left_out),
        failure_section(run),
        _alarms(run),
        _tiles(run),
        proofs_section(run),
        html("<h2 id='curves'>Curves</h2>{}", charts_of(run) or Html("<p>Nothing was logged yet.</p>")),
    ]
    return together(sections)


def _alarms(run: RunRecord) -> Html:
    form = "<tr><th>step {}</th><td class='said'>{}</td></tr>"
    rows = together(html(form, line["step"] + 1, line["text"]) for line in run.alarms)
    if not rows:
        return NOTHING
    return html(
        "<section class='failure' id='alarms'><h2>Alarms</h2><p>No proof has failed because of them, and the run went "
        "on.</p><div class='wide'><table>{}</table></div></section>",
        rows,
    )


def _rollouts(run: RunRecord, share: float) -> Html:
    if not share:
        return Html(
            "<p>The rollouts are too long for this page; see the files in <code>rollouts/</code>.</p>"
        )
    held_out = evaluations_section(run.before, run.after, share)
    turns = training_section(run.shown, share) + turns_section((run.after or {}).get("turns", ()), share)
    return together([held_out, _SWITCH if turns else NOTHING, turns])


def _subtitle(run: RunRecord) -> str:
    about = run.about
    started = f"started {_minute(about['started'])}" if "started" in about else ""
    words = [str(run.folder), started, about.get("model", "")]
    return " · ".join(str(word) for word in words if word)


def _minute(moment: str) -> str:
    """A moment in ISO format, to the minute."""
    try:
        return f"{datetime.fromisoformat(moment):%Y-%m-%d %H:%M %Z}".strip()
    except ValueError:
        return moment


def figures_of(run: RunRecord) -> dict[str, str]:
    """A run in a few figures, by name."""
    steps, summary, proven = run.steps, run.summary, run.proven
    found: dict[str, str] = {"steps": f"{run.last_step}"}
    rewards = [line["reward"] for line in steps if "reward" in line]
    if rewards:
        part = max(len(rewards) // 10, 1)
        first, last = sum(rewards[:part]) / part, sum(rewards[-part:]) / part
        found["training reward"] = f"{first:.3f} → {last:.3f}"
    evaluations = [own["metrics"] for own in (run.before, run.after) if own]
    held = [_interval(metrics) for metrics in evaluations if "eval_reward" in metrics]
    if held:
        found["held-out reward"] = " → ".join(held)
    if proven:
        if (largest := closest(largest_gaps(proven, math.inf))) is not None:
            of = f" of {number(largest.limit, 2)}" if largest.limit < math.inf else ""
            found["largest gap"] = f"{number(largest.figure, 2)}{of} nats"
        found["tokens compared"] = f"{sum(line['checked_tokens'] for line in proven):,}"
    cut = [line["completions/clipped_ratio"] for line in steps if "completions/clipped_ratio" in line]
    if cut:
        found["cut at the limit"] = f"{cut[-1]:.0%} at the last log"
    seconds = summary.get("wall_s") or run.end.get("seconds")
    if seconds:
        found["wall time"] = f"{clock(seconds)}"
    if summary.get("tokens_per_s"):
        found["tokens per second"] = f"{summary['tokens_per_s']:g}"
    return found


def _tiles(run: RunRecord) -> Html:
    form = "<div><small>{}</small><b>{}</b></div>"
    tiles = together(html(form, name, _unbroken(text)) for name, text in figures_of(run).items())
    return html("<div class='tiles'>{}</div>", tiles)


def _unbroken(text: str) -> Html:
    """HTML in which a line ends after an arrow at most."""
    return together((html("<i>{}</i>", part) for part in text.replace(" → ", " →\n").split("\n")), " ")


def _interval(metrics: Line) -> str:
    return f"{metrics['eval_reward']:.3f} ± {metrics.get('eval_reward_ci95', 0):.3f}"


_SWITCH = Html(
    "<div class='switch'><small>color of tokens:</small> <input type='radio' name='color' id='gap' checked>"
    "<label for='gap'> gap</label><input type='radio' name='color' id='advantage'>"
    "<label for='advantage'> advantage</label></div>"
)


def _settings(run: RunRecord) -> Html:
    about = run.about
    if not about:
        return NOTHING
    settings, chosen = about.get("settings", {}), about.get("chosen", [])
    data = {f"{name} prompts": count for name, count in about.get("rows", {}).items()} | about.get("data", {})
    own = {name: settings[name] for name in chosen if name in settings}
    others = {name: value for name, value in settings.items() if name not in chosen}
    machine = {**about.get("versions", {}), **about.get("machine", {})}
    return (
        Html("<h2 id='settings'>Configuration, data, versions</h2>")
        + _table(own, "Settings that are not the defaults", is_open=True)
        + _table(others, "All other settings")
        + _table(data, "Data: numbers of prompts, and digests of rows", is_open=True)
        + _table(machine, "Versions and machine", is_open=True)
        + _table(about.get("engine", {}), "Engine, as it reported itself")
    )


def _table(values: Mapping[str, Any], title: str, *, is_open: bool = False) -> Html:
    if not values:
        return NOTHING
    row = "<tr><td><code>{}</code></td><td class='said'>{}</td></tr>"
    rows = together(html(row, name, _short(value)) for name, value in values.items())
    form = "<details{}><summary>{}</summary><div class='wide'><table>{}</table></div></details>"
    return html(form, " open" if is_open else "", title, rows)


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= _VALUE else f"{text[:_VALUE]} … {len(text) - _VALUE} more characters"


_SHOWN = 200


def render_comparison(runs: Sequence[RunRecord]) -> str:
    """The page about several runs as HTML text."""
    named = _named(runs)
    verdicts = {name: verdict_of(run) for name, run in named.items()}
    rows = [_row("run", {name: title_of(run) for name, run in named.items()}, named)]
    kinds, form = {"good": "goodtext", "bad": "badtext"}, "<td><span class='{}'>{}</span></td>"
    cells = [html(form, kinds.get(v.kind, ""), v.line) for v in verdicts.values()]
    rows.append(html("<tr><th>verdict</th>{}</tr>", together(cells)))
    figures = {name: figures_of(run) for name, run in named.items()}
    for figure in dict.fromkeys(key for own in figures.values() for key in own):
        rows.append(_row(figure, {name: own.get(figure, "") for name, own in figures.items()}, named))
    settings = [_row(field, values, named, mark=True) for field, values in _differences(named).items()]
    heads = together(html("<th>{}</th>", name) for name in named)
    title = " · ".join(named)
    table = "<div class='wide'><table><tr><th></th>{}</tr>{}</table></div>"
    body = [
        html("<h1>{}</h1>", title),
        html(table, heads, together(rows)),
        html("<h2>Curves</h2>{}<h2>What differs between the runs</h2>", charts_of_several(named)),
        html(table, heads, together(settings))
        if settings
        else Html("<p>Settings, data, versions and machine are the same.</p>"),
    ]
    return page_of(title, together(body))


def _named(runs: Sequence[RunRecord]) -> dict[str, RunRecord]:
    """The runs by the shortest ends of their paths that differ."""
    paths = [run.folder.resolve().parts for run in runs]
    for count in range(1, max(map(len, paths)) + 1):
        names = ["/".join(parts[-count:]) for parts in paths]
        if len(set(names)) == len(names):
            break
    return dict(zip(names, runs, strict=True))


def _differences(runs: dict[str, RunRecord]) -> dict[str, dict[str, str]]:
    """Settings, data, versions and machine that differ, by name and run."""
    titles = {"settings": "", "data": "", "versions": "version of ", "machine": "machine: "}

    def flat_of(about: Line) -> dict[str, str]:
        parts = [
            (title + key, value)
            for kind, title in titles.items()
            for key, value in about.get(kind, {}).items()
        ]
        parts += [(key, about.get(key, "")) for key in ("method", "model")]
        return {key: str(value) for key, value in parts}

    flat = {name: flat_of(run.about) for name, run in runs.items()}
    keys = dict.fromkeys(key for own in flat.values() for key in own)
    found = {key: {name: own.get(key, "") for name, own in flat.items()} for key in keys}
    return {key: values for key, values in found.items() if len(set(values.values())) > 1}


def _row(title: str, values: dict[str, str], runs: dict[str, RunRecord], *, mark: bool = False) -> Html:
    kind = "said different" if mark else "said"
    cells = [html("<td class='{}'>{}</td>", kind, values[name][:_SHOWN]) for name in runs]
    return html("<tr><th>{}</th>{}</tr>", title, together(cells))
