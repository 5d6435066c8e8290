"""Several runs side by side on one page: verdicts, figures, the settings that differ, and the same curves."""

from __future__ import annotations

from collections.abc import Sequence

from lockstep.report.page.charts import charts_of_several
from lockstep.report.page.markup import Html, html, together
from lockstep.report.page.report import figures_of, page_of, title_of, verdict_of
from lockstep.report.page.run_record import RunRecord

_SHOWN = 200


def render_comparison(runs: Sequence[RunRecord]) -> str:
    """The page about several runs as HTML text."""
    named = _named(runs)
    verdicts = {name: verdict_of(run) for name, run in named.items()}
    rows = [_row("run", {name: title_of(run) for name, run in named.items()}, named)]
    kinds = {"good": "goodtext", "bad": "badtext"}
    cells = [html("<td><span class='{}'>{}</span></td>", kinds.get(v.kind, ""), v.line) for v in verdicts.values()]
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
    flat = {
        name: {
            f"{part}{key}": str(value)
            for kind, part in (("settings", ""), ("data", ""), ("versions", "version of "), ("machine", "machine: "))
            for key, value in {**run.about.get(kind, {})}.items()
        }
        | {key: str(run.about.get(key, "")) for key in ("method", "model")}
        for name, run in runs.items()
    }
    keys = dict.fromkeys(key for own in flat.values() for key in own)
    found = {key: {name: own.get(key, "") for name, own in flat.items()} for key in keys}
    return {key: values for key, values in found.items() if len(set(values.values())) > 1}


def _row(title: str, values: dict[str, str], runs: dict[str, RunRecord], *, mark: bool = False) -> Html:
    kind = "said different" if mark else "said"
    cells = [html("<td class='{}'>{}</td>", kind, values[name][:_SHOWN]) for name in runs]
    return html("<tr><th>{}</th>{}</tr>", title, together(cells))
