"""A user's function leaves the process as it found it: what it changes is put back or told, in one line per kind."""

from __future__ import annotations

import asyncio
import locale
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from scored import score_groups
from test_rewards import groups
from tiny import make_tokenizer

from lockstep import threads
from lockstep.errors import InputError
from lockstep.extras.agents.agent_program import Agent, AgentFailed
from lockstep.images.prompts import PromptReader
from lockstep.rollouts.judges import judge_pairs
from lockstep.rollouts.programs.rollout_func import Bounds
from lockstep.rollouts.programs.workers import Worker
from lockstep.rollouts.rewards import reward_name
from lockstep.run.programs import RolloutFunction


def read() -> dict[str, Any]:
    return {
        "working directory": os.getcwd(),
        "locale": locale.setlocale(locale.LC_ALL),
        "default dtype": torch.get_default_dtype(),
        "default device": torch.get_default_device(),
        "gradients": torch.is_grad_enabled(),
        "handlers": [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)],
        "alarm": signal.getitimer(signal.ITIMER_REAL)[0] > 0,
        "sys.stdout": (sys.stdout, sys.stderr),
    }


def rollout_function(function: Callable[..., Any]) -> RolloutFunction:
    return RolloutFunction(function, None, PromptReader(make_tokenizer()), Bounds(384, 8, 64, [0]))


CHANGES: dict[str, Callable[[Path], object]] = {
    "working directory": os.chdir,
    "locale": lambda _: locale.setlocale(locale.LC_ALL, "C"),
    "default dtype": lambda _: torch.set_default_dtype(torch.float64),
    "default device": lambda _: torch.set_default_device("meta"),
    "gradients": lambda _: torch.set_grad_enabled(False),
    "handlers": lambda _: signal.signal(signal.SIGINT, signal.SIG_IGN),
    "sys.stdout": lambda folder: setattr(sys, "stdout", (folder / "said").open("w", encoding="utf-8")),
}


@pytest.fixture
def clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(threads, "_SAID", set())
    kinds = [*threads._OF_MAIN_THREAD, *threads._SHARED]
    before = [kind.read() for kind in kinds]
    locale.setlocale(locale.LC_ALL, "C.UTF-8")
    # A shell starts what runs in its background with SIGINT ignored, and then the function would change nothing.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for kind, value in zip(kinds, before, strict=True):
        if kind.put_back is not None:
            kind.put_back(value)


