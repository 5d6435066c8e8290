"""Checks the age of tokens: the current weight version minus the version that sampled each token. A pure function.

The completions come from an engine that samples while the trainer continues (`training/generate/source.py`). A token that is
older than allowed shows that a request was lost or delayed, and the trainer does not learn from it.
"""

from __future__ import annotations

from collections.abc import Iterable

from lockstep.engines.protocol import Completion
from lockstep.errors import ProofError


def check_staleness(completions: Iterable[Completion], version: int, most: int) -> None:
    """Check the age of tokens against a limit.

    Args:
        version: the weight version that the engine holds, and that learns from these tokens first.
        most: largest allowed age of a token, in versions.

    Raises:
        ProofError: a token is older than allowed, or newer than `version`.
    """
    for completion in completions:
        if not len(completion.token_ids):
            continue
        oldest, newest = int(completion.weight_versions.min()), int(completion.weight_versions.max())
        if oldest < version - most or newest > version:
            raise ProofError(
                "staleness",
                f"request {completion.key} has tokens of versions {oldest} to {newest}, at version {version} with a staleness of "
                f"at most {most}",
                "generations were not used in order, or the engine delayed a request over too many pushes",
                "report it with this message; max_staleness=0 runs without generations ahead",
            )
