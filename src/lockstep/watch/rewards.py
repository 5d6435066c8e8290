"""Proofs of rewards: a completion's row and text, its scores asked again, and the rows of an evaluation.

The functions' arguments are made a second time here, beside `rollouts/rewards.py`, from the data set and by prompt id.

Proof `evaluation`.
Shows: the rows that were evaluated are those of the evaluation set, every row once and with all of its completions
(exact, by a digest from when the trainer was made); `gap`, `draws`, `rows`, `rewards`, `ends` and the proofs of
requests hold as in training (docs/internals/proof.md#evaluations).
Does not show: gap and draws of completions that were not drawn; that the evaluation set is a good one.
When: every evaluation.

Proof `rows`.
Shows: every group has the prompt and the columns of the row with its prompt id; in one drawn group, the text of every
completion is the tokenizer's text of its ids.
Does not show: texts that a tool, an environment or an agent has made.
When: every generation, after the rewards.

Proof `scores`.
Shows: a reward function that is asked again about one drawn group, with texts, prompts and columns made again from
ids and data set, gives the same scores (docs/internals/rollouts.md).
Does not show: coroutine functions, reward models, judges, environments; rollouts whose text a program made; functions
that answer differently each time, or by the other completions of a call (they are named, and left out).
When: one group per generation; calls after the first take at most 1 % of the run's time.
"""

from __future__ import annotations

import logging
import math
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from lockstep.errors import ProofError
from lockstep.learn.sequence import TrainingSequence
from lockstep.models.reward_model import RewardModel
from lockstep.rollouts.group import Prompt, RolloutGroup
from lockstep.rollouts.rewards import RewardFunction, RewardScorer, Scorer, reward_name
from lockstep.threads import call_within, is_coroutine_function
from lockstep.watch.inputs import data_digest

_logger = logging.getLogger(__name__)

# Share of a run's time that may be spent on asking again, after the first time.
SHARE = 0.01

Scores = list[float | None]