@pytest.mark.parametrize("what", CHANGES)
@pytest.mark.parametrize("kind", ["reward", "judge", "rollout_func"])
def test_what_a_function_changes_of_the_process_is_put_back_and_said_once(
    what: str, kind: str, clean: None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def score(completions: list[str], **_: Any) -> list[float]:
        CHANGES[what](tmp_path)
        return [1.0] * len(completions)

    class Judge:
        def judge(self, prompts: list[str], completions: Any, shuffle_order: bool = True) -> list[int]:
            CHANGES[what](tmp_path)
            return [0] * len(prompts)

    before = read()
    for _ in range(2):
        if kind == "reward":
            score_groups(groups(), [score], [1.0])
        elif kind == "rollout_func":
            with pytest.raises(InputError, match="rollout_func returned"):
                rollout_function(lambda prompts, trainer: [CHANGES[what](tmp_path)]).groups([], 2, 1)
        else:
            pairs = [type(g)(g.prompt, g.rollouts[:2]) for g in groups()]
            judge_pairs(pairs, Judge(), 60.0)
        assert read() == before
    said = [record.getMessage() for record in caplog.records if what in record.getMessage()]
    assert len(said) == 1
    who = {"reward": "reward function score", "judge": "judge Judge"}.get(kind, kind)
    assert said[0].startswith(f"{who} changed")


@pytest.mark.parametrize("fails", [False, True])
def test_an_agent_leaves_folder_and_locale(fails: bool, clean: None, tmp_path: Path) -> None:
    def agent(base_url: str, api_key: str, row: dict[str, Any]) -> float:
        os.chdir(tmp_path)
        locale.setlocale(locale.LC_ALL, "C")
        return 1.0 / (0 if fails else 1)

    before = read()
    with pytest.raises(AgentFailed) if fails else nullcontext():
        asyncio.run(Agent(agent, None, 60.0).run("http://127.0.0.1", "key", {}))
    assert read() == before


def test_a_coroutine_function_leaves_the_folder_too(clean: None, tmp_path: Path) -> None:
    async def score(completions: list[str], **_: Any) -> list[float]:
        await asyncio.sleep(0)
        os.chdir(tmp_path)
        return [1.0] * len(completions)

    before = os.getcwd()
    score_groups(groups(), [score], [1.0])
    assert os.getcwd() == before


def test_a_folder_that_is_gone_is_left(clean: None, tmp_path: Path) -> None:
    def score(completions: list[str], **_: Any) -> list[float]:
        (tmp_path / "gone").mkdir()
        os.chdir(tmp_path / "gone")
        (tmp_path / "gone").rmdir()
        return [1.0] * len(completions)

    before = os.getcwd()
    score_groups(groups(), [score], [1.0])
    assert os.getcwd() == before


def test_variables_of_the_environment_stay_and_are_told(
    clean: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("LOCKSTEP_TEST_KEY", raising=False)

    def score(completions: list[str], **_: Any) -> list[float]:
        monkeypatch.setenv("LOCKSTEP_TEST_KEY", "needed by the next call")
        return [1.0] * len(completions)

    score_groups(groups(), [score], [1.0])
    assert "LOCKSTEP_TEST_KEY" in os.environ
    assert "changed environment variables (os.environ) for the whole process, which stay so" in caplog.text


@pytest.mark.timeout(120)
def test_a_call_that_ends_takes_no_folder_from_a_call_of_another_thread(clean: None, tmp_path: Path) -> None:
    before, inside, checked = os.getcwd(), threading.Event(), threading.Event()
    seen: list[str] = []

    def long() -> None:
        os.chdir(tmp_path)
        inside.set()
        checked.wait(60)
        seen.append(os.getcwd())

    async def both() -> None:
        one, other = Worker("one"), Worker("other")
        running = asyncio.ensure_future(one.run(long, 60.0, "a tool"))
        await asyncio.to_thread(inside.wait, 60)
        await other.run(lambda: None, 60.0, "another tool")
        checked.set()
        await running
        one.end()
        other.end()

    asyncio.run(both())
    assert seen == [str(tmp_path)]
    assert os.getcwd() == before


def test_a_call_that_hangs_beyond_its_limit_keeps_the_folder_from_no_other_call(
    clean: None, tmp_path: Path
) -> None:
    before = os.getcwd()
    with threads.folder_as_before("a tool that hangs", 0.0):
        with threads.folder_as_before("a tool"):
            os.chdir(tmp_path)
        assert os.getcwd() == before


ENDLESS = """
import threading, time
from lockstep import threads
threads._AGAIN, threads._ATTEMPTS, threads._LAST = 0.01, 2, 4

def endless():
    while True:
        try:
            while True:
                time.sleep(0.001)
        except BaseException:
            pass

def call():
    threads.call_within(0.05, "reward function endless", endless)

call() if {is_main} else threading.Thread(target=call).start()
"""


@pytest.mark.parametrize("is_main", [True, False])
def test_a_function_that_catches_everything_in_a_loop_ends_the_run(is_main: bool) -> None:
    code = ENDLESS.format(is_main=is_main)
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, encoding="utf-8", timeout=120, check=False
    )
    assert found.returncode == 2, found.stderr
    assert (
        "reward function endless took longer than 0.05 s and cannot be ended" in found.stdout + found.stderr
    )
    assert "The run ends here" in found.stdout + found.stderr


def test_a_tool_that_hangs_in_a_thread_of_its_own_does_not_end_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(threads, "_AGAIN", 0.001)
    monkeypatch.setattr(threads, "_end_process", lambda why: pytest.fail(why))
    done, attempts = threading.Event(), []

    def endless() -> None:
        while not done.is_set():
            try:
                while not done.wait(0.001):
                    pass
            except BaseException:  # noqa: BLE001 - as such functions do
                attempts.append(1)
                if len(attempts) > 2 * threads._LAST:
                    done.set()

    worker = threading.Thread(
        target=threads.ended_within, args=(0.01, "a tool", endless), kwargs={"awaited": False}
    )
    worker.start()
    worker.join(60)
    assert not worker.is_alive()


def test_errors_and_names_of_functions_are_cut_to_what_a_reader_needs() -> None:
    def fails(**_: Any) -> list[float]:
        raise ValueError("long\n" * 100_000)

    class Judge:
        def judge(self, *_: Any, **__: Any) -> list[int]:
            raise ValueError("x" * 100_000)

    pairs = [type(g)(g.prompt, g.rollouts[:2]) for g in groups()]
    for call in (lambda: score_groups(groups(), [fails], [1.0]), lambda: judge_pairs(pairs, Judge(), 60.0)):
        with pytest.raises(ValueError, match="characters in all") as found:
            call()
        assert len(str(found.value)) < 800
        assert "\n" not in str(found.value)
    fails.__name__ = "n" * 100_000
    assert len(reward_name(fails)) == 200
