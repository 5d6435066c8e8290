"""Whether the samples of a group are independent draws.

With one seed for all requests every completion of a group is the same (fault A5), and the advantages are zero for ever. That a
model without doubt repeats itself is no fault: what is tested is the chance of the repetition under the engine's own log-probs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from lockstep.engines.protocol import Completion
from lockstep.errors import ProofError

# Chance, a group, of stopping a run without a fault. P(all n equal and p(s)^(n−1) ≤ α) ≤ α for independent samples.
_ALPHA = 1e-9


def check_samples(groups: Iterable[Sequence[Completion]]) -> None:
    """Check that no group repeats one completion against all odds.

    Raises:
        ProofError: the samples of a prompt are equal, and by their log-probs they should not be.
    """
    for completions in groups:
        first = completions[0]
        if len({c.token_ids for c in completions}) > 1:
            continue
        log_chance = (len(completions) - 1) * sum(first.logprobs)
        if log_chance < math.log(_ALPHA):
            raise ProofError(
                "samples",
                f"all {len(completions)} completions of prompt {first.key.prompt_id} are the same {len(first.token_ids)} tokens; "
                f"by their own log-probs that has a chance of 1e{log_chance / math.log(10):.0f}",
                "the engine samples every request with the same seed, or answers several requests with one completion",
                "give every request its own seed, and turn off anything that de-duplicates requests",
            )
