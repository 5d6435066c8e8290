"""Reward calls: TRL's convention, and one clear error for every wrong answer."""

from __future__ import annotations

import asyncio
import functools
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scored import score_groups

from lockstep import threads as coroutines
from lockstep import threads as guarded_call
from lockstep.contract.protocol import Completion, RequestKey
from lockstep.errors import InputError
from lockstep.rollouts.group import Prompt, Rollout, RolloutGroup
from lockstep.rollouts.judges import judge_pairs
from lockstep.rollouts.rewards import RewardLog


def groups(conversational: bool = False) -> list[RolloutGroup]:
    made = []
    for p in range(2):
        source: Any = [{"role": "user", "content": f"question {p}"}] if conversational else f"question {p}"
        prompt = Prompt(f"row/{p}", (1, 2), source, {"answer": f"answer {p}"})
        rollouts = tuple(
            Rollout(
                Completion(RequestKey(f"row/{p}", s), (1, 2), (3, s), (-0.1, -0.2), (0, 0), "stop"),
                f"text {p}{s}",
            )
            for s in range(3)
        )
        made.append(RolloutGroup(prompt, rollouts))
    return made


def rewards_of(function: Any, **kwargs: Any) -> list[list[float]]:
    functions = function if isinstance(function, list) else [function]
    weights = kwargs.pop("weights", [1.0] * len(functions))
    return [group.rewards for group in score_groups(groups(), functions, weights, **kwargs)]


def test_functions_get_prompts_completions_ids_columns_and_state_by_keyword() -> None:
    seen: dict[str, Any] = {}

    def record(**kwargs: Any) -> list[float]:
        seen.update(kwargs)
        return [0.0] * 6

    score_groups(groups(), [record], [1.0], trainer_state="state")
    assert seen["prompts"] == ["question 0"] * 3 + ["question 1"] * 3
    assert seen["completions"] == ["text 00", "text 01", "text 02", "text 10", "text 11", "text 12"]
    assert seen["completion_ids"] == [[3, 0], [3, 1], [3, 2]] * 2
    assert seen["answer"] == ["answer 0"] * 3 + ["answer 1"] * 3
    assert seen["trainer_state"] == "state"
    assert callable(seen["log_metric"])
    assert callable(seen["log_extra"])
    score_groups(groups(conversational=True), [record], [1.0])
    assert seen["completions"][4] == [{"role": "assistant", "content": "text 11"}]
    assert seen["prompts"][0] == [{"role": "user", "content": "question 0"}]


def test_each_score_goes_to_its_own_rollout() -> None:
    assert rewards_of(lambda completions, **_: [float(text[-2:]) for text in completions]) == [
        [0, 1, 2],
        [10, 11, 12],
    ]


def test_several_functions_are_weighed_and_none_is_left_out_of_the_sum() -> None:
    def some(completions: list[str], **_: Any) -> list[float | None]:
        return [None if text.endswith("1") else 2.0 for text in completions]

    def always(completions: list[str], **_: Any) -> list[float]:
        return [1.0] * len(completions)

    assert rewards_of([some, always], weights=[0.5, 3.0]) == [[4.0, 3.0, 4.0]] * 2
    scored = score_groups(groups(), [some, always], [0.5, 3.0])
    assert scored[0].rollouts[1].scores == {"some": None, "always": 1.0}


def test_coroutine_functions_run_together() -> None:
    started = []

    async def slow(completions: list[str], **_: Any) -> list[float]:
        started.append(1)
        while len(started) < 2:
            await asyncio.sleep(0.001)
        return [1.0] * len(completions)

    async def other(completions: list[str], **_: Any) -> list[float]:
        started.append(1)
        return [2.0] * len(completions)

    assert rewards_of([slow, other], timeout=10.0) == [[3.0] * 3] * 2


def test_a_coroutine_that_takes_too_long_is_named() -> None:
    async def stuck(**_: Any) -> list[float]:
        await asyncio.sleep(60)
        return []

    with pytest.raises(InputError, match="stuck took longer"):
        rewards_of(stuck, timeout=0.05)


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


def test_an_error_whose_text_cannot_be_made_is_named() -> None:
    def mute(**_: Any) -> list[float]:
        raise Mute

    with pytest.raises(InputError, match="mute raised Mute: without a text"):
        rewards_of(mute)


