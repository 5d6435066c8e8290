"""The fields of rollouts with tools, environments, or a program of the user's own.

`OnlineConfig` inherits the fields.
"""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.training.config.option import SECONDS, Bookkeeping, Bounds, option


@dataclass
class ToolFields:
    """The fields of tool calls."""

    max_tool_calling_iterations: int | None = option(
        None,
        "How often a rollout may call tools and go on. Default: until it calls none, or is out of tokens.",
        group="tools",
        bounds=Bounds(0),
    )
    tool_timeout: float = option(
        60.0,
        "Seconds that one tool call, or one call of an environment, may take; later the model reads an error.",
        group="tools",
        bounds=SECONDS,
        bookkeeping=Bookkeeping.WAITING,
    )
    tool_threads: bool = option(
        False,
        "Each call of a plain tool, and each environment, gets a thread of its own, so that slow ones run at the same time. "
        "Signals do not work there, and neither does a connection that was made once (SQLite).",
        group="tools",
        bookkeeping=Bookkeeping.THREADS,
    )
    tool_format: str | None = option(
        None,
        "How the model writes tool calls: hermes, qwen3_xml, glm, mistral, deepseek, kimi, harmony, gemma, pythonic or "
        "llama3_json. Default: as the chat template writes them.",
        group="tools",
    )
