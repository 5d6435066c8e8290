"""The proofs of a push: probe the engine's modules, and compare the canary.

`PushWatch` proves the pushes that a run makes. `ProvenPusher` also makes them, for trainers that are not Lockstep's own.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from lockstep.contract.distribution import Distribution
from lockstep.contract.protocol import Engine
from lockstep.errors import foreign_errors
from lockstep.models.autocast import Precision
from lockstep.sync.adapters.push import AdapterPusher
from lockstep.sync.adapters.source import EffectiveSource
from lockstep.sync.push import SyncRecord, forget_push, push_weights
from lockstep.tokens.tokenizer import embedding_rows
from lockstep.watch.adapter_probe import check_adapter_probe
from lockstep.watch.canary import canary_sequences, check_canary, score_canary
from lockstep.watch.gap import GapStats
from lockstep.watch.modules import ModuleProbe, ProbeRecord, check_probe
from lockstep.watch.quantised_gap import QuantisationError, widened
from lockstep.watch.quantised_whole_inputs import sample_with_whole_inputs, score_with_whole_inputs
from lockstep.watch.tolerances import Tolerance, tolerance

_logger = logging.getLogger(__name__)

# What failed if an engine or a library fails during a push.
NOT_PUSHED = "the weights could not be pushed into the engine"
Phase = Callable[[str], AbstractContextManager]
# Told once, where the sharper canary of an engine in 8 bits is left out.
_COMPILED = (
    "the engine runs compiled programs (CUDA graphs) or packed codes, so its layers in 8 bits cannot leave their inputs as "
    "they are: the canary without quantised inputs is left out, and log-probs are held to the wider limits of 8 bits. "
    "vllm_engine_kwargs: {enforce_eager: true}, or --enforce-eager for a server, brings it back where programs are the reason"
)


@dataclass(frozen=True, slots=True)
class PushProof:
    """The results of one push and of its proofs.

    Attributes:
        push: the record of the sent weights, with their digest.
        probe: the differences between the outputs of the engine's modules and the outputs of the trained model's weights.
        canary: the gap over the canary's tokens; None if this push did not score the canary.
    """

    push: SyncRecord
    probe: ProbeRecord
    canary: GapStats | None


class PushWatch:
    """The proofs of the pushes of one model into one engine.

    The first push after the start, after a push that was not proven, or after `distrust`, sends everything, and every module of the
    engine is probed. Later pushes send what changed, and a sample of the modules is probed, unless `every_module` asks for all.

    Args:
        model: the trained model; it is only read.
        engine: receives the weights.
        engine_dtype: the dtype in which the engine computes.
        precision: the dtypes in which the trainer computes its forward.
        seed: seed of the run; the probe vectors depend on it and on the version.
        quantised: whether the engine holds the weights in 8 bits.
        adapters: pushes the adapter alone, for vLLM's own LoRA; None: merged weights are pushed.
        phase: measures the time of the proofs ("verify").

    Attributes:
        every_module: probe every module after the next push.
        canary: score the canary after the next push.
        proof: of the last push; None before the first.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        engine: Engine,
        engine_dtype: torch.dtype,
        precision: Precision,
        *,
        seed: int = 0,
        quantised: bool = False,
        adapters: AdapterPusher | None = None,
        phase: Phase = lambda name: nullcontext(),
    ) -> None:
        self._model, self._engine, self._dtype = model, engine, engine_dtype
        self.precision = precision
        self._limit = tolerance(engine_dtype, precision.dtype_of(model))
        self.quantisation = (
            QuantisationError(model, engine_dtype, precision, lambda: self.module_probe.quantised_tensors)
            if quantised
            else None
        )
        self._seed, self._phase, self._adapters = seed, phase, adapters
        self._module_probe: ModuleProbe | None = None
        self._probed: tuple[str, ...] = ()
        self._trusted, self._told = False, False
        self.every_module, self.canary = True, False
        self.proof: PushProof | None = None

    @property
    def limit(self) -> Tolerance:
        """The limits on the canary's gap."""
        return self._limit if self.quantisation is None else widened(self._limit, self.quantisation.canary)

    @property
    def limit_of_tokens(self) -> Tolerance:
        """The limits on the gap of sampled tokens."""
        return self._limit if self.quantisation is None else widened(self._limit, self.quantisation.of_tokens)

    @property
    def module_probe(self) -> ModuleProbe:
        """The probe of the engine's modules; it is made at its first use, and again when the engine has other servers.

        Raises:
            InputError: the engine runs no module under the trained model's names.
        """
        members: tuple[str, ...] = getattr(self._engine, "members", ())
        if self._module_probe is None or members != self._probed:
            self._probed = members
            if self._adapters is None:
                self._module_probe = ModuleProbe(self._model, self._engine, self._dtype)
            else:
                dtype = self._dtype
                self._module_probe = ModuleProbe(
                    self._model, self._engine, dtype, source=lambda model: EffectiveSource(model, dtype)
                )
        return self._module_probe

    def distrust(self) -> None:
        """Send everything in the next push and then probe every module: the engine was lost and may have been replaced, or a proof
        has failed."""
        self._trusted = False

    def pushing(self) -> None:
        """The weights will be pushed. If the last push was not proven, this one sends everything, and every module is probed."""
        if not self._trusted:
            self.every_module = True
            # What was left out would stay as it is, also if it is wrong.
            forget_push(self._engine)
        self._trusted = False

    def pushed(self, record: SyncRecord) -> PushProof:
        """The weights were pushed. Prove that the engine computes with them.

        Raises:
            ProofError: the engine computes with other weights.
            LockstepError: the engine or a library raised an error of its own. The message has its type, its text and its place.
        """
        with self._phase("verify"):
            probe = self.probe(record.version, every_module=self.every_module)
            gap = self.score_canary(record.version) if self.canary else None
        self._trusted, self.every_module, self.canary = True, False, False
        self.proof = PushProof(record, probe, gap)
        return self.proof

    @foreign_errors("the modules of the engine could not be probed")
    def probe(self, version: int, *, every_module: bool = True) -> ProbeRecord:
        """Compare the engine's modules with the model's current weights.

        Raises:
            ProofError: a module gives other outputs. The message names it.
        """
        seed = self._seed * 1_000_003 + version
        record = self.module_probe.measure(seed, every=every_module)
        check_probe(record, version)
        if self._adapters is not None:
            check_adapter_probe(self._model, self._adapters.receiver, self._dtype, seed, version, every=every_module)
        return record

    @foreign_errors("the canary could not be scored")
    def score_canary(self, version: int) -> GapStats:
        """Score the canary's sequences on both sides.

        Raises:
            ProofError: the gap is over its limit.
        """
        context = self._engine.settings().max_model_len
        if self.quantisation is not None:
            sequences = canary_sequences(embedding_rows(self._model), context)
            self.quantisation.measure_canary(sequences)
            self.quantisation.with_whole_inputs = score_with_whole_inputs(
                self._engine, self.quantisation, sequences, self._limit, version
            )
            if self.quantisation.with_whole_inputs is None and not self._told:
                self._told = True
                _logger.info(_COMPILED)
        gap = score_canary(self._model, self._engine, context, self.precision)
        check_canary(gap, self.limit, version)
        return gap

    @foreign_errors("the canary could not be sampled without quantised inputs")
    def sample_canary(self, distribution: Distribution, version: int) -> None:
        """Let an engine in 8 bits sample from the run's distribution without quantised inputs.

        `watch/quantised_whole_inputs.py` has the proof.

        Raises:
            ProofError: the gap is over a limit of the dtypes.
        """
        if self.quantisation is not None:
            context = self._engine.settings().max_model_len
            sequences = canary_sequences(embedding_rows(self._model), context)
            self.quantisation.sampled_with_whole_inputs = sample_with_whole_inputs(
                self._engine, self.quantisation, sequences, distribution, self._limit, version
            )