@pytest.mark.parametrize("how", ["returns", "raises"])
def test_a_copy_of_the_process_that_a_function_has_made_does_not_go_on(how: str, tmp_path: Path) -> None:
    copies: list[int] = []

    def forks(**_: Any) -> list[float]:
        copies.append(os.fork())
        if copies[0] == 0 and how == "raises":
            raise ValueError("in the copy")
        return [1.0] * 6

    process = os.getpid()
    try:
        assert rewards_of(forks) == [[1.0] * 3] * 2
        (tmp_path / str(os.getpid())).touch()
    finally:
        if os.getpid() != process:
            # The copy has come back. As a second pytest it would end in place of this one.
            os._exit(3)
    _, status = os.waitpid(copies[0], 0)
    assert os.waitstatus_to_exitcode(status) == 1
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("values", [np.ones(6), torch.ones(6), tuple([1] * 6)])
def test_arrays_and_tuples_of_numbers_are_taken(values: Any) -> None:
    assert rewards_of(lambda **_: values) == [[1.0] * 3] * 2


def raises(**_: Any) -> list[float]:
    raise KeyError("oops")


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (raises, "raises raised KeyError: 'oops'"),
        (lambda **_: [1.0] * 5, "returned 5 scores for 6 completions"),
        (lambda **_: [float("nan")] * 6, "NaN for all 6"),
        (lambda **_: [float("inf")] * 6, "infinite"),
        (lambda **_: ["good"] * 6, "'good', not a number"),
        (lambda **_: 1.0, "returned float, not a list"),
        (lambda **_: None, "returned NoneType, not a list"),
        (lambda **_: b"abcdef", "returned bytes, not a list"),
        (lambda **_: "abcdef", "returned str, not a list"),
        (lambda **_: torch.ones(6, device="meta"), "an answer that cannot be read: NotImplementedError"),
        (lambda log_metric, **_: log_metric("loss", 1.0), "'loss' cannot be a metric's name"),
        (lambda log_metric, **_: log_metric("parity/gap", 1.0), "'parity/gap' cannot be a metric's name"),
        (lambda log_metric, **_: log_metric("update/norm", 1.0), "'update/norm' cannot be a metric's name"),
        (lambda log_metric, **_: log_metric("hits", "many"), "hits is 'many', not a number"),
        (lambda log_metric, **_: log_metric("hits", float("nan")), "hits is nan, not a finite number"),
        (lambda log_extra, **_: log_extra("note", ["a"]), "column 'note' has 1 values for 6 completions"),
        (lambda **_: np.float64(1.0), "returned 1 scores for 6"),
    ],
)
def test_a_wrong_answer_is_one_clear_error(function: Any, message: str) -> None:
    with pytest.raises(InputError, match=message.replace("(", r"\(")):
        rewards_of(function)


def test_a_rollout_that_no_function_scored_has_no_reward_and_the_others_keep_theirs() -> None:
    found = score_groups(groups(), [lambda **_: [1.0, None, 3.0, float("nan"), 5.0, None]], [2.0])
    assert str([group.rewards for group in found]) == "[[2.0, nan, 6.0], [nan, 10.0, nan]]"
    assert [rollout.scored for group in found for rollout in group.rollouts] == [
        True,
        False,
        True,
        False,
        True,
        False,
    ]


def test_no_prompts_are_no_error() -> None:
    assert score_groups([], [lambda completions, **_: [1.0] * len(completions)], [1.0]) == []


class Objects:
    """A reward function that is an object with a coroutine for `__call__`."""

    async def __call__(self, completions: list[str], **_: Any) -> list[float]:
        await asyncio.sleep(0)
        return [float(text[-1]) for text in completions]


@pytest.mark.parametrize(
    "function", [Objects(), functools.partial(Objects()), functools.partial(Objects(), extra=1)]
)
def test_an_object_with_a_coroutine_call_is_awaited_in_partials_too(function: Any) -> None:
    assert rewards_of(function) == [[0, 1, 2]] * 2
    assert list(score_groups(groups(), [function], [1.0])[0].rollouts[0].scores) == ["Objects"]


def test_metrics_that_functions_log_are_averaged_over_calls_and_taken_once() -> None:
    log = RewardLog()

    def logs(completions: list[str], log_metric: Any, **_: Any) -> list[float]:
        log_metric("hits", 1)
        log_metric("hits", torch.tensor(4.0))
        log_metric("rewards/part", 0.5)
        return [0.0] * len(completions)

    async def waits(completions: list[str], log_metric: Any, **_: Any) -> list[float]:
        log_metric("hits", 7)
        return [0.0] * len(completions)

    score_groups(groups(), [logs, waits], [1.0, 1.0], log=log)
    score_groups(groups(), [logs, waits], [1.0, 1.0])
    assert log.take() == {"hits": 4.0, "rewards/part": 0.5}
    assert log.take() == {}
    score_groups(groups(), [logs], [1.0], log=log)
    with pytest.raises(InputError, match="'hits' is a metric of the trainer's own"):
        log.take(own=["reward", "hits"])


