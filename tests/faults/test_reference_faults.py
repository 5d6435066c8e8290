"""A reference whose forward uses trained weights is stopped, although every frozen weight stays as it is."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from methods import ALONE, FIELDS, GROUPS, PAIRS, StopAfter, lora, make
from peft import LoraConfig, get_peft_model
from tiny import perturbed
from transformers import TrainerCallback

from lockstep.contract.protocol import Engine
from lockstep.errors import ProofError
from lockstep.learn import policy_and_reference as references
from lockstep.models.adapters import base_alone
from lockstep.models.arithmetic import Precision
from lockstep.models.policy import load_policy
from lockstep.watch import reference
from lockstep.watch.reference import ReferenceOutputs, _logps

KL: dict[str, dict[str, Any]] = {
    "GRPO": {**GROUPS, "beta": 0.1},
    "RLOO": {**GROUPS, "beta": 0.1},
    "OnlineDPO": PAIRS,
    "ReinforcePP": ALONE,
    "PPO": {**ALONE, "beta": 0.1},
}


def made(
    method: str, model: str, folder: Path, engine: Engine, bf16: bool, adapter: bool, **fields: Any
) -> Any:
    """A trainer with a reference. The engine of the tests computes in fp32; in bf16 a trainer makes one of its own."""
    own = {"bf16": True, "use_vllm": False} if bf16 else {}
    arguments = {"peft_config": lora()} if adapter else {}
    given: Any = None if bf16 else engine
    return make(method, model, folder, given, {**KL[method], **own, **fields}, **arguments)


def adapter_left_on(run: Any, patched: pytest.MonkeyPatch) -> None:
    patched.setattr(references, "without_adapter", lambda model: nullcontext())


def one_layer_left_on(run: Any, patched: pytest.MonkeyPatch) -> None:
    layer = next(
        module for name, module in run.model.named_modules() if name.endswith("layers.1.mlp.up_proj")
    )
    patched.setattr(layer, "enable_adapters", lambda enabled: None)


def policy_scores(run: Any, patched: pytest.MonkeyPatch) -> None:
    patched.setattr(run.reference, "model", lambda: nullcontext(run.model))


def one_module_of_the_policy(run: Any, patched: pytest.MonkeyPatch) -> None:
    run.reference.own.model.layers[1] = run.model.model.layers[1]


Fault = Callable[[Any, pytest.MonkeyPatch], None]
ADAPTED = (adapter_left_on, one_layer_left_on)


class Begin(TrainerCallback):
    """Injects a fault after some optimizer steps, before the next generation."""

    def __init__(self, after: int, inject: Callable[[], None]) -> None:
        self._after, self._inject = after, inject

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self._after:
            self._inject()


def stopped(run: Any, **how: Any) -> tuple[str, int]:
    """The proof that has stopped a run, and after how many optimizer steps."""
    with pytest.raises(ProofError) as error:
        run.train(**how)
    return error.value.check, run.state.global_step


# Each pair of values of two columns occurs. A reference that is wrong from a start on shows when the policy has moved.
CASES: list[tuple[Fault, str, bool, str]] = [
    (adapter_left_on, "GRPO", False, "start"),
    (adapter_left_on, "PPO", True, "middle"),
    (adapter_left_on, "RLOO", True, "resume"),
    (one_layer_left_on, "GRPO", True, "start"),
    (one_layer_left_on, "OnlineDPO", False, "middle"),
    (one_layer_left_on, "RLOO", False, "resume"),
    (policy_scores, "ReinforcePP", True, "start"),
    (policy_scores, "GRPO", False, "middle"),
    (policy_scores, "OnlineDPO", True, "resume"),
    (one_module_of_the_policy, "PPO", False, "start"),
    (one_module_of_the_policy, "GRPO", True, "middle"),
    (one_module_of_the_policy, "ReinforcePP", False, "resume"),
]


@pytest.mark.parametrize(
    ("fault", "method", "bf16", "begins"), CASES, ids=[f"{f.__name__}-{m}-{b}-{s}" for f, m, b, s in CASES]
)
def test_a_reference_with_trained_weights_stops_the_run(
    untied_dir: str,
    tmp_path: Path,
    hf_engine: Engine,
    monkeypatch: pytest.MonkeyPatch,
    fault: Fault,
    method: str,
    bf16: bool,
    begins: str,
) -> None:

    def begun() -> Any:
        saved = {"max_steps": 5, "save_strategy": "steps", "save_steps": 2}
        return made(method, untied_dir, tmp_path, hf_engine, bf16, fault in ADAPTED, **saved)

    run, how = begun(), {}
    if begins == "resume":
        run.add_callback(StopAfter(2))
        run.train()
        run, how = begun(), {"resume_from_checkpoint": True}
    after = {"start": 0, "middle": 2, "resume": 2}[begins]
    run.add_callback(Begin(after, lambda: fault(run, monkeypatch)))
    # At the start the reference and the policy are alike: the fault has no effect before the first step.
    assert stopped(run, **how) == ("reference_outputs", after + 1 if begins == "start" else after)


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("adapter", [False, True], ids=["full", "adapter"])
@pytest.mark.parametrize("method", sorted(FIELDS))
def test_an_honest_reference_gives_the_same_bits_in_each_generation(
    untied_dir: str, tmp_path: Path, hf_engine: Engine, method: str, adapter: bool, bf16: bool
) -> None:
    kept: list[torch.Tensor] = []
    honest = ReferenceOutputs.check

    def noting(self: ReferenceOutputs, *given: Any) -> None:
        honest(self, *given)
        assert self._kept is not None
        kept.append(self._kept[2])

    run = made(method, untied_dir, tmp_path, hf_engine, bf16, adapter, max_steps=4)
    with patch.object(ReferenceOutputs, "check", noting):
        run.train()
    assert len(kept) >= 4
    assert all(found is kept[0] for found in kept)


def test_a_reference_that_follows_the_policy_begins_anew_and_is_compared_between_its_moves(
    untied_dir: str, tmp_path: Path, hf_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    follows = {"sync_ref_model": True, "ref_model_sync_steps": 3, "max_steps": 8}
    made("GRPO", untied_dir, tmp_path / "clean", hf_engine, False, False, **follows).train()
    run = made("GRPO", untied_dir, tmp_path, hf_engine, False, False, **follows)
    # The reference has followed after step 3. The generations after steps 4 and 5 have the same one.
    run.add_callback(Begin(4, lambda: policy_scores(run, monkeypatch)))
    assert stopped(run) == ("reference_outputs", 4)


def twice_the_share(run: Any) -> None:
    real = run.reference.follow
    run.reference.follow = lambda share: real(min(1.0, 2 * share))


def never(run: Any) -> None:
    run.reference.follow = lambda share: None


def one_tensor_stays(run: Any) -> None:
    real, kept = run.reference.follow, next(run.reference.own.parameters())

    def follow(share: float) -> None:
        before = kept.detach().clone()
        real(share)
        kept.data.copy_(before)

    run.reference.follow = follow


def in_every_step(run: Any) -> None:
    run.config.ref_model_sync_steps, real = 1, run.watch.moving_reference

    def thinks_of_three(reference: Any) -> Any:
        run.config.ref_model_sync_steps = 3
        found = real(reference)
        run.config.ref_model_sync_steps = 1
        return found

    run.watch.moving_reference = thinks_of_three


MOVES = ((twice_the_share, 3), (never, 3), (one_tensor_stays, 3), (in_every_step, 1))


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("fault", "step"), MOVES, ids=[fault.__name__ for fault, _ in MOVES])
def test_a_reference_that_follows_by_another_rule_stops_the_run(
    untied_dir: str, tmp_path: Path, hf_engine: Engine, fault: Any, step: int, bf16: bool
) -> None:
    follows = {
        "sync_ref_model": True,
        "ref_model_sync_steps": 3,
        "ref_model_mixup_alpha": 0.3,
        "max_steps": 4,
    }
    run = made("GRPO", untied_dir, tmp_path, hf_engine, bf16, False, **follows)
    fault(run)
    assert stopped(run) == ("reference_outputs", step)


ADAPTERS: dict[str, dict[str, Any]] = {
    "lora": {},
    "rslora with dropout": {"use_rslora": True, "lora_dropout": 0.3},
    "dora": {"use_dora": True},
    "head trained whole": {"modules_to_save": ["lm_head"]},
    "ids of the embedding": {"trainable_token_indices": {"embed_tokens": [3, 4]}},
}


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("kind", ADAPTERS)
def test_the_base_alone_gives_the_bits_of_an_adapter_that_is_switched_off(
    untied_dir: str, kind: str, bf16: bool
) -> None:
    model = get_peft_model(
        load_policy(untied_dir), LoraConfig(target_modules=["q_proj", "up_proj"], **ADAPTERS[kind])
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter) if parameter.requires_grad else 0.0)
    precision = Precision(torch.bfloat16) if bf16 else Precision()
    with references.without_adapter(model):
        due = _logps(model.get_base_model(), precision)
    with base_alone(model.get_base_model()):
        found = _logps(model.get_base_model(), precision)
    assert torch.equal(found, due)
    assert not torch.equal(_logps(model.get_base_model(), precision), due)


@pytest.mark.parametrize("wrong", [False, True], ids=["honest", "wrong"])
def test_a_forward_that_does_not_repeat_its_bits_is_held_to_the_limits_on_a_gap(
    untied_dir: str, tmp_path: Path, hf_engine: Engine, monkeypatch: pytest.MonkeyPatch, wrong: bool
) -> None:
    run = made("GRPO", untied_dir, tmp_path, hf_engine, False, False, max_steps=3)
    head = run.reference.own.lm_head
    head.register_forward_hook(lambda module, given, logits: logits + 1e-6 * torch.randn_like(logits))
    if not wrong:
        run.train()
        return
    run.add_callback(Begin(1, lambda: one_module_of_the_policy(run, monkeypatch)))
    assert stopped(run) == ("reference_outputs", 1)


def test_what_may_change_the_bits_of_an_honest_reference_begins_anew(
    untied_dir: str, tmp_path: Path, hf_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reference, "_second_way", lambda *given: None)
    policy = made("GRPO", untied_dir, tmp_path, hf_engine, False, False).loop.policy()
    proof, weights, threads, seeds = ReferenceOutputs(), object(), torch.get_num_threads(), count()

    def check(frozen: Any) -> None:
        other = perturbed(policy.model, seed=next(seeds))
        proof.check(replace(policy, model=other), policy.model, frozen, Precision())

    check(None)
    check(weights)
    check(object())
    try:
        torch.set_num_threads(threads + 1)
        check(weights)
    finally:
        torch.set_num_threads(threads)
    check(weights)
    with pytest.raises(ProofError, match="other log-probs than at the first generation"):
        check(weights)
