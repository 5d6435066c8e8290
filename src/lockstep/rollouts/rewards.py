"""Calls reward functions with TRL's convention, and makes one reward per rollout from their results.

A reward function takes `prompts`, `completions`, `completion_ids`, `trainer_state`, `log_metric`, `log_extra` and the
dataset's other columns, all by keyword. It returns one number per completion, or None for "no score". It may be a coroutine
function, or an object whose `__call__` is one.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from lockstep.errors import InputError
from lockstep.rollouts.coroutines import run_coroutine
from lockstep.rollouts.group import Rollout, RolloutGroup
from lockstep.rollouts.reward_log import Extras, RewardLog

RewardFunction = Callable[..., Sequence[float | None] | Awaitable[Sequence[float | None]]]
Scores = list[float | None]


class RewardRaised(InputError):
    """A reward function or a judge raised an error. That error is the cause of this one."""


def reward_name(function: RewardFunction) -> str:
    """Name of a reward function in metrics."""
    function = _unwrapped(function)
    return getattr(function, "__name__", None) or type(function).__name__


class Scorer(Protocol):
    """Gives groups their rewards, in two halves. Each rank does the first half for its share of the groups."""

    def score(self, groups: Sequence[RolloutGroup], state: Any, log: RewardLog) -> list[RolloutGroup]:
        """Some groups with their scores.

        Args:
            state: the trainer's state, for the reward functions.
            log: receives the metrics that reward functions log.
        """

    def finish(self, groups: Sequence[RolloutGroup]) -> list[RolloutGroup]:
        """All groups with their rewards, from all groups with their scores."""


@dataclass(frozen=True, slots=True)
class RewardScorer:
    """A `Scorer` whose reward is the weighted sum of the scores of reward functions; NaN for a rollout without a score.

    Attributes:
        functions: reward functions, and reward models behind the same convention.
        weights: one weight per function.
        timeout: seconds that coroutine functions may take together. A plain function cannot be interrupted.
    """

    functions: Sequence[RewardFunction]
    weights: Sequence[float]
    timeout: float

    def score(self, groups: Sequence[RolloutGroup], state: Any, log: RewardLog) -> list[RolloutGroup]:
        return call_functions(groups, self.functions, state, self.timeout, log)

    def finish(self, groups: Sequence[RolloutGroup]) -> list[RolloutGroup]:
        return weigh_scores(groups, self.weights)


def check_weights(weights: Sequence[float], functions: int) -> None:
    """Check that there is one weight per reward function.

    Raises:
        InputError: there is not.
    """
    if len(weights) != functions:
        raise InputError(f"reward_weights has {len(weights)} entries for {functions} reward functions")


def call_functions(
    groups: Sequence[RolloutGroup],
    functions: Sequence[RewardFunction],
    trainer_state: Any = None,
    timeout: float = 600.0,
    log: RewardLog | None = None,
) -> list[RolloutGroup]:
    """Scores of any part of the groups, without rewards. A returned NaN stays NaN.

    Raises:
        InputError: a function raised, or returned a wrong number of scores or values that are not numbers.
    """
    extras = Extras(sum(len(group.rollouts) for group in groups))
    log_metric = (log if log is not None else RewardLog()).log_metric
    arguments = _arguments(groups) | {
        "trainer_state": trainer_state,
        "log_metric": log_metric,
        "log_extra": extras.log_extra,
    }
    plain = {i: _call(f, arguments) for i, f in enumerate(functions) if not _is_coroutine_function(f)}
    pending = {i: f for i, f in enumerate(functions) if i not in plain}
    called = ", ".join(reward_name(function) for function in pending.values())
    answers = plain | (run_coroutine(_call_all(pending, arguments, timeout), timeout, called) if pending else {})
    names = _unique([reward_name(function) for function in functions])
    columns = {name: _checked(name, answers[i], len(arguments["completions"])) for i, name in enumerate(names)}
    return _attach(groups, columns, extras)


def weigh_scores(groups: Sequence[RolloutGroup], weights: Sequence[float]) -> list[RolloutGroup]:
    """Rewards of all groups together, from their scores.

    Raises:
        InputError: a function returned NaN for every rollout, or no function scored any rollout.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    names = list(rollouts[0].scores) if rollouts else []
    for name in names:
        if all(_is_nan(rollout.scores[name]) for rollout in rollouts):
            raise InputError(f"reward function {name} returned NaN for all {len(rollouts)} completions")
    weighed = [
        replace(
            group,
            rollouts=tuple(_weighed(rollout, dict(zip(names, weights, strict=True))) for rollout in group.rollouts),
        )
        for group in groups
    ]
    check_scored(weighed, f"no reward function ({', '.join(names)})")
    return weighed


