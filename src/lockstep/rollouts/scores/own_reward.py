"""The reward that environments or an agent give themselves, in the form of a reward function.

A trainer lists it in `reward_funcs` behind the user's functions, as TRL's does. The run itself takes these rewards from
the rollouts (`rollouts/scores/rewards.py`), and never calls the object.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from lockstep.errors import InputError
from lockstep.threads import run_coroutine

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
        return run_coroutine(found, _LIMIT, "get_reward") if inspect.iscoroutine(found) else found
