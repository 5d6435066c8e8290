"""The proofs of a push: the probes of the engine's modules, and the canary.

`PushWatch` proves the pushes that a run makes. `ProvenPusher` also makes them, for trainers that are not Lockstep's
own.

The canary is a few fixed sequences that both sides score at the same weight version: by `Engine.score`, which uses no
cache, and by the trainer's plain forward. It needs no rollouts. So it can run before the first rollout is sampled, and
stands in for rollouts that are older than the weights.

Proof canary (`gap`).
Shows: both sides give four fixed sequences the same log-probs, by another path than sampling.
Does not show: that sampled tokens agree.
When: before the first sample, an evaluation included; with `max_staleness` also every generation, before the
optimizer step.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from lockstep.contract.distribution import Distribution
from lockstep.contract.protocol import Completion, Engine, ProbedEngine
from lockstep.contract.sampling import Sampling
from lockstep.errors import foreign_errors
from lockstep.extensions import PUSHES, asked
from lockstep.models.arithmetic import Precision
from lockstep.tokens.chat import embedding_rows
from lockstep.watch.gap import GapStats, measure_gap
from lockstep.watch.gap_explained import check_gap
from lockstep.watch.held_weights import HeldRecord, HeldWeights, check_held
from lockstep.watch.modules import ModuleProbe, ProbeRecord, check_probe
from lockstep.watch.plain_forward import casting_once, completion_logps
from lockstep.watch.tolerances import Tolerance, tolerance
from lockstep.weights.push import SyncRecord, forget_push, push_weights
from lockstep.weights.source import PlainSource

_SEQUENCES, _LENGTH = 4, 24


def canary_sequences(vocab_size: int, max_model_len: int) -> dict[str, tuple[int, ...]]:
    """Sequences of ids drawn from the whole vocabulary. They are always the same for a model and an engine."""
    draw = random.Random(0)
    length = max(2, min(_LENGTH, max_model_len - 1))
    return {f"canary{i}": tuple(draw.randrange(vocab_size) for _ in range(length)) for i in range(_SEQUENCES)}


def canary_gap(
    model: PreTrainedModel,
    sequences: Mapping[str, tuple[int, ...]],
    scores: Mapping[str, Sequence[float] | torch.Tensor],
    precision: Precision,
) -> GapStats:
    """Parity gap between an engine's scores and the trainer's log-probs, with its current weights, at temperature 1.

    `scores` has the engine's log-probs of every id of each sequence, except the first id.
    """
    gap = GapStats()
    with casting_once(model, precision):
        for name, ids in sequences.items():
            policy = completion_logps(model, ids[:1], ids[1:], Sampling(max_tokens=1), precision)
            gap = gap + measure_gap(torch.as_tensor(scores[name]), policy, [name], [len(policy)])
    return gap


def score_canary(
    model: PreTrainedModel, engine: ProbedEngine, max_model_len: int, precision: Precision
) -> GapStats:
    """Parity gap between engine and trainer over the canary's tokens, at temperature 1."""
    sequences = canary_sequences(embedding_rows(model), max_model_len)
    return canary_gap(model, sequences, engine.score(sequences), precision)


def check_canary(gap: GapStats, limit: Tolerance, version: int) -> None:
    """Check the canary's parity gap against its limits."""
    check_gap(
        gap,
        limit,
        version,
        "the canary's tokens, which no policy sampled, score differently although every probed module "
        "agrees: positions, attention mask, or a part of the model that no probe reaches",
        "compare the model's configuration on both sides (rope scaling, sliding window, soft-capping)",
    )


# What failed if an engine or a library fails during a push.
NOT_PUSHED = "the weights could not be pushed into the engine"
Phase = Callable[[str], AbstractContextManager]


@dataclass(frozen=True, slots=True)
class PushProof:
    """The record of one push, the results of its probes, and the canary's gap if this push scored it."""

    push: SyncRecord
    probe: ProbeRecord
    held: HeldRecord
    canary: GapStats | None


class PushExtension:
    """What an extra adds to the pushes into an engine and to their proofs. This class itself adds nothing.

    Attributes:
        push: sends the model as a version, instead of `push_weights`; None: `push_weights` sends it.
        source: the weights with which the engine's modules should compute (`ModuleProbe`); None: those that a push
            sends.
        held: the weights that the engine's plain modules hold (`HeldWeights`); None: those that a push sends.
    """

    push: Callable[[int], SyncRecord] | None = None
    source: Callable[[PreTrainedModel], PlainSource] | None = None
    held: Callable[[PreTrainedModel], PlainSource] | None = None

    def __init__(self, watch: PushWatch) -> None:
        self.watch = watch

    def prove_modules(self, seed: int, version: int, *, every: bool) -> None:
        """Prove what the engine's modules compute, after the module probe has passed."""

    def limit(self, of_dtypes: Tolerance) -> Tolerance:
        """The limits on the canary's gap, from the limits of the dtypes."""
        return of_dtypes

    def limit_of_tokens(self, of_dtypes: Tolerance) -> Tolerance:
        """The limits on the gap of sampled tokens."""
        return of_dtypes

    def prove_canary(self, version: int) -> None:
        """Prove what must be proven before the canary is scored."""

    def sample_canary(self, distribution: Distribution, version: int) -> None:
        """After the push of a start, let the engine sample from the run's distribution, and prove what it samples."""

    def measure(
        self, completions: Sequence[Completion], version: int, distribution: Distribution, *, always: bool
    ) -> None:
        """Measure on sampled tokens what the limits depend on, if it is due or `always`."""

    def metrics(self) -> dict[str, float]:
        """Metrics of the run."""
        return {}

    def receipt(self) -> dict[str, Any]:
        """Fields of the receipt's line of a push."""
        return {}