class AskedAgain:
    """The reward functions of a run that are asked again, if that is `wanted`.

    Coroutine functions are not, because they most often ask a service, and neither are reward models, environments
    and judges. One function may take `timeout` seconds.
    """

    def __init__(self, scorer: Scorer, decode: Callable[[Any], str], timeout: float, *, wanted: bool) -> None:
        self._all: list[RewardFunction] = []
        if wanted and isinstance(scorer, RewardScorer) and scorer.environment_of is None:
            names = [reward_name(f) for f in scorer.functions]
            self._all = [
                f
                for f, name in zip(scorer.functions, names, strict=True)
                if not is_coroutine_function(f) and not isinstance(f, RewardModel) and names.count(name) == 1
            ]
        self._decode, self._timeout = decode, timeout
        self.forget()

    def forget(self) -> None:
        """Start again: all functions are asked at the next generation."""
        self._functions = list(self._all)
        self._spent, self._began = 0.0, time.perf_counter()

    def check(
        self, groups: Sequence[RolloutGroup], rows: Mapping[str, Prompt], state: Any, seed: tuple[int, ...]
    ) -> dict[str, float]:
        """Ask for one drawn group of this rank, and return figures to log. Texts of a program are left out.

        Args:
            rows: the prompts of the data set, by id.
            state: the trainer's state that the functions got.
            seed: draws the group.
        """
        if not self._functions:
            return {}
        now = time.perf_counter()
        plain = [g for g in groups if not any(r.notes or r.further for r in g.rollouts)]
        if not plain or self._spent > SHARE * (now - self._began):
            return {"checked/asked_again": 0.0}
        group = plain[int(np.random.default_rng(seed).integers(len(plain)))]
        with _same_random_numbers():
            for function in list(self._functions):
                before = _scores(function, [group])
                if (found := self._ask(function, [group], rows, state)) is not None and not _equal(
                    before, found
                ):
                    self._judge(function, groups, rows, state)
        self._spent += time.perf_counter() - now
        return {"checked/asked_again": len(group.rollouts) / sum(len(g.rollouts) for g in groups)}

    def _judge(
        self, function: RewardFunction, groups: Sequence[RolloutGroup], rows: Mapping[str, Prompt], state: Any
    ) -> None:
        """Say why scores differ: a function may need its call's other completions, or answer differently each time."""
        if any(r.notes or r.further for g in groups for r in g.rollouts):
            self._leave_out(function, "gives other scores for a part of the completions")
            return
        before = _scores(function, groups)
        once, again = (self._ask(function, groups, rows, state) for _ in range(2))
        if once is None or again is None:
            return
        if not _equal(once, again):
            self._leave_out(function, "gives other scores when it is asked again")
        elif _equal(before, once):
            self._leave_out(function, "scores a completion by the other completions of its call")
        else:
            at = next(i for i, (a, b) in enumerate(zip(before, once, strict=True)) if not _equal([a], [b]))
            rollout = [r for g in groups for r in g.rollouts][at]
            raise ProofError(
                "scores",
                f"{reward_name(function)} gave {rollout.key} a score of {before[at]}; asked again with its "
                f"row and its text, it gives {once[at]}, twice",
                "the scores belong to other completions, the function got other rows or texts, or it "
                "depends on time or on its earlier calls",
                "set recheck_rewards: false if the function depends on time or on earlier calls; otherwise "
                "this is a defect of Lockstep: report it",
            )

    def _leave_out(self, function: RewardFunction, why: str) -> None:
        if function not in self._functions:
            return
        self._functions.remove(function)
        _logger.warning(
            f"reward function {reward_name(function)} {why}; its scores are not compared any more"
        )

    def _ask(
        self, function: RewardFunction, groups: Sequence[RolloutGroup], rows: Mapping[str, Prompt], state: Any
    ) -> Scores | None:
        """The scores of all rollouts; None if the function fails, which then is left out."""
        asked = [(rows[g.prompt.prompt_id], r.token_ids.tolist()) for g in groups for r in g.rollouts]
        texts = [(row, self._decode(ids)) for row, ids in asked]
        arguments: dict[str, Any] = {
            **{
                name: [row.columns.get(name) for row, _ in asked]
                for name in {n for row, _ in asked for n in row.columns}
            },
            "prompts": [row.source for row, _ in asked],
            "completions": [
                [{"role": "assistant", "content": text}] if isinstance(row.source, list) else text
                for row, text in texts
            ],
            "completion_ids": [ids for _, ids in asked],
            "trainer_state": state,
            "log_metric": lambda *args, **kwargs: None,
            "log_extra": lambda *args, **kwargs: None,
        }
        try:
            name = f"reward function {reward_name(function)}"
            answer: Any = call_within(self._timeout, name, lambda: function(**arguments))
            found = [None if a is None or math.isnan(a) else float(a) for a in answer]
        except Exception as error:  # noqa: BLE001 - the user's code, which has answered before
            self._leave_out(function, f"fails when it is asked again ({type(error).__name__}: {error})")
            return None
        return found


def _scores(function: RewardFunction, groups: Sequence[RolloutGroup]) -> Scores:
    return [r.scores[reward_name(function)] for g in groups for r in g.rollouts]


@contextmanager
def _same_random_numbers() -> Iterator[None]:
    """Restore the global random numbers, so that a run with this proof is the run without it."""
    kept = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(kept[0])
        np.random.set_state(kept[1])
        torch.set_rng_state(kept[2])


def _equal(one: Scores, other: Scores) -> bool:
    """Whether scores are equal, up to the rounding of another order of summation."""
    return len(one) == len(other) and all(
        a is b if a is None or b is None else abs(a - b) <= 1e-6 * max(abs(a), abs(b))
        for a, b in zip(one, other, strict=True)
    )


