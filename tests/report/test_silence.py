"""No command is silent for long: lasting work prints further lines, and on a terminal a spinner turns."""

from __future__ import annotations

import io
import logging
import re
import socket
import threading
from types import SimpleNamespace
from unittest.mock import patch

import pytest
from rich.console import Console
from transformers import TrainerState

from lockstep import progress as heartbeat
from lockstep import progress as waits
from lockstep.engines import connect
from lockstep.errors import LockstepError
from lockstep.progress import Heartbeat, StatusLine, busy, waiting, watched_by
from lockstep.report.live import About, LiveView
from lockstep.report.phases import PhaseClock

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
        """Whether the text comes. On a busy machine 0 or 2 seconds may be some more."""
        pattern = re.sub(r"\b[02]\\ s", r"\\d+\\ s", re.escape(text))
        with self._written:
            return self._written.wait_for(lambda: re.search(pattern, self.getvalue()) is not None, LIMIT)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first further line about work comes almost at once."""
    monkeypatch.setattr(heartbeat, "FIRST", 0.001)


def view_of(console: Console, clock: PhaseClock) -> LiveView:
    about = About("GRPO · vllm in lockstep", "model", "runs/one")
    return LiveView(about, clock.progress, dict, lambda: None, dict, console)


def test_a_silence_is_broken_after_five_seconds_and_then_ever_more_rarely_up_to_a_minute() -> None:
    printed, waited, ended = iter([False] * 6 + [True] + [False] * 2), list[float | None](), threading.Event()

    class Printed(threading.Event):
        """Says at once whether a line was printed within the seconds. After the last of `printed` it really waits."""

        def wait(self, timeout: float | None = None) -> bool:
            if (found := next(printed, None)) is None:
                ended.set()
                return super().wait(LIMIT)
            waited.append(timeout)
            return found

    with patch.object(heartbeat, "threading", SimpleNamespace(Event=Printed, Thread=threading.Thread)):
        silence = Heartbeat(lambda: None)
    silence.printed()
    assert ended.wait(LIMIT)
    silence.stop()
    assert waited == [5, 10, 20, 40, 60, 60, 60, 5, 10]


@pytest.mark.usefixtures("impatient")
def test_nothing_is_said_after_the_end() -> None:
    beats = threading.Semaphore(0)
    silence = Heartbeat(beats.release)
    silence.printed()
    assert beats.acquire(timeout=LIMIT)
    silence.stop()
    silence.stop()
    assert not [thread for thread in threading.enumerate() if thread.name == "lockstep-heartbeat"]
    # The same one can begin again.
    while beats.acquire(blocking=False):
        pass
    silence.printed()
    assert beats.acquire(timeout=LIMIT)
    silence.stop()


@pytest.mark.usefixtures("impatient")
def test_work_that_lasts_prints_its_progress_away_from_a_terminal() -> None:
    out = Lines()
    with watched_by(StatusLine(Console(file=out, width=200))):
        with busy("evaluating on 7 problems", lambda: "3/28 completions"):
            assert out.has(
                "evaluating on 7 problems …\nevaluating on 7 problems · 3/28 completions · 0 s in all\n"
            )
            with busy("waiting for the engine"):
                assert out.has("waiting for the engine …\nwaiting for the engine · 0 s\n")
        said = out.getvalue()
    assert out.getvalue() == said


@pytest.mark.usefixtures("impatient")
def test_a_step_that_lasts_prints_its_phase_and_counters_away_from_a_terminal() -> None:
    out, clock = Lines(), PhaseClock()
    view = view_of(Console(file=out, width=200), clock)
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
    console = Console(file=io.StringIO(), width=100)
    view, state = view_of(console, PhaseClock()), SimpleNamespace(global_step=3)

    def shown() -> str:
        with console.capture() as captured:
            console.print(view.panel())
        return " ".join(captured.get().replace("│", " ").split())

    view.on_evaluate(None, state, None, {"eval_math_reward": 0.5, "eval_math_reward_ci95": 0.1})
    assert "evaluation math: 0.500 ± 0.100 at step 3" in shown()
    view.on_evaluate(None, state, None, {"eval_reward": 0.25, "eval_reward_ci95": 0.05})
    assert "evaluation 0.250 ± 0.050 at step 3" in shown()
    view.on_evaluate(None, state, None, {"other": 1.0})
    assert "evaluation 0.250 ± 0.050 at step 3" in shown()


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waits are told almost at once."""
    monkeypatch.setattr(waits, "FIRST", 0.0)
    monkeypatch.setattr(waits, "LOOK_EVERY", 0.01)


