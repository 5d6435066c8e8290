"""The proofs of a training run, in the order in which a step meets them, and the receipt that they leave.

| when | proofs |
|------|--------|
| start, before anything is sampled (an evaluation too) | engine settings, one push with a probe of every module, the canary |
| every push | transport digest, acknowledgement, cache reset, version, a probe of some modules |
| every generation | the samples of a group are independent draws |
| every optimizer step, before the optimizer | the parity gap over all sampled tokens |

With `max_staleness`, some tokens are older than the trainer's weights. The gap is then over the tokens that are not, staleness is
bounded, and the canary is scored at every generation. The checks themselves are in `parity/`. Trainers and `lockstep verify` call
them through this module.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from lockstep.engines.protocol import Completion, Engine
from lockstep.engines.server_calls import Pending
from lockstep.engines.vllm_server import VLLMServer
from lockstep.parity.canary import canary_gap, canary_sequences, check_canary
from lockstep.parity.decomposition import decompose
from lockstep.parity.gap import GapStats, PooledGap, check_count, gap_error, over_limits
from lockstep.parity.module_probe import ModuleProbe, ProbeRecord
from lockstep.parity.proven_push import ProvenPusher, PushProof
from lockstep.parity.receipt import RECEIPT, RECEIPT_HEAD, Receipt
from lockstep.parity.rescoring import Precision
from lockstep.parity.samples import check_samples
from lockstep.parity.tail import GapTail
from lockstep.parity.tolerances import Tolerance
from lockstep.report.phases import PhaseClock
from lockstep.rollouts.group import RolloutGroup
from lockstep.tokens.tokenizer import embedding_rows
from lockstep.training.config.online_config import OnlineConfig
from lockstep.training.config.sampling import sampling_of

# How many completions, and tokens, a failed gap is explained with.
_EXPLAINED = 3
_EXPLAINED_TOKENS = 2048


class Proofs:
    """All checks between an engine's answers and an optimizer step.

    Args:
        model: the trained model; it is only read.
        engine: the engine that samples for the model.
        config: the run's configuration.
        clock: counts pushes under `sync` and proofs under `verify`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        engine: Engine,
        config: OnlineConfig,
        clock: PhaseClock,
    ) -> None:
        self._model = model
        self._engine = engine
        self._config = config
        self._clock = clock
        self.engine_dtype = config.engine_torch_dtype
        self.precision = Precision(
            autocast=torch.bfloat16 if config.bf16 else None,
            head=torch.float32 if config.cast_lm_head_to_fp32 else None,
        )
        self._pusher = ProvenPusher(
            model, engine, self.engine_dtype, self.precision, seed=config.seed, phase=clock.phase
        )
        self.limit = self._pusher.limit
        self._receipt: Receipt | None = None
        self._canary: Canary | None = None
        self._canary_gap: GapStats | None = None
        self._pool = PooledGap()
        self._tail = GapTail(self.limit)

    @property
    def probe(self) -> ModuleProbe:
        """The probe of the engine's modules."""
        return self._pusher.module_probe

    def distrust(self) -> None:
        """Probe every module after the next push, because the engine was lost and may be another one now."""
        self._pusher.distrust()
        self._canary = None

    def start(self, folder: Path, step: int) -> None:
        """Open the receipt, and prove the engine before it samples the first rollout.

        Raises:
            ProofError: a push, any module, or the canary fails.
            InputError: a run is continued and its receipt is broken.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self._receipt = Receipt(folder / RECEIPT, step)
        self._tail = GapTail(self.limit)
        for entry in self._receipt.entries:
            self._tail.passed(
                GapStats(sum_cubes=entry.get("sum_cubes", 0.0), sum_fourths=entry.get("sum_fourths", 0.0))
            )
        proof = self.prove_engine(step)
        assert proof.canary is not None
        probed, settings = proof.probe, self._engine.settings()
        name, error = probed.worst
        self._receipt.append(
            {
                "kind": "start",
                "step": step,
                "version": step,
                "engine": {key: str(value) for key, value in asdict(settings).items()},
                "trainer": {"compute": str(self.precision.autocast or self._model.dtype)},
                "temperature": self._config.temperature,
                "limits": {
                    **asdict(self.limit),
                    "max": self.limit.largest(proof.canary.tokens),
                    "module_probe": probed.limit,
                },
                "modules": {"probed": probed.modules, "unreached": list(probed.unreached)},
                "worst_module": {"name": name, "error": error},
                "canary": _figures(proof.canary),
            }
        )

    def prove_engine(self, version: int) -> PushProof:
        """Push the weights, probe every module and score the canary. This comes before the engine samples anything.

        Raises:
            ProofError: the push, a module or the canary fails.
        """
        self._pusher.distrust()
        return self._pusher.push(version, canary=True)

    def remember_receipt(self, checkpoint: Path) -> None:
        """Write the hash of the receipt's last line into a checkpoint, which no longer fits a receipt that is cut or rewritten."""
        assert self._receipt is not None
        (checkpoint / RECEIPT_HEAD).write_text(self._receipt.head + "\n")

    def sync(self, version: int, *, every_module: bool = False) -> ProbeRecord:
        """Push the weights and probe the engine.

        Raises:
            ProofError: the engine did not receive, load or commit the weights, or computes with others.
        """
        return self._pusher.push(version, every_module=every_module).probe

    def start_canary(self, engine: VLLMServer, limit: float) -> None:
        """Ask the engine to score the canary with the weights that it holds now, while the trainer goes on.

        Args:
            limit: seconds that the answer may take, including the requests that the engine works on first.
        """
        sequences = canary_sequences(embedding_rows(self._model), engine.settings().max_model_len)
        self._canary = Canary(sequences, engine.submit_scores(sequences, limit=limit))

    @property
    def canary_is_due(self) -> bool:
        """Whether the engine was asked for the canary and its answer was not checked yet."""
        return self._canary is not None

    def check_canary_scores(self, version: int) -> None:
        """Wait for the canary's answer and check it. Called before the policy changes.

        Raises:
            ProofError: trainer and engine give the canary different log-probs.
            EngineLost: the engine was lost meanwhile.
        """
        assert self._canary is not None
        with self._clock.phase("verify"):
            scores = self._canary.scores.result()
            self._canary_gap = canary_gap(self._model, self._canary.sequences, scores, self.precision)
            self._canary = None
            check_canary(self._canary_gap, self.limit, version)

    def check_groups(self, groups: Sequence[RolloutGroup]) -> None:
        """Check the samples of a whole generation.

        Raises:
            ProofError: completions of one group are copies of each other.
        """
        with self._clock.phase("verify"):
            check_samples([[r.completion for r in group.rollouts] for group in groups])

    def check_gap(self, gap: GapStats, sampled: int, completions: Sequence[Completion], version: int) -> None:
        """Check the parity gap before the optimizer step.

        Args:
            gap: over all tokens that the policy scored.
            sampled: how many tokens the engine sampled with the weights of `version`.
            completions: the sampled completions; a failure is explained with some of them.

        Raises:
            ProofError: tokens are missing, or the gap is over a limit. The error says where the gap comes from.
        """
        with self._clock.phase("verify"):
            check_count(gap, sampled, version)
            limit = self._tail.limit
            found = self._pool.add(gap, limit) if self._config.max_staleness else gap
            if over_limits(found, limit):
                raise self._explained(found, limit, completions, version)

    def _explained(self, gap: GapStats, limit: Tolerance, completions: Sequence[Completion], version: int) -> Exception:
        chosen = _short_enough(sorted(completions, key=lambda c: str(c.key) != gap.worst)[:_EXPLAINED])
        try:
            found = decompose(
                self._model,
                self._engine,
                chosen,
                sampling_of(self._config),
                self.precision,
                self._pusher.module_probe,
                version,
                limit,
                stale_by_design=self._config.max_staleness > 0,
            )
        except (RuntimeError, MemoryError) as error:
            # Most often out of memory. The gap must be reported even where it cannot be explained.
            why = f"it could not be taken apart ({type(error).__name__}: {str(error)[:200]})"
            return gap_error(gap, limit, version, why, "not known", "run 'lockstep verify' on this model and engine")
        return gap_error(gap, limit, version, str(found.parts), found.cause, found.fix)

    def write(self, gap: GapStats, sampled: int, stale: int, step: int, version: int) -> None:
        """Write the receipt's line of a step whose proofs have passed.

        Args:
            gap: over the tokens that the weights of `version` sampled.
            sampled: how many tokens the engine sampled in all.
            stale: how many of them older weights sampled.
        """
        assert self._receipt is not None
        assert self._pusher.proof is not None
        push, probed = self._pusher.proof.push, self._pusher.proof.probe
        name, error = probed.worst
        self._receipt.append(
            {
                "kind": "step",
                "step": step,
                "version": version,
                "digest": push.digest,
                "tensors": push.tensors,
                "modules_probed": probed.modules,
                "worst_module": {"name": name, "error": error},
                "sampled_tokens": sampled,
                "checked_tokens": gap.tokens,
                **self._of_staleness(stale),
                "sum_abs_gap": gap.sum_abs,
                "max_abs_gap": gap.max_abs,
                "max_allowed": self._tail.limit.largest(gap.tokens),
                "sum_k3": gap.sum_k3,
                "sum_cubes": gap.sum_cubes,
                "sum_fourths": gap.sum_fourths,
                "worst_request": gap.worst,
            }
        )
        self._tail.passed(gap)

    def _of_staleness(self, stale: int) -> dict[str, Any]:
        """The receipt's fields about stale tokens; empty for a run that has none."""
        if self._canary_gap is None:
            return {}
        return {"stale_tokens": stale, "canary": _figures(self._canary_gap)}


@dataclass(frozen=True, slots=True)
class Canary:
    """A canary that the engine is scoring: the sequences, and the pending answer."""

    sequences: dict[str, tuple[int, ...]]
    scores: Pending[Any, dict[str, tuple[float, ...]]]


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


def _figures(gap: GapStats) -> dict[str, float]:
    return {"tokens": gap.tokens, "mean_abs_gap": gap.mean_abs, "max_abs_gap": gap.max_abs, "k3": gap.k3}
