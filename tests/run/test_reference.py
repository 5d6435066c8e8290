"""The reference model starts as the policy, changes only if asked to follow, and costs nothing with an adapter."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from methods import ALONE, GROUPS, PAIRS, logs, lora, make, parameters, reference_of
from tiny import make_model, perturbed
from transformers import TrainerCallback

from lockstep.contract.protocol import Engine
from lockstep.errors import InputError
from lockstep.learn.policy_and_reference import Reference
from lockstep.models.policy import load_policy

WITH_REFERENCE: dict[str, dict[str, Any]] = {
    "GRPO": {**GROUPS, "beta": 0.2},
    "RLOO": GROUPS,
    "OnlineDPO": PAIRS,
    "ReinforcePP": ALONE,
    "PPO": ALONE,
}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("adapter", [False, True], ids=["full", "adapter"])
@pytest.mark.parametrize("method", sorted(WITH_REFERENCE))
def test_the_reference_is_the_policy_of_the_start_and_the_divergence_from_it_begins_at_0(
    untied_dir: str, tmp_path: Path, hf_engine: Engine, method: str, adapter: bool
) -> None:
    arguments = {"peft_config": lora()} if adapter else {}
    run = make(
        method, untied_dir, tmp_path, hf_engine, {**WITH_REFERENCE[method], "max_steps": 3}, **arguments
    )
    start_weights, trained = parameters(make_model()), parameters(run.model)
    run.train()
    assert not same(parameters(run.model), trained)
    if adapter:
        assert reference_of(run) is None
    else:
        assert same(parameters(reference_of(run)), start_weights)
        assert not any(p.requires_grad for p in reference_of(run).parameters())
    with run.reference.model() as model:
        ids = torch.arange(4, 40, device=model.device)[None]
        with torch.no_grad():
            assert torch.equal(model(ids).logits, make_model().to(model.device)(ids).logits)
    # The adapter is restored: the trained parameters, and the results of the model.
    assert {name for name, p in run.model.named_parameters() if p.requires_grad} == {
        name for name in trained if not adapter or "lora_" in name
    }
    name = "objective/kl" if method == "OnlineDPO" else "kl"
    divergences = [log[name] for log in logs(run) if name in log]
    assert abs(divergences[0]) < 1e-5
    assert all(abs(later) > 1e-4 for later in divergences[1:])


def test_the_reference_comes_back_after_an_error(untied_dir: str, tmp_path: Path, hf_engine: Engine) -> None:
    run = make("RLOO", untied_dir, tmp_path, hf_engine, {**GROUPS, "max_steps": 2}, peft_config=lora())
    run.train()
    ids = torch.arange(4, 40, device=run.model.device)[None]
    with torch.no_grad():
        before = run.model(ids).logits

        def interrupted() -> None:
            with run.reference.model() as model:
                assert not torch.equal(model(ids).logits, before)
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            interrupted()
        assert torch.equal(run.model(ids).logits, before)


def test_a_reference_that_is_told_to_follows_by_its_share_at_its_steps_alone(
    untied_dir: str, tmp_path: Path, hf_engine: Engine
) -> None:
    class Watch(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            policies.append(parameters(run.model))
            references.append(parameters(reference_of(run)))

    fields = {
        "sync_ref_model": True,
        "ref_model_mixup_alpha": 0.25,
        "ref_model_sync_steps": 2,
        "max_steps": 5,
    }
    run = make("GRPO", untied_dir, tmp_path, hf_engine, {**WITH_REFERENCE["GRPO"], **fields})
    policies, references = [parameters(run.model)], [parameters(reference_of(run))]
    run.add_callback(Watch())
    run.train()
    for step in range(1, 6):
        before, after = references[step - 1], references[step]
        if step % 2:
            assert same(before, after)
            continue
        assert not same(before, after)
        for name, value in after.items():
            mixed = 0.25 * policies[step][name] + 0.75 * before[name]
            assert torch.allclose(value, mixed, atol=1e-7), (step, name)


def test_a_reference_of_the_users_own_is_used_and_left_alone(
    untied_dir: str, tmp_path: Path, hf_engine: Engine
) -> None:
    other = perturbed(make_model())
    before = parameters(copy.deepcopy(other))
    run = make("OnlineDPO", untied_dir, tmp_path, hf_engine, {**PAIRS, "max_steps": 2}, ref_model=other)
    run.train()
    assert reference_of(run) is other
    assert same(parameters(other), before)
    assert abs(logs(run)[0]["objective/kl"]) > 1e-3


def test_references_that_cannot_work_are_refused_before_anything_is_sampled(
    untied_dir: str, tmp_path: Path, hf_engine: Engine
) -> None:
    follows = {**GROUPS, "beta": 0.1, "sync_ref_model": True}
    with pytest.raises(InputError, match="sync_ref_model needs a reference model of its own"):
        make("GRPO", untied_dir, tmp_path, hf_engine, follows, peft_config=lora())
    with pytest.raises(InputError, match="sync_ref_model has no reference"):
        make("GRPO", untied_dir, tmp_path, hf_engine, {**follows, "beta": 0.0})
    model = load_policy(untied_dir)
    with pytest.raises(InputError, match="ref_model is the model that is trained"):
        make("OnlineDPO", model, tmp_path, hf_engine, PAIRS, ref_model=model)
    injected = peft.inject_adapter_in_model(lora(), load_policy(untied_dir))
    with pytest.raises(InputError, match="no adapter to switch off"):
        Reference(injected)  # type: ignore[arg-type]


@pytest.mark.parametrize("named", [False, True], ids=["off", "another adapter"])
def test_what_is_trained_stays_what_it_was_after_the_reference(untied_dir: str, named: bool) -> None:
    model = peft.get_peft_model(load_policy(untied_dir), lora())
    if named:
        model.add_adapter("ref", lora())
    # A tensor that the user has frozen, in an adapter that is trained apart from it.
    frozen = next(p for name, p in model.named_parameters() if "lora_A.default" in name)
    frozen.requires_grad_(False)
    before = {name: p.requires_grad for name, p in model.named_parameters()}
    with Reference(model).model():  # type: ignore[arg-type]
        pass
    assert {name: p.requires_grad for name, p in model.named_parameters()} == before
    assert model.active_adapters == ["default"]


def adapted(untied_dir: str, **fields: Any) -> Any:
    model = load_policy(untied_dir)
    return peft.get_peft_model(
        model, peft.LoraConfig(r=4, target_modules=["q_proj", "up_proj"], task_type="CAUSAL_LM", **fields)
    )


def test_the_base_of_an_adapter_that_is_not_at_its_start_is_no_reference(
    untied_dir: str, tmp_path: Path, hf_engine: Engine
) -> None:
    trained = adapted(untied_dir)
    with torch.no_grad():
        for name, parameter in trained.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    with pytest.raises(InputError, match="the adapter is not at its start"):
        make("RLOO", trained, tmp_path, hf_engine, GROUPS)
    with pytest.raises(InputError, match="the adapter is not at its start"):
        make("RLOO", adapted(untied_dir, init_lora_weights=False), tmp_path, hf_engine, GROUPS)
    # Without a reference such an adapter may be trained further.
    make("RLOO", trained, tmp_path, hf_engine, {**GROUPS, "beta": 0.0})


def test_base_weights_that_are_trained_beside_an_adapter_leave_no_reference(
    untied_dir: str, tmp_path: Path, hf_engine: Engine
) -> None:
    with pytest.raises(InputError, match="bias is trained beside the adapter"):
        make("RLOO", adapted(untied_dir, bias="all"), tmp_path, hf_engine, GROUPS)


def test_a_reference_over_other_tokens_or_of_other_attention_is_refused(
    untied_dir: str, tmp_path: Path, hf_engine: Engine
) -> None:
    other = make_model()
    other.resize_token_embeddings(400, mean_resizing=False)
    with pytest.raises(InputError, match="ref_model has a vocabulary of 400 tokens, the policy one of 384"):
        make("RLOO", untied_dir, tmp_path, hf_engine, GROUPS, ref_model=other)
    eager = load_policy(untied_dir, {"attn_implementation": "eager"})
    with pytest.raises(InputError, match="packed batches need 'sdpa'"):
        make("RLOO", untied_dir, tmp_path, hf_engine, GROUPS, ref_model=eager)


class Norms(TrainerCallback):
    def __init__(self, run: Any) -> None:
        self._run, self.found = run, []

    def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        parts = [*self._run.model.parameters(), *self._run.critic.parameters()]
        self.found.append(float(torch.stack([p.grad.norm() for p in parts]).norm()))


def test_the_value_head_is_clipped_with_the_policy(
    untied_dir: str, tmp_path: Path, hf_engine: Engine
) -> None:
    run = make("PPO", untied_dir, tmp_path, hf_engine, {**ALONE, "max_steps": 2, "max_grad_norm": 0.01})
    norms = Norms(run)
    run.add_callback(norms)
    run.train()
    assert norms.found == pytest.approx([0.01, 0.01], rel=1e-3)
    assert all(log["grad_norm"] > 0.01 for log in logs(run))
