"""What a trainer is given, checked before a model is loaded.

Comes from: a trainer's constructor. Pure functions of its arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from lockstep.errors import InputError
from lockstep.rollouts.group import RolloutGroup
from lockstep.rollouts.rewards import RewardFunction, score_groups
from lockstep.training.config import OnlineConfig

# Arguments of TRL's trainers that nothing here does yet.
_KNOWN = {"quantization_config", "tools", "rollout_func", "environment_factory"}
_KNOWN |= {"data_collator", "compute_metrics", "preprocess_logits_for_metrics"}
# Gives groups their rewards; gets the trainer's state.
Scorer = Callable[[Sequence[RolloutGroup], Any], list[RolloutGroup]]


def refuse_arguments(given: Mapping[str, Any]) -> None:
    """Refuse arguments of TRL's constructors that have no meaning here yet.

    Raises:
        InputError: one is not None.
        TypeError: no trainer has such an argument.
    """
    for name, value in given.items():
        if name not in _KNOWN:
            raise TypeError(f"unexpected argument {name!r}")
        if value is not None:
            raise InputError(f"{name} is not supported yet; leave it out")


def reward_scorer(
    reward_funcs: RewardFunction | list[RewardFunction] | None, args: OnlineConfig, processing_classes: Any
) -> Scorer:
    """What scores groups by the weighted sum of reward functions.

    Raises:
        InputError: there is none, one cannot be called, or the weights are not one a function.
    """
    given = list(reward_funcs) if isinstance(reward_funcs, list | tuple) else [reward_funcs]
    functions: list[RewardFunction] = [function for function in given if function is not None]
    if not functions:
        raise InputError("no reward function given")
    for function in functions:
        if not callable(function) or isinstance(function, torch.nn.Module):
            raise InputError(
                f"reward function {function!r:.80} is no Python function; reward models are not supported yet"
            )
    weights = list(args.reward_weights) if args.reward_weights is not None else [1.0] * len(functions)
    if len(weights) != len(functions):
        raise InputError(f"reward_weights has {len(weights)} entries for {len(functions)} reward functions")

    def score(groups: Sequence[RolloutGroup], state: Any) -> list[RolloutGroup]:
        return score_groups(groups, functions, weights, trainer_state=state, timeout=args.reward_timeout)

    return score
