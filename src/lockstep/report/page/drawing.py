"""The curves of a report: which metrics are drawn together, with which limits; and their drawing as inline SVG.

Colors come from the page's style sheet (classes `c0` to `c7`), so that one drawing serves the light and the dark
theme. Invisible columns over a drawing have a `<title>`, which browsers show when a pointer rests on it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from lockstep.report.page.markup import NOTHING, Html, html, together
from lockstep.report.page.run_record import Line, RunRecord, judged_means

_WIDTH, _HEIGHT = 400, 210
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 8, 10, 24
COLORS = 8
# Points of one curve, columns with a title, and bars.
_POINTS, _COLUMNS, _BARS = 200, 80, 60
_LINE = "<line class='{}' x1='{}' x2='{}' y1='{:.1f}' y2='{:.1f}'/>"
_TEXT = "<text x='{:.1f}' y='{:.1f}' text-anchor='{}'>{}</text>"
_BAR = "<rect class='{}' x='{:.1f}' y='{:.1f}' width='{:.1f}' height='{:.1f}'>{}</rect>"


class Series(NamedTuple):
    """One curve, or dots without a line between them. Points without a finite value are left out."""

    name: str
    points: Sequence[tuple[float, float | None]]
    dots: bool = False


class Limit(NamedTuple):
    """A line that values must stay below. A limit that changes has its value at each step, and the last one."""

    name: str
    value: float
    points: Sequence[tuple[float, float]] = ()


def line_chart(series: Sequence[Series], limits: Sequence[Limit] = (), *, log: bool = False) -> Html:
    """Curves over steps, with a legend if there are several. Empty if no curve has a value.

    Args:
        log: a logarithmic axis; values of 0 or less are drawn at its lower end.
    """
    known = [(place, s, _finite(s.points)) for place, s in enumerate(series)]
    known = [(place, s, points) for place, s, points in known if points]
    if not known:
        return NOTHING
    ys = [y for _, _, points in known for _, y in points]
    bounds = [y for limit in limits for y in (limit.value, *(y for _, y in limit.points))]
    axis = _Axis.of([*ys, *bounds], log=log)
    xs = [x for _, _, points in known for x, _ in points]
    first, last = min(xs), max(xs)
    across = _across(first, last)
    parts = [_frame(axis, _ticks(first, last, whole=True), across)]
    for limit in limits:
        y = axis.place(limit.value)
        if len(limit.points) > 1:
            thinned = _thinned(list(limit.points))
            places = [(across(min(max(x, first), last)), axis.place(y)) for x, y in thinned]
            parts.append(html("<polyline class='limit' fill='none' points='{}'/>", _path(places)))
        else:
            parts.append(html(_LINE, "limit", _LEFT, _WIDTH - _RIGHT, y, y))
        parts.append(html(_TEXT, _WIDTH - _RIGHT, y + 12, "end", f"{limit.name} {number(limit.value, 3)}"))
    for place, s, points in known:
        drawn = [(across(x), axis.place(y)) for x, y in _thinned(points)]
        if s.dots or len(drawn) == 1:
            dot = "<circle class='d{}' cx='{:.1f}' cy='{:.1f}' r='3.2'/>"
            parts += [html(dot, place % COLORS, x, y) for x, y in drawn]
        if not s.dots and len(drawn) > 1:
            parts.append(html("<polyline class='c{}' points='{}'/>", place % COLORS, _path(drawn)))
    parts.append(_titles([(s.name, points) for _, s, points in known], limits, across))
    legend = [(f"k{place % COLORS}", s.name) for place, s, _ in known]
    return _svg(parts, legend if len(legend) > 1 else [])


def histogram(groups: Mapping[str, Sequence[float]], bins: int = 20) -> Html:
    """How often values occur, as shares of each group: one bar per group and bin, side by side. Empty without any."""
    named = {name: [v for v in values if math.isfinite(v)] for name, values in groups.items()}
    named = {name: values for name, values in named.items() if values}
    values = [v for own in named.values() for v in own]
    if not values:
        return NOTHING
    distinct = sorted(set(values))
    low, high = distinct[0], distinct[-1]
    if len(distinct) <= bins:
        # Rewards are often few different numbers. Then each has a bar.
        edges = distinct
        place_of: Callable[[float], int] = {v: i for i, v in enumerate(distinct)}.__getitem__
        labels = [f"{v:g}" for v in distinct]
    else:
        width = (high - low) / bins
        edges = [low + i * width for i in range(bins)]

        def place_of(value: float) -> int:
            return min(int((value - low) / width), bins - 1)

        labels = [f"{edge:.3g} to {edge + width:.3g}" for edge in edges]
    counts = {name: [0] * len(edges) for name in named}
    for name, own in named.items():
        for value in own:
            counts[name][place_of(value)] += 1
    shares = {name: [100 * c / len(named[name]) for c in own] for name, own in counts.items()}
    axis = _Axis.of([0.0, max(map(max, shares.values()))])
    room = (_WIDTH - _LEFT - _RIGHT) / len(edges)
    bar = room * 0.8 / len(shares)
    ticks = [(i, labels[i].split(" to ")[0]) for i in range(0, len(edges), max(len(edges) // 5, 1))]
    parts = [_frame(axis, [(i + 0.5, text) for i, text in ticks], lambda x: _LEFT + x * room)]
    for n, (name, own) in enumerate(shares.items()):
        for i, share in enumerate(own):
            if share:
                x, y = _LEFT + i * room + room * 0.1 + n * bar, axis.place(share)
                title = html("<title>{}</title>", f"{name}: {share:.1f} % at {labels[i]}")
                width, height = max(bar - 0.5, 0.5), axis.place(0) - y
                parts.append(html(_BAR, f"d{n % COLORS}", x, y, width, height, title))
    return _svg(parts, [(f"k{n % COLORS}", name) for n, name in enumerate(shares)] if len(shares) > 1 else [])


def stacked_bars(names: Sequence[str], rows: Sequence[tuple[float, Sequence[float]]]) -> Html:
    """One bar per row (a step, and the value of each named part), or per few rows. Empty without rows."""
    if not rows:
        return NOTHING
    size = -(-len(rows) // _BARS)
    bars = []
    for start in range(0, len(rows), size):
        part = rows[start : start + size]
        bars.append((part[-1][0], [sum(row[1][i] for row in part) / len(part) for i in range(len(names))]))
    axis = _Axis.of([0.0, max(sum(values) for _, values in bars)])
    room = (_WIDTH - _LEFT - _RIGHT) / len(bars)
    ticks = [(i + 0.5, f"{bars[i][0]:g}") for i in range(0, len(bars), max(len(bars) // 5, 1))]
    parts = [_frame(axis, ticks, lambda x: _LEFT + x * room)]
    for i, (step, values) in enumerate(bars):
        base = 0.0
        for n, value in enumerate(values):
            top, bottom = axis.place(base + value), axis.place(base)
            base += value
            if bottom - top > 0.1:
                x = _LEFT + i * room + room * 0.08
                parts.append(html(_BAR, f"d{n % COLORS}", x, top, room * 0.84, bottom - top, NOTHING))
        words = ", ".join(f"{name} {value:.3g} s" for name, value in zip(names, values, strict=True) if value)
        parts.append(_column(_LEFT + i * room, room, f"step {step:g}: {words}"))
    return _svg(parts, [(f"k{n % COLORS}", name) for n, name in enumerate(names)])


@dataclass(frozen=True, slots=True)
class _Axis:
    """The vertical axis."""

    low: float
    high: float
    log: bool

    @classmethod
    def of(cls, values: Sequence[float], *, log: bool = False) -> _Axis:
        if log:
            there = [v for v in values if v > 0] or [1.0]
            power = math.floor(math.log10(min(there)))
            return cls(power, max(math.ceil(math.log10(max(there))), power + 1), True)
        low, high = min(values), max(values)
        if high == low:
            pad = abs(high) * 0.1 or 1.0
            return cls(low - pad if low else 0.0, high + pad, False)
        pad = 0.05 * (high - low)
        return cls(low - pad if low else 0.0, high + pad, False)

    def place(self, value: float) -> float:
        if self.log:
            value = math.log10(value) if value > 0 else self.low
        share = (value - self.low) / (self.high - self.low)
        return _HEIGHT - _BOTTOM - min(max(share, 0.0), 1.0) * (_HEIGHT - _TOP - _BOTTOM)

    def ticks(self) -> list[tuple[float, str]]:
        if self.log:
            every = max(int(self.high - self.low) // 5, 1)
            return [(10.0**e, f"1e{e}") for e in range(int(self.low), int(self.high) + 1, every)]
        return _ticks(self.low, self.high)


def _ticks(low: float, high: float, *, whole: bool = False) -> list[tuple[float, str]]:
    """About five round numbers between two numbers, with their text."""
    span = high - low
    if span <= 0:
        return [(low, number(low))]
    size = 10.0 ** math.floor(math.log10(span / 5))
    size *= next(f for f in (1, 2, 5, 10) if span / (size * f) <= 6)
    if whole:
        size = float(max(round(size), 1))
    first = math.ceil(low / size - 1e-9)
    return [(i * size, number(i * size)) for i in range(first, math.floor(high / size + 1e-9) + 1)]


def number(value: float, digits: int = 6) -> str:
    """A number in few characters, with at most `digits` digits."""
    if value and math.isfinite(value) and not 1e-3 <= abs(value) < 1e5:
        leading, _, power = f"{value:.2e}".partition("e")
        return f"{float(leading):g}e{int(power)}"
    return f"{value:.{digits}g}"


def _across(first: float, last: float) -> Callable[[float], float]:
    span = (last - first) or 1.0
    shift = 0.5 if last == first else 0.0
    return lambda x: _LEFT + 6 + ((x - first) / span + shift) * (_WIDTH - _LEFT - _RIGHT - 12)


def _frame(axis: _Axis, ticks: Sequence[tuple[float, str]], across: Callable[[float], float]) -> Html:
    parts = []
    for value, text in axis.ticks():
        y = axis.place(value)
        parts.append(html(_LINE, "grid", _LEFT, _WIDTH - _RIGHT, y, y))
        parts.append(html(_TEXT, _LEFT - 6, y + 4, "end", text))
    for x, text in ticks:
        parts.append(html(_TEXT, across(x), _HEIGHT - 6, "middle", text))
    return together(parts)


def _path(places: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in places)


def _titles(
    curves: Sequence[tuple[str, Sequence[tuple[float, float]]]],
    limits: Sequence[Limit],
    across: Callable[[float], float],
) -> Html:
    """Columns whose titles have the values of all curves at a step."""
    values = {name: dict(points) for name, points in curves}
    xs = sorted({x for own in values.values() for x in own})
    chosen = xs if len(xs) <= _COLUMNS else [xs[i * len(xs) // _COLUMNS] for i in range(_COLUMNS)]
    places = [across(x) for x in chosen]
    allowed = [(limit.name, limit.value, dict(limit.points)) for limit in limits]
    parts = []
    for i, x in enumerate(chosen):
        start = _LEFT if i == 0 else (places[i - 1] + places[i]) / 2
        end = _WIDTH - _RIGHT if i + 1 == len(places) else (places[i] + places[i + 1]) / 2
        words = ", ".join(f"{name} {own[x]:.4g}" for name, own in values.items() if x in own)
        more = "".join(f", {name} {own.get(x, value):.4g}" for name, value, own in allowed)
        parts.append(_column(start, end - start, f"step {x:g}: {words}{more}"))
    return together(parts)


def _column(x: float, width: float, title: str) -> Html:
    return html(_BAR, "h", x, _TOP, width, _HEIGHT - _TOP - _BOTTOM, html("<title>{}</title>", title))


def _svg(parts: Sequence[Html], legend: Sequence[tuple[str, str]]) -> Html:
    words = together(html("<span><i class='{}'></i>{}</span>", kind, name) for kind, name in legend)
    drawing = html("<svg viewBox='0 0 {} {}' role='img'>{}</svg>", _WIDTH, _HEIGHT, together(parts))
    return drawing + (html("<div class='legend'>{}</div>", words) if words else NOTHING)


def _finite(points: Sequence[tuple[float, float | None]]) -> list[tuple[float, float]]:
    return [(x, float(y)) for x, y in points if y is not None and math.isfinite(y)]


def _thinned(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """At most `_POINTS` points. Of every stretch, the lowest and the highest stay, so that no peak is lost."""
    if len(points) <= _POINTS:
        return points
    size = -(-len(points) * 2 // _POINTS)
    kept = []
    for start in range(0, len(points), size):
        part = points[start : start + size]
        ends = sorted({min(part, key=lambda p: p[1]), max(part, key=lambda p: p[1])})
        kept += ends
    return kept


# Evidence against the draws above this power of ten fails its proof.
DRAWS_LIMIT = 6.0


class Chart(NamedTuple):
    """One drawing of metrics, with their names in the legend, perhaps on a logarithmic axis."""

    title: str
    unit: str
    keys: Mapping[str, str]
    log: bool = False


CHARTS = (
    Chart("KL divergence", "nats per token", {"kl": "to the reference", "objective/kl": "to the reference"}),
    Chart("Entropy", "nats per token", {"entropy": "entropy"}),
    Chart("Loss", "", {"loss": "loss", "loss/value": "critic"}),
    Chart("Gradient norm", "before clipping", {"grad_norm": "norm"}),
    Chart("Learning rate", "", {"learning_rate": "rate"}),
    Chart(
        "Length of completions",
        "sampled tokens",
        {
            "completions/mean_length": "mean",
            "completions/max_length": "longest",
            "completions/min_length": "shortest",
        },
    ),
    Chart("Completions cut at the limit", "share", {"completions/clipped_ratio": "cut"}),
    Chart("Groups whose rewards are all equal", "share", {"frac_reward_zero_std": "no spread"}),
    Chart("Clipped tokens", "share", {"clip_ratio/region_mean": "clipped", "clip_ratio": "clipped"}),
)
_OF_GAP = {"parity/mean_abs_gap": "mean |g|", "parity/max_abs_gap": "largest |g|"}
_GAP = Chart("Parity gap between engine and trainer", "nats", _OF_GAP, log=True)


_EVIDENCE = "power of ten; every token was drawn from what was reported"
_SPEED = "sampled tokens, whole steps"


def _evidence(steps: Sequence[Line]) -> Html:
    key = "parity/draws_log10_evidence"
    if not any(key in line for line in steps):
        return NOTHING
    return line_chart([Series("evidence", _points(steps, key))], [Limit("limit", DRAWS_LIMIT)])


def charts_of(run: RunRecord) -> Html:
    """All drawings of a run."""
    steps = run.steps
    drawn = [
        _figure("Reward", "of training rollouts; points: evaluations", line_chart(_rewards(run))),
        _figure("Rewards, rollout by rollout", "share of the rollouts of a step, in %", _spread(run)),
        _figure(_GAP.title, _GAP.unit, line_chart(_gaps(run), gap_limits(run), log=True)),
        *(_figure(c.title, c.unit, line_chart(_series(steps, c), log=c.log)) for c in CHARTS),
        _figure("Evidence against the draws", _EVIDENCE, _evidence(steps)),
        _figure("Tokens per second", _SPEED, line_chart([Series("speed", speeds(steps))])),
        _figure("Where the time goes", "seconds per log", _times(steps)),
    ]
    return html("<div class='charts'>{}</div>", together(drawn)) if any(drawn) else NOTHING


def charts_of_several(runs: Mapping[str, RunRecord]) -> Html:
    """The same metrics of several runs, one curve per run and metric."""

    def several(key: str) -> list[Series]:
        return [Series(name, _points(run.steps, key)) for name, run in runs.items()]

    logged = {key for run in runs.values() for line in run.steps for key in line}
    chosen = [
        ("Reward", "of training rollouts", "reward", False),
        ("Largest parity gap", "nats", "parity/max_abs_gap", True),
        ("Mean parity gap", "nats", "parity/mean_abs_gap", True),
    ]
    for chart in CHARTS:
        key = next((key for key in chart.keys if key in logged), None)
        if key is not None:
            chosen.append((chart.title, chart.unit, key, chart.log))
    drawn = [_figure(title, unit, line_chart(several(key), log=log)) for title, unit, key, log in chosen]
    held = [Series(name, evaluation_points(run)) for name, run in runs.items()]
    drawn.insert(1, _figure("Held-out reward", "evaluations", line_chart(held)))
    speed = [Series(name, speeds(run.steps)) for name, run in runs.items()]
    drawn.append(_figure("Tokens per second", _SPEED, line_chart(speed)))
    last = {name: run.rewards[max(run.rewards)] for name, run in runs.items() if run.rewards}
    drawn.append(_figure("Rewards at the last kept step", "share of its rollouts, in %", histogram(last)))
    return html("<div class='charts'>{}</div>", together(drawn))


def gap_limits(run: RunRecord) -> list[Limit]:
    """The limits on the mean and on the largest gap. The latter depends on the tokens of a step, and falls in a run."""
    limits = run.start.get("limits", {})
    largest = [(line["step"], line["max_allowed"]) for line in run.proven if "max_allowed" in line]
    of_mean = "limit of the judged mean" if _judged_later(run) else "limit of the mean"
    found = [Limit(of_mean, limits["mean"])] if "mean" in limits else []
    return found + ([Limit("limit of the largest", largest[-1][1], largest)] if largest else [])


def _gaps(run: RunRecord) -> list[Series]:
    """The gaps of the logs; and the means that were judged, where these are not the means of single steps."""
    judged = judged_means(run.proven, "mean_abs_gap") if _judged_later(run) else []
    points = [(one.lines[-1]["step"], one.figure) for one in judged]
    return _series(run.steps, _GAP) + ([Series("judged mean |g|", points)] if points else [])


def _judged_later(run: RunRecord) -> bool:
    """Whether means were judged over the tokens of several steps."""
    return any("waiting" in line for line in run.proven)


def evaluation_points(run: RunRecord) -> list[tuple[float, float | None]]:
    """Step and held-out reward of every evaluation, those before and after training too."""
    points: list[tuple[float, float | None]] = []
    if run.before:
        points.append((0, run.before["metrics"].get("eval_reward")))
    points += [(line["step"], line.get("eval_reward")) for line in run.evaluations]
    if run.after:
        points.append((run.last_step, run.after["metrics"].get("eval_reward")))
    return points


def speeds(steps: Sequence[Line]) -> list[tuple[float, float | None]]:
    """Sampled tokens per second of each log."""
    timed = (line for line in steps if line.get("time/step") and "sampling/tokens" in line)
    return [(line["step"], line["sampling/tokens"] / line["time/step"]) for line in timed]


def _points(steps: Sequence[Line], key: str) -> list[tuple[float, float | None]]:
    return [(line["step"], line.get(key)) for line in steps]


def _series(steps: Sequence[Line], chart: Chart) -> list[Series]:
    there = [key for key in chart.keys if any(key in line for line in steps)]
    return [Series(chart.keys[key], _points(steps, key)) for key in there]


def _rewards(run: RunRecord) -> list[Series]:
    steps = run.steps
    keys = dict.fromkeys(key for line in steps for key in line)
    parts = [key for key in keys if key.startswith("rewards/") and key.endswith("/mean")]
    series = [Series("reward", _points(steps, "reward"))]
    for key in parts if len(parts) > 1 else ():
        series.append(Series(key.removeprefix("rewards/").removesuffix("/mean"), _points(steps, key)))
    held_out = evaluation_points(run)
    return series + ([Series("held out", held_out, dots=True)] if held_out else [])


def _spread(run: RunRecord) -> Html:
    return histogram({f"step {step}": rewards for step, rewards in run.rewards.items()})


def _times(steps: Sequence[Line]) -> Html:
    keys = dict.fromkeys(
        key for line in steps for key in line if key.startswith("time/") and key != "time/step"
    )
    names = [name for name in keys if any(line.get(name, 0) > 0 for line in steps)]
    rows = [(line["step"], [line.get(name, 0.0) for name in names]) for line in steps]
    return stacked_bars([name.removeprefix("time/") for name in names], rows) if names else NOTHING


def _figure(title: str, unit: str, drawing: Html) -> Html:
    if not drawing:
        return NOTHING
    small = html(" <small>{}</small>", unit) if unit else NOTHING
    return html("<figure><figcaption>{}{}</figcaption>{}</figure>", title, small, drawing)
