"""The error of a parity gap that is over a limit: where the gap comes from, and which server's answers have it.

Comes from: `training/generate/proofs/proofs.py`, when a gap is over a limit. Gives back: the error, which ends the run. The trainer
scores a few completions again in other ways (`watch/gap_parts.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from lockstep.engines.http.vllm_server import VLLMServer
from lockstep.engines.protocol import Completion, Engine
from lockstep.errors import ProofError
from lockstep.watch.distributions import Distribution
from lockstep.watch.gap import GapStats, gap_error, measure_gap, over_limits
from lockstep.watch.gap_parts import decompose
from lockstep.watch.push import ProvenPusher
from lockstep.watch.rescoring import Precision, sampled_logps
from lockstep.watch.tolerances import Tolerance

# How many completions, and tokens, a failed gap is explained with.
_EXPLAINED = 3
_EXPLAINED_TOKENS = 2048


class ExplainedGap:
    """Explains a gap that is over a limit.

    Args:
        model: the trained model; it is only read.
        distribution: the distribution that the trainer scores.
        precision: how the trainer computes a forward.
        pusher: has the probe of the engine's modules.
        stale_by_design: whether tokens may be older than the trainer's weights.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        engine: Engine,
        distribution: Distribution,
        precision: Precision,
        pusher: ProvenPusher,
        *,
        stale_by_design: bool,
    ) -> None:
        self._model, self._engine, self._pusher = model, engine, pusher
        self._distribution, self._precision = distribution, precision
        self._stale_by_design = stale_by_design

    def error(self, gap: GapStats, limit: Tolerance, completions: Sequence[Completion], version: int) -> ProofError:
        """The error of a gap that is over a limit. It says where the gap comes from.

        Args:
            gap: over all compared tokens.
            completions: the sampled completions. The worst one is scored again, and up to two others.
            version: the weight version of the trainer.
        """
        chosen = _short_enough(sorted(completions, key=lambda c: str(c.key) != gap.worst)[:_EXPLAINED])
        try:
            found = decompose(
                self._model,
                self._engine,
                chosen,
                self._distribution,
                self._precision,
                self._pusher.module_probe,
                version,
                limit,
                stale_by_design=self._stale_by_design,
                packed=gap,
            )
        except (RuntimeError, MemoryError) as error:
            # Most often out of memory. The gap must be reported even where it cannot be explained.
            why = f"its parts could not be computed ({type(error).__name__}: {str(error)[:200]})"
            return gap_error(gap, limit, version, why, "not known", "run 'lockstep verify' on this model and engine")
        cause = found.cause + self._servers_at_fault(completions, limit, version)
        return gap_error(gap, limit, version, str(found.parts), cause, found.fix)

    def _servers_at_fault(self, completions: Sequence[Completion], limit: Tolerance, version: int) -> str:
        """The servers whose answers have a gap, as the end of a sentence; empty if there is one server, or if all have a gap."""
        if not isinstance(self._engine, VLLMServer):
            return ""
        by_server: dict[str, list[Completion]] = {}
        for c in completions:
            if (c.sampled_versions == version).all():
                by_server.setdefault(self._engine.server_of(c.key), []).append(c)
        wrong = [url for url, answers in by_server.items() if over_limits(self._plain_gap(answers), limit)]
        if not wrong or len(wrong) == len(by_server):
            return ""
        return f"; only the answers of {', '.join(wrong)} differ, those of the other servers agree"

    def _plain_gap(self, completions: Sequence[Completion]) -> GapStats:
        """The gap of a few completions, by the plain forward."""
        found = GapStats()
        for c in _short_enough(completions[:_EXPLAINED]):
            own = sampled_logps(self._model, c, self._distribution, self._precision)
            found += measure_gap(torch.from_numpy(c.sampled_logprobs.copy()), own, [str(c.key)], [len(own)])
        return found


def _short_enough(completions: Sequence[Completion]) -> list[Completion]:
    """The first completion, and as many more as stay within the token limit."""
    kept: list[Completion] = []
    tokens = 0
    for c in completions:
        tokens += len(c.prompt_ids) + len(c.token_ids)
        if kept and tokens > _EXPLAINED_TOKENS:
            break
        kept.append(c)
    return kept
