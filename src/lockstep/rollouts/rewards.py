"""Reward functions: how they are made and called, rewards of environments and agents, and what a reward logs.

`reward_scorer` makes reward functions of `reward_funcs`: functions stay as they are; names and models become reward
models, which are called alike. `RewardScorer` makes one reward per rollout of their scores.

A reward function takes `prompts`, `completions`, `completion_ids`, `trainer_state`, `log_metric`, `log_extra` and the
dataset's other columns, all by keyword. It returns one number per completion, or None for "no score". It may be a
coroutine function, or an object whose `__call__` is one. With environments it also gets `environments`, the object of
each rollout. A rollout that failed has no score. Values of `log_metric` go to the trainer's logs, those of `log_extra`
to the rollouts.

An environment's own reward (`get_reward`), or an agent's, is one more score. As in TRL it stands in the trainer's
`reward_funcs` behind the user's functions (`OwnReward`), but the run takes it from the rollouts and never calls it.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import threading
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeAlias

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lockstep import threads
from lockstep.errors import InputError, quoted
from lockstep.images.reading import with_opened_images
from lockstep.models.resolve import resolve_model
from lockstep.models.reward_model import RewardModel, load_reward_model
from lockstep.progress import waiting
from lockstep.rollouts.call_fits import not_callable_by_name
from lockstep.rollouts.group import Prompt, Rollout, RolloutGroup
from lockstep.threads import Interrupted, TooSlow
from lockstep.tokens.chat import load_tokenizer

# Names that a log line already has. A reward function that used one would hide the trainer's value.
_TAKEN = (
    "loss",
    "grad_norm",
    "learning_rate",
    "epoch",
    "step",
    "num_tokens",
    "entropy",
    "kl",
    "aux_loss",
    "step_time",
)
_TAKEN_FAMILIES = (
    *(
        "parity/",
        "time/",
        "engine/",
        "completions/",
        "sampling/",
        "push/",
        "update/",
        "checked/",
        "clip_ratio/",
        "staleness/",
    ),
    *("prompts/", "objective/", "logps/", "pairs/", "val/"),
)


class RewardLog:
    """Metrics that reward functions log, kept until the trainer takes them."""

    def __init__(self) -> None:
        self._values: dict[str, list[float]] = {}

    def log_metric(self, name: str, value: float) -> None:
        """Store one value of a metric.

        Raises:
            InputError: the name belongs to the trainer, or the value is not a finite number.
        """
        if not isinstance(name, str) or name in _TAKEN or name.startswith(_TAKEN_FAMILIES):
            raise InputError(f"log_metric: {name!r:.80} cannot be a metric's name here; choose another")
        try:
            number = float(value)
        except (TypeError, ValueError) as error:
            raise InputError(f"log_metric: {name} is {value!r:.80}, not a number") from error
        if not math.isfinite(number):
            raise InputError(
                f"log_metric: {name} is {number}, not a finite number; leave the call out instead"
            )
        self._values.setdefault(name, []).append(number)

    def values(self) -> dict[str, list[float]]:
        """All stored values, by metric."""
        return dict(self._values)

    def add(self, values: Mapping[str, Sequence[float]]) -> None:
        """Add the values of another log."""
        for name, more in values.items():
            self._values.setdefault(name, []).extend(more)

    def take(self, own: Iterable[str] = ()) -> dict[str, float]:
        """Mean of each metric over the calls since the last `take`.

        Args:
            own: names of the trainer's own metrics in the same log line.

        Raises:
            InputError: a reward function logged one of `own`.
        """
        clash = sorted(set(self._values) & set(own))
        if clash:
            raise InputError(
                f"log_metric: {clash[0]!r} is a metric of the trainer's own; choose another name"
            )
        means = {name: sum(values) / len(values) for name, values in self._values.items()}
        self._values.clear()
        return means


class Extras:
    """Columns that reward functions add to the rollouts of one call: one value per completion.

    Args:
        count: number of completions of the call.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._columns: dict[str, list[Any]] = {}

    def log_extra(self, column: str, values: Iterable[Any]) -> None:
        """Store a column. If it is logged again, the new values replace the old ones.

        Raises:
            InputError: the number of values differs from the number of completions.
        """
        kept = list(values)
        if len(kept) != self._count:
            raise InputError(
                f"log_extra: column {column!r} has {len(kept)} values for {self._count} completions"
            )
        self._columns[str(column)] = kept

    def of(self, position: int) -> dict[str, Any]:
        """The values of one completion, by column."""
        return {column: values[position] for column, values in self._columns.items()}


