"""The proofs on the tokens of a whole generation: they are the engine's, and draws from what it reported.

`run/loop.py` calls them with the sums over all tokens, on the rank that holds the engine. The figures go to the receipt
(`training/generate/proofs/proofs.py`).
"""

from __future__ import annotations

from collections.abc import Callable

from lockstep.rollouts.ahead import GenerationsAhead
from lockstep.training.generate.proofs.proofs import Proofs
from lockstep.training.generate.recovery import Recovery
from lockstep.training.step.generation import Generation
from lockstep.watch.draws import DrawStats
from lockstep.watch.gap import GapStats
from lockstep.watch.kept_sets import KeptSetStats


class GenerationProofs:
    """The proofs on generations.

    Args:
        ahead: the generations that the engine samples ahead; None: there are none.
        push: pushes the weights of a version. It is called if the engine was lost after it was asked.
        limit: seconds that a request may wait behind generations that began earlier.
    """

    def __init__(
        self,
        proofs: Proofs,
        recovery: Recovery,
        ahead: GenerationsAhead | None,
        push: Callable[[int], None],
        limit: float,
    ) -> None:
        self._proofs, self._recovery, self._ahead = proofs, recovery, ahead
        self._push, self._limit = push, limit

    def check(
        self,
        gap: GapStats,
        draws: DrawStats,
        kept_sets: KeptSetStats,
        generation: Generation,
        step: int,
        *,
        record: bool = True,
    ) -> None:
        """Check the parity gap of a whole generation and its draws, and write them to the receipt.

        Args:
            gap: over all tokens of the generation but those that are left aside.
            draws: over all tokens of its drawn rollouts. The draws of a generation count once, at the first call.
            kept_sets: over drawn tokens.
            record: write the receipt's line; there is one per generation.

        Raises:
            ProofError: tokens are missing, the gap is over a limit, or the tokens are no draws from what was reported.
        """
        version = generation.version
        if self._ahead is not None:
            if not record:
                # The gap is checked once per generation, together with the canary. The policy does not change before that.
                self._proofs.check_draws(draws, version)
                return
            self._recovery.run(lambda: self._prove_ahead(generation))
        self._proofs.check_gap(gap, kept_sets, generation.due_tokens, generation.completions, version)
        self._proofs.check_draws(draws, version)
        if record:
            self._proofs.write(gap, generation.sampled_tokens, generation.aside_tokens, step, version)

    def _prove_ahead(self, generation: Generation) -> None:
        """The proofs of a run with tokens of older weights, before the policy changes."""
        assert self._ahead is not None
        version = generation.version
        if not self._proofs.canary_is_due:
            # The engine was lost after it was asked.
            self._push(version)
            self._proofs.ask_again(generation.completions, version, self._limit)
        self._proofs.check_asked_again(version)
        begun = {number: [c for r in found for c in r.branches] for number, found in self._ahead.finished().items()}
        self._proofs.check_begun(begun, version)
