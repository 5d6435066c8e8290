"""The placeholder proof: the engine has sampled no placeholder of a picture.

A model reads the placeholders of a prompt as parts of pictures. A sampled one would shift every picture behind it.

Proof `placeholder`.
Shows: no sampled id is the placeholder of a picture, which every request of a run with pictures bans
(docs/internals/images.md).
Does not show: that other banned ids were not sampled (the gap shows this).
When: every generation of a run with pictures.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from lockstep.contract.protocol import Completion
from lockstep.errors import ProofError


def check_placeholders(completions: Iterable[Completion], banned: Sequence[int]) -> None:
    """Check the ids that the engine has sampled. Inserted ids may show pictures.

    Args:
        banned: the placeholders of pictures. Empty: the run has no pictures.

    Raises:
        ProofError: a placeholder was sampled.
    """
    if not banned:
        return
    for completion in completions:
        ids = completion.token_ids[completion.sampled_places]
        if (found := np.isin(ids, banned)).any():
            raise ProofError(
                "placeholder",
                f"completion {completion.key} has id {ids[found][0]}, the placeholder of pictures, which every request bans",
                "the engine samples without the bans of its requests, and may have put a picture in the place of the token",
                "remove logits processors and sampling settings of your own from the engine; otherwise report this message",
            )
