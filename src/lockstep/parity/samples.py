"""Checks that the samples of a group are independent draws.

With one seed for all requests, all completions of a group are equal (fault A5), and the advantages are always zero. A very
certain model may rightly repeat itself. So the check computes the probability of the repetition under the engine's own
log-probs (in which inserted tokens have probability 1).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np

from lockstep.engines.protocol import Completion
from lockstep.errors import ProofError

# Probability of a false alarm, for one group and for one generation.
# A group: P(all n equal and p(s)^(n−1) ≤ α) ≤ α for independent samples.
# A generation: e = ½ + ½·[all equal]·p(s)^(−(n−1)/2) has mean ≤ 1, so P(product over groups > 1/α) ≤ α.
_ALPHA = 1e-9


def check_samples(groups: Iterable[Sequence[Completion]]) -> None:
    """Check that no group repeats one completion although that is very improbable.

    Raises:
        ProofError: the samples of a prompt are equal, and by their log-probs they should not be.
    """
    evidence = 0.0
    for completions in groups:
        first = completions[0]
        repeats = len(completions) > 1 and all(np.array_equal(c.token_ids, first.token_ids) for c in completions[1:])
        log_chance = (len(completions) - 1) * sum(first.logprobs.tolist()) if repeats else 0.0
        evidence += _log_evidence(log_chance) if repeats else math.log(0.5)
        if repeats and log_chance < math.log(_ALPHA):
            raise ProofError(
                "samples",
                f"all {len(completions)} completions of prompt {first.key.prompt_id} are the same {len(first.token_ids)} tokens; "
                f"by their own log-probs that has a chance of 1e{log_chance / math.log(10):.0f}",
                "the engine samples every request with the same seed, or answers several requests with one completion",
                "give every request its own seed, and turn off anything that de-duplicates requests",
            )
    if evidence > -math.log(_ALPHA):
        raise ProofError(
            "samples",
            f"completions repeat in group after group of a generation: the chance of that is below {_ALPHA:.0e}",
            "the engine samples every request with the same seed, or answers several requests with one completion",
            "give every request its own seed, and turn off anything that de-duplicates requests",
        )


def _log_evidence(log_chance: float) -> float:
    """log(½ + ½·exp(−log_chance / 2)), without overflow."""
    half = -log_chance / 2
    return math.log(0.5) + half + math.log1p(math.exp(-half))
