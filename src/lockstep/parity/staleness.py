"""How old tokens are: the current weight version less the one that each was sampled at. A pure check of completions.

Comes from: completions that an engine sampled while the trainer went on (`training/generate/source.py`). What is too old was lost
from sight somewhere, and is not learned from.
"""

from __future__ import annotations

from collections.abc import Iterable

from lockstep.engines.protocol import Completion
from lockstep.errors import ProofError


def check_staleness(completions: Iterable[Completion], version: int, most: int) -> None:
    """Pass or stop on the age of tokens.

    Args:
        version: the weights that the engine holds, and that learn from these tokens first.
        most: versions that a token may be older.

    Raises:
        ProofError: a token is older than that, or newer than `version`.
    """
    for completion in completions:
        oldest, newest = int(completion.weight_versions.min()), int(completion.weight_versions.max())
        if oldest < version - most or newest > version:
            raise ProofError(
                "staleness",
                f"request {completion.key} has tokens of versions {oldest} to {newest}, at version {version} with a staleness of "
                f"at most {most}",
                "a generation was taken out of its turn, or the engine held a request back over more pushes than it should",
                "report it with this message; max_staleness=0 goes without generations ahead",
            )