def check_scored(groups: Sequence[RolloutGroup], nobody: str) -> None:
    """Check that at least one rollout of a generation has a reward.

    Raises:
        InputError: no rollout has a reward.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    if rollouts and not any(rollout.scored for rollout in rollouts):
        raise InputError(
            f"{nobody} scored any of the {len(rollouts)} completions: there is nothing to learn from; let one return numbers, or "
            "leave these rows out of the data"
        )


def _weighed(rollout: Rollout, weights: dict[str, float]) -> Rollout:
    # NaN means "no score", as in TRL.
    scores = {name: None if _is_nan(score) else score for name, score in rollout.scores.items()}
    given = [weights[name] * score for name, score in scores.items() if score is not None]
    return replace(rollout, scores=scores, reward=sum(given) if given else math.nan)


def _is_nan(score: float | None) -> bool:
    return score is not None and math.isnan(score)


def _is_coroutine_function(function: Any) -> bool:
    """Whether a call returns a coroutine: for a coroutine function, an object with such a `__call__`, or a partial of either."""
    function = _unwrapped(function)
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def _unwrapped(function: Any) -> Any:
    while isinstance(function, functools.partial):
        function = function.func
    return function


def _arguments(groups: Sequence[RolloutGroup]) -> dict[str, Any]:
    pairs = [(group.prompt, rollout) for group in groups for rollout in group.rollouts]
    conversational = [isinstance(prompt.source, list) for prompt, _ in pairs]
    columns: dict[str, Any] = {
        name: [p.columns[name] for p, _ in pairs] for name in (pairs[0][0].columns if pairs else ())
    }
    return {
        **columns,
        "prompts": [prompt.source for prompt, _ in pairs],
        "completions": [
            [{"role": "assistant", "content": rollout.text}] if chat else rollout.text
            for (_, rollout), chat in zip(pairs, conversational, strict=True)
        ],
        "completion_ids": [rollout.completion.token_ids.tolist() for _, rollout in pairs],
    }


def _call(function: RewardFunction, arguments: dict[str, Any]) -> Any:
    try:
        return function(**arguments)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        # SystemExit too: a reward function does not end the run without a word.
        raise _raised(function, error) from error


async def _call_all(functions: dict[int, RewardFunction], arguments: dict[str, Any], timeout: float) -> dict[int, Any]:
    async def one(function: RewardFunction) -> Any:
        try:
            return await asyncio.wait_for(_awaited(function, arguments), timeout)
        except TimeoutError as error:
            raise InputError(f"reward function {reward_name(function)} took longer than {timeout:g} s") from error

    answers = await asyncio.gather(*(one(function) for function in functions.values()))
    return dict(zip(functions, answers, strict=True))


async def _awaited(function: RewardFunction, arguments: dict[str, Any]) -> Any:
    try:
        answer = function(**arguments)
        assert inspect.isawaitable(answer)
        return await answer
    except (KeyboardInterrupt, asyncio.CancelledError):
        raise
    except BaseException as error:
        raise _raised(function, error) from error


def _raised(function: RewardFunction, error: BaseException) -> RewardRaised:
    return RewardRaised(f"reward function {reward_name(function)} raised {type(error).__name__}: {error}")


def _checked(name: str, answer: Any, count: int) -> Scores:
    if not isinstance(answer, Sequence) and not hasattr(answer, "tolist"):
        raise InputError(f"reward function {name} returned {type(answer).__name__}, not a list of numbers")
    values = answer.tolist() if hasattr(answer, "tolist") else list(answer)
    if not isinstance(values, list) or len(values) != count:
        found = len(values) if isinstance(values, list) else 1
        raise InputError(f"reward function {name} returned {found} scores for {count} completions")
    return [_number(name, value) for value in values]


def _number(name: str, value: Any) -> float | None:
    if value is None:
        return None
    try:
        number = float(value)
    except (TypeError, ValueError) as error:
        raise InputError(f"reward function {name} returned {value!r:.80}, not a number or None") from error
    if math.isinf(number):
        raise InputError(f"reward function {name} returned an infinite score")
    return number


def _attach(groups: Sequence[RolloutGroup], columns: dict[str, Scores], extras: Extras) -> list[RolloutGroup]:
    scored, position = [], 0
    for group in groups:
        rollouts = []
        for rollout in group.rollouts:
            scores = {name: column[position] for name, column in columns.items()}
            rollouts.append(replace(rollout, scores=scores, extra=extras.of(position)))
            position += 1
        scored.append(replace(group, rollouts=tuple(rollouts)))
    return scored


def _unique(names: list[str]) -> list[str]:
    return [f"{name}_{i}" if names.count(name) > 1 else name for i, name in enumerate(names)]
