"""The distribution that a run samples from, as engines take it.

Comes from: a config. Goes to: requests, and to the proofs that score the same distribution.
"""

from __future__ import annotations

from lockstep.engines.protocol import Sampling
from lockstep.training.config.online_config import OnlineConfig


def sampling_of(config: OnlineConfig) -> Sampling:
    """The distribution that a run samples from."""
    return Sampling(
        max_tokens=config.completion_limit,
        temperature=config.temperature,
        stop=tuple(config.stop_strings or ()),
    )
