"""Judges: which of the two completions of a prompt is better. For trainers that learn from pairs (Online DPO).

A judge gets rollout groups of two, and the trainer uses the verdicts to select chosen and rejected. The interface is
that of `BasePairwiseJudge`, which TRL had until it dropped its judges. A judge that was written for it works here.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from lockstep.errors import InputError, quoted
from lockstep.rollouts.call_fits import not_callable_as
from lockstep.rollouts.group import Prompt, RolloutGroup
from lockstep.rollouts.rewards import RewardLog, RewardRaised, check_finished
from lockstep.threads import TooSlow, call_within

NO_VERDICT = -1


class PairwiseJudge(Protocol):
    """Compares the two completions of each prompt."""

    def judge(
        self, prompts: list[str], completions: list[list[str]], shuffle_order: bool = True
    ) -> Sequence[int]:
        """Index of the better completion of each pair: 0 or 1, or −1 if the judge gives no verdict.

        Args:
            prompts: text of each prompt.
            completions: for each prompt, the texts of its two completions.
            shuffle_order: whether the judge may change the order of the two internally, against a preference for one
                position. The verdict always refers to the given order.
        """
        ...


def judge_pairs(
    groups: Sequence[RolloutGroup], judge: PairwiseJudge, timeout: float, *, shuffle_order: bool = True
) -> list[int]:
    """The rollout that the judge prefers in each group.

    Args:
        groups: groups of two rollouts each. Prompts that are messages are shown as paragraphs, `Role: content`.
        timeout: seconds that the judge may take.

    Returns:
        One number per group, in order: 0 or 1, the index of the better rollout, or −1 for no verdict.

    Raises:
        InputError: a group does not have two rollouts; or the judge raised, took too long, or returned a wrong number
            of verdicts or an invalid one.
    """
    for group in groups:
        if len(group.rollouts) != 2:
            raise InputError(
                f"prompt {group.prompt.prompt_id} has {len(group.rollouts)} completions; a pairwise judge compares two "
                "(num_generations 2)"
            )
    if not groups:
        return []
    name = type(judge).__name__
    prompts = [_text(group.prompt) for group in groups]
    completions = [[rollout.text for rollout in group.rollouts] for group in groups]
    try:
        answer = call_within(
            timeout, f"judge {name}", lambda: judge.judge(prompts, completions, shuffle_order=shuffle_order)
        )
    except (KeyboardInterrupt, TooSlow):
        raise
    except BaseException as error:
        advice = ""
        if isinstance(error, TypeError):
            called = "judge(prompts, completions, shuffle_order=…)"
            advice = not_callable_as(judge.judge, called, prompts, completions, shuffle_order=shuffle_order)
        raise RewardRaised(f"judge {name} raised {type(error).__name__}: {quoted(error)}{advice}") from error
    return _checked(name, answer, len(groups))


def judged(group: RolloutGroup, verdict: int) -> RolloutGroup:
    """A pair with reward 1 for the better rollout and 0 for the other. Without a verdict, both scores are None."""
    scores = [
        None if verdict == NO_VERDICT else float(place == verdict) for place in range(len(group.rollouts))
    ]
    pairs = zip(group.rollouts, scores, strict=True)
    return replace(
        group,
        rollouts=tuple(
            replace(rollout, scores={"judge": score}, reward=math.nan if score is None else score)
            for rollout, score in pairs
        ),
    )


def _checked(name: str, answer: Any, count: int) -> list[int]:
    values = answer.tolist() if hasattr(answer, "tolist") else answer
    if not isinstance(values, list | tuple):
        raise InputError(f"judge {name} returned {type(answer).__name__}, not a list of 0, 1 or -1")
    if len(values) != count:
        raise InputError(f"judge {name} returned {len(values)} verdicts for {count} pairs")
    return [_verdict(name, value) for value in values]


def _verdict(name: str, value: Any) -> int:
    try:
        # Bools are refused: True could mean "the first is better", while 1 means that the second is.
        verdict = None if "bool" in type(value).__name__ else operator.index(value)
    except TypeError:
        verdict = None
    if verdict not in (0, 1, NO_VERDICT):
        raise InputError(
            f"judge {name} returned {value!r:.80}, not 0 or 1 (the better completion) or -1 (no verdict)"
        )
    return verdict


def _text(prompt: Prompt) -> str:
    if isinstance(prompt.source, str):
        return prompt.source
    return "\n\n".join(f"{message['role'].capitalize()}: {message['content']}" for message in prompt.source)


@dataclass(frozen=True, slots=True)
class JudgeScorer:
    """A `Scorer` for pairs: 1 for the completion that a judge prefers, 0 for the other, no score without a verdict.

    Args:
        timeout: seconds that the judge may take for the pairs of a generation.

    Raises:
        InputError: the object has no method `judge`.
    """

    judge: PairwiseJudge
    timeout: float

    def __post_init__(self) -> None:
        if not callable(getattr(self.judge, "judge", None)):
            raise InputError(
                f"judge is a {type(self.judge).__name__} without a method 'judge' (see lockstep.rollouts.judges)"
            )

    def score(self, groups: Sequence[RolloutGroup], state: Any, log: RewardLog) -> list[RolloutGroup]:
        # A pair with a rollout that failed has no better one.
        whole = [group for group in groups if all(rollout.failed is None for rollout in group.rollouts)]
        verdicts = dict(
            zip(
                (g.prompt.prompt_id for g in whole), judge_pairs(whole, self.judge, self.timeout), strict=True
            )
        )
        return [judged(group, verdicts.get(group.prompt.prompt_id, NO_VERDICT)) for group in groups]

    def finish(self, groups: Sequence[RolloutGroup]) -> list[RolloutGroup]:
        check_finished(groups)
        return list(groups)