def check_rows(
    groups: Sequence[RolloutGroup],
    rows: Mapping[str, Prompt],
    decode: Callable[[Any], str],
    seed: tuple[int, ...],
) -> None:
    """Compare groups with the rows of their prompt ids, and the texts of one drawn group with its ids."""
    for group in groups:
        row, own = rows.get(group.prompt.prompt_id), group.prompt
        same = row is not None and (
            own is row
            or (
                own.source == row.source
                and np.array_equal(own.ids, row.ids)
                and _same_columns(own.columns, row.columns)
            )
        )
        if not same:
            raise _wrong_row(
                f"the group of prompt {own.prompt_id} does not have the prompt and the columns of that row"
            )
    drawn = groups[int(np.random.default_rng(seed).integers(len(groups)))]
    for rollout in drawn.rollouts:
        # What a program, an environment or an agent has noted may have made another text.
        if rollout.notes or rollout.further:
            continue
        due = decode(rollout.token_ids.tolist())
        if rollout.text != due:
            raise _wrong_row(f"the text of {rollout.key} is {rollout.text[:60]!r}; its ids are {due[:60]!r}")


def _same_columns(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two rows are equal. Values that have no truth value, such as arrays, are compared by their text."""
    return one.keys() == other.keys() and all(repr(one[name]) == repr(other[name]) for name in one)


def _wrong_row(found: str) -> ProofError:
    return ProofError(
        "rows",
        found,
        "rollouts were paired with another row or another completion's text, so that rewards belong to other "
        "completions",
        "let nothing replace groups between sampling and scoring; otherwise this is a defect of Lockstep: report it",
    )


# One completion in this many is scored again, and at least this many completions.
_ONE_IN, _AT_LEAST = 4, 64


def check_evaluated(groups: Sequence[RolloutGroup], digest: str, num_generations: int) -> None:
    """Check that groups are those of the evaluation set: every row once, in its order, with all of its completions.

    `digest` is that of the evaluation set's prompts (`data_digest`), from when the trainer was made.
    """
    odd = [g.prompt.prompt_id for g in groups if len(g.rollouts) != num_generations]
    if odd:
        raise _wrong_evaluation(
            f"row {odd[0]} was evaluated with another number of completions than {num_generations}"
        )
    if data_digest(group.prompt for group in groups) != digest:
        names = ", ".join(group.prompt.prompt_id for group in groups[:3])
        raise _wrong_evaluation(
            f"the {len(groups)} rows that were evaluated ({names}, …) are not those of the evaluation set"
        )


def drawn_sequences(sequences: Sequence[TrainingSequence], version: int, seed: int) -> list[TrainingSequence]:
    """The completions of an evaluation that the policy scores again, in their order. Version and seed draw them."""
    count = min(len(sequences), max(_AT_LEAST, len(sequences) // _ONE_IN))
    drawn = np.random.default_rng((seed, version)).choice(len(sequences), count, replace=False)
    return [sequences[i] for i in np.sort(drawn)]


def count_seen(train: Sequence[Prompt], evaluation: Sequence[Prompt], *, tell: bool) -> int:
    """How many evaluation prompts have the token ids and pictures of a training prompt. `tell` prints a warning."""
    known = {_content(prompt) for prompt in train}
    seen = [prompt.prompt_id for prompt in evaluation if _content(prompt) in known]
    if seen and tell:
        _logger.warning(
            f"{len(seen)} of {len(evaluation)} evaluation prompts are training prompts too ({seen[0]} first), "
            "so the evaluation is not held out: remove them from one of the two datasets"
        )
    return len(seen)


def _content(prompt: Prompt) -> tuple[bytes, tuple[str, ...]]:
    """What two prompts have in common if a model cannot tell them apart."""
    return prompt.ids.tobytes(), prompt.pictures.digests


def _wrong_evaluation(found: str) -> ProofError:
    return ProofError(
        "evaluation",
        found,
        "the evaluation set was changed after the trainer was made, or something replaced its rows or its completions",
        "give the evaluation set as eval_dataset when the trainer is made, and let nothing replace it; "
        "otherwise this is a defect of Lockstep: report it",
    )
