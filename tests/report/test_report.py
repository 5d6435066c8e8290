"""The summary and the live view show the numbers of the run."""

from __future__ import annotations

import io
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from transformers import TrainerState

from lockstep.progress import StatusLine, busy, watched_by
from lockstep.report.live import About, LiveView, clock
from lockstep.report.phases import PhaseClock
from lockstep.report.summary import summarise, summary_lines
from lockstep.run.files.logs import StepLog
from lockstep.terminal import sparkline


def line(step: int, **changes: Any) -> dict[str, Any]:
    base = {
        "step": step, "loss": 0.1, "reward": 0.2 * step, "completions/mean_length": 3.0, "completions/max_length": 5.0,
        "completions/min_length": 2.0, "parity/mean_abs_gap": 1e-6, "parity/max_abs_gap": 1e-5,
        "parity/checked_tokens": 40.0,
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
        [{"step": 0, "eval_reward": 0.4}, line(1), line(2)],
        RECEIPT,
        BEFORE,
        {**BEFORE, "eval_reward": 0.9},
        12.34,
    )
    assert (summary["eval_reward_before"], summary["eval_reward_after"], summary["eval_samples"]) == (
        0.4,
        0.9,
        800,
    )
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


def test_the_summary_names_the_figure_that_came_closest_to_its_limit_as_it_was_judged() -> None:
    # The first step alone is above the limit on k3; it was judged with the second.
    first = {**RECEIPT[1], "sum_k3": 40 * 0.03, "waiting": {"tokens": 40}}
    second = {**RECEIPT[2], "judged": {**JUDGED, "tokens": 100, "k3": 0.012, "k3_allowed": 0.02}}
    summary = summarise([line(1), line(2)], [RECEIPT[0], first, second], None, None, 1.0)
    assert summary["parity"]["closest_to_limit"] == {
        "share": pytest.approx(0.6),
        "text": "k3 0.012 of 0.02 (steps 1 to 2, 100 tokens)",
    }
    assert "closest: k3 0.012 of 0.02 (steps 1 to 2, 100 tokens), 60% of the limit" in "\n".join(
        summary_lines(summary)
    )


def test_the_summary_says_what_of_an_evaluation_was_proven_and_what_was_not_held_out() -> None:
    after = {**BEFORE, "eval_parity/checked_share": 0.25, "eval_seen_in_training": 12.0}
    summary = summarise([line(1)], RECEIPT, None, after, 1.0)
    text = "\n".join(summary_lines(summary))
    assert "gap proven on 25% of the tokens" in text
    assert "12 of 200 evaluation prompts are training prompts too" in text
    clean = summarise([line(1)], RECEIPT, None, {**after, "eval_seen_in_training": 0.0}, 1.0)
    assert "not held out" not in "\n".join(summary_lines(clean))


def test_the_summary_counts_the_checks_that_could_not_be_made() -> None:
    line_of = {"kind": "unproven", "step": 1, "proof": "model_gradient", "why": "a kernel refuses float64"}
    summary = summarise([line(1)], [*RECEIPT, line_of, {**line_of, "step": 11}], None, None, 1.0)
    assert summary["unproven"] == {"model_gradient": 2}
    assert "model_gradient: 2 checks that were due could not be made" in "\n".join(summary_lines(summary))
    assert "unproven" not in summarise([line(1)], RECEIPT, None, None, 1.0)


def test_a_run_without_evaluation_has_a_summary_too() -> None:
    summary = summarise([line(1)], RECEIPT[:2], None, None, 5.0)
    assert "eval_reward_before" not in summary
    assert summary_lines(summary)[0].startswith("parity")


JUDGED = {
    "tokens": 300, "mean_abs_gap": 2e-6, "mean_allowed": 1e-4, "max_abs_gap": 1e-5, "max_allowed": 1e-3, "k3": 1e-9,
    "k3_allowed": 1e-6,
}  # fmt: skip
SAMPLE = [("sample", "[b]The answer\nis " + "42 " * 60)]


def view_of(
    console: Console,
    phase: Callable[[], str] = str,
    steps: Callable[[], dict[str, float]] = dict,
    said: Sequence[tuple[str, str]] = SAMPLE,
    judged: Callable[[], Mapping[str, float]] = dict,
) -> LiveView:
    about = About("GRPO · vllm in lockstep", "smollm2-135m-instruct", "runs/a-rather-long-name" * 4)
    return LiveView(about, phase, steps, lambda: (1.0, list(said)), judged, console)


def shown(view: LiveView, console: Console) -> list[str]:
    with console.capture() as caught:
        console.print(view.panel())
    return caught.get().splitlines()


def test_away_from_a_terminal_each_log_is_a_plain_line_and_so_is_each_long_phase() -> None:
    console = Console(file=io.StringIO(), width=200)
    view, state = view_of(console), TrainerState(max_steps=4)
    with watched_by(view):
        view.on_train_begin(None, state, None)
        for step in (1, 2):
            state.global_step = step
            view.on_step_end(None, state, None)
            view.on_log(None, state, None, line(step))
        with busy("evaluating on 7 problems"):
            pass
        view.on_train_end(None, state, None)
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    assert len(lines) == 4
    assert lines.pop(0) == "training, step 1 to 4 …"
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
    assert lines[2] == "evaluating on 7 problems …"