def test_extra_columns_go_to_their_own_rollouts() -> None:
    def logs(completions: list[str], log_extra: Any, **_: Any) -> list[float]:
        log_extra("upper", [text.upper() for text in completions])
        log_extra("place", range(len(completions)))
        return [0.0] * len(completions)

    found = [rollout for group in score_groups(groups(), [logs], [1.0]) for rollout in group.rollouts]
    assert [rollout.extra["upper"] for rollout in found] == [rollout.text.upper() for rollout in found]
    assert [rollout.extra["place"] for rollout in found] == list(range(6))
    assert not groups()[0].rollouts[0].extra


def test_a_rollout_of_another_prompt_cannot_enter_a_group() -> None:
    first, second = groups()
    with pytest.raises(ValueError, match="does not belong to prompt row/0"):
        RolloutGroup(first.prompt, second.rollouts)


class _Stop(BaseException):
    pass


@pytest.mark.parametrize("ending", [SystemExit(0), _Stop("enough")])
@pytest.mark.parametrize("kind", ["plain", "coroutine", "judge"])
def test_user_code_that_ends_the_program_is_an_error_that_names_it(ending: BaseException, kind: str) -> None:
    def ends(**_: Any) -> list[float]:
        raise ending

    async def ends_later(**_: Any) -> list[float]:
        await asyncio.sleep(0)
        raise ending

    class Ends:
        def judge(self, *_: Any, **__: Any) -> list[int]:
            raise ending

    pairs = [replace(group, rollouts=group.rollouts[:2]) for group in groups()]
    calls = {
        "plain": lambda: rewards_of(ends),
        "coroutine": lambda: rewards_of(ends_later),
        "judge": lambda: judge_pairs(pairs, Ends(), 60.0),
    }
    with pytest.raises(InputError, match=f"(?i)ends.* raised {type(ending).__name__}"):
        calls[kind]()


def test_ctrl_c_within_a_reward_function_stays_one() -> None:
    def interrupted(**_: Any) -> list[float]:
        raise KeyboardInterrupt

    async def interrupted_later(**_: Any) -> list[float]:
        raise KeyboardInterrupt

    for function in (interrupted, interrupted_later):
        with pytest.raises(KeyboardInterrupt):
            rewards_of(function)


def test_coroutine_rewards_run_beside_an_event_loop_that_runs_already() -> None:
    """As in a notebook, whose cells are run by a loop."""

    async def waits(completions: list[str], **_: Any) -> list[float]:
        await asyncio.sleep(0)
        return [1.0] * len(completions)

    async def fails(**_: Any) -> list[float]:
        raise KeyError("oops")

    async def stuck(**_: Any) -> list[float]:
        await asyncio.Event().wait()
        return []

    async def cell() -> list[list[float]]:
        for function, message in ((fails, "fails raised KeyError"), (stuck, "stuck took longer than 0.01 s")):
            with pytest.raises(InputError, match=message):
                rewards_of(function, timeout=0.01)
        return rewards_of(waits)

    assert asyncio.run(cell()) == [[1.0] * 3] * 2


@pytest.mark.parametrize("in_a_notebook", [False, True])
def test_a_coroutine_reward_that_blocks_its_loop_is_waited_for_no_longer_than_its_time(
    monkeypatch: pytest.MonkeyPatch, in_a_notebook: bool
) -> None:
    """Its loop cannot cancel it."""
    monkeypatch.setattr(coroutines, "GRACE", 0.01)
    done = threading.Event()

    async def blocks(**_: Any) -> list[float]:
        done.wait(60)
        return []

    async def cell() -> None:
        rewards_of(blocks, timeout=0.01)

    try:
        with pytest.raises(InputError, match="blocks did not give way"):
            asyncio.run(cell()) if in_a_notebook else rewards_of(blocks, timeout=0.01)
    finally:
        done.set()


