"""Metrics of scored groups, under TRL's names, and generations in which nothing has a score.

After a generation without a score the run raises an alarm and goes on; it ends if too many follow each other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from lockstep.errors import InputError
from lockstep.report.alarms import Alarms
from lockstep.rollouts.group import RolloutGroup
from lockstep.start_up import TRL_LOGGER


def rollout_metrics(groups: Sequence[RolloutGroup]) -> dict[str, float]:
    """Rewards and lengths of scored groups.

    Returns:
        `reward`, `reward_std` (over all rollouts with a reward) and `frac_reward_zero_std` (share of groups whose
        rewards are all equal), all three only where a rollout has a reward; `rewards/unscored` (number of rollouts
        without a reward; only where there are some); `rewards/<function>/mean` and `/std` over the rollouts that the
        function scored, if there are some, and `/unscored`, the number of the others, if there are some;
        `completions/…` lengths in sampled tokens, and `completions/clipped_ratio` by the engine's finish reason.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    by_group = [group.given_rewards for group in groups]
    rewards = torch.tensor([reward for group in by_group for reward in group], dtype=torch.float64)
    metrics: dict[str, float] = {}
    if len(rewards):
        metrics = {
            "reward": float(rewards.mean()),
            "reward_std": _std(rewards),
            "frac_reward_zero_std": sum(len(set(group)) == 1 for group in by_group) / len(groups),
        }
    if len(rewards) < len(rollouts):
        metrics["rewards/unscored"] = float(len(rollouts) - len(rewards))
    for name in rollouts[0].scores:
        given = torch.tensor(
            [r.scores[name] for r in rollouts if r.scores[name] is not None], dtype=torch.float64
        )
        if len(given):
            metrics |= {f"rewards/{name}/mean": float(given.mean()), f"rewards/{name}/std": _std(given)}
        if len(given) < len(rollouts):
            metrics[f"rewards/{name}/unscored"] = float(len(rollouts) - len(given))
    return metrics | _lengths(groups)


def staleness_metrics(groups: Sequence[RolloutGroup], version: int) -> dict[str, float]:
    """Mean and largest staleness of the sampled tokens, in weight versions, and the share of fresh ones."""
    versions = np.concatenate(
        [c.sampled_versions for group in groups for r in group.rollouts for c in r.branches]
    )
    return {
        "staleness/mean": version - int(versions.sum()) / len(versions),
        "staleness/max": float(version - int(versions.min())),
        "staleness/fresh": int(np.count_nonzero(versions == version)) / len(versions),
    }


def _lengths(groups: Sequence[RolloutGroup]) -> dict[str, float]:
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    # Sampled tokens, as in TRL: what tools, environments and interruptions inserted does not count.
    lengths = [sum(len(c.sampled_places) for c in r.branches) for r in rollouts]
    ended = [length for r, length in zip(rollouts, lengths, strict=True) if r.finish_reason == "stop"]
    return {
        "completions/mean_length": sum(lengths) / len(lengths),
        "completions/min_length": float(min(lengths)),
        "completions/max_length": float(max(lengths)),
        "completions/clipped_ratio": 1 - len(ended) / len(lengths),
        "completions/mean_terminated_length": sum(ended) / len(ended) if ended else 0.0,
        "completions/min_terminated_length": float(min(ended, default=0)),
        "completions/max_terminated_length": float(max(ended, default=0)),
    }


def interruption_metrics(groups: Sequence[RolloutGroup]) -> dict[str, float]:
    """`completions/interrupted`: share of the completions whose thinking was interrupted."""
    interrupted = [r.completion.sampled is not None for group in groups for r in group.rollouts]
    return {"completions/interrupted": sum(interrupted) / len(interrupted)}