class ProvenPusher(PushWatch):
    """Pushes a model's weights into an engine and proves each push.

    Args:
        adapter_alone: whether the engine gets the adapter alone, for vLLM's own LoRA, instead of merged weights.
        seed, quantised: as `PushWatch` has them.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        engine: Engine,
        engine_dtype: torch.dtype,
        precision: Precision,
        *,
        seed: int = 0,
        quantised: bool = False,
        adapter_alone: bool = False,
    ) -> None:
        adapters = AdapterPusher(model, engine) if adapter_alone else None
        super().__init__(model, engine, engine_dtype, precision, seed=seed, quantised=quantised, adapters=adapters)

    def push(self, version: int, *, every_module: bool = False, canary: bool = False) -> PushProof:
        """Push the weights as `version`, and prove that the engine computes with them.

        Args:
            every_module: probe all modules, even if this is not the first push.
            canary: also score the canary.

        Raises:
            ProofError: the engine did not receive, load or commit the weights, or computes with other weights.
            LockstepError: the engine or a library raised an error of its own. The message has its type, its text and its place.
        """
        self.every_module, self.canary = every_module, canary
        self.pushing()
        with foreign_errors(NOT_PUSHED):
            adapters = self._adapters
            record = push_weights(self._model, self._engine, version) if adapters is None else adapters.push(version)
        return self.pushed(record)
