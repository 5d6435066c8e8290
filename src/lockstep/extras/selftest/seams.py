"""The places at which faults are injected, each as a patch that is removed again.

A fault is injected below the proof that should catch it: into the requests to the engine, its answers, the weights
that it loads, or the trainer's use of the answers. No proof is patched.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import torch

import lockstep.extras.verify.logprob_checks as checks
import lockstep.learn.generation as trainer_module
from lockstep.contract.inbox import Inbox
from lockstep.contract.protocol import Completion, GenerationRequest, RequestKey
from lockstep.contract.tensors import LoadedWeights, tensor_specs
from lockstep.definitions.sampling import user_settings
from lockstep.engines.vllm.in_process import VLLMInProcess
from lockstep.extras.verify.stage import Stage
from lockstep.learn.generation import Generation
from lockstep.weights.push import weights_of

Patch = AbstractContextManager[Any]
Named = list[tuple[str, torch.Tensor]]
Requests = Sequence[GenerationRequest]
Answers = list[Completion]


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault.

    Attributes:
        id: name of the fault in the list of known faults (docs/reference/faults.md), or `small-…`.
        what: the fault in one line.
        inject: returns a context in which the fault happens.
        needs: why the fault cannot happen on a stage, or an empty string if it can.
        check: the check of `lockstep verify` that detects the fault, if a training step does not stop on it.
        learns: whether the fault needs real optimizer steps.
        evaluates: whether the fault happens at an evaluation instead of training steps.
    """

    id: str
    what: str
    inject: Callable[[Stage], Patch]
    needs: Callable[[Stage], str] = lambda stage: ""
    check: str | None = None
    learns: bool = False
    evaluates: bool = False


class Reach:
    """Counts how often vLLM calls what a fault has put into it.

    A compiled program or a CUDA graph goes on without a patch that comes later. The fault is then absent, and no
    proof sees it.
    """

    def __init__(self) -> None:
        # Since the fault was injected; None: the fault does not count any.
        self.calls: int | None = None

    def of(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, whose calls are counted from now on."""
        self.calls = self.calls or 0

        def counted(*args: Any, **more: Any) -> Any:
            assert self.calls is not None
            self.calls += 1
            return function(*args, **more)

        return counted


# Of the fault that is injected now: there is one at a time.
REACH = Reach()


def needs_single(otherwise: str) -> Callable[[Stage], str]:
    """For `Fault.needs`: an engine in fp32. `otherwise` says why half precision cannot show the fault."""
    return lambda stage: "" if stage.trainer.proofs.engine_dtype == torch.float32 else otherwise


class Between:
    """An inbox that passes requests and answers on to another inbox, and may change them on the way.

    Args:
        inbox: the inbox of those who ask. It checks the answers.
        requests: changes the requests that an engine takes.
        answers: changes the answers to all requests that the engine has taken, when they are complete. It also gets
            these requests. None: each answer is passed on at once.
    """

    def __init__(
        self,
        inbox: Inbox,
        requests: Callable[[list[GenerationRequest]], list[GenerationRequest]] = list,
        answers: Callable[[Requests, Answers], Answers] | None = None,
    ) -> None:
        self._inbox, self._requests, self._change = inbox, requests, answers
        self._taken: dict[RequestKey, GenerationRequest] = {}
        self._answers: list[tuple[Completion, Collection[int]]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inbox, name)

    @contextmanager
    def taken(self, working: int | None, wait: float) -> Iterator[list[GenerationRequest] | None]:
        # To the inbox, an answer that is kept here is still being worked on.
        held = None if working is None else working + len(self._answers)
        with self._inbox.taken(held, wait) as requests:
            if requests is not None:
                self._taken |= {request.key: request for request in requests}
            yield None if requests is None else self._requests(requests)

    def answer(self, found: Completion, versions: Collection[int], vocab_size: int | None = None) -> None:
        self._answers.append((found, versions))
        if self._change is None or len(self._answers) == len(self._taken):
            requests, answers = list(self._taken.values()), [own for own, _ in self._answers]
            self._answers.clear()
            self._taken.clear()
            for changed in self._change(requests, answers) if self._change is not None else answers:
                self._inbox.answer(changed, versions, vocab_size)


def requests_become(
    stage: Stage, change: Callable[[list[GenerationRequest]], list[GenerationRequest]]
) -> Patch:
    """A program between trainer and engine rewrites requests."""
    real = stage.engine.serve
    return patch.object(stage.engine, "serve", lambda inbox: real(Between(inbox, requests=change)))  # type: ignore[arg-type]


def each_request_becomes(stage: Stage, change: Callable[[GenerationRequest], GenerationRequest]) -> Patch:
    """A program between trainer and engine rewrites each request."""
    return requests_become(stage, lambda requests: [change(request) for request in requests])


def answers_become(stage: Stage, change: Callable[[Requests, Answers], Answers]) -> Patch:
    """The engine's answers differ from what it computed."""
    real = stage.engine.serve
    return patch.object(stage.engine, "serve", lambda inbox: real(Between(inbox, answers=change)))  # type: ignore[arg-type]


def each_answer_becomes(stage: Stage, change: Callable[[Completion], Completion]) -> Patch:
    """Each of the engine's answers differs from what it computed."""
    return answers_become(stage, lambda requests, answers: [change(answer) for answer in answers])


def loads_instead(stage: Stage, change: Callable[[Named], Named]) -> Patch:
    """The engine loads other tensors than those it received, and acknowledges those it received."""
    real = stage.engine.load

    def load(tensors: Iterable[tuple[str, torch.Tensor]], base: str = "") -> LoadedWeights:
        sent = list(tensors)
        arrived = {spec.name: spec for spec in tensor_specs(sent)}
        found = real(change(sent), base)
        return replace(found, tensors=tuple(arrived.get(spec.name, spec) for spec in found.tensors))

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


def at_temperature_one(inject: Callable[[Stage], Patch]) -> Callable[[Stage], Patch]:
    """The fault at temperature 1. At a lower temperature, a very certain model would not show it."""

    @contextmanager
    def at_one(stage: Stage) -> Iterator[None]:
        with user_asks(stage, temperature=1.0), inject(stage):
            yield

    return at_one


@contextmanager
def user_asks(stage: Stage, **given: Any) -> Iterator[None]:
    """The user has asked for these values of the config's fields."""
    with patch.multiple(stage.config, **given):
        wanted = user_settings(vars(stage.config))
        with patch.object(stage.trainer.settings, "wanted", wanted):
            yield


def weights_now(stage: Stage) -> dict[str, torch.Tensor]:
    """A copy of the policy's weights, as a push sends them: under the names of a checkpoint, and a tied weight once."""
    return {name: tensor.clone() for name, tensor in weights_of(stage.model)}


def vllm_worker(stage: Stage) -> Any:
    assert isinstance(stage.engine, VLLMInProcess)
    found: list[Any] = []
    stage.engine.llm.collective_rpc(found.append)
    return found[0]


def is_vllm(stage: Stage) -> bool:
    """Whether the engine is vLLM, with its model in this process."""
    return isinstance(stage.engine, VLLMInProcess) and not stage.engine.is_split
