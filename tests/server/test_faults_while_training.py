"""Training runs whose servers and network fail in known ways.

Each run continues and ends with the weights of a run without a fault, bit for bit. Or it stops with one error before
it learns from wrong data, and reaches those weights when it is resumed.

CI injects one fault for each way in which the trainer reacts: a lost answer, a late answer, an answer to a request
that was sent twice, a push that is lost before, while and after its weights are sent, and a wrong answer.
`test_sick_answers.py` shows for each fault and each call that the engine is lost or the answer is refused. All faults
in whole runs are tested before a release.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import VLLM
from faulty_proxy import GENERATE, FaultyProxy, faulty_proxy
from portions import portion
from server_runs import equal, make_trainer, train, weights
from servers import Server, impatient
from transformers import TrainerCallback

from lockstep.errors import ProofError
from lockstep.run.files.checkpoints import last_checkpoint
from lockstep.run.trainers.methods import GRPOTrainer
from lockstep.watch.receipt import check_receipt

pytestmark = [*VLLM, pytest.mark.long, pytest.mark.usefixtures("server_key")]

# The faults of an answer; each step has one of them.
ANSWERS = ["cut", "500", "503", "late", "asked_twice", "body_twice", "truncated", "empty", "last"]
OFTEN = ["cut", "late", "asked_twice"]
# The faults after which the trainer still has all answers that it needs.
HARMLESS = {"asked_twice", "last"}
# The calls of a push, in their order, with the fault of each.
PUSH = [
    ("cut", "/pause"),
    ("truncated", "/collective_rpc"),
    ("500", "/start_weight_update"),
    ("late", "/update_weights"),
    ("cut", "/finish_weight_update"),
    ("503", "/reset_prefix_cache"),
    ("body_twice", "/update_weight_version"),
    ("empty", "/weight_info"),
    ("cut", "/resume"),
]
PUSH_OFTEN = [
    ("cut", "/pause"),
    ("late", "/update_weights"),
    ("cut", "/finish_weight_update"),
    ("cut", "/resume"),
]
# Wrong answers, their number, and the proof that detects them.
LIES = [
    ("token_lost", 1, "logprobs"),
    ("logprob_missing", 1, "logprobs"),
    ("exchanged", 2, "keys"),
]
LIES_OFTEN = [("exchanged", 2, "keys")]
# The steps of the longest run of CI, and of the longest run before a release.
STEPS_OFTEN, STEPS = len(PUSH_OFTEN), len(ANSWERS)
# Seconds that a call may take in the step with the late answer, which comes after it.
LIMIT = 4.0
SETTINGS: dict[str, Any] = {
    # With a constant learning rate the first steps of a run do not depend on the number of steps.
    "lr_scheduler_type": "constant",
    "max_completion_length": 24,
}
Weights = dict[str, torch.Tensor]
Expected = Callable[[int], list[Weights]]


class Faults:
    """Applies the faults of each step, and records the weights at the start of each step.

    Args:
        faults: by step: the fault, the path that it affects, and how many times.
    """

    def __init__(self, proxy: FaultyProxy, faults: Mapping[int, tuple[str, str, int]]) -> None:
        self.proxy, self.faults = proxy, faults
        self.begun: list[Weights] = []

    @contextmanager
    def __call__(self, trainer: GRPOTrainer, step: int) -> Iterator[None]:
        self.begun.append(weights(trainer))
        before, (fault, path, times) = self.proxy.faults, self.faults.get(step, ("", "", 0))
        self.proxy.once(fault, path, times)
        try:
            with impatient(trainer.engine, LIMIT) if fault == "late" else nullcontext():
                yield
        finally:
            self.proxy.rule = lambda path: None
            assert self.proxy.faults == before + times, f"step {step} has not met {fault!r} at {path}"


@pytest.fixture(scope="module")
def proxy(server: Server) -> Iterator[FaultyProxy]:
    with faulty_proxy(server.url) as made:
        made.late = LIMIT + 1
        # Each step asks for eight completions.
        made.others = 7
        yield made


@pytest.fixture(scope="module")
def expected(
    server: Server, proxy: FaultyProxy, untied_dir: str, tmp_path_factory: pytest.TempPathFactory
) -> Expected:
    """The weights before the first step of a run without faults, and after each step."""

    @functools.cache
    def whole(steps: int) -> list[Weights]:
        watch = Faults(proxy, {})
        trainer = make_trainer(
            untied_dir, tmp_path_factory.mktemp("whole"), server.url, **SETTINGS, max_steps=steps
        )
        last = train(trainer, watch)
        return [*watch.begun, last]

    return lambda steps: whole(STEPS_OFTEN if steps <= STEPS_OFTEN else STEPS)[: steps + 1]


def check(found: Weights, faults: Faults, expected: list[Weights], folder: Path) -> None:
    """Assert that every step learned only from right data."""
    for step, (mine, theirs) in enumerate(zip([*faults.begun, found], expected, strict=True)):
        assert equal(mine, theirs), f"after {faults.faults.get(step - 1)} the weights are others"
    check_receipt(folder / "receipt.jsonl")


@pytest.mark.parametrize("answers", portion([OFTEN, ANSWERS], lambda answers: answers == OFTEN), ids=len)
def test_whatever_happens_to_an_answer_the_run_goes_on_with_the_right_data(
    answers: list[str], proxy: FaultyProxy, expected: Expected, untied_dir: str, tmp_path: Path
) -> None:
    faults = Faults(proxy, {step: (fault, GENERATE, 1) for step, fault in enumerate(answers)})
    trainer = make_trainer(untied_dir, tmp_path, proxy.url, **SETTINGS, max_steps=len(answers))
    found = train(trainer, faults)
    check(found, faults, expected(len(answers)), tmp_path)
    assert trainer.source.losses == len(set(answers) - HARMLESS)


# A transport takes part in four of the calls; the other calls are the same for both.
PUSHES = [
    ("shared_memory", PUSH_OFTEN),
    ("gloo", PUSH_OFTEN[1:3]),
    ("shared_memory", PUSH),
    ("gloo", PUSH[1:5]),
]


@pytest.mark.parametrize(("transport", "calls"), portion(PUSHES, lambda push: push in PUSHES[:2]))
def test_whatever_happens_to_a_push_the_run_goes_on_with_the_right_weights(
    transport: str,
    calls: list[tuple[str, str]],
    proxy: FaultyProxy,
    expected: Expected,
    untied_dir: str,
    tmp_path: Path,
) -> None:
    faults = Faults(proxy, {step: (fault, path, 1) for step, (fault, path) in enumerate(calls)})
    settings = {**SETTINGS, "max_steps": len(calls), "vllm_weight_transport": transport}
    trainer = make_trainer(untied_dir, tmp_path, proxy.url, **settings)
    found = train(trainer, faults)
    check(found, faults, expected(len(calls)), tmp_path)
    assert trainer.source.losses >= len(calls) - 1


@pytest.mark.parametrize("lies", portion([LIES_OFTEN, LIES], lambda lies: lies == LIES_OFTEN), ids=len)
def test_false_answers_stop_the_run_before_it_learns_and_it_resumes_to_the_same_weights(
    lies: list[tuple[str, int, str]], proxy: FaultyProxy, expected: Expected, untied_dir: str, tmp_path: Path
) -> None:
    saves = {"save_strategy": "steps", "save_steps": 1, "logging_steps": 1}
    settings = {**SETTINGS, **saves, "max_steps": len(lies) + 1}

    def resumed() -> tuple[GRPOTrainer, str | None]:
        found = last_checkpoint(tmp_path)
        return make_trainer(untied_dir, tmp_path, proxy.url, **settings), str(found) if found else None

    for step, (fault, times, proof) in enumerate(lies, start=1):
        trainer, checkpoint = resumed()
        with pytest.raises(ProofError) as refused:
            train(trainer, Faults(proxy, {step: (fault, GENERATE, times)}), resume_from_checkpoint=checkpoint)
        assert refused.value.check == proof
        assert trainer.state.global_step == step
        assert equal(weights(trainer), expected(step)[step]), f"something was learned from {fault}"
    trainer, checkpoint = resumed()
    assert equal(train(trainer, resume_from_checkpoint=checkpoint), expected(len(lies) + 1)[-1])
    check_receipt(tmp_path / "receipt.jsonl")


def test_gradients_that_are_reversed_later_stop_a_run(
    untied_dir: str, server: Server, tmp_path: Path
) -> None:
    # With this seed a part of the third step is checked.
    trainer = make_trainer(untied_dir, tmp_path, server.url, seed=8, max_steps=4, **SETTINGS)

    class Reverses(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 1:
                for parameter in trainer.model.parameters():
                    parameter.register_hook(torch.neg)

    trainer.add_callback(Reverses())
    with pytest.raises(ProofError) as error:
        train(trainer)
    assert (error.value.check, trainer.state.global_step) == ("model_gradient", 2)
