"""The fields of rollouts that an agent makes through the gateway.

`OnlineConfig` inherits the fields.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from lockstep.training.config.fields.trl import doc


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
