"""A run in view of the user: a live panel on a terminal, plain lines elsewhere, and tables of completions.

The panel is drawn again four times per second, so that the user sees the progress of the current phase. Where there
is no terminal, a line appears for each log, for each long piece of work, and after some seconds without one
(`progress.py`). A trainer in a script or a notebook prints the same lines for its logs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text
from transformers import TrainerCallback

from lockstep.progress import Heartbeat, StatusLine, clock, open_waits
from lockstep.report.page.drawing import number
from lockstep.safe_text import visible
from lockstep.terminal import Terminal, sparkline

_WIDEST = 100
# A gap above this share of its limit is shown in yellow.
_CLOSE = 0.5
# Turns and results of a rollout that are shown.
_TURNS = 6


@dataclass(frozen=True, slots=True)
class About:
    """The values that do not change during a run.

    Attributes:
        folder: the output directory.
    """

    title: str
    model: str
    folder: str


class LiveView(TrainerCallback):
    """Follows a run. It is also the watcher of long work (`progress.py`) while the run trains.

    Args:
        phase: returns the current phase in words, with its counters; empty between phases.
        latest: returns the figures of the last step, by metric name.
        sample: returns the reward of one rollout, and what was said in it: a label and a text for each turn and each
            result of a tool. None: there is none yet.
        judged: returns the figures of the last gap whose means were judged, with their limits, in nats; empty before
            that.
        alarms: returns the alarms of the run.
    """

    def __init__(
        self,
        about: About,
        phase: Callable[[], str],
        latest: Callable[[], Mapping[str, float]],
        sample: Callable[[], tuple[float, list[tuple[str, str]]] | None],
        judged: Callable[[], Mapping[str, float]],
        console: Terminal | None = None,
        alarms: Callable[[], Sequence[str]] = tuple,
    ) -> None:
        self._about, self._phase, self._latest = about, phase, latest
        self._sample, self._judged, self._alarms = sample, judged, alarms
        self._console = console or Terminal()
        self._live: Live | None = None
        self._spinner = Spinner("dots", style="cyan")
        self._work: list[tuple[str, Callable[[], str], bool]] = []
        # Shows long work on a terminal before the panel is there.
        self._status = StatusLine(self._console)
        self._heartbeat = Heartbeat(self._beat)
        self._figures: Mapping[str, float] = {}
        self._logged: dict[str, float] = {}
        self._trends: dict[str, list[float]] = {"reward": [], "parity/max_abs_gap": []}
        self._evaluation = ""
        self._began = self._stepped = time.monotonic()
        self._first_step = self._step = self._steps = self._logged_step = 0

    # ---- input from the run ------------------------------------------------------------------------------------

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._began = self._stepped = time.monotonic()
        self._first_step = self._step = state.global_step
        self._steps = state.max_steps
        if self._console.is_terminal:
            self._live = Live(console=self._console, get_renderable=self.panel, refresh_per_second=4)
            self._live.start(refresh=True)
        else:
            self._print(f"training, step {self._step + 1} to {self._steps} …")

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._step, self._stepped = state.global_step, time.monotonic()
        self._figures = self._latest()
        for name, values in self._trends.items():
            values.append(self._figures.get(name, float("nan")))

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any
    ) -> None:
        if not logs or "loss" not in logs:
            return
        # A step that learns from the rollouts of an earlier step logs no reward, so the last reward is kept.
        self._logged_step = state.global_step
        self._logged = {"reward": self._logged.get("reward", float("nan")), **logs}
        if self._live is None:
            self._print(plain_line(state.global_step, state.max_steps, self._logged, self._left()))

    def on_evaluate(
        self, args: Any, state: Any, control: Any, metrics: Mapping[str, float], **kwargs: Any
    ) -> None:
        # Of several evaluation sets, each is told alone, under its own name.
        ending = "_reward_ci95"
        for prefix in (key.removesuffix(ending) for key in metrics if key.endswith(ending)):
            name = "" if prefix == "eval" else f"{prefix.removeprefix('eval_')}: "
            mean, half = metrics[f"{prefix}_reward"], metrics[f"{prefix}{ending}"]
            self._evaluation = f"{name}{mean:.3f} ± {half:.3f} at step {state.global_step}"

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.stop()

    def begin(self, text: str, detail: Callable[[], str]) -> None:
        before_panel = self._console.is_terminal and self._live is None
        self._work.append((text, detail, before_panel))
        if before_panel:
            self._status.begin(text, detail)
        elif self._live is None:
            self._print(f"{text} …")

    def end(self) -> None:
        _, _, before_panel = self._work.pop()
        if before_panel:
            self._status.end()

    def note(self, line: str) -> None:
        if self._console.is_terminal and self._live is None:
            self._status.note(line)
        elif self._live is None:
            self._print(f"step {self._step}/{self._steps} done · {line}" if self._steps else line)

    def stop(self) -> None:
        """Release the terminal; safe to call twice."""
        self._heartbeat.stop()
        if self._live is not None:
            self._live.stop()
            self._live = None

    # ---- output to the user ------------------------------------------------------------------------------------

    def panel(self) -> Panel:
        """The panel at this moment. Its lines are never wrapped."""
        rows = Table.grid(padding=(0, 2))
        rows.add_column(no_wrap=True, style="bold", min_width=len("evaluation"))
        rows.add_column(no_wrap=True, overflow="ellipsis", ratio=1)
        for label, shown in self._rows():
            rows.add_row(label, shown)
        self._spinner.update(text=_line(self._under_way()))
        head = _line(f"{self._about.model} → {self._about.folder}")
        whole = Group(head, self._bar(), self._spinner, Text(""), rows)
        width = min(_WIDEST, self._console.width)
        return Panel(whole, title=_line(self._about.title), border_style="cyan", width=width)

    def _bar(self) -> Table:
        bar = Table.grid(padding=(0, 2), expand=True)
        bar.add_column(no_wrap=True)
        bar.add_column(ratio=1)
        bar.add_column(no_wrap=True)
        elapsed = clock(time.monotonic() - self._began)
        left = f"{clock(self._left())} left" if self._step > self._first_step else "first step"
        done = ProgressBar(total=max(self._steps, 1), completed=self._step)
        bar.add_row(f"step {self._step}/{self._steps}", done, f"{elapsed} elapsed, {left}")
        return bar

    def _print(self, line: str) -> None:
        """Print a line where there is no panel."""
        self._console.print(line, highlight=False, soft_wrap=True, markup=False)
        self._heartbeat.printed()

    def _beat(self) -> None:
        line = f"step {self._step}/{self._steps} done · {self._under_way()}"
        self._console.print(line, highlight=False, soft_wrap=True, markup=False)

    def _under_way(self) -> str:
        if work := self._work[-1:]:
            ((text, detail, _),) = work
            words = [text, detail()]
        else:
            words = [self._phase() or "between two phases"]
        return " · ".join(filter(None, [*words, open_waits()]))

    def _rows(self) -> list[tuple[str, Text]]:
        figures = self._figures
        rows: list[tuple[str, Text]] = []

        def add(label: str, needed: str, words: Callable[[], str], style: str = "") -> None:
            if needed in figures:
                rows.append((label, _line(words(), style)))

        rows += [("ALARM", _line(text, "bold red")) for text in self._alarms()]
        add("reward", "reward", lambda: f"{figures['reward']:.3f}  {sparkline(self._trends['reward'])}")
        if self._logged:
            rows.append(("loss", _line(f"{self._logged['loss']:.4g} at the log of step {self._logged_step}")))
        add("entropy", "entropy", lambda: f"{figures['entropy']:.3f}")
        add("length", "completions/mean_length", lambda: _lengths(figures))
        equal = "frac_reward_zero_std"
        add("no spread", equal, lambda: f"{figures[equal]:.0%} of the groups")
        add("gap", "parity/mean_abs_gap", lambda: self._gap(figures))
        if judged := self._judged():
            rows.append(("judged", _line(*limits_kept(judged))))
        add("checked", "parity/checked_tokens", lambda: checked(figures))
        if self._logged:
            rows.append(("speed", _line(f"{tokens_per_second(self._logged):.0f} tokens/s over whole steps")))
            rows.append(("time", _line(time_shares(self._logged))))
        if self._evaluation:
            rows.append(("evaluation", _line(self._evaluation)))
        if (found := self._sample()) is not None:
            reward, said = found
            shown = [(label, " ".join(text.split())) for label, text in said[:_TURNS]]
            shown[0] = shown[0][0], f"{reward:.2f}: {shown[0][1]}"
            if len(said) > _TURNS:
                shown.append(("", f"{len(said) - _TURNS} more turns and results"))
            rows += [(label, _line(text, "dim")) for label, text in shown]
        return rows

    def _gap(self, figures: Mapping[str, float]) -> str:
        mean, largest = figures["parity/mean_abs_gap"], figures["parity/max_abs_gap"]
        return f"{mean:.1e} mean, {largest:.1e} max  {sparkline(self._trends['parity/max_abs_gap'], 16)}"

    def _left(self) -> float:
        """Estimated seconds until the last step ends, from the mean seconds per step so far."""
        done = max(self._step - self._first_step, 1)
        pace = (self._stepped - self._began) / done
        return max(pace * (self._steps - self._step) - (time.monotonic() - self._stepped), 0.0)


def _line(text: str, style: str = "") -> Text:
    # A Text object, because square brackets in a completion must not be read as markup.
    return Text(visible(text), style=style, no_wrap=True, overflow="ellipsis")


def limits_kept(judged: Mapping[str, float]) -> tuple[str, str]:
    """The figures of a gap that was judged beside their limits, in words, and the color of the row."""
    names = {"mean": "mean_abs_gap", "max": "max_abs_gap", "k3": "k3"}
    found = [(word, judged[name], judged[f"{word}_allowed"]) for word, name in names.items()]
    words = ", ".join(f"{word} {number(figure, 2)} of {number(limit, 2)}" for word, figure, limit in found)
    share = max(figure / limit for _, figure, limit in found)
    return f"{words}; {judged['tokens']:.0f} tokens", "yellow" if share > _CLOSE else "green"


def _lengths(figures: Mapping[str, float]) -> str:
    cut = figures.get("completions/clipped_ratio", 0.0)
    return f"{figures['completions/mean_length']:.0f} tokens on average, {cut:.0%} cut at the limit"


def plain_line(step: int, steps: int, logs: Mapping[str, float], left: float) -> str:
    """One step as a line of text."""
    return (
        f"step {step}/{steps}  reward {logs['reward']:.3f}  gap {logs['parity/mean_abs_gap']:.1e} mean "
        f"{logs['parity/max_abs_gap']:.1e} max over {logs['parity/checked_tokens']:.0f} tokens  "
        f"{tokens_per_second(logs):.0f} tok/s  {time_shares(logs)}  {clock(left)} left"
    )


def tokens_per_second(logs: Mapping[str, float]) -> float:
    """Sampled tokens per second of the whole step."""
    return logs["sampling/tokens"] / logs["time/step"] if logs.get("time/step") else 0.0


def checked(logs: Mapping[str, float]) -> str:
    """The number of tokens that were compared with the policy, and why the others were not."""
    aside = logs.get("parity/aside_tokens", 0.0)
    stale = logs["sampling/tokens"] - logs["parity/checked_tokens"] - aside
    others = [f"{stale:.0f} are older than the policy"] if stale else []
    others += [f"{aside:.0f} have no gradient and were not drawn"] if aside else []
    more = "; " + "; ".join(others) if others else ", all that were sampled"
    return f"{logs['parity/checked_tokens']:.0f} tokens{more}"


def time_shares(logs: Mapping[str, float]) -> str:
    """Seconds of each phase of a step, the longest first."""
    phases = [(k, v) for k, v in logs.items() if k.startswith("time/") and k != "time/step" and v >= 0.05]
    longest = sorted(phases, key=lambda item: -item[1])
    return " ".join(f"{name.removeprefix('time/')} {seconds:.1f}s" for name, seconds in longest)


class LogLines(TrainerCallback):
    """One line per log of a training step or an evaluation."""

    def __init__(self) -> None:
        self._began, self._first_step, self._reward = 0.0, 0, float("nan")
        # In a notebook, rich would make a block of HTML of every line.
        self._console = Terminal(force_jupyter=False)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._began, self._first_step = time.monotonic(), state.global_step

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any
    ) -> None:
        if not logs or not state.is_world_process_zero:
            return
        # An evaluation before training belongs to no step yet.
        step = f"step {state.global_step}/{state.max_steps}  " if state.max_steps else ""
        if "loss" in logs and "parity/mean_abs_gap" in logs:
            # A step that learns from the rollouts of an earlier step logs no reward, so the last reward is kept.
            self._reward = logs.get("reward", self._reward)
            done = max(state.global_step - self._first_step, 1)
            left = (time.monotonic() - self._began) / done * (state.max_steps - state.global_step)
            self._say(plain_line(state.global_step, state.max_steps, {"reward": self._reward, **logs}, left))
        elif "eval_reward" in logs:
            self._say(f"{step}held-out reward {logs['eval_reward']:.3f} ± {logs['eval_reward_ci95']:.3f}")
        elif "train_runtime" in logs:
            self._say(f"{step}training took {logs['train_runtime']:.0f} s")

    def _say(self, line: str) -> None:
        self._console.print(line, highlight=False, soft_wrap=True, markup=False)


@dataclass(frozen=True, slots=True)
class Row:
    """One completion.

    Attributes:
        prompt: text, or messages with `role` and `content`.
        scores: score per reward function; None if the function gave none.
        extra: values that reward functions logged for the completion, by column.
        finish_reasons: the finish reason of each sampled turn.
    """

    prompt: Any
    completion: str
    scores: Mapping[str, float | None]
    advantage: float
    extra: Mapping[str, Any] = field(default_factory=dict)
    finish_reasons: Sequence[str] = ()


def chosen_rows(rows: Sequence[Row], count: int | None, *, unique_prompts: bool) -> list[Row]:
    """At most `count` rows, at even distances, so that they cover many prompts; perhaps only one of every prompt."""
    kept = list(rows)
    if unique_prompts:
        first: dict[str, Row] = {}
        for row in rows:
            first.setdefault(repr(row.prompt), row)
        kept = list(first.values())
    if count is None or count >= len(kept):
        return kept
    return [kept[place * len(kept) // count] for place in range(count)]


def print_completions(rows: Sequence[Row], step: int, console: Terminal | None = None) -> None:
    """Print rows as one table, with a column for every score and every extra value, and for finish reasons of turns."""
    scores = list(dict.fromkeys(name for row in rows for name in row.scores))
    extras = list(dict.fromkeys(name for row in rows for name in row.extra))
    table = Table(expand=True, show_lines=True)
    table.add_column("Prompt", style="yellow")
    table.add_column("Completion", style="green")
    for name in (*scores, "Advantage"):
        table.add_column(Text(visible(name)), style="cyan", justify="right")
    ends = any(len(row.finish_reasons) > 1 for row in rows)
    for name in [*(["Finish reasons"] if ends else []), *extras]:
        table.add_column(Text(visible(name)))
    for row in rows:
        numbers = [_number(row.scores.get(name)) for name in scores] + [_number(row.advantage)]
        said = [Text(", ".join(row.finish_reasons))] if ends else []
        said += [_text(row.extra[name]) if name in row.extra else Text("") for name in extras]
        table.add_row(_text(row.prompt), _text(row.completion), *numbers, *said)
    (console or Terminal()).print(Panel(table, title=f"Step {step}", expand=False))


def _number(value: float | None) -> str:
    return "" if value is None or value != value else f"{value:.2f}"


def _text(value: Any) -> Text:
    # The cells are Text objects, because square brackets in a completion must not be read as markup.
    if isinstance(value, list) and value and all(isinstance(message, Mapping) for message in value):
        value = "\n\n".join(f"{str(m.get('role', '')).upper()}\n{m.get('content', '')}" for m in value)
    return Text(visible(str(value)))