def tool_metrics(groups: Sequence[RolloutGroup], *, environments: bool) -> dict[str, float]:
    """What rollouts with tools did.

    Returns:
        TRL's `tools/call_frequency` (calls per rollout) and `tools/failure_frequency` (share of the calls that failed,
        malformed ones included), `tools/turns` (sampled turns per rollout), `tools/truncated` (share of the rollouts
        that ran out of tokens) and, with environments, `environments/failed` (share of the rollouts).
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    calls = sum(rollout.notes["tool_calls"] for rollout in rollouts)
    failures = sum(rollout.notes["tool_failures"] for rollout in rollouts)
    metrics = {
        "tools/call_frequency": calls / len(rollouts),
        "tools/failure_frequency": failures / calls if calls else 0.0,
        "tools/turns": sum(len(rollout.finish_reasons) for rollout in rollouts) / len(rollouts),
        "tools/truncated": sum(rollout.finish_reason == "length" for rollout in rollouts) / len(rollouts),
    }
    if environments:
        metrics["environments/failed"] = sum(rollout.failed is not None for rollout in rollouts) / len(
            rollouts
        )
    return metrics


def mean_with_interval(groups: Sequence[RolloutGroup]) -> tuple[float, float]:
    """Mean reward and half-width of its 95 % interval.

    The samples of one problem are not independent, so the interval comes from the spread of the problems' means
    (normal approximation). Rollouts without a reward do not count, and neither do problems without any reward.
    """
    scored = [rewards for group in groups if (rewards := group.given_rewards)]
    means = torch.tensor([sum(rewards) / len(rewards) for rewards in scored], dtype=torch.float64)
    return float(means.mean()), 1.96 * _std(means) / max(len(means), 1) ** 0.5


def evaluation_metrics(
    groups: Sequence[RolloutGroup], measured: Mapping[str, float], prefix: str
) -> dict[str, float]:
    """Metrics of an evaluation: the mean reward with its interval, the sizes, and `measured`, each under `prefix`."""
    mean, half_width = mean_with_interval(groups)
    metrics = {
        **measured,
        "reward": mean,
        "reward_ci95": half_width,
        "problems": len(groups),
        "samples": sum(len(group.rollouts) for group in groups),
    }
    return {f"{prefix}_{name}": float(value) for name, value in metrics.items()}


def _std(values: torch.Tensor) -> float:
    return float(values.std()) if len(values) > 1 else 0.0


class UnscoredGenerations:
    """Counts the generations without a single score; `limit` of them in a row end the run."""

    def __init__(self, limit: int, alarms: Alarms, *, owner: bool) -> None:
        self._limit, self._alarms, self._owner = limit, alarms, owner
        self._in_a_row = 0

    def note(self, groups: Sequence[RolloutGroup]) -> dict[str, float]:
        """Count one generation, and raise an alarm about functions that gave no score in it.

        Returns the metric `rewards/unscored_generations`, which is 1, if there is no score; otherwise nothing.
        """
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        finished = [rollout for rollout in rollouts if rollout.failed is None]
        if any(rollout.scored for rollout in rollouts):
            self._in_a_row = 0
            for name in rollouts[0].scores:
                if all(rollout.scores[name] is None for rollout in finished):
                    self._alarms.tell("reward_none", name, count=len(finished))
            return {}
        self._in_a_row += 1
        names = ", ".join(rollouts[0].scores)
        if self._in_a_row >= self._limit:
            raise InputError(
                f"none of {names} scored any of the {len(rollouts)} completions, in {self._in_a_row} "
                "generations in a row: there is nothing to learn from. Let one return numbers, leave these "
                "rows out of the data, or raise max_unscored_generations"
            )
        self._alarms.tell("unscored", names, count=len(rollouts), limit=self._limit)
        if self._owner:
            prompt = groups[0].prompt
            TRL_LOGGER.warning(
                "All reward functions returned None for the following kwargs:\n%s",
                {"prompt": prompt.source, **prompt.columns},
            )
        return {"rewards/unscored_generations": 1.0}
