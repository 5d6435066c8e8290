"""The proofs of a training run, in the order in which a step meets them, and the receipt they leave.

Before anything is sampled (by an evaluation before training too): settings, one push probed at every module, the canary. Every
push: transport digest, acknowledgement, caches, version, a sampled module probe. Every generation: samples. Every optimizer step:
the gap over all sampled tokens, before the optimizer. Where generations are sampled ahead, tokens may be older than the weights:
the gap is over those that are not, staleness has a bound, and the canary is scored anew at every generation.
The checks themselves are in `parity/`; this is where a trainer calls them, and `lockstep verify` with it.
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
from lockstep.parity.canary import canary_gap, canary_sequences, check_canary, score_canary
from lockstep.parity.decomposition import decompose
from lockstep.parity.gap import GapStats, PooledGap, check_count, gap_error, over_limits
from lockstep.parity.module_probe import ModuleProbe, ProbeRecord, check_probe
from lockstep.parity.receipt import RECEIPT, RECEIPT_HEAD, Receipt
from lockstep.parity.rescoring import Precision
from lockstep.parity.samples import check_samples
from lockstep.parity.tolerances import tolerance
from lockstep.report.phases import PhaseClock
from lockstep.rollouts.group import RolloutGroup
from lockstep.sync.push import SyncRecord, push_weights
from lockstep.tokens.tokenizer import embedding_rows
from lockstep.training.config.online_config import OnlineConfig
from lockstep.training.config.sampling import sampling_of

# Completions that a failed gap is explained on.
_EXPLAINED = 3
_EXPLAINED_TOKENS = 2048


class Proofs:
    """Everything that stands between an engine's answers and an optimizer step.

    Args:
        model: the trained model; only read.
        engine: the engine that samples for it.
        config: the run's.
        compute_dtype: dtype of the trainer's forward.
        clock: pushes are charged to `sync`, proofs to `verify`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        engine: Engine,
        config: OnlineConfig,
        compute_dtype: torch.dtype,
        clock: PhaseClock,
    ) -> None:
        self._model = model
        self._engine = engine
        self._config = config
        self._clock = clock
        self.engine_dtype = config.engine_torch_dtype
        self.limit = tolerance(self.engine_dtype, compute_dtype)
        self.precision = Precision(
            autocast=torch.bfloat16 if config.bf16 else None,
            head=torch.float32 if config.cast_lm_head_to_fp32 else None,
        )
        self.probe = ModuleProbe(model, engine, self.engine_dtype)
        self._receipt: Receipt | None = None
        self._push: SyncRecord | None = None
        self._probed: ProbeRecord | None = None
        self._distrusted = False
        self._canary: Canary | None = None
        self._canary_gap: GapStats | None = None
        self._pool = PooledGap()

    def distrust(self) -> None:
        """Probe every module after the next push: the engine is not the one it was."""
        self._distrusted = True
        self._canary = None

    def start(self, folder: Path, step: int) -> None:
        """Open the receipt, and prove the engine before the first rollout is paid for.

        Raises:
            ProofError: a push, any module, or the canary fails.
            InputError: the receipt of the run that is to be continued is broken.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self._receipt = Receipt(folder / RECEIPT, step)
        probed, canary = self.prove_engine(step)
        settings = self._engine.settings()
        name, error = probed.worst
        self._receipt.append(
            {
                "kind": "start",
                "step": step,
                "version": step,
                "engine": {key: str(value) for key, value in asdict(settings).items()},
                "trainer": {"compute": str(self.precision.autocast or self._model.dtype)},
                "temperature": self._config.temperature,
                "limits": {**asdict(self.limit), "module_probe": probed.limit},
                "modules": {"probed": probed.modules, "unreached": list(probed.unreached)},
                "worst_module": {"name": name, "error": error},
                "canary": _figures(canary),
            }
        )

    def prove_engine(self, version: int) -> tuple[ProbeRecord, GapStats]:
        """Push the weights, probe every module, and score the canary: what comes before anything is sampled.

        Raises:
            ProofError: a push, any module, or the canary fails.
        """
        probed = self.sync(version, every_module=True)
        canary = score_canary(self._model, self._engine, self._engine.settings().max_model_len, self.precision)
        check_canary(canary, self.limit, version)
        return probed, canary

    def remember_receipt(self, checkpoint: Path) -> None:
        """Leave the receipt's head in a checkpoint, so that a receipt that is cut short or written anew shows."""
        assert self._receipt is not None
        (checkpoint / RECEIPT_HEAD).write_text(self._receipt.head + "\n")

    def sync(self, version: int, *, every_module: bool = False) -> ProbeRecord:
        """Push the weights and probe the engine.

        Raises:
            ProofError: the engine did not get, load or commit them, or computes with others.
        """
        with self._clock.phase("sync"):
            self._push = push_weights(self._model, self._engine, version)
        with self._clock.phase("verify"):
            seed = self._config.seed * 1_000_003 + version
            self._probed = self.probe.measure(seed, every=every_module or self._distrusted)
            check_probe(self._probed, version)
        self._distrusted = False
        return self._probed

    def start_canary(self, engine: VLLMServer, limit: float) -> None:
        """Ask the engine for the canary at the weights it now holds; it sings while the trainer learns.

        Args:
            limit: seconds that it may take, behind what the engine was asked before.
        """
        sequences = canary_sequences(embedding_rows(self._model), engine.settings().max_model_len)
        self._canary = Canary(sequences, engine.submit_scores(sequences, limit=limit))

    @property
    def canary_is_due(self) -> bool:
        """Whether a canary was asked for that has not been heard."""
        return self._canary is not None

    def check_canary_scores(self, version: int) -> None:
        """Pass or stop on the canary, waited for; to be checked before the policy changes.

        Raises:
            ProofError: trainer and engine score it differently.
            EngineLost: the engine was lost meanwhile.
        """
        assert self._canary is not None
        with self._clock.phase("verify"):
            scores = self._canary.scores.result()
            self._canary_gap = canary_gap(self._model, self._canary.sequences, scores, self.precision)
            self._canary = None
            check_canary(self._canary_gap, self.limit, version)

    def check_groups(self, groups: Sequence[RolloutGroup]) -> None:
        """Check what a generation as a whole must be.

        Raises:
            ProofError: the samples of a group are copies of each other.
        """
        with self._clock.phase("verify"):
            check_samples([[r.completion for r in group.rollouts] for group in groups])

    def check_gap(self, gap: GapStats, sampled: int, completions: Sequence[Completion], version: int) -> None:
        """Pass or stop, before the optimizer step.

        Args:
            gap: over everything that was scored.
            sampled: tokens that the engine sampled with the weights of `version`.
            completions: what was sampled, to explain a failure on.

        Raises:
            ProofError: tokens are missing, or the gap is over a limit; with where it comes from.
        """
        with self._clock.phase("verify"):
            check_count(gap, sampled, version)
            found = self._pool.add(gap, self.limit) if self._config.max_staleness else gap
            if not over_limits(found, self.limit):
                return
            raise self._explained(found, completions, version)

    def _explained(self, gap: GapStats, completions: Sequence[Completion], version: int) -> Exception:
        chosen = _short_enough(sorted(completions, key=lambda c: str(c.key) != gap.worst)[:_EXPLAINED])
        try:
            found = decompose(
                self._model,
                self._engine,
                chosen,
                sampling_of(self._config),
                self.precision,
                self.probe,
                version,
                self.limit,
                stale_by_design=self._config.max_staleness > 0,
            )
        except (RuntimeError, MemoryError) as error:
            # Out of memory, most often. What was found must be said even where it cannot be explained.
            why = f"it could not be taken apart ({type(error).__name__}: {str(error)[:200]})"
            return gap_error(
                gap, self.limit, version, why, "not known", "run 'lockstep verify' on this model and engine"
            )
        return gap_error(gap, self.limit, version, str(found.parts), found.cause, found.fix)

    def write(self, gap: GapStats, sampled: int, stale: int, step: int, version: int) -> None:
        """One line of the receipt, for a step whose proofs have passed.

        Args:
            gap: over the tokens that the weights of `version` have sampled.
            sampled: all tokens that the engine sampled.
            stale: those of older weights.
        """
        assert self._receipt is not None
        assert self._push is not None
        assert self._probed is not None
        name, error = self._probed.worst
        self._receipt.append(
            {
                "kind": "step",
                "step": step,
                "version": version,
                "digest": self._push.digest,
                "tensors": self._push.tensors,
                "modules_probed": self._probed.modules,
                "worst_module": {"name": name, "error": error},
                "sampled_tokens": sampled,
                "checked_tokens": gap.tokens,
                **self._of_staleness(stale),
                "sum_abs_gap": gap.sum_abs,
                "max_abs_gap": gap.max_abs,
                "sum_k3": gap.sum_k3,
                "worst_request": gap.worst,
            }
        )

    def _of_staleness(self, stale: int) -> dict[str, Any]:
        """What a receipt's line says of tokens that older weights have sampled, where a run may have such."""
        if self._canary_gap is None:
            return {}
        return {"stale_tokens": stale, "canary": _figures(self._canary_gap)}


@dataclass(frozen=True, slots=True)
class Canary:
    """A canary that an engine was asked for: the sequences, and what will give their log-probs."""

    sequences: dict[str, tuple[int, ...]]
    scores: Pending[Any, dict[str, tuple[float, ...]]]


def _short_enough(completions: Sequence[Completion]) -> list[Completion]:
    """The first, and as many more as keep their whole logits within memory."""
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
