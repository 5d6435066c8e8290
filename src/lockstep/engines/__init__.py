"""Engines take prompt ids and return token ids with log-probs and weight versions: one protocol, several engines."""

from typing import Any


def __getattr__(name: str) -> Any:
    # `connect` pushes weights and proves them, so it is implemented above this package. Users look for it here.
    if name == "connect":
        from lockstep.connection import connect

        return connect
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
