"""An engine for another program's trainer. Pushes are proven, answers are checked, a lost engine gets weights again.

It works on the rank that holds the engine. The proofs are those of `watch/engine.py`, without a config and without the
parity gap of the optimizer step, which only the trainer can measure. The canary after every push stands in for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import cast

import torch
from transformers import PreTrainedModel

from lockstep.contract.inbox import check_answers
from lockstep.contract.protocol import Completion, Engine, GenerationRequest, RequestKey, request_seed
from lockstep.contract.sampling import Sampling
from lockstep.extras.trl.trl_inputs import Shown
from lockstep.models.arithmetic import Precision
from lockstep.rollouts.recovery import Recovery
from lockstep.watch.push import ProvenPusher, PushProof
from lockstep.watch.samples import check_samples
from lockstep.weights.push import SleepingEngine, let_sleep


class ProvenEngine:
    """Pushes weights and generates completions. Both pass their proofs or raise.

    Args:
        model: the trained model, whole in this process; only read.
        engine: an engine that has passed the handshake. The caller closes it.
        dtype: dtype in which the engine computes.
        precision: precision in which the trainer computes its forward.
        seed: seed of the run, from which every request's own seed is derived.
        sleeps: whether the engine gives its memory back after each generation. The next generation pushes the weights
            again, if the trainer has not done so.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        engine: Engine,
        dtype: torch.dtype,
        precision: Precision,
        seed: int,
        *,
        sleeps: bool = False,
    ) -> None:
        self._engine = engine
        self._pusher = ProvenPusher(model, engine, dtype, precision, seed=seed)
        self._seed, self._sleeps = seed, sleeps
        self._context = engine.settings().max_model_len
        self._recovery = Recovery(self._pusher.distrust)
        self.version = 0

    @property
    def proof(self) -> PushProof | None:
        """What proved the last push; None before the first."""
        return self._pusher.proof

    @property
    def losses(self) -> int:
        """Number of times that the engine was lost and came back."""
        return self._recovery.losses

    def sync(self) -> int:
        """Push the weights under a new version, and prove the push."""
        self._recovery.run(self._push)
        return self.version

    def generate(
        self, prompts: Mapping[RequestKey, Shown], sampling: Sampling
    ) -> dict[RequestKey, Completion]:
        """One completion per key. An engine that holds no weights, or lost them, gets them first.

        As in vLLM, `max_tokens` is lowered for a prompt that leaves less room in the engine's context.
        """
        if not prompts:
            return {}
        if not self._holds_our_weights:
            self.sync()
        # Fixed before the first try, so that the same requests give the same tokens after a loss of the engine.
        requests = requests_for(prompts, sampling, self.version, self._seed, self._context)
        answers = self._recovery.run(lambda: self._answers(requests))
        check_draws(answers.values())
        if self._sleeps:
            let_sleep(cast(SleepingEngine, self._engine))
        return answers

    @property
    def _holds_our_weights(self) -> bool:
        # An engine that ran before this trainer may hold another trainer's weights.
        return self.version > 0 and self._engine.version == self.version

    def _answers(self, requests: list[GenerationRequest]) -> dict[RequestKey, Completion]:
        if not self._holds_our_weights:
            self._push()
        # The engine has checked its own answers. This checks that they match these requests and the pushed weights.
        return check_answers(requests, self._engine.generate(requests).values(), [self.version])

    def _push(self) -> None:
        self.version += 1
        self._pusher.push(self.version, canary=True)


def requests_for(
    prompts: Mapping[RequestKey, Shown], sampling: Sampling, version: int, seed: int, context: int
) -> list[GenerationRequest]:
    """A request per prompt, each with a seed of its own and no more tokens than the context has room for."""

    def fitted(prompt_tokens: int) -> Sampling:
        room = max(context - prompt_tokens, 1)
        return sampling if sampling.max_tokens <= room else replace(sampling, max_tokens=room)

    return [
        GenerationRequest(key, ids, fitted(len(ids)), request_seed(seed, version, key), pictures)
        for key, (ids, pictures) in prompts.items()
    ]


def check_draws(answers: Iterable[Completion]) -> None:
    """Raise a ProofError if completions of the same prompt repeat themselves."""
    by_prompt: dict[tuple[bytes, tuple[str, ...]], list[tuple[Completion]]] = {}
    for completion in answers:
        prompt = completion.prompt_ids.tobytes(), completion.pictures.digests
        by_prompt.setdefault(prompt, []).append((completion,))
    check_samples(by_prompt.values())
