"""The curves of a report: which metrics are drawn together, with which limits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from lockstep.report.judged_gap import judged_means
from lockstep.report.page.markup import NOTHING, Html, html, together
from lockstep.report.page.run_record import Line, RunRecord
from lockstep.report.page.svg import Limit, Series, histogram, line_chart, stacked_bars

# Evidence against the draws above this power of ten fails its proof.
DRAWS_LIMIT = 6.0


class Chart(NamedTuple):
    """One drawing.

    Attributes:
        keys: the metrics that are drawn, with their names in the legend.
        log: whether its axis is logarithmic.
    """

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
_GAP = Chart(
    "Parity gap between engine and trainer",
    "nats",
    {"parity/mean_abs_gap": "mean |g|", "parity/max_abs_gap": "largest |g|"},
    log=True,
)


def charts_of(run: RunRecord) -> Html:
    """All drawings of a run."""
    steps = run.steps
    drawn = [
        _figure("Reward", "of training rollouts; points: evaluations", line_chart(_rewards(run))),
        _figure("Rewards, rollout by rollout", "share of the rollouts of a step, in %", _spread(run)),
        _figure(_GAP.title, _GAP.unit, line_chart(_gaps(run), gap_limits(run), log=True)),
        *(_figure(c.title, c.unit, line_chart(_series(steps, c), log=c.log)) for c in CHARTS),
        _figure(
            "Evidence against the draws",
            "power of ten; every token was drawn from what was reported",
            line_chart(
                [Series("evidence", _points(steps, "parity/draws_log10_evidence"))], [Limit("limit", DRAWS_LIMIT)]
            )
            if any("parity/draws_log10_evidence" in line for line in steps)
            else NOTHING,
        ),
        _figure("Tokens per second", "sampled tokens, whole steps", line_chart([Series("speed", speeds(steps))])),
        _figure("Where the time goes", "seconds per log", _times(steps)),
    ]
    return html("<div class='charts'>{}</div>", together(drawn)) if any(drawn) else NOTHING


def charts_of_several(runs: Mapping[str, RunRecord]) -> Html:
    """The same metrics of several runs, one curve per run and metric."""

    def several(key: str) -> list[Series]:
        return [Series(name, _points(run.steps, key)) for name, run in runs.items()]

    chosen = [("Reward", "of training rollouts", "reward", False)]
    for name, title in (("parity/max_abs_gap", "Largest parity gap"), ("parity/mean_abs_gap", "Mean parity gap")):
        chosen.append((title, "nats", name, True))
    for chart in CHARTS:
        key = next((k for k in chart.keys if any(k in line for run in runs.values() for line in run.steps)), None)
        if key is not None:
            chosen.append((chart.title, chart.unit, key, chart.log))
    drawn = [_figure(title, unit, line_chart(several(key), log=log)) for title, unit, key, log in chosen]
    held = [Series(name, evaluation_points(run)) for name, run in runs.items()]
    drawn.insert(1, _figure("Held-out reward", "evaluations", line_chart(held)))
    speed = [Series(name, speeds(run.steps)) for name, run in runs.items()]
    drawn.append(_figure("Tokens per second", "sampled tokens, whole steps", line_chart(speed)))
    last = {name: run.rewards[max(run.rewards)] for name, run in runs.items() if run.rewards}
    drawn.append(_figure("Rewards at the last kept step", "share of its rollouts, in %", histogram(last)))
    return html("<div class='charts'>{}</div>", together(drawn))


def gap_limits(run: RunRecord) -> list[Limit]:
    """The limits on the mean and on the largest gap. The latter depends on the tokens of a step, and falls during a run."""
    limits = run.start.get("limits", {})
    largest = [(line["step"], line["max_allowed"]) for line in run.proven if "max_allowed" in line]
    of_mean = "limit of the judged mean" if _judged_later(run) else "limit of the mean"
    found = [Limit(of_mean, limits["mean"])] if "mean" in limits else []
    return found + ([Limit("limit of the largest", largest[-1][1], largest)] if largest else [])


def _gaps(run: RunRecord) -> list[Series]:
    """The gaps of the logs; and the means that were judged, where these are not the means of single steps."""
    judged = judged_means(run.proven, "mean_abs_gap") if _judged_later(run) else []
    means = [Series("judged mean |g|", [(one.lines[-1]["step"], one.figure) for one in judged])] if judged else []
    return _series(run.steps, _GAP) + means


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
    return [
        (line["step"], line["sampling/tokens"] / line["time/step"])
        for line in steps
        if line.get("time/step") and "sampling/tokens" in line
    ]


def _points(steps: Sequence[Line], key: str) -> list[tuple[float, float | None]]:
    return [(line["step"], line.get(key)) for line in steps]


def _series(steps: Sequence[Line], chart: Chart) -> list[Series]:
    there = [key for key in chart.keys if any(key in line for line in steps)]
    return [Series(chart.keys[key], _points(steps, key)) for key in there]


def _rewards(run: RunRecord) -> list[Series]:
    steps = run.steps
    parts = dict.fromkeys(k for line in steps for k in line if k.startswith("rewards/") and k.endswith("/mean"))
    series = [Series("reward", _points(steps, "reward"))]
    if len(parts) > 1:
        series += [Series(key.removeprefix("rewards/").removesuffix("/mean"), _points(steps, key)) for key in parts]
    held_out = evaluation_points(run)
    return series + ([Series("held out", held_out, dots=True)] if held_out else [])


def _spread(run: RunRecord) -> Html:
    return histogram({f"step {step}": rewards for step, rewards in run.rewards.items()})


def _times(steps: Sequence[Line]) -> Html:
    names = list(dict.fromkeys(k for line in steps for k in line if k.startswith("time/") and k != "time/step"))
    names = [name for name in names if any(line.get(name, 0) > 0 for line in steps)]
    rows = [(line["step"], [line.get(name, 0.0) for name in names]) for line in steps]
    return stacked_bars([name.removeprefix("time/") for name in names], rows) if names else NOTHING


def _figure(title: str, unit: str, drawing: Html) -> Html:
    if not drawing:
        return NOTHING
    small = html(" <small>{}</small>", unit) if unit else NOTHING
    return html("<figure><figcaption>{}{}</figcaption>{}</figure>", title, small, drawing)
