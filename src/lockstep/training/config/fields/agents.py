"""The fields of rollouts that an agent makes through the gateway, and the form of an agent.

`OnlineConfig` inherits the fields.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from lockstep.training.config.option import SECONDS, Bookkeeping, Bounds, option

Reward: TypeAlias = float | None
# agent(base_url, api_key, row) -> reward or None
AgentFunction = Callable[[str, str, dict[str, Any]], Reward | Awaitable[Reward]]


@dataclass
class AgentFields:
    """The fields of agents."""

    agent_timeout: float = option(
        300.0,
        "Seconds that an agent may take for one rollout, its wait for the engine included.",
        group="tools",
        bounds=SECONDS,
        bookkeeping=Bookkeeping.WAITING,
    )
    gateway_host: str = option(
        "127.0.0.1",
        "Address on which agents reach the gateway; other machines need another one.",
        group="tools",
        bookkeeping=Bookkeeping.SERVERS,
    )
    gateway_port: int = option(
        0,
        "Port of the gateway. Default: a free one.",
        group="tools",
        bounds=Bounds(0, 65535),
        bookkeeping=Bookkeeping.SERVERS,
    )
