"""The update proof passes on clean runs of every method, and stops a run whose optimizer step is wrong."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import methods
import pytest
import torch
from portions import portion
from transformers import TrainerCallback, get_scheduler

from lockstep.contract.protocol import Engine
from lockstep.definitions.optimizer import rate_factor
from lockstep.errors import ProofError
from lockstep.models.policy import load_policy
from lockstep.watch import update
from lockstep.watch.elements import AccumulationProof
from lockstep.watch.model_gradient import Checked, ModelGradient

SEVERAL = {"gradient_accumulation_steps": 2, "warmup_steps": 2}


class At(TrainerCallback):
    """Calls a function at an event of one step."""

    def __init__(self, event: str, step: int, work: Any) -> None:
        def called(args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == step:
                work()

        setattr(self, event, called)


# The proof of a schedule does not know the method.
CLEAN = portion(
    product(["linear", "cosine_with_restarts"], methods.FIELDS), lambda c: c[0] == "linear" or c[1] == "GRPO"
)


@pytest.mark.parametrize(("schedule", "method"), CLEAN)
def test_clean_steps_pass_and_their_sizes_are_logged(
    method: str, schedule: str, untied_dir: str, tmp_path: Path, hf_engine: Engine
) -> None:
    several = {} if method == "OnlineDPO" else {"num_iterations": 2}
    fields = {**methods.FIELDS[method], **SEVERAL, **several, "lr_scheduler_type": schedule}
    run = methods.make(method, untied_dir, tmp_path, hf_engine, fields)
    before = methods.parameters(run.model)
    run.train()
    first, *later = methods.logs(run)
    # The first step of a warm-up has a learning rate of 0.
    assert first["update/norm"] == 0
    assert all(log["update/norm"] > 0 and 0 < log["update/moved_share"] <= 1 for log in later)
    assert any(not torch.equal(p, before[n]) for n, p in run.model.named_parameters())


def test_the_logged_size_is_that_of_the_change(untied_dir: str, tmp_path: Path, hf_engine: Engine) -> None:
    run = methods.make("GRPO", untied_dir, tmp_path, hf_engine, {**methods.GROUPS, "max_steps": 1})
    before = methods.parameters(run.model)
    run.train()
    exact = (
        sum(float((p.detach() - before[n]).square().sum()) for n, p in run.model.named_parameters()) ** 0.5
    )
    # Estimated from drawn elements: AdamW's first step changes elements by about as much.
    assert methods.logs(run)[0]["update/norm"] == pytest.approx(exact, rel=0.3)


@pytest.mark.parametrize("optim", ["sgd", "adafactor", "adamw_torch"])
def test_adapters_pass_with_every_kind_of_optimizer(optim: str, untied_dir: str, tmp_path: Path) -> None:
    fields = {**methods.GROUPS, "optim": optim, "bf16": True, "use_vllm": False, "max_steps": 3}
    run = methods.make("GRPO", untied_dir, tmp_path, None, fields, peft_config=methods.lora())  # type: ignore[arg-type]
    run.train()
    assert run.state.global_step == 3
    run.close()


def test_the_half_of_an_adapter_that_is_frozen_is_named(
    untied_dir: str, tmp_path: Path, hf_engine: Engine
) -> None:
    run = methods.make("GRPO", untied_dir, tmp_path, hf_engine, methods.GROUPS, peft_config=methods.lora())
    for name, p in run.model.named_parameters():
        if "lora_B" in name:
            p.requires_grad_(False)
    with pytest.raises(ProofError, match=r"lora_A.* is trained, and .*lora_B.* is frozen"):
        run.train()


def test_a_tensor_that_is_frozen_during_the_run_is_named(
    untied_dir: str, tmp_path: Path, hf_engine: Engine
) -> None:
    run = methods.make("GRPO", untied_dir, tmp_path, hf_engine, methods.GROUPS)
    head = run.model.lm_head.weight
    run.add_callback(At("on_step_end", 2, lambda: head.requires_grad_(False)))
    with pytest.raises(ProofError, match=r"requires_grad of lm_head\.weight has changed"):
        run.train()


def test_a_clip_by_another_norm_than_that_of_all_gradients_is_found_within_four_steps(
    untied_dir: str, tmp_path: Path, hf_engine: Engine
) -> None:
    fields = {**methods.GROUPS, "max_grad_norm": 1e-3, "max_steps": 9}
    run = methods.make("GRPO", untied_dir, tmp_path, hf_engine, fields)

    def by_half_the_norm(parameters: Any, limit: float) -> torch.Tensor:
        own = list(parameters)
        norm = torch.nn.utils.get_total_norm([p.grad for p in own]) / 2
        torch.nn.utils.clip_grads_with_norm_(own, limit, norm)
        return norm

    run.add_callback(
        At("on_step_begin", 1, lambda: setattr(run.accelerator, "clip_grad_norm_", by_half_the_norm))
    )
    with pytest.raises(
        ProofError, match=r"the gradients were clipped by a norm of .*; the norm over all trained tensors is"
    ):
        run.train()
    assert 1 <= run.state.global_step <= 4


def test_a_clip_that_is_left_out_is_named(untied_dir: str, tmp_path: Path, hf_engine: Engine) -> None:
    fields = {**methods.GROUPS, "max_grad_norm": 1e-3, "max_steps": 3}
    run = methods.make("GRPO", untied_dir, tmp_path, hf_engine, fields)
    run.add_callback(
        At("on_step_begin", 1, lambda: setattr(run, "_clip_grad_norm", lambda model: torch.tensor(1.0)))
    )
    with pytest.raises(ProofError, match="clipping"):
        run.train()
    assert run.state.global_step == 1


def test_a_tensor_that_is_in_no_group_of_the_optimizer_is_named(
    untied_dir: str, tmp_path: Path, hf_engine: Engine
) -> None:
    run = methods.make("PPO", untied_dir, tmp_path, hf_engine, methods.ALONE)
    real = run.create_optimizer

    def without_critic() -> Any:
        optimizer = real()
        optimizer.param_groups.pop()
        return optimizer

    with (
        patch.object(run, "create_optimizer", without_critic),
        pytest.raises(ProofError, match=r"value_head\.weight requires a gradient and is in no group"),
    ):
        run.train()


def test_a_critic_whose_gradients_stay_is_named(untied_dir: str, tmp_path: Path, hf_engine: Engine) -> None:
    run = methods.make("PPO", untied_dir, tmp_path, hf_engine, methods.ALONE)
    with (
        patch.object(run.critic, "zero_grad", lambda: None),
        pytest.raises(
            ProofError, match=r"before the first backward of the step, value_head\.\w+ holds a gradient"
        ),
    ):
        run.train()


@pytest.mark.parametrize(("name", "what"), [("lm_head.weight", "an element of lm_head.weight changed by")])
def test_weights_that_change_between_two_steps_are_named(
    name: str, what: str, untied_dir: str, tmp_path: Path, hf_engine: Engine
) -> None:
    run = methods.make("GRPO", untied_dir, tmp_path, hf_engine, methods.GROUPS)
    parameter = dict(run.model.named_parameters())[name]
    run.add_callback(At("on_step_begin", 2, lambda: parameter.data.mul_(1.0001)))
    with pytest.raises(ProofError, match=what):
        run.train()
    assert run.state.global_step == 2


@pytest.mark.parametrize("optim", ["sgd", "adamw_torch"])
def test_a_frozen_tensor_that_moves_is_named(
    optim: str, untied_dir: str, tmp_path: Path, hf_engine: Engine
) -> None:
    fields = {**methods.GROUPS, "optim": optim}
    run = methods.make("GRPO", untied_dir, tmp_path, hf_engine, fields, peft_config=methods.lora())
    base = dict(run.model.named_parameters())["base_model.model.model.norm.weight"]
    run.add_callback(At("on_pre_optimizer_step", 1, lambda: base.data.add_(1e-3)))
    with pytest.raises(ProofError, match=r"model\.norm\.weight is frozen and has changed"):
        run.train()


def test_an_unknown_optimizer_that_leaves_a_tensor_out_is_stopped(
    untied_dir: str, tmp_path: Path, hf_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(update, "PATIENCE", 3)
    model = load_policy(untied_dir)
    own = torch.optim.NAdam(model.parameters(), lr=0.01)
    run = methods.make("GRPO", model, tmp_path, hf_engine, methods.GROUPS, optimizers=(own, None))
    head = run.model.lm_head.weight
    real = own.step

    def step(closure: Any = None) -> None:
        kept = head.detach().clone()
        real()
        head.data.copy_(kept)

    with (
        patch.object(own, "step", step),
        pytest.raises(ProofError, match=r"lm_head\.weight has a gradient and did not move in 3 steps"),
    ):
        run.train()


def test_a_tensor_whose_gradient_is_cut_off_is_named(
    untied_dir: str, tmp_path: Path, hf_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(update, "PATIENCE", 3)
    run = methods.make("GRPO", untied_dir, tmp_path, hf_engine, methods.GROUPS)
    layer = run.model.model.layers[0].self_attn.k_proj
    layer.register_forward_hook(lambda module, given, keys: keys.detach())
    # Without the proof of the backward, which finds it before the first step.
    monkeypatch.setattr(ModelGradient, "begin", lambda *given: Checked({}))
    with pytest.raises(ProofError, match=r"k_proj\.weight is trained and had no gradient in 3 steps"):
        run.train()


def test_a_learning_rate_that_is_not_the_configs_is_refused_at_the_start(
    untied_dir: str, tmp_path: Path, hf_engine: Engine
) -> None:
    run = methods.make("GRPO", untied_dir, tmp_path, hf_engine, methods.GROUPS)
    real = run.create_optimizer

    def other() -> Any:
        optimizer = real()
        for group in optimizer.param_groups:
            group["lr"] *= 10
        return optimizer

    with (
        patch.object(run, "create_optimizer", other),
        pytest.raises(ProofError, match=r"a learning rate of 0\.1 for .*; the config gives 0\.01"),
    ):
        run.train()


def test_the_gradient_of_every_tensor_is_compared_within_ten_steps() -> None:
    named = {f"tensor {i}": torch.nn.Parameter(torch.zeros(2)) for i in range(700)}
    seen: set[str] = set()
    for step in range(5, 15):
        proof = AccumulationProof(named, seed=3, step=step)
        seen |= set(proof.names)
        proof.end()
    assert seen == set(named)


@pytest.mark.parametrize("name", ["constant", "constant_with_warmup", "linear", "cosine"])
def test_the_formula_of_a_schedule_is_that_of_transformers(name: str) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = get_scheduler(name, optimizer, num_warmup_steps=3, num_training_steps=11)
    for step in range(11):
        assert rate_factor(name, step, 3, 11) == pytest.approx(scheduler.get_last_lr()[0], abs=1e-12)
        optimizer.step()
        scheduler.step()