@pytest.mark.parametrize("is_late", [False, True])
def test_after_a_call_in_another_thread_a_function_can_be_traced(is_late: bool) -> None:
    # Python 3.11 does not begin a traced function while it believes that an exception waits for a thread.
    code = f"""
import sys, threading
from lockstep.threads import TooSlow, call_within

def score():
    while {is_late}:
        pass

def call():
    try:
        call_within(0.2 if {is_late} else 60, "score", score)
    except TooSlow:
        print("too slow")

thread = threading.Thread(target=call)
thread.start()
thread.join()
sys.settrace(lambda *_: None)
(lambda: print("traced"))()
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert found.stdout.split("\n")[:-1] == (["too slow"] if is_late else []) + ["traced"], found.stderr


def test_a_function_that_returns_just_at_its_limit_leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The signal of the limit comes when the function has returned, before the limit has ended."""
    real, before = threading.Lock, signal.getsignal(signal.SIGVTALRM)
    # Functions of other tests may still be at work in threads of their own.
    running = set(threading.enumerate())
    returned: list[bool] = []

    class Late:
        def __init__(self) -> None:
            self._lock = real()

        def __enter__(self) -> None:
            if returned and threading.current_thread() is threading.main_thread():
                signal.raise_signal(signal.SIGVTALRM)
            self._lock.acquire()

        def __exit__(self, *_: Any) -> None:
            self._lock.release()

        def __getattr__(self, name: str) -> Any:
            return getattr(self._lock, name)

    monkeypatch.setattr(guarded_call.threading, "Lock", Late)
    guarded_call.call_within(60, "reward function f", lambda: returned.append(True))
    monkeypatch.undo()
    assert signal.getsignal(signal.SIGVTALRM) is before
    assert not [t for t in threading.enumerate() if t.name == "lockstep-reward-limit" and t not in running]


def test_what_belongs_to_an_event_loop_may_live_as_long_as_the_run() -> None:
    """As in TRL: a client or a semaphore of a module is bound to the loop in which it first waited."""
    one_at_a_time, loops = asyncio.Semaphore(1), set()

    async def waits(completions: list[str], **_: Any) -> list[float]:
        async def one() -> None:
            async with one_at_a_time:
                await asyncio.sleep(0.001)

        loops.add(asyncio.get_running_loop())
        await asyncio.gather(*(one() for _ in range(3)))
        return [1.0] * len(completions)

    for _ in range(3):
        assert rewards_of(waits) == [[1.0] * 3] * 2
    assert len(loops) == 1


def test_after_a_function_has_blocked_the_loop_the_next_one_gets_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(coroutines, "GRACE", 0.01)
    done = threading.Event()

    async def blocks(**_: Any) -> list[float]:
        done.wait(60)
        return []

    async def answers(completions: list[str], **_: Any) -> list[float]:
        return [1.0] * len(completions)

    try:
        with pytest.raises(InputError, match="blocks did not give way"):
            rewards_of(blocks, timeout=0.01)
        assert rewards_of(answers, timeout=5) == [[1.0] * 3] * 2
    finally:
        done.set()


def ones(completions: list[str]) -> list[float]:
    return [1.0] * len(completions)


async def ones_later(completions: list[str]) -> list[float]:
    return [1.0] * len(completions)


def asks_for_more(completions: list[str], solution: list[str], **_: Any) -> list[float]:
    return [1.0] * len(completions)


def fails_inside(completions: list[str], **_: Any) -> list[float]:
    return [1 + text for text in completions]  # type: ignore[operator]


@pytest.mark.parametrize(
    ("function", "advice"),
    [
        (ones, r"add \*\*kwargs to its parameters, as in def reward\(completions, \*\*kwargs\)$"),
        (ones_later, r"add \*\*kwargs to its parameters"),
        (functools.partial(ones), r"add \*\*kwargs to its parameters"),
        (
            asks_for_more,
            "asks for solution, and reward functions get answer, completion_ids, .*: rename the parameter",
        ),
        (fails_inside, r"unsupported operand type\(s\) for \+: 'int' and 'str'$"),
    ],
)
def test_a_function_whose_parameters_do_not_fit_gets_advice(function: Any, advice: str) -> None:
    with pytest.raises(InputError, match=advice):
        rewards_of(function)


def parses(completions: list[str], **_: Any) -> list[float]:
    from math_verify import parse

    return [float(bool(parse(text))) for text in completions]


async def parses_later(completions: list[str], **_: Any) -> list[float]:
    return parses(completions)


def parses_in_a_thread(completions: list[str], **_: Any) -> list[float]:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(parses, completions).result()


@pytest.mark.parametrize(
    ("function", "in_main_thread", "advice"),
    [
        (parses_later, True, "coroutine functions run in a loop beside it: make it a plain function"),
        (parses_in_a_thread, True, "the function has started a thread: call it there"),
        (parses, False, "leave out max_staleness together with environments"),
    ],
)
def test_where_math_verify_cannot_set_its_time_limit_the_setting_is_named(
    function: Any, in_main_thread: bool, advice: str
) -> None:
    def call() -> str:
        with pytest.raises(InputError) as found:
            rewards_of(function)
        return str(found.value)

    with ThreadPoolExecutor(1) as pool:
        said = call() if in_main_thread else pool.submit(call).result()
    assert advice in said
    assert "parsing_timeout=None and timeout_seconds=None" in said
