"""The fields of rollouts with tools, environments, or a program of the user's own.

`OnlineConfig` inherits the fields.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from lockstep.training.config.fields.trl import doc


@dataclass
class ToolFields:
    """The fields of tool calls."""

    max_tool_calling_iterations: int | None = field(
        default=None,
        metadata=doc(
            "How often a rollout may call tools and go on. Default: until it calls none, or is out of tokens."
        ),
    )
    tool_timeout: float = field(
        default=60.0,
        metadata=doc(
            "Seconds that one tool call, or one call of an environment, may take; later the model reads an error."
        ),
    )
    tool_threads: bool = field(
        default=False,
        metadata=doc(
            "Each call of a plain tool, and each environment, gets a thread of its own, so that slow ones run at the same time. "
            "Signals do not work there, and neither does a connection that was made once (SQLite)."
        ),
    )
    tool_format: str | None = field(
        default=None,
        metadata=doc(
            "How the model writes tool calls: hermes, qwen3_xml, glm, mistral, deepseek, kimi, harmony, gemma, pythonic or "
            "llama3_json. Default: as the chat template writes them."
        ),
    )
