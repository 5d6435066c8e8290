"""An engine that a foreign trainer samples from: every push proven, every answer checked, a lost engine given its weights anew.

Comes from: `integrations/trl.py`, on the rank that holds the engine. The proofs are those of `training/generate/proofs.py`,
without a config and without the gap of the optimizer step, which belongs to the trainer; the canary after every push stands in
for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from transformers import PreTrainedModel

from lockstep.engines.answers import check_answers
from lockstep.engines.protocol import Completion, Engine, GenerationRequest, RequestKey, Sampling, request_seed
from lockstep.parity.canary import check_canary, score_canary
from lockstep.parity.gap import GapStats
from lockstep.parity.module_probe import ModuleProbe, ProbeRecord, check_probe
from lockstep.parity.rescoring import Precision
from lockstep.parity.samples import check_samples
from lockstep.parity.tolerances import tolerance
from lockstep.sync.push import SyncRecord, push_weights
from lockstep.tokens.arrays import Ids
from lockstep.training.generate.recovery import Recovery


@dataclass(frozen=True, slots=True)
class PushProof:
    """What proved one push.

    Attributes:
        push: what was sent, and that it arrived.
        probe: how far the engine's modules are from the trained model's.
        canary: gap over fixed sequences.
    """

    push: SyncRecord
    probe: ProbeRecord
    canary: GapStats


class ProvenEngine:
    """Pushes and generations that pass their proofs or raise.

    Args:
        model: the trained model, whole in this process; only read.
        engine: shaken hands with; it stays the caller's to close.
        dtype: in which the engine computes.
        precision: in which the trainer computes its forward.
        seed: of the run; every request has its own, derived from it.
    """

    def __init__(
        self, model: PreTrainedModel, engine: Engine, dtype: torch.dtype, precision: Precision, seed: int
    ) -> None:
        self._model = model
        self._engine = engine
        self._dtype = dtype
        self._precision = precision
        self._limit = tolerance(dtype, precision.autocast or model.dtype)
        self._seed = seed
        self._context = engine.settings().max_model_len
        self._probe: ModuleProbe | None = None
        # The first push probes every module, and so does one to an engine that was lost.
        self._trusted = False
        self._recovery = Recovery(self._distrust)
        self.version = 0
        self.proof: PushProof | None = None

    @property
    def losses(self) -> int:
        """How often the engine was lost and came back."""
        return self._recovery.losses

    def sync(self) -> int:
        """Push the weights as a version that no push had before, and prove it.

        Raises:
            ProofError: the engine did not get, load or commit them, or computes with others.
            LockstepError: the engine was lost and did not come back in time.
        """
        self._recovery.run(self._push)
        return self.version

    def generate(self, prompts: Mapping[RequestKey, Ids], sampling: Sampling) -> dict[RequestKey, Completion]:
        """One completion a key. An engine that holds no weights, or lost them, is given them first.

        Args:
            prompts: token ids by key.
            sampling: `max_tokens` is lowered where the engine's context leaves a prompt less room, as in vLLM.

        Raises:
            ProofError: an answer is not to what was asked, not by the weights that were pushed, or samples repeat themselves.
            InputError: a prompt is empty or fills the context.
            LockstepError: the engine was lost and did not come back in time.
        """
        if not prompts:
            return {}
        if not self._holds_our_weights:
            self.sync()
        # Fixed before the first try: the same work gives the same tokens, also by an engine that was lost in between.
        requests = [
            GenerationRequest(key, ids, self._fitted(sampling, len(ids)), request_seed(self._seed, self.version, key))
            for key, ids in prompts.items()
        ]
        answers = self._recovery.run(lambda: self._answers(requests))
        by_prompt: dict[bytes, list[Completion]] = {}
        for completion in answers.values():
            by_prompt.setdefault(completion.prompt_ids.tobytes(), []).append(completion)
        check_samples(by_prompt.values())
        return answers

    @property
    def _holds_our_weights(self) -> bool:
        # An engine that was here before may hold another's.
        return self.version > 0 and self._engine.version == self.version

    def _answers(self, requests: list[GenerationRequest]) -> dict[RequestKey, Completion]:
        if not self._holds_our_weights:
            self._push()
        # The engine has checked its own answers; this end checks that they are to what it asked, by what it pushed.
        return check_answers(requests, self._engine.generate(requests).values(), [self.version])

    def _push(self) -> None:
        self.version += 1
        push = push_weights(self._model, self._engine, self.version)
        if self._probe is None:
            self._probe = ModuleProbe(self._model, self._engine, self._dtype)
        probed = self._probe.measure(self._seed * 1_000_003 + self.version, every=not self._trusted)
        check_probe(probed, self.version)
        canary = score_canary(self._model, self._engine, self._context, self._precision)
        check_canary(canary, self._limit, self.version)
        self._trusted = True
        self.proof = PushProof(push, probed, canary)

    def _distrust(self) -> None:
        self._trusted = False

    def _fitted(self, sampling: Sampling, prompt_tokens: int) -> Sampling:
        room = max(self._context - prompt_tokens, 1)
        return sampling if sampling.max_tokens <= room else replace(sampling, max_tokens=room)
