"""Scores groups while the engine is still sampling: a group is scored as soon as its last rollout has arrived.

Finished rollouts arrive one by one, in any order. The scores are taken after the whole generation has been checked.
Groups are scored one at a time, in one thread beside the engine's.

Proof `answers`.
Shows: the completions of a generation are those that were scored during sampling (only with `overlap_rewards`).
When: every generation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from types import TracebackType

from lockstep.errors import ProofError
from lockstep.rollouts.group import Prompt, Rollout, RolloutGroup
from lockstep.rollouts.scores.reward_log import RewardLog

Score = Callable[[Sequence[RolloutGroup], RewardLog], list[RolloutGroup]]


class EarlyScores:
    """Scores of groups that are complete before their generation is complete.

    Args:
        score: scores groups, and gets a log for metrics and extras of the reward functions.
        thread: in which they are scored. It is the same for all generations, because a function may keep a connection in it.
    """

    def __init__(
        self, prompts: Sequence[Prompt], num_generations: int, score: Score, thread: ThreadPoolExecutor
    ) -> None:
        self._prompts = {prompt.prompt_id: prompt for prompt in prompts}
        self._size = num_generations
        self._score = score
        self._finished: dict[str, dict[int, Rollout]] = {name: {} for name in self._prompts}
        self._scored: dict[str, Future[tuple[RolloutGroup, RewardLog]]] = {}
        self._thread = thread

    def __enter__(self) -> EarlyScores:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for future in self._scored.values():
            future.cancel()
        wait(self._scored.values())

    def finished(self, rollout: Rollout) -> None:
        """Take one rollout. Called from the thread of the programs."""
        key = rollout.key
        found = self._finished[key.prompt_id]
        found[key.sample] = rollout
        if len(found) == self._size and key.prompt_id not in self._scored:
            group = RolloutGroup(self._prompts[key.prompt_id], tuple(found[i] for i in range(self._size)))
            self._scored[key.prompt_id] = self._thread.submit(self._one, group)

    def take(self, groups: Sequence[RolloutGroup], log: RewardLog) -> list[RolloutGroup]:
        """Wait for the scores, and return the groups with them.

        Args:
            groups: the whole generation, checked.
            log: receives the metrics of the reward functions, in the order of the groups.

        Raises:
            InputError: as in a direct call of the reward functions.
            ProofError: a group was scored with completions that differ from those of the generation.
        """
        scored = []
        for group in groups:
            future = self._scored.get(group.prompt.prompt_id) or self._thread.submit(self._one, group)
            own, said = future.result()
            if [r.branches for r in own.rollouts] != [r.branches for r in group.rollouts]:
                raise ProofError(
                    "answers",
                    f"the completions of prompt {group.prompt.prompt_id} are not those that were scored during sampling",
                    "the engine answered a request twice",
                    "report it with this message; overlap_rewards=false scores after sampling instead",
                )
            scored.append(own)
            log.add(said.values())
        return scored

    def _one(self, group: RolloutGroup) -> tuple[RolloutGroup, RewardLog]:
        log = RewardLog()
        (scored,) = self._score([group], log)
        return scored, log
