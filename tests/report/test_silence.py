"""No command is silent for long: away from a terminal, work that lasts prints further lines; on a terminal a spinner turns."""

from __future__ import annotations

import io
import threading
from types import SimpleNamespace
from typing import Any

from rich.console import Console
from transformers import TrainerState

from lockstep.report.busy import busy, watched_by
from lockstep.report.heartbeat import Heartbeat
from lockstep.report.live import About, LiveView
from lockstep.report.phases import PhaseClock
from lockstep.report.status import StatusLine

# Seconds until a test fails that waits for a line.
LIMIT = 60


class Lines(io.StringIO):
    """Output of which a test can wait for a text."""

    def __init__(self) -> None:
        super().__init__()
        self._written = threading.Condition()

    def write(self, text: str) -> int:
        with self._written:
            self._written.notify_all()
            return super().write(text)

    def has(self, text: str) -> bool:
        with self._written:
            return self._written.wait_for(lambda: text in self.getvalue(), LIMIT)


def impatient(view: Any, seconds: float = 0.01) -> Any:
    """The same view, whose first further line comes almost at once."""
    view._heartbeat = Heartbeat(view._beat, seconds)
    return view


def view_of(console: Console, clock: PhaseClock) -> LiveView:
    about = About("GRPO · vllm in lockstep", "model", "runs/one")
    return LiveView(about, clock.progress, dict, lambda: None, dict, console)


def test_a_silence_is_broken_after_five_seconds_and_then_ever_more_rarely_up_to_a_minute() -> None:
    printed, waited = iter([False] * 6 + [True] + [False]), []
    heartbeat = Heartbeat(lambda: None)

    def wait(seconds: float) -> bool:
        waited.append(seconds)
        found = next(printed, None)
        heartbeat._stopped = found is None
        return bool(found)

    heartbeat._printed = SimpleNamespace(wait=wait, clear=lambda: None)  # type: ignore[assignment]
    heartbeat._run()
    assert waited == [5, 10, 20, 40, 60, 60, 60, 5, 10]


def test_nothing_is_said_after_the_end() -> None:
    beats = threading.Semaphore(0)
    heartbeat = Heartbeat(beats.release, 0.001)
    heartbeat.printed()
    assert beats.acquire(timeout=LIMIT)
    heartbeat.stop()
    heartbeat.stop()
    assert not [thread for thread in threading.enumerate() if thread.name == "lockstep-heartbeat"]
    # The same one can begin again.
    while beats.acquire(blocking=False):
        pass
    heartbeat.printed()
    assert beats.acquire(timeout=LIMIT)
    heartbeat.stop()


def test_work_that_lasts_prints_its_progress_away_from_a_terminal() -> None:
    out = Lines()
    with watched_by(impatient(StatusLine(Console(file=out, width=200)))):
        with busy("evaluating on 7 problems", lambda: "3/28 completions"):
            assert out.has("evaluating on 7 problems …\nevaluating on 7 problems · 3/28 completions · 0 s in all\n")
            with busy("waiting for the engine"):
                assert out.has("waiting for the engine …\nwaiting for the engine · 0 s\n")
        said = out.getvalue()
    assert out.getvalue() == said


def test_a_step_that_lasts_prints_its_phase_and_counters_away_from_a_terminal() -> None:
    out, clock = Lines(), PhaseClock()
    view = impatient(view_of(Console(file=out, width=200), clock))
    view.on_train_begin(None, TrainerState(max_steps=4), None)
    try:
        answered = clock.counted(8)
        with clock.phase("generate"):
            answered(SimpleNamespace(token_ids=(1, 2, 3)))
            assert out.has("step 0/4 done · sampling · 1/8 completions · ")
        view.on_step_end(None, TrainerState(max_steps=4, global_step=1), None)
        with clock.phase("verify"):
            assert out.has("step 1/4 done · checking proofs · 0 s\n")
    finally:
        view.stop()
    assert not [thread for thread in threading.enumerate() if thread.name == "lockstep-heartbeat"]


def test_work_before_the_panel_has_a_spinner_on_a_terminal() -> None:
    out = Lines()
    view = view_of(Console(file=out, width=100, force_terminal=True), PhaseClock())
    with watched_by(view), busy("proving every module of the engine", lambda: "checking proofs"):
        assert out.has("proving every module of the engine · checking proofs · 0 s in all")
        view.on_train_begin(None, TrainerState(max_steps=4), None)
    view.stop()
    with watched_by(view), busy("saving checkpoint-4"):
        assert out.has("saving checkpoint-4 · 0 s")


def test_an_evaluation_of_several_sets_is_told_by_its_own_name() -> None:
    view = view_of(Console(file=io.StringIO()), PhaseClock())
    state = SimpleNamespace(global_step=3)
    view.on_evaluate(None, state, None, {"eval_math_reward": 0.5, "eval_math_reward_ci95": 0.1})
    assert view._evaluation == "math: 0.500 ± 0.100 at step 3"
    view.on_evaluate(None, state, None, {"eval_reward": 0.25, "eval_reward_ci95": 0.05})
    assert view._evaluation == "0.250 ± 0.050 at step 3"
    view.on_evaluate(None, state, None, {"other": 1.0})
