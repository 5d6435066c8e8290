"""The fields of rollouts that an agent makes through the gateway, and the form of an agent.

`OnlineConfig` inherits the fields.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from lockstep.training.config.fields.trl import doc

Reward: TypeAlias = float | None
# agent(base_url, api_key, row) -> reward or None
AgentFunction = Callable[[str, str, dict[str, Any]], Reward | Awaitable[Reward]]


@dataclass
class AgentFields:
    """The fields of agents."""

    agent_timeout: float = field(
        default=300.0,
        metadata=doc("Seconds that an agent may take for one rollout, its wait for the engine included."),
    )
    gateway_host: str = field(
        default="127.0.0.1", metadata=doc("Address on which agents reach the gateway; other machines need another one.")
    )
    gateway_port: int = field(default=0, metadata=doc("Port of the gateway. Default: a free one."))
