"""The report shows the numbers of the run's files, and text from a model cannot break the page."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console
from transformers import TrainerState

from lockstep.report.html import render_report
from lockstep.report.live import LiveView, clock, sparkline
from lockstep.report.summary import summarise, summary_lines


def line(step: int, **changes: Any) -> dict[str, Any]:
    base = {
        "step": step, "loss": 0.1, "reward": 0.2 * step, "completions/mean_length": 3.0, "completions/max_length": 5.0,
        "completions/min_length": 2.0, "parity/mean_abs_gap": 1e-6, "parity/max_abs_gap": 1e-5, "parity/checked_tokens": 40.0,
        "sampling/tokens": 40.0,
        "rewards/f/mean": 0.5, "time/generate": 2.0, "time/forward_backward": 1.0, "time/sync": 0.5, "time/step": 4.0,
    }  # fmt: skip
    return {**base, **changes}


RECEIPT = [
    {"kind": "start", "step": 0},
    {
        "kind": "step",
        "step": 1,
        "sampled_tokens": 40,
        "checked_tokens": 40,
        "sum_abs_gap": 4e-5,
        "max_abs_gap": 1e-5,
        "sum_k3": 1e-9,
        "worst_module": {"name": "a", "error": 4e-6},
    },
    {
        "kind": "step",
        "step": 2,
        "sampled_tokens": 60,
        "checked_tokens": 60,
        "sum_abs_gap": 6e-5,
        "max_abs_gap": 3e-5,
        "sum_k3": 1e-9,
        "worst_module": {"name": "a", "error": 4e-6},
    },
]
BEFORE = {"eval_reward": 0.4, "eval_reward_ci95": 0.05, "eval_samples": 800.0, "eval_problems": 200.0}


def test_the_summary_adds_up_its_files() -> None:
    summary = summarise(
        [{"step": 0, "eval_reward": 0.4}, line(1), line(2)], RECEIPT, BEFORE, {**BEFORE, "eval_reward": 0.9}, 12.34
    )
    assert (summary["eval_reward_before"], summary["eval_reward_after"], summary["eval_samples"]) == (0.4, 0.9, 800)
    assert summary["time"] == {"generate": 4.0, "forward_backward": 2.0, "sync": 1.0}
    assert (summary["steps"], summary["wall_s"], summary["tokens_per_s"]) == (2, 12.3, 12.5)
    assert summary["parity"] == {
        "mean_abs_gap": pytest.approx(1e-6),
        "worst_module_error": 4e-6,
        "max_abs_gap": 3e-5,
        "k3": pytest.approx(2e-11),
        "checked_tokens": 100,
        "failed": 0,
    }
    text = "\n".join(summary_lines(summary))
    assert "0.400 ± 0.050  →  0.900 ± 0.050" in text
    assert "100 tokens checked, 0 failed" in text


def test_a_run_without_evaluation_has_a_summary_too() -> None:
    summary = summarise([line(1)], RECEIPT[:2], None, None, 5.0)
    assert "eval_reward_before" not in summary
    assert summary_lines(summary)[0].startswith("parity")


def test_the_page_is_self_contained_and_escapes_what_a_model_wrote() -> None:
    rollout = {"prompt": "1 < 2?", "completions": ["<script>alert(1)</script>", "yes"], "rewards": [0.0, 1.0]}
    page = render_report("t", summarise([line(1)], RECEIPT, None, None, 1.0), [line(1), line(2)], [rollout], [rollout])
    assert "<script>alert(1)</script>" not in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page
    assert 'src="http' not in page
    for title in ("Reward of the training rollouts", "Length of completions", "Parity gap", "Where the time goes"):
        assert title in page


def follow(console: Console) -> str:
    view, state = LiveView("GRPO", console), TrainerState(max_steps=4)
    view.on_train_begin(None, state, None)
    for step in (1, 2):
        state.global_step = step
        view.on_log(None, state, None, line(step))
    view.on_train_end(None, state, None)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_away_from_a_terminal_each_step_is_a_plain_line() -> None:
    lines = follow(Console(file=io.StringIO(), width=200)).splitlines()
    assert len(lines) == 2
    for word in (
        "step 2/4",
        "reward 0.400",
        "gap 1.0e-06 mean 1.0e-05 max over 40 tokens",
        "10 tok/s",
        "generate 2.0s",
        "left",
    ):
        assert word in lines[1]
    assert "\x1b" not in lines[1]


def test_on_a_terminal_a_panel_shows_trend_gap_speed_time_and_what_is_left() -> None:
    shown = follow(Console(file=io.StringIO(), force_terminal=True, width=100))
    for word in ("step 2/4", "reward", "▁█", "parity gap", "tokens/s", "generate 2.0s", "left"):
        assert word in shown


def test_small_helpers() -> None:
    assert sparkline([0.0, 1.0, 0.5]) == "▁█▅"
    assert sparkline([2.0]) == "▁"
    assert clock(125) == "2:05"


def test_a_rollout_without_a_reward_is_shown_as_such_and_is_not_the_best() -> None:
    entry = {"prompt": "q", "completions": ["first", "second", "third"], "rewards": [None, 0.5, 0.25]}
    page = render_report("t", {}, [], [entry], [{**entry, "rewards": [None, None, None]}])
    assert "<span class='bad'>first</span> (no score)" in page
    assert "<span class='good'>second</span> (0.5)" in page
    assert page.count("(no score)") == 4
