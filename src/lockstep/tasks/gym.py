"""reasoning-gym as a source of problems, by the name of one of its data sets. Its own scorer is the reward function."""

from __future__ import annotations

import json
from typing import Any

from datasets import Dataset

from lockstep.errors import InputError
from lockstep.tasks.arithmetic import chat
from lockstep.tasks.builtin_rewards import Reward, gym_package, texts

SYSTEM = "Answer with just the result."

# Seed offsets. They are far apart, so that training, evaluation and example problems differ.
_EVAL_OFFSET, _EXAMPLE_OFFSET = 1_000_000, 2_000_000


def reasoning_gym_problems(
    name: str, train_size: int, eval_size: int, seed: int, examples: int = 2
) -> tuple[Dataset, Dataset, Reward]:
    """Training and evaluation problems of a reasoning-gym data set, and its scorer as a reward function.

    Args:
        name: for example `letter_counting`, `chain_sum` or `gcd`.
        examples: number of worked examples before every question. They are separate problems.

    Returns:
        Two data sets with columns `prompt`, `answer` and `entry` (the problem as JSON), and the reward function. A training
        problem that also occurs in the evaluation set is dropped from the training set.

    Raises:
        InputError: reasoning-gym has no such data set, or is not installed.
    """
    gym = gym_package()
    try:
        source = gym.create_dataset(name, seed=seed, size=max(train_size, 1))
        held_out = gym.create_dataset(name, seed=seed + _EVAL_OFFSET, size=max(eval_size, 1))
        worked = gym.create_dataset(name, seed=seed + _EXAMPLE_OFFSET, size=max(examples, 1))
    except ValueError as error:
        raise InputError(f"reasoning-gym has no data set {name!r}: {error}") from error
    shown = [(worked[i]["question"], str(worked[i]["answer"])) for i in range(examples)]
    evaluation = [held_out[i] for i in range(eval_size)]
    kept_back = {entry["question"] for entry in evaluation} | {question for question, _ in shown}
    training = [entry for entry in (source[i] for i in range(train_size)) if entry["question"] not in kept_back]

    def reasoning_gym_score(completions: list[Any], entry: list[str], **_: Any) -> list[float]:
        return [
            float(source.score_answer(text.strip(), json.loads(problem)))
            for text, problem in zip(texts(completions), entry, strict=True)
        ]

    return _gym_rows(training, shown), _gym_rows(evaluation, shown), reasoning_gym_score


class _Problem:
    """An environment for the rows of `reasoning_gym_problems`. The reward is the best score of the answers so far."""

    def reset(self, entry: str, **row: Any) -> None:
        """Begin with the problem of a row's column `entry`."""
        self._entry = json.loads(entry)
        self._score = gym_package().get_score_answer_fn(self._entry["metadata"]["source_dataset"])
        self._best = 0.0

    def get_reward(self) -> float:
        """The best score of the answers so far."""
        return self._best

    def _is_right(self, text: str) -> bool:
        score = float(self._score(text.strip(), self._entry))
        self._best = max(self._best, score)
        return score == 1.0


class SeveralTries(_Problem):
    """The model gives its answers with a tool, as often as it likes."""

    def answer(self, text: str) -> str:
        """Give an answer to the problem.

        Args:
            text: The answer, and nothing else.
        """
        return "right" if self._is_right(text) else "wrong, try again"


class SpokenTries(_Problem):
    """Each turn is an answer, without a tool. After a wrong one the user asks again, until the model is out of tokens."""

    def next_user_message(self, answer: str) -> str | None:
        """Score an answer. Returns None if it is right."""
        return None if self._is_right(answer) else "That is wrong. Try again. " + SYSTEM


def _gym_rows(entries: list[dict[str, Any]], shown: list[tuple[str, str]]) -> Dataset:
    return Dataset.from_dict(
        {
            "prompt": [chat(SYSTEM, shown, entry["question"]) for entry in entries],
            "answer": [str(entry["answer"]) for entry in entries],
            "entry": [json.dumps(entry, default=str) for entry in entries],
        }
    )
