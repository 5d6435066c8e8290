"""The sampling distribution of a run, as engines take it.

It is made from a config. Requests use it, and the proofs score the same distribution.
"""

from __future__ import annotations

from lockstep.engines.protocol import Sampling
from lockstep.training.config.online_config import OnlineConfig


def sampling_of(config: OnlineConfig) -> Sampling:
    """The sampling distribution of a run."""
    return Sampling(
        max_tokens=config.completion_limit,
        temperature=config.temperature,
        stop=tuple(config.stop_strings or ()),
    )
