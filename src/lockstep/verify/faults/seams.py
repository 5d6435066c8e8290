"""The places at which faults are injected, each as a patch that is removed again.

A fault is injected below the proof that should catch it: into the requests to the engine, its answers, the weights that it
loads, or the trainer's use of the answers. No proof is patched.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch

import lockstep.training.step.generation as trainer_module
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
        id: name of the fault in the list of known faults (docs/proof.md), or `small-…`.
        what: the fault in one line.
        inject: returns a context in which the fault happens.
        needs: why the fault cannot happen on a stage, or an empty string if it can.
        check: the check of `lockstep verify` that detects the fault, if a training step does not stop on it.
    """

    id: str
    what: str
    inject: Callable[[Stage], Patch]
    needs: Callable[[Stage], str] = lambda stage: ""
    check: str | None = None


def requests_become(stage: Stage, change: Callable[[list[GenerationRequest]], list[GenerationRequest]]) -> Patch:
    """A program between trainer and engine rewrites requests."""
    real = stage.engine.generate
    return patch.object(stage.engine, "generate", lambda requests, *more: real(change(list(requests)), *more))


def answers_become(
    stage: Stage, change: Callable[[Sequence[GenerationRequest], list[Completion]], list[Completion]]
) -> Patch:
    """The engine's answers differ from what it computed."""
    module = sys.modules[type(stage.engine).__module__]
    real = module.check_answers

    def changed(requests: Sequence[GenerationRequest], answers: Iterable[Completion], version: int) -> Any:
        return real(requests, change(requests, list(answers)), version)

    return patch.object(module, "check_answers", changed)


def loads_instead(stage: Stage, change: Callable[[Named], Named]) -> Patch:
    """The engine loads other tensors than those it received, and acknowledges those it received."""
    real = stage.engine.load

    def load(tensors: Iterable[tuple[str, torch.Tensor]]) -> LoadedWeights:
        sent = list(tensors)
        return LoadedWeights(tensor_specs(sent), real(change(sent)).untouched)

    return patch.object(stage.engine, "load", load)


@contextmanager
def generations_become(change: Callable[[Generation], Generation]) -> Iterator[None]:
    """The trainer makes a wrong generation from scored groups, in its own steps and in the steps of a check."""
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
    """Inject a fault at temperature 1. At a lower temperature, a very certain model would not show it."""
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
