"""What a run shows while it goes: a live panel on a terminal, plain lines elsewhere.

Comes from: the trainer's logs. It never slows a step by more than a redraw.
"""

from __future__ import annotations

import time
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text
from transformers import TrainerCallback

_BLOCKS = "▁▂▃▄▅▆▇█"


class LiveView(TrainerCallback):
    """Follows a run's logs; `start_step` is the step a resumed run begins at."""

    def __init__(self, title: str, console: Console | None = None) -> None:
        self._title = title
        self._console = console or Console()
        self._live: Live | None = None
        self._history: list[dict[str, float]] = []
        self._began = 0.0
        self._first_step = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._began, self._first_step = time.monotonic(), state.global_step
        if self._console.is_terminal:
            self._live = Live(Text("starting the first step …"), console=self._console, refresh_per_second=4)
            self._live.start()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
        if not logs or "loss" not in logs:
            return
        # A step that learns from an earlier step's rollouts has no reward of its own.
        last = self._history[-1] if self._history else {"reward": float("nan")}
        logs = {"reward": last["reward"], **logs}
        self._history.append(logs)
        left = self._seconds_left(state.global_step, state.max_steps)
        if self._live is not None:
            self._live.update(self._panel(state.global_step, state.max_steps, left))
        else:
            self._console.print(
                plain_line(state.global_step, state.max_steps, logs, left), highlight=False, soft_wrap=True
            )

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.stop()

    def stop(self) -> None:
        """Give the terminal back; safe to call twice."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _seconds_left(self, step: int, steps: int) -> float:
        done = max(step - self._first_step, 1)
        return (time.monotonic() - self._began) / done * max(steps - step, 0)

    def _panel(self, step: int, steps: int, left: float) -> Panel:
        logs = self._history[-1]
        table = Table.grid(padding=(0, 2))
        rewards = [entry["reward"] for entry in self._history]
        table.add_row("reward", f"{logs['reward']:.3f}", Text(sparkline(rewards), style="green"))
        gaps = [entry["parity/max_abs_gap"] for entry in self._history]
        table.add_row("parity gap", f"{logs['parity/mean_abs_gap']:.1e} mean, {gaps[-1]:.1e} max", sparkline(gaps))
        table.add_row("checked", checked(logs), "")
        table.add_row("tokens/s", f"{tokens_per_second(logs):.0f} sampled", "")
        table.add_row("time", time_shares(logs), "")
        progress = Table.grid(padding=(0, 2))
        progress.add_row(
            f"step {step}/{steps}", ProgressBar(total=steps, completed=step, width=40), f"{clock(left)} left"
        )
        return Panel(
            Group(progress, table), title=self._title, border_style="cyan", width=min(100, self._console.width)
        )


def plain_line(step: int, steps: int, logs: dict[str, float], left: float) -> str:
    """One step as a line of text."""
    return (
        f"step {step}/{steps}  reward {logs['reward']:.3f}  gap {logs['parity/mean_abs_gap']:.1e} mean "
        f"{logs['parity/max_abs_gap']:.1e} max over {logs['parity/checked_tokens']:.0f} tokens  "
        f"{tokens_per_second(logs):.0f} tok/s  {time_shares(logs)}  {clock(left)} left"
    )


def tokens_per_second(logs: dict[str, float]) -> float:
    """Sampled tokens over the whole step's time."""
    return logs["sampling/tokens"] / logs["time/step"] if logs.get("time/step") else 0.0


def checked(logs: dict[str, float]) -> str:
    """How many tokens were compared with the policy, and how many were too old to be."""
    stale = logs["sampling/tokens"] - logs["parity/checked_tokens"]
    others = f"; {stale:.0f} are older than the policy" if stale else ", all that were sampled"
    return f"{logs['parity/checked_tokens']:.0f} tokens{others}"


def time_shares(logs: dict[str, float]) -> str:
    """Seconds of each phase of a step, the longest first."""
    phases = {k.removeprefix("time/"): v for k, v in logs.items() if k.startswith("time/") and k != "time/step"}
    longest = sorted(phases.items(), key=lambda item: -item[1])
    return " ".join(f"{name} {seconds:.1f}s" for name, seconds in longest if seconds >= 0.05)


def sparkline(values: list[float], width: int = 32) -> str:
    """The last values as blocks of eight heights."""
    shown = [value for value in values[-width:] if value == value]
    if not shown:
        return ""
    low, high = min(shown), max(shown)
    span = (high - low) or 1.0
    return "".join(_BLOCKS[round((value - low) / span * (len(_BLOCKS) - 1))] for value in shown)


def clock(seconds: float) -> str:
    """Minutes and seconds."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"