def push_extension(options: object) -> Callable[[PushWatch], PushExtension]:
    """What extends the pushes of a run with these options."""
    found = asked(PUSHES, options)
    return found[0] if found else PushExtension


class PushWatch:
    """The proofs of the pushes of one model into one engine.

    The first push after the start, after a push that was not proven, or after `distrust`, sends everything, and every
    module of the engine is probed. Later pushes send what changed, and a sample of the modules is probed, unless
    `every_module` asks for all.

    Args:
        engine_dtype, precision: the dtypes in which the engine computes, and the trainer its forward.
        seed: of the run; the probe vectors depend on it and on the version.
        extension: makes what an extra adds (`push_extension`).
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
        extension: Callable[[PushWatch], PushExtension] = PushExtension,
        phase: Phase = lambda name: nullcontext(),
    ) -> None:
        self.model, self.engine, self.engine_dtype, self.precision = model, engine, engine_dtype, precision
        # The limits that follow from the dtypes alone.
        self.of_dtypes = tolerance(engine_dtype, precision.dtype_of(model))
        self._seed, self._phase = seed, phase
        self._probes: tuple[ModuleProbe, HeldWeights] | None = None
        self._probed: tuple[str, ...] = ()
        self._trusted = False
        self.every_module, self.canary = True, False
        self.proof: PushProof | None = None
        self.extension = extension(self)

    @property
    def limit(self) -> Tolerance:
        """The limits on the canary's gap."""
        return self.extension.limit(self.of_dtypes)

    @property
    def limit_of_tokens(self) -> Tolerance:
        """The limits on the gap of sampled tokens."""
        return self.extension.limit_of_tokens(self.of_dtypes)

    @property
    def probes(self) -> tuple[ModuleProbe, HeldWeights]:
        """The probes of the engine's modules, made at their first use, and again when the engine has other servers."""
        members: tuple[str, ...] = getattr(self.engine, "members", ())
        if self._probes is None or members != self._probed:
            self._probed, made, of = members, self.extension, (self.model, self.engine)
            probe = ModuleProbe(*of, self.engine_dtype, source=made.source)
            self._probes = probe, HeldWeights(*of, probe, self.engine_dtype, source=made.held)
        return self._probes

    @property
    def module_probe(self) -> ModuleProbe:
        """The probe of what the engine's modules compute."""
        return self.probes[0]

    @property
    def held_weights(self) -> HeldWeights:
        """The exact probe of what the engine's modules hold."""
        return self.probes[1]

    def distrust(self) -> None:
        """Send everything in the next push and probe every module: the engine was lost, or a proof has failed."""
        self._trusted = False

    def pushing(self) -> None:
        """The weights will be pushed: all of them, and every module is probed, if the last push was not proven."""
        if not self._trusted:
            self.every_module = True
            # What was left out would stay as it is, also if it is wrong.
            forget_push(self.engine)
        self._trusted = False

    def pushed(self, record: SyncRecord) -> PushProof:
        """The weights were pushed. Prove that the engine computes with them."""
        with self._phase("verify"):
            probe = self.probe(record.version, every_module=self.every_module)
            held = self.compare_held(record.version, every_module=self.every_module)
            gap = self.score_canary(record.version) if self.canary else None
        self._trusted, self.every_module, self.canary = True, False, False
        self.proof = PushProof(record, probe, held, gap)
        return self.proof

    @foreign_errors("the modules of the engine could not be probed")
    def probe(self, version: int, *, every_module: bool = True) -> ProbeRecord:
        """Compare the engine's modules with the model's current weights."""
        seed = self._seed * 1_000_003 + version
        record = self.module_probe.measure(seed, every=every_module)
        check_probe(record, version)
        self.extension.prove_modules(seed, version, every=every_module)
        return record

    @foreign_errors("the weights of the engine's modules could not be read")
    def compare_held(self, version: int, *, every_module: bool = True) -> HeldRecord:
        """Compare what the engine's modules hold with the model's current weights, to the bit."""
        record = self.held_weights.compare(version, every=every_module)
        check_held(record, version)
        return record

    @foreign_errors("the canary could not be scored")
    def score_canary(self, version: int) -> GapStats:
        """Score the canary's sequences on both sides."""
        context = self.engine.settings().max_model_len
        self.extension.prove_canary(version)
        gap = score_canary(self.model, self.engine, context, self.precision)
        check_canary(gap, self.limit, version)
        return gap


class ProvenPusher(PushWatch):
    """Pushes a model's weights into an engine and proves each push. Its arguments are those of `PushWatch`."""

    def push(self, version: int, *, every_module: bool = False, canary: bool = False) -> PushProof:
        """Push the weights as `version`, and prove that the engine computes with them.

        Args:
            every_module: probe all modules, even if this is not the first push.
            canary: also score the canary.

        Raises:
            ProofError: the engine did not receive, load or commit the weights, or computes with other weights.
            LockstepError: the engine or a library raised an error of its own. The message has its type, text and place.
        """
        self.every_module, self.canary = every_module, canary
        self.pushing()
        with foreign_errors(NOT_PUSHED):
            own = self.extension.push
            record = push_weights(self.model, self.engine, version) if own is None else own(version)
        return self.pushed(record)