def test_the_panel_shows_every_step_before_the_first_log_and_wraps_nothing_at_80_columns() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=80, color_system=None)
    clock, log = PhaseClock(), StepLog()
    judged: dict[str, float] = {}
    view, state = (
        view_of(console, clock.progress, log.latest, judged=lambda: judged),
        TrainerState(max_steps=40),
    )
    view.on_train_begin(None, state, None)
    view.stop()
    before = shown(view, console)
    assert "step 0/40" in "".join(before)
    assert "first step" in "".join(before)
    rows = len(before)
    for step in (1, 2):
        log.note(
            {k: v for k, v in line(step).items() if k not in ("step", "loss") and not k.startswith("time/")}
        )
        log.note({"entropy": 1.25, "frac_reward_zero_std": 0.25, "completions/clipped_ratio": 0.125})
        state.global_step = step
        view.on_step_end(None, state, None)
    view.on_evaluate(None, state, None, BEFORE)
    judged |= JUDGED
    answered = clock.counted(8)
    with clock.phase("generate"):
        for _ in range(3):
            answered(SimpleNamespace(token_ids=(1, 2, 3)))
        page = shown(view, console)
    text = "\n".join(page)
    for word in (
        "smollm2-135m-instruct → runs/",
        "step 2/40",
        "sampling · 3/8 completions · ",
        "tokens/s",
        "0.400  ▁█",
        "1.250",
        "3 tokens on average, 12% cut at the limit",
        "25% of the groups",
        "1.0e-06 mean, 1.0e-05 max",
        "mean 2e-6 of 1e-4, max 1e-5 of 0.001, k3 1e-9 of 1e-6",
        "40 tokens, all that were sampled",
        "0.400 ± 0.050 at step 2",
        "1.00: [b]The answer is 42 42",
        "left",
    ):
        assert word in text, word
    assert {len(row) for row in page} == {80}
    # One row for each figure, so nothing was wrapped.
    assert len(page) == rows + 8
    assert "loss" not in text
    view.on_log(None, state, None, line(2))
    with busy_in(view, "evaluating on 7 problems", clock.progress), clock.phase("rewards"):
        text = "\n".join(shown(view, console))
    assert "evaluating on 7 problems · scoring completions · 0 s" in text
    assert "0.1 at the log of step 2" in text
    for label in (
        "reward",
        "loss",
        "entropy",
        "length",
        "no spread",
        "gap",
        "judged",
        "checked",
        "speed",
        "time",
        "evaluation",
        "sample",
    ):
        assert f"│ {label} " in text, label
    assert "generate 2.0s" in text


@contextmanager
def busy_in(view: LiveView, text: str, detail: Callable[[], str]) -> Iterator[None]:
    with watched_by(view), busy(text, detail):
        yield


def test_a_judged_gap_close_to_a_limit_is_shown_in_another_colour_and_a_single_step_is_not() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=100, color_system="standard")
    pages = []
    for gap in ({}, {"k3": 6e-7}, {"max_abs_gap": 9e-4}):
        # A single step above every limit is not a judgement.
        step = line(1, **{"parity/mean_abs_gap": 1.0})
        view = view_of(console, str, lambda step=step: step, judged=lambda gap=gap: {**JUDGED, **gap})
        view.on_step_end(None, TrainerState(max_steps=4, global_step=1), None)
        pages.append(next(row for row in shown(view, console) if "of 0.001" in row))
    assert ["\x1b[33m" in page for page in pages] == [False, True, True]


def test_the_panel_is_drawn_anew_while_a_step_is_under_way() -> None:
    frames: list[str] = []
    moved = threading.Event()

    def phase() -> str:
        frames.append("asked")
        if len(frames) > 2:
            moved.set()
        return f"phase {len(frames)}"

    console = Console(file=io.StringIO(), force_terminal=True, width=80)
    view = view_of(console, phase)
    view.on_train_begin(None, TrainerState(max_steps=4), None)
    try:
        assert moved.wait(60)
    finally:
        view.stop()
    assert isinstance(console.file, io.StringIO)
    assert "phase 2" in console.file.getvalue()


def test_the_status_line_says_what_is_under_way_and_how_far_it_is() -> None:
    plain = Console(file=io.StringIO(), width=80)
    with watched_by(StatusLine(plain)), busy("loading the model"), busy("starting vLLM"):
        pass
    assert isinstance(plain.file, io.StringIO)
    assert plain.file.getvalue().splitlines() == ["loading the model …", "starting vLLM …"]
    terminal, asked = Console(file=io.StringIO(), force_terminal=True, width=80), threading.Event()

    def detail() -> str:
        asked.set()
        return "3/8 completions"

    with watched_by(StatusLine(terminal)), busy("evaluating", detail):
        assert asked.wait(60)
    assert isinstance(terminal.file, io.StringIO)
    assert "evaluating · 3/8 completions · 0 s in all" in terminal.file.getvalue()


def test_small_helpers() -> None:
    assert sparkline([0.0, 1.0, 0.5]) == "▁█▅"
    assert sparkline([2.0]) == "▁"
    assert clock(125) == "2:05"
    assert clock(3725) == "1:02:05"


def test_the_panel_shows_turns_and_results_up_to_six() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=80, color_system=None)
    said = [(label, f"{label} says\n{n}") for n in range(4) for label in ("assistant", "tool")]
    page = shown(view_of(console, said=said), console)
    text = "\n".join(page)
    assert "1.00: assistant says 0" in text
    assert "tool says 2" in text
    assert "assistant says 3" not in text
    assert "2 more turns and results" in text
    assert {len(row) for row in page} == {80}
