"""The built-in reward functions: the scores that each gives for hand-made completions."""

from __future__ import annotations

import json
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import reasoning_gym as gym

from lockstep.errors import InputError
from lockstep.tasks import math_comparison
from lockstep.tasks.rewards import (
    accuracy,
    format,
    length,
    load_reward,
    names_model,
    reasoning_gym,
    soft_overlong,
)

SAME = [
    (r"so it is \boxed{\frac{1}{2}}", "0.5"),
    (r"so it is \boxed{0.5}", r"\frac{1}{2}"),
    ("The answer is $x = 4$.", "4"),
    (r"first \boxed{3} metres", "3"),
    (r"\boxed{(1, 2)}", "$(1,2)$"),
]
OTHER = [
    (r"so it is \boxed{\frac{1}{3}}", "0.5"),
    ("no idea", "4"),
    ("", "4"),
    (r"\boxed{", "4"),
    ("4", "4"),
    (r"\boxed{3} or \boxed{4}", "4"),
]


def chat(text: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": text}]


@pytest.mark.parametrize("shape", [str, chat])
def test_accuracy_compares_final_answers_as_mathematics(shape: Any) -> None:
    for pairs, expected in ((SAME, 1.0), (OTHER, 0.0)):
        completions, references = zip(*pairs, strict=True)
        found = accuracy(completions=[shape(text) for text in completions], solution=list(references))
        assert found == [expected] * len(pairs), pairs


def test_accuracy_and_format_are_trls() -> None:
    rewards = pytest.importorskip("trl.rewards")
    pairs = [
        *SAME,
        *OTHER,
        (r"\boxed{7}", "apple"),
        ("thus $4$", "4"),
        (r"<think>\boxed{3}</think> \boxed{4}", "4"),
    ]
    texts, references = [list(column) for column in zip(*pairs, strict=True)]
    completions = [chat(text) for text in texts]
    assert accuracy(completions, solution=references) == rewards.accuracy_reward(completions, references)
    assert format(completions) == rewards.think_format_reward(completions)


def test_accuracy_reads_solution_before_answer_and_one_of_them_must_be_there() -> None:
    completions = [r"\boxed{7}"]
    assert accuracy(completions, answer=[7], entry=["x"]) == [1.0]
    assert accuracy(completions, solution=["8"], answer=["7"]) == [0.0]
    with pytest.raises(InputError, match="needs a column 'solution' or 'answer'"):
        accuracy(completions, entry=["x"])


def test_accuracy_gives_no_score_where_there_is_no_readable_reference() -> None:
    extras: dict[str, list[str]] = {}
    found = accuracy([r"\boxed{7}"] * 3, solution=["", "7", None], log_extra=extras.__setitem__)
    assert found == [None, 1.0, None]
    assert extras["gold_parsed"][0] == "[unparseable]"
    assert extras["answer_parsed"][0] == "[skipped]"
    assert "7" in extras["answer_parsed"][1]


def elsewhere(completions: list[str], solution: list[str]) -> list[Any]:
    """What `accuracy` gives in a thread that is not the main one."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(accuracy, completions, solution=solution).result(120)


def test_accuracy_is_the_same_in_another_thread() -> None:
    completions, references = [list(column) for column in zip(*SAME, *OTHER, strict=True)]
    assert elsewhere(completions, references) == accuracy(completions, solution=references)


def test_in_another_thread_an_expression_that_hangs_costs_its_own_score_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(math_comparison, "PAIR_LIMIT", 0.05)
    assert elsewhere([r"\boxed{9^{9^{9^{9}}}}"], ["7"]) == [0.0]
    assert "took longer than 0.05 s" in capsys.readouterr().out
    monkeypatch.undo()
    assert elsewhere([r"\boxed{7}", r"\boxed{8}"], ["7", "7"]) == [1.0, 0.0]


def test_a_process_that_compares_and_ends_is_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []
    start = subprocess.Popen
    monkeypatch.setattr(
        subprocess, "Popen", lambda *words, **more: started.append(start(*words, **more)) or started[-1]
    )
    worker = math_comparison.Worker()
    for count in (1, 2):
        assert [worker.compare("7", r"\boxed{7}").score for _ in range(2)] == [1.0, 1.0]
        assert len(started) == count
        started[-1].kill()
        started[-1].wait(60)


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("<think>a\nb</think>\nfour", 1.0),
        ("<think></think>", 1.0),
        ("<think>a</think> four </think>", 1.0),
        ("<think>a four", 0.0),
        ("a</think> four", 0.0),
        (" <think>a</think> four", 0.0),
        ("<think>a</think> <think>b</think>", 0.0),
        ("</think><think>", 0.0),
        ("", 0.0),
    ],
)
def test_format_wants_one_thought_at_the_start_and_closed(text: str, score: float) -> None:
    assert format([text, chat(text)]) == [score, score]


def test_length_counts_tokens_and_prefers_few() -> None:
    assert length(completions=["long text"], completion_ids=[[5, 6, 7]]) == [-3.0]


def test_soft_overlong_grows_in_a_straight_line_before_the_limit() -> None:
    punish = soft_overlong(100, 20)
    assert punish(completion_ids=[[0] * n for n in (1, 80, 90, 100, 101)]) == [0.0, 0.0, -0.5, -1.0, -1.0]
    assert soft_overlong(100, 0)(completion_ids=[[0] * 100, [0] * 101]) == [0.0, -1.0]
    assert load_reward("soft_overlong(100, 20)")(completion_ids=[[0] * 90]) == [-0.5]
    assert load_reward("soft_overlong(100,20)").__name__ == "soft_overlong"
    with pytest.raises(InputError, match="must be between 0 and the first"):
        load_reward("soft_overlong(20,100)")


def test_reasoning_gym_scores_every_row_by_its_own_data_set() -> None:
    problems = [gym.create_dataset(name, seed=1, size=1)[0] for name in ("letter_counting", "chain_sum")]
    entries = [json.dumps(problems[0], default=str), problems[1]]
    answers = [str(problem["answer"]) for problem in problems]
    assert reasoning_gym(answers, entry=entries) == [1.0, 1.0]
    assert reasoning_gym([f" {answers[0]}\n", chat("x")], entry=entries)[0] == 1.0
    assert max(reasoning_gym(["x", "x"], entry=entries)) < 0.5


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"question": "?"}, "names no reasoning-gym data set"),
        ("[1]", "names no reasoning-gym data set"),
        ({"metadata": {"source_dataset": "nope"}}, "no data set 'nope'"),
    ],
)
def test_an_entry_without_its_data_set_is_named(entry: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        reasoning_gym(["x"], entry=[entry])


def test_a_builtin_is_called_in_metrics_what_it_is_called_in_a_config() -> None:
    for name in ("exact_match", "accuracy", "format", "length", "reasoning_gym"):
        assert load_reward(name).__name__ == name


def test_directories_and_hub_ids_name_models_and_nothing_else_does(tmp_path: Path) -> None:
    assert names_model(str(tmp_path))
    assert names_model("user/model-1.5")
    assert names_model("./not/there")
    for function in (
        "accuracy",
        "soft_overlong(10,5)",
        "a/b.py:f",
        "pkg.module.f",
        "./rewards.py",
        "nothing",
    ):
        assert not names_model(function)
    with pytest.raises(InputError, match=r"nor file\.py:function"):
        load_reward("./rewards.py")