RewardFunction = Callable[..., Sequence[float | None] | Awaitable[Sequence[float | None]]]
Scores = list[float | None]
EnvironmentOf = Callable[[Rollout], Any]
Given: TypeAlias = str | PreTrainedModel | RewardFunction
ProcessingClasses: TypeAlias = PreTrainedTokenizerBase | Sequence[PreTrainedTokenizerBase | None] | None

# The first words are TRL's (CONTRIBUTING.md).
_NO_SOURCE = "No reward source provided: give reward_funcs, or environments with a method get_reward"
# A name in metrics and messages has at most so many characters.
_LONGEST_NAME = 200
# Standard deviations are computed in float32, whose squares of larger scores are infinite.
_LARGEST = 1e15


class RewardRaised(InputError):
    """A reward function or a judge raised an error. That error is the cause of this one."""


def reward_name(function: RewardFunction) -> str:
    """Name of a reward function in metrics."""
    function = threads.unwrapped(function)
    name = getattr(function, "__name__", None) or type(function).__name__
    return str(name)[:_LONGEST_NAME]


class Scorer(Protocol):
    """Gives groups their rewards, in two halves. Each rank does the first half for its share of the groups.

    Attributes:
        timeout: seconds that each of its functions may take.
    """

    @property
    def timeout(self) -> float: ...

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
        weights: one weight per function, and behind them one for each of `own`.
        timeout: seconds that coroutine functions may take together, and that each plain function may take.
        own: the rewards that rollouts bring from their environments, by the names of the environments' classes.
        environment_of: gives the environment of a rollout; None if there are no environments.
    """

    functions: Sequence[RewardFunction]
    weights: list[float]
    timeout: float
    own: Sequence[str] = ()
    environment_of: EnvironmentOf | None = None

    def score(self, groups: Sequence[RolloutGroup], state: Any, log: RewardLog) -> list[RolloutGroup]:
        return call_functions(groups, self.functions, state, self.timeout, log, self.own, self.environment_of)

    def finish(self, groups: Sequence[RolloutGroup]) -> list[RolloutGroup]:
        return weigh_scores(groups, self.weights)


def entries_of(given: Any) -> list[Any]:
    """The `reward_funcs` of a trainer, one or several, as a list."""
    return list(given) if isinstance(given, list | tuple) else [given]


def reward_scorer(
    given: Given | list[Given] | None,
    processing_classes: ProcessingClasses,
    *,
    weights: Sequence[float] | None,
    timeout: float,
    chat_template_kwargs: dict[str, Any] | None,
    device: torch.device | str | None,
    own: Sequence[str] = (),
    environment_of: EnvironmentOf | None = None,
) -> RewardScorer:
    """The scorer of a trainer's `reward_funcs`.

    Args:
        weights: one weight per function; None for 1 each.
        timeout: seconds that coroutine functions may take together.
        own, environment_of: as in `RewardScorer`. If environments give rewards, there may be no function.

    Raises:
        InputError: no function is given, the number of weights is wrong, or as in `reward_functions`.
    """
    entries = [] if own and given is None else entries_of(given)
    if (not entries and not own) or None in entries:
        raise InputError(_NO_SOURCE)
    weighted = [1.0] * len(entries) if weights is None else list(weights)
    # Before a reward model is loaded.
    check_weights(weighted, len(entries))
    functions = (
        reward_functions(
            entries, processing_classes, chat_template_kwargs=chat_template_kwargs, device=device
        )
        if entries
        else []
    )
    return RewardScorer(functions, [*weighted, *(1.0 for _ in own)], timeout, own, environment_of)


def check_weights(weights: Sequence[float], functions: int) -> None:
    """Check that there is one weight per reward function.

    Raises:
        InputError: there is not.
    """
    if len(weights) != functions:
        raise InputError(
            f"reward_weights has {len(weights)} entries for {functions} reward functions; the numbers must match"
        )


def reward_functions(
    given: Given | Sequence[Given],
    processing_classes: ProcessingClasses = None,
    *,
    chat_template_kwargs: dict[str, Any] | None = None,
    device: torch.device | str | None = None,
) -> list[RewardFunction]:
    """Reward functions from a mixed list, in its order.

    Args:
        given: one or several of: a function; a loaded sequence classifier with one output; a directory or hub id of
            one.
        processing_classes: tokenizers of the reward models: one per entry of `given` (None for functions, and for a
            model's own tokenizer), or a single one if `given` is one entry.
        chat_template_kwargs: arguments for the chat templates of reward models.
        device: device for models that are loaded here. A model that is given loaded stays on its device.

    Raises:
        InputError: there is no entry, an entry is none of these, a model is not a reward model or has no tokenizer,
            or the number of tokenizers differs from the number of entries.
    """
    entries = entries_of(given)
    if not entries:
        raise InputError("no reward function given")
    tokenizers: list[Any] = [None] * len(entries)
    if processing_classes is not None:
        tokenizers = (
            list(processing_classes) if isinstance(processing_classes, list | tuple) else [processing_classes]
        )
    if len(tokenizers) != len(entries):
        raise InputError(
            f"reward_processing_classes has {len(tokenizers)} entries for {len(entries)} reward functions; "
            f"the numbers must match: "
            "give one per entry, None for functions"
        )
    _check_kinds(entries)
    return [
        _reward_model(entry, tokenizer, chat_template_kwargs, device)
        if isinstance(entry, str | PreTrainedModel)
        else entry
        for entry, tokenizer in zip(entries, tokenizers, strict=True)
    ]


def _check_kinds(entries: list[Any]) -> None:
    """Check all entries before any model is loaded."""
    for entry in entries:
        module = isinstance(entry, torch.nn.Module) and not isinstance(entry, PreTrainedModel)
        if module or not (isinstance(entry, str | PreTrainedModel) or callable(entry)):
            raise InputError(
                f"reward function {entry!r:.80} ({type(entry).__name__}) is neither a function nor a reward "
                f"model (a transformers "
                "sequence classifier, its directory or its hub id)"
            )


def _reward_model(
    entry: str | PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    chat_template_kwargs: dict[str, Any] | None,
    device: torch.device | str | None,
) -> RewardModel:
    if isinstance(entry, str):
        path = resolve_model(entry)
        # The tokenizer first, because a missing tokenizer is found quickly.
        tokenizer = tokenizer if tokenizer is not None else load_tokenizer(path)
        model = load_reward_model(path)
        return RewardModel(
            model.to(device) if device is not None else model,
            tokenizer,
            chat_template_kwargs=chat_template_kwargs,
        )
    if tokenizer is None:
        name = entry.config._name_or_path
        if not name:
            raise InputError(
                "a reward model that was not loaded from anywhere needs its tokenizer in reward_processing_classes"
            )
        tokenizer = load_tokenizer(name)
    return RewardModel(entry, tokenizer, chat_template_kwargs=chat_template_kwargs)


def call_functions(
    groups: Sequence[RolloutGroup],
    functions: Sequence[RewardFunction],
    trainer_state: Any = None,
    timeout: float = 600.0,
    log: RewardLog | None = None,
    own: Sequence[str] = (),
    environment_of: EnvironmentOf | None = None,
) -> list[RolloutGroup]:
    """Scores of any part of the groups, without rewards.

    A returned NaN stays NaN. Functions do not get rollouts that failed.

    Args:
        own, environment_of: as in `RewardScorer`.

    Raises:
        InputError: a function raised, or returned a wrong number of scores or values that are not numbers.
    """
    finished = [
        (group.prompt, rollout) for group in groups for rollout in group.rollouts if rollout.failed is None
    ]
    extras = Extras(len(finished))
    log_metric = (log if log is not None else RewardLog()).log_metric
    arguments = _arguments(finished) | {
        "trainer_state": trainer_state,
        "log_metric": log_metric,
        "log_extra": extras.log_extra,
    }
    if environment_of is not None:
        arguments["environments"] = [environment_of(rollout) for _, rollout in finished]
    # Without a finished rollout no function is called.
    asked = list(enumerate(functions)) if finished else []
    plain = {i: _call(f, arguments, timeout) for i, f in asked if not threads.is_coroutine_function(f)}
    pending = {i: f for i, f in asked if i not in plain}
    called = ", ".join(reward_name(function) for function in pending.values())
    answers = plain
    if pending:
        # Its thread is another one, and this thread waits for it.
        with threads.process_as_before(f"reward function {called}"):
            answers |= threads.run_coroutine(_call_all(pending, arguments, timeout), timeout, called)
    names = _unique([*(reward_name(function) for function in functions), *own])
    columns = {
        name: _checked(name, answers.get(i, []), len(finished))
        for i, name in enumerate(names[: len(functions)])
    }
    for name, title in zip(names[len(functions) :], own, strict=True):
        columns[name] = [rollout.notes.get("rewards", {}).get(title) for _, rollout in finished]
    return _attach(groups, columns, extras)


def weigh_scores(groups: Sequence[RolloutGroup], weights: Sequence[float]) -> list[RolloutGroup]:
    """Rewards of all groups together, from their scores.

    Raises:
        InputError: a function returned NaN for every rollout, or all rollouts failed.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    names = list(rollouts[0].scores) if rollouts else []
    for name in names:
        if all(_is_nan(rollout.scores[name]) for rollout in rollouts):
            raise InputError(f"reward function {name} returned NaN for all {len(rollouts)} completions")
    weighed = [
        replace(
            group,
            rollouts=tuple(
                _weighed(rollout, dict(zip(names, weights, strict=True))) for rollout in group.rollouts
            ),
        )
        for group in groups
    ]
    check_finished(weighed)
    return weighed


def check_finished(groups: Sequence[RolloutGroup]) -> None:
    """Check that at least one rollout of a generation did not fail.

    Raises:
        InputError: all of them failed.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    failed = [rollout.failed for rollout in rollouts if rollout.failed is not None]
    if failed and len(failed) == len(rollouts):
        raise InputError(f"all {len(rollouts)} rollouts failed: {failed[0]}")


def _weighed(rollout: Rollout, weights: dict[str, float]) -> Rollout:
    # NaN means "no score", as in TRL.
    scores = {name: None if _is_nan(score) else score for name, score in rollout.scores.items()}
    given = [weights[name] * score for name, score in scores.items() if score is not None]
    return replace(rollout, scores=scores, reward=sum(given) if given else math.nan)


def _is_nan(score: float | None) -> bool:
    return score is not None and math.isnan(score)


def _arguments(finished: Sequence[tuple[Prompt, Rollout]]) -> dict[str, Any]:
    rows = [{**prompt.columns, **rollout.notes.get("columns", {})} for prompt, rollout in finished]
    columns: dict[str, Any] = {name: [row.get(name) for row in rows] for row in rows for name in row}
    return {
        **columns,
        "prompts": [
            with_opened_images(rollout.notes["prompt"]) if "prompt" in rollout.notes else prompt.source
            for prompt, rollout in finished
        ],
        "completions": [_said(prompt, rollout) for prompt, rollout in finished],
        "completion_ids": [rollout.token_ids.tolist() for _, rollout in finished],
    }


def _said(prompt: Prompt, rollout: Rollout) -> Any:
    """The completion as a reward function gets it: text, or the messages after a prompt that is messages."""
    if not isinstance(prompt.source, list):
        return rollout.text
    messages = rollout.notes.get("messages")
    return with_opened_images(messages) if messages else [{"role": "assistant", "content": rollout.text}]


def _call(function: RewardFunction, arguments: dict[str, Any], timeout: float) -> Any:
    try:
        return threads.call_within(
            timeout, f"reward function {reward_name(function)}", lambda: function(**_own_lists(arguments))
        )
    except (KeyboardInterrupt, TooSlow):
        raise
    except BaseException as error:
        # SystemExit too: a reward function does not end the run without a word.
        raise _raised(function, error, arguments) from error


def _own_lists(arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments with lists of their own: what one function does to its lists does not reach the next function."""
    return {name: list(value) if isinstance(value, list) else value for name, value in arguments.items()}


async def _call_all(
    functions: dict[int, RewardFunction], arguments: dict[str, Any], timeout: float
) -> dict[int, Any]:
    async def one(function: RewardFunction) -> Any:
        try:
            with waiting(f"reward function {reward_name(function)}", timeout):
                return await asyncio.wait_for(_awaited(function, arguments), timeout)
        except TimeoutError as error:
            raise InputError(
                f"reward function {reward_name(function)} took longer than {timeout:g} s"
            ) from error

    answers = await asyncio.gather(*(one(function) for function in functions.values()))
    return dict(zip(functions, answers, strict=True))


async def _awaited(function: RewardFunction, arguments: dict[str, Any]) -> Any:
    try:
        answer = function(**_own_lists(arguments))
        assert inspect.isawaitable(answer)
        return await answer
    except KeyboardInterrupt as error:
        raise Interrupted from error
    except asyncio.CancelledError:
        raise
    except BaseException as error:
        raise _raised(function, error, arguments) from error


def _raised(function: RewardFunction, error: BaseException, arguments: Mapping[str, Any]) -> RewardRaised:
    advice = ""
    if threads.uses_signal(error):
        advice = _how_to_use_a_signal(function)
    elif isinstance(error, TypeError):
        example = "def reward(completions, **kwargs)"
        advice = not_callable_by_name(function, arguments, "reward functions", example)
    # The advice stands whole in a sentence of bounded length.
    text = quoted(error, 100) if advice else quoted(error)
    return RewardRaised(
        f"reward function {reward_name(function)} raised {type(error).__name__}: {text}{advice}"
    )


def _how_to_use_a_signal(function: RewardFunction) -> str:
    without = (
        "or give what it calls no time limit of its own (math-verify: parsing_timeout=None and timeout_seconds=None): "
        "reward_timeout ends a call that takes too long"
    )
    if threads.is_coroutine_function(function):
        return (
            f"; only the main thread handles signals, and coroutine functions run in a loop beside it: make "
            f"it a plain function, "
            f"{without}"
        )
    if threading.current_thread() is threading.main_thread():
        return (
            f"; only the main thread handles signals, and the function has started a thread: call it "
            f"there, {without}"
        )
    return (
        "; only the main thread handles signals: leave out max_staleness together with environments, and start "
        f"training in the main thread, {without}"
    )


def _checked(name: str, answer: Any, count: int) -> Scores:
    is_text = isinstance(answer, str | bytes | bytearray)
    if is_text or not (isinstance(answer, Sequence) or hasattr(answer, "tolist")):
        raise InputError(f"reward function {name} returned {type(answer).__name__}, not a list of numbers")
    try:
        values = answer.tolist() if hasattr(answer, "tolist") else list(answer)
    except Exception as error:
        # A tensor without values, for example.
        said = f"{type(error).__name__}: {quoted(error)}"
        raise InputError(f"reward function {name} returned an answer that cannot be read: {said}") from error
    if not isinstance(values, list) or len(values) != count:
        found = len(values) if isinstance(values, list) else 1
        raise InputError(f"reward function {name} returned {found} scores for {count} completions")
    return [_number(name, value) for value in values]


def _number(name: str, value: Any) -> float | None:
    if value is None:
        return None
    try:
        if isinstance(value, str | bytes):
            raise TypeError
        number = float(value)
    except (TypeError, ValueError) as error:
        raise InputError(f"reward function {name} returned {value!r:.80}, not a number or None") from error
    except OverflowError as error:
        raise InputError(f"reward function {name} returned a score beyond {_LARGEST:g}") from error
    if math.isinf(number):
        raise InputError(f"reward function {name} returned an infinite score")
    if abs(number) > _LARGEST:
        raise InputError(f"reward function {name} returned {number:g}, a score beyond {_LARGEST:g}")
    return number


def _attach(groups: Sequence[RolloutGroup], columns: dict[str, Scores], extras: Extras) -> list[RolloutGroup]:
    scored, position = [], 0
    for group in groups:
        rollouts = []
        for rollout in group.rollouts:
            if rollout.failed is not None:
                rollouts.append(replace(rollout, scores=dict.fromkeys(columns), extra={}))
                continue
            scores = {name: column[position] for name, column in columns.items()}
            rollouts.append(replace(rollout, scores=scores, extra=extras.of(position)))
            position += 1
        scored.append(replace(group, rollouts=tuple(rollouts)))
    return scored


def _unique(names: list[str]) -> list[str]:
    return [f"{name}_{i}" if names.count(name) > 1 else name for i, name in enumerate(names)]


# Seconds that one call of `get_reward` may take.
_LIMIT = 600.0


class OwnReward:
    """The reward of the environments of one class, or of an agent.

    Args:
        name: name of the class; it is the reward's name in metrics.
    """

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __eq__(self, other: object) -> bool:
        return isinstance(other, OwnReward) and other.__name__ == self.__name__

    def __hash__(self) -> int:
        return hash(self.__name__)

    def __call__(self, environments: Sequence[Any] | None = None, **_: Any) -> list[Any]:
        """What `get_reward` of each environment returns; None for an environment of another class.

        Raises:
            InputError: there are no environments, because an agent gives this reward.
        """
        if environments is None:
            raise InputError(f"the reward {self.__name__} has no function: what makes the rollouts gives it")
        return [self._of(one) if type(one).__name__ == self.__name__ else None for one in environments]

    def _of(self, environment: Any) -> Any:
        found = environment.get_reward()
        return threads.run_coroutine(found, _LIMIT, "get_reward") if inspect.iscoroutine(found) else found