def test_a_wait_is_told_after_five_seconds_and_then_ever_more_rarely_up_to_a_minute() -> None:
    found = waits.Waits()
    wait = waiting("the server", 240.0, lambda: "cannot be reached")
    wait.since = 100.0
    found.open.add(wait)
    told = {second: lines for second in range(300) if (lines := found.tell(100.0 + second))}
    assert list(told) == [5, 15, 35, 75, 135, 195, 255]
    assert told[5] == ["waiting for the server: 5 s of at most 240 s · cannot be reached"]
    # Later waits for the same thing are not told more often, unless nothing was said about it for minutes.
    wait.since = 400.0
    assert not found.tell(410.0)
    assert found.tell(255 + 100.0 + 180.0)
    found.open.clear()
    assert found.tell(1000.0) == []


def test_waits_for_one_thing_make_one_line_and_work_is_told_only_where_nothing_is_waited_for() -> None:
    found = waits.Waits()
    for since in (4.0, 0.0, 9.5):
        wait = waiting("tool search", 60.0)
        wait.since = since
        found.open.add(wait)
    work = waiting("loading the model", verb="")
    found.open.add(work)
    work.since = 0.0
    assert found.tell(10.0) == ["waiting for tool search (3 times): 10 s of at most 60 s"]
    found.open = {work}
    assert found.tell(10.0) == ["loading the model: 10 s"]


@pytest.mark.usefixtures("eager")
def test_without_a_watcher_a_wait_and_long_work_go_to_the_log() -> None:
    logger = logging.getLogger("lockstep.progress")
    said = Lines()
    handler = logging.StreamHandler(said)
    logger.addHandler(handler)
    try:
        with waiting("rank 1", 30.0):
            assert said.has("waiting for rank 1: 0 s of at most 30 s")
        with busy("converting the model", lambda: "half"):
            assert said.has("converting the model: 0 s · half")
    finally:
        logger.removeHandler(handler)


@pytest.mark.usefixtures("eager")
def test_a_watcher_away_from_a_terminal_prints_waits_and_a_panel_shows_them_in_its_own_line() -> None:
    out = Lines()
    with watched_by(StatusLine(Console(file=out, width=200))), waiting("the agents", 60.0):
        assert out.has("waiting for the agents: 0 s of at most 60 s\n")
    out, clock = Lines(), PhaseClock()
    view = view_of(Console(file=out, width=200), clock)
    view.on_train_begin(None, TrainerState(max_steps=4), None)
    with watched_by(view), clock.phase("rewards"), waiting("reward function judge", 60.0):
        assert out.has("step 0/4 done · waiting for reward function judge: 0 s of at most 60 s\n")
    view.stop()
    # On a terminal nothing is printed beside the panel; its line has the wait.
    out = Lines()
    view = view_of(Console(file=out, width=100, force_terminal=True), clock)
    with watched_by(view), waiting("the server to be ready", 60.0) as wait:
        wait.since -= 2.0
        view.on_train_begin(None, TrainerState(max_steps=4), None)
        assert out.has("between two phases · waiting for the server to be ready: 2 s of at most 60 s")
        view.note("a line beside the panel")
    view.stop()
    assert "a line beside the panel" not in out.getvalue()


@pytest.mark.usefixtures("eager")
def test_a_script_that_connects_to_a_server_that_is_not_there_says_so_before_the_limit() -> None:
    said = Lines()
    handler = logging.StreamHandler(said)
    logging.getLogger("lockstep.progress").addHandler(handler)
    try:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            url = f"http://127.0.0.1:{free.getsockname()[1]}"
        with pytest.raises(LockstepError, match="did not answer within 1 s"):
            connect(url, timeout=1.0)
    finally:
        logging.getLogger("lockstep.progress").removeHandler(handler)
    line = next(line for line in said.getvalue().splitlines() if "to be ready" in line)
    assert line.startswith(f"waiting for the server at {url} to be ready: ")
    assert "s of at most 1 s" in line
