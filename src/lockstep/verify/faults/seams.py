"""The places where faults get in, each as a patch that goes away again.

A fault is put below the proof that should catch it: into what an engine is asked, what it answers, what it loads, or what the
trainer makes of it. No proof is patched.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch

import lockstep.training.step.preparation as trainer_module
import lockstep.verify.logprob_checks as checks
from lockstep.engines.protocol import Completion, GenerationRequest, LoadedWeights
from lockstep.engines.tensor_specs import tensor_specs
from lockstep.engines.vllm_inprocess import VLLMInProcess
from lockstep.training.step.generation import Generation
from lockstep.verify.stage import Stage

Patch = AbstractContextManager[Any]
Named = list[tuple[str, torch.Tensor]]


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault.

    Attributes:
        id: its name in the list of known faults (docs/proof.md), or `small-…`.
        what: what goes wrong, in a line.
        inject: makes it happen as long as the context lasts.
        needs: why it cannot happen on a stage, or an empty string where it can.
        check: the check of `lockstep verify` that sees it, where a training step has no reason to stop.
    """

    id: str
    what: str
    inject: Callable[[Stage], Patch]
    needs: Callable[[Stage], str] = lambda stage: ""
    check: str | None = None


def requests_become(stage: Stage, change: Callable[[list[GenerationRequest]], list[GenerationRequest]]) -> Patch:
    """Something between trainer and engine rewrites requests."""
    real = stage.engine.generate
    return patch.object(stage.engine, "generate", lambda requests, *more: real(change(list(requests)), *more))


def answers_become(
    stage: Stage, change: Callable[[Sequence[GenerationRequest], list[Completion]], list[Completion]]
) -> Patch:
    """The engine answers something else than it computed."""
    module = sys.modules[type(stage.engine).__module__]
    real = module.check_answers

    def changed(requests: Sequence[GenerationRequest], answers: Iterable[Completion], version: int) -> Any:
        return real(requests, change(requests, list(answers)), version)

    return patch.object(module, "check_answers", changed)


def loads_instead(stage: Stage, change: Callable[[Named], Named]) -> Patch:
    """The engine loads other tensors than it was sent, and acknowledges those that it was sent."""
    real = stage.engine.load

    def load(tensors: Iterable[tuple[str, torch.Tensor]]) -> LoadedWeights:
        sent = list(tensors)
        return LoadedWeights(tensor_specs(sent), real(change(sent)).untouched)

    return patch.object(stage.engine, "load", load)


@contextmanager
def generations_become(change: Callable[[Generation], Generation]) -> Iterator[None]:
    """The trainer makes something else of scored groups; in its steps, and where a check makes steps of its own."""
    real = trainer_module.prepare_generation

    def changed(*args: Any) -> Generation:
        return change(real(*args))

    with (
        patch.object(trainer_module, "prepare_generation", changed),
        patch.object(checks, "prepare_generation", changed),
    ):
        yield


@contextmanager
def at_temperature_one(stage: Stage, inject: Callable[[Stage], Patch]) -> Iterator[None]:
    """A fault that a cold or very sure model would not show."""
    with patch.object(stage.config, "temperature", 1.0), inject(stage):
        yield


def weights_now(stage: Stage) -> dict[str, torch.Tensor]:
    """A copy of the policy's weights."""
    return {name: p.detach().clone() for name, p in stage.model.named_parameters()}


def vllm_worker(stage: Stage) -> Any:
    """The worker inside vLLM."""
    assert isinstance(stage.engine, VLLMInProcess)
    found: list[Any] = []
    stage.engine.llm.collective_rpc(found.append)
    return found[0]


def is_vllm(stage: Stage) -> bool:
    """Whether the engine is vLLM."""
    return isinstance(stage.engine, VLLMInProcess)
