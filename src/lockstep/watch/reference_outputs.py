"""The proof that the reference model goes on to compute what it computed when training began.

The proof `reference` reads weights. It does not see which weights the forward of the reference uses: an adapter that is left
on, or a module of the policy in the reference's place, gives a KL divergence near 0 and changes no frozen weight.

Proof `reference_outputs`.
Shows: the reference model gives a sequence of the canary the same log-probs, bit for bit, as at the first generation
of this start of the run.
Does not show: that the reference was the right model at that generation; a policy in its place that has not moved yet.
It begins anew when the reference follows the policy (`sync_ref_model`), and when the number of threads changes. Where a
forward does not repeat its own bits, a difference below the limits on a gap is not seen.
When: every generation that the reference scores: a plain forward of 24 tokens.
"""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from lockstep.contract.sampling import Sampling
from lockstep.errors import ProofError
from lockstep.models.autocast import Precision
from lockstep.tokens.tokenizer import embedding_rows
from lockstep.training.step.update import Policy
from lockstep.watch.canary import canary_sequences
from lockstep.watch.reference import FrozenWeights
from lockstep.watch.rescoring import completion_logps
from lockstep.watch.tolerances import own_limit

# A number of ids for which every model has room.
_CONTEXT = 32
# Further forwards that say whether a forward repeats its own bits. They are made only after a difference.
_AGAIN = 3


class ReferenceOutputs:
    """The proof. It keeps the log-probs of the first generation."""

    def __init__(self) -> None:
        self._kept: tuple[FrozenWeights, int, torch.Tensor] | None = None

    def check(self, scorer: Policy, frozen: FrozenWeights | None, precision: Precision) -> None:
        """Score the sequence with the reference, and compare.

        Args:
            scorer: the reference model, as it scores sequences of the run.
            frozen: the weights that must stay; another object: the reference may have other weights from now on. None: there is
                no training yet, and nothing is compared.

        Raises:
            ProofError: the log-probs differ from those of the first generation.
        """
        if frozen is None:
            return
        now, threads = _logps(scorer.model, precision), torch.get_num_threads()
        if self._kept is None or self._kept[0] is not frozen or self._kept[1] != threads:
            self._kept = (frozen, threads, now)
            return
        due = self._kept[2]
        if torch.equal(now, due):
            return
        gap = (now - due).abs()
        mean, largest = float(gap.mean()), float(gap.max())
        if not all(torch.equal(_logps(scorer.model, precision), now) for _ in range(_AGAIN)):
            # Some kernels add in another order each time.
            limit = own_limit(precision, scorer.model)
            if mean <= limit.mean_of(len(gap)) and largest <= limit.largest(len(gap)):
                return
        raise ProofError(
            "reference_outputs",
            f"the reference model gives {len(gap)} fixed tokens other log-probs than at the first generation: by {mean:.2g} nats "
            f"on average and {largest:.2g} at most",
            "the reference computes with trained weights: its adapter is not switched off, or a module of the policy stands in "
            "its place. The KL divergence is then too small, whatever is learned",
            "let nothing replace the reference, its modules, or how peft switches adapters off; otherwise this is a defect of "
            "Lockstep: report it",
        )


def _logps(scorer: PreTrainedModel, precision: Precision) -> torch.Tensor:
    """(N,) log-probs of the first sequence of the canary, without its first token."""
    # One sequence, because a forward of a large model over few tokens is as slow as reading its weights.
    ids, *_ = canary_sequences(embedding_rows(scorer), _CONTEXT).values()
    return completion_logps(scorer, ids[:1], ids[1:], Sampling(1), precision)
