"""Prints one short line per log, for a trainer in a script or a notebook: what the command line prints where it has no terminal.

Comes from: the trainer's logs. `run/trainers/online.py` adds it, unless the user asks for transformers' progress bar
(`disable_tqdm=False`). A terminal shows the live view instead.
"""

from __future__ import annotations

import time
from typing import Any

from transformers import TrainerCallback

from lockstep.report.live import plain_line
from lockstep.report.terminal import Terminal


class LogLines(TrainerCallback):
    """One line per log of a training step or an evaluation."""

    def __init__(self) -> None:
        self._began, self._first_step, self._reward = 0.0, 0, float("nan")
        # In a notebook, rich would make a block of HTML of every line.
        self._console = Terminal(force_jupyter=False)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._began, self._first_step = time.monotonic(), state.global_step

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
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
