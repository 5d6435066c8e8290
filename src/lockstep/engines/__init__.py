"""Ids in, ids with log-probs and weight versions out: one protocol, several engines."""

from typing import Any


def __getattr__(name: str) -> Any:
    # Its home is above this room, since it pushes weights and proves them; here is where people look for it.
    if name == "connect":
        from lockstep.connection import connect

        return connect
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
